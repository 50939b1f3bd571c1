"""Typical acceptance, which is LOSSY: it accepts what the target finds likely enough, so its text is not of the law p.

Cai et al. 2024 (Medusa), arXiv 2401.10774, section 2.3.1. Here p is the law after temperature and other processors, so
that at temperature 0 it is greedy decoding. V target vocabulary
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rejection import Candidates, Law, Outcome
from .tape import Choose

EPSILON, DELTA = 0.09, 0.3
"""The paper's thresholds."""


def typical(tree: Candidates, p: Law, choose: Choose, epsilon: float = EPSILON, delta: float = DELTA) -> Outcome:
    """Accept a child x if p(x) > min(epsilon, delta exp(-H(p))); take the longest accepted path, the likelier of two.

    No random number takes part in the acceptance. The token that follows the path is drawn from p.
    """
    best, best_rank = [0], (0, 0.0)
    paths = [([0], 0.0)]
    while paths:
        path, log_likelihood = paths.pop()
        if (len(path) - 1, log_likelihood) > best_rank:
            best, best_rank = path, (len(path) - 1, log_likelihood)
        if not tree.children[path[-1]]:
            continue
        law = p(path[-1])
        enough = threshold(law, epsilon, delta)
        for child in tree.children[path[-1]]:
            probability = float(law[tree.tokens[child]])
            if probability > enough:
                paths.append(([*path, child], log_likelihood + math.log(probability)))
    return best, choose(p(best[-1]))


def threshold(law: Tensor, epsilon: float = EPSILON, delta: float = DELTA) -> float:
    """min(epsilon, delta exp(-H)), H the entropy of ``law`` [V]: a flat law asks for less.

    >>> round(threshold(torch.full((10,), 0.1)), 3), threshold(torch.tensor([1.0, 0.0]))
    (0.03, 0.09)
    """
    return min(epsilon, delta * math.exp(-float(torch.special.entr(law).sum())))
