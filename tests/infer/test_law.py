"""Sampled text follows the target's law for any draft: checked against a target whose law is known exactly."""

import pytest
import torch
from scipy import stats

from kit import markov_rand, random_heads, tokenizer
from treedraft.heads import Medusa
from treedraft.infer import Sampling, Target, complete
from treedraft.tree import Tree

SAMPLES = 4000
PROMPT = [14]  # w1


@pytest.fixture(scope="module")
def known() -> tuple[Target, torch.Tensor]:
    model, law = markov_rand()
    return Target(model, tokenizer()), law.double()


def contrary_heads(target: Target, law: torch.Tensor) -> Medusa:
    """Always proposes the rarest tokens: the output layer with its sign turned."""
    head = random_heads(target, 2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    rows, bias = head._shared
    head._shared = (-rows, bias)
    return head


def check_fit(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square over cells with an expectation of at least 5; the rest is one more cell. p > 0.001."""
    big = expected >= 5
    observed = torch.cat([counts[big], counts[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    keep = wanted > 0
    assert counts[expected == 0].sum() == 0
    wanted = wanted[keep] * observed.sum() / wanted[keep].sum()  # the law was stored in fp32
    assert stats.chisquare(observed[keep].numpy(), wanted.numpy()).pvalue > 0.001


@pytest.mark.parametrize(
    "tree", [Tree.chain(2), Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])], ids=["chain", "tree"]
)
@pytest.mark.parametrize("draft", ["random", "contrary", "none"])
def test_first_and_second_tokens_fit_the_known_law(known: tuple[Target, torch.Tensor], draft: str, tree: Tree) -> None:
    target, law = known
    head = {
        "random": lambda: random_heads(target, 2),
        "contrary": lambda: contrary_heads(target, law),
        "none": lambda: None,
    }[draft]()
    done = complete(
        target,
        [PROMPT] * SAMPLES,
        head=head,
        tree=tree,
        sampling=Sampling(temperature=1.0),
        seed=97,
        max_new_tokens=3,
        batch_size=250,
        end_ids=(),
    )
    first = torch.tensor([c.ids[0] for c in done])
    second = torch.tensor([c.ids[1] for c in done])
    third = torch.tensor([c.ids[2] for c in done])
    check_fit(torch.bincount(first, minlength=96).double(), SAMPLES * law[PROMPT[-1]])
    for before, after in ((first, second), (second, third)):
        for token in torch.bincount(before, minlength=96).topk(3).indices:
            given = after[before == token]
            check_fit(torch.bincount(given, minlength=96).double(), len(given) * law[token])
