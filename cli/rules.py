"""What the commands say of an acceptance rule whose text is not the one of the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .console import note

if TYPE_CHECKING:
    from ..heads import Drafter
    from ..infer import Sampling


def note_rule(name: str, law: Sampling, head: Drafter | None) -> None:
    """A line on stderr, unless the text is that of the seed: by the coupled rule, or because nothing is drafted."""
    from ..infer import find_rule

    caveat = find_rule(name).caveat
    if caveat and head is not None:
        note(f"Rule {name}: " + ("at temperature 0 it is the greedy match" if law.greedy else caveat))
