"""What is expected of heads of which nothing was measured."""

from __future__ import annotations

# Chance that the rank-r candidate of a head is right when its parent was, and how it falls with depth: what lightly
# trained Medusa heads show (docs/log.md).
RANK_SHARE = (0.40, 0.12, 0.07, 0.05, 0.035, 0.025, 0.02, 0.015)
DEPTH_SHARE = (1.0, 0.5)
