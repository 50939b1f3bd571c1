"""Every acceptance rule that weighs p against q gives exactly the law p: all its random choices are enumerated.

The law of the text is that of what a step emits, continued by sampling from p up to a fixed length, so that steps of
unequal length compare. Candidates are drawn when a rule first looks at them; since a draw depends on its ancestors and
elder siblings alone, this changes no law and keeps the enumeration small.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from treedraft.infer import (
    Candidates,
    Choose,
    block_verification,
    chain_rejection,
    outcomes,
    recursive_rejection,
    traversal,
    typical,
)
from treedraft.infer.rejection import Law, Outcome, residual, without

Context = tuple[int, ...]
RowRule = Callable[[Candidates, Law, Law, Choose], Outcome]
Run = Callable[[Choose], Context]
"""One step: from random choices to the tokens it emits."""

CHAINS = {"chain of 1": [-1, 0], "chain of 2": [-1, 0, 1], "chain of 3": [-1, 0, 1, 2]}
TREES = {
    "three children": [-1, 0, 0, 0],
    "two by two": [-1, 0, 1, 1, 0, 4, 4],
    "a lone second child": [-1, 0, 0, 2],
    "depth 3": [-1, 0, 1, 2, 0, 4],
}
PAGE = Path(__file__).parents[2] / "docs" / "lossless.md"
SHAPES = {**CHAINS, **TREES}
RULES: dict[str, tuple[RowRule, dict[str, list[int]]]] = {
    "chain rejection": (chain_rejection, CHAINS),
    "block": (block_verification, CHAINS),
    "recursive rejection": (recursive_rejection, TREES),
    "traversal": (traversal, TREES),
}
CASES = [(rule, shape) for rule, (_, shapes) in RULES.items() for shape in shapes]


@dataclass(frozen=True)
class Model:
    """Laws p and q [V] after every context of fewer than ``length`` tokens."""

    vocab: int
    p: dict[Context, Tensor]
    q: dict[Context, Tensor]

    def text_law(self, length: int, before: Context = ()) -> Tensor:
        """The joint law [V, ..., V] of the tokens behind ``before`` up to ``length`` in all."""
        if len(before) == length:
            return torch.ones((), dtype=torch.float64)
        following = [self.text_law(length, (*before, x)) for x in range(self.vocab)]
        return torch.stack([share * rest for share, rest in zip(self.p[before], following, strict=True)])


KINDS = ("dense", "dense again", "sharp", "zeros in p", "zeros in q", "zeros in both", "p = q", "disjoint")


def model(kind: str, vocab: int, length: int = 4, seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed + 1000 * KINDS.index(kind))
    sharpness = 4.0 if kind == "sharp" else 1.5

    def law(zeros: Sequence[int] = ()) -> Tensor:
        logits = sharpness * torch.randn(vocab, generator=generator, dtype=torch.float64)
        logits[list(zeros)] = float("-inf")
        return logits.softmax(-1)

    def some(name: str) -> list[int]:
        """One or more tokens without weight, never all of them."""
        if kind not in (f"zeros in {name}", "zeros in both"):
            return []
        order = torch.randperm(vocab, generator=generator).tolist()
        return order[: 1 + int(torch.randint(vocab - 1, (), generator=generator))]

    p, q = {}, {}
    for context in contexts(vocab, length):
        half = range(vocab // 2)
        p[context] = law(half) if kind == "disjoint" else law(some("p"))
        q[context] = law([x for x in range(vocab) if x not in half]) if kind == "disjoint" else law(some("q"))
        if kind == "p = q":
            q[context] = p[context]
    return Model(vocab, p, q)


def contexts(vocab: int, length: int) -> Iterator[Context]:
    found: list[Context] = [()]
    for _ in range(length):
        yield from found
        found = [(*c, x) for c in found for x in range(vocab)]


def flat(p: Sequence[float], q: Sequence[float], length: int) -> Model:
    """Laws that do not depend on the context."""
    laws = [torch.tensor(law, dtype=torch.float64) for law in (p, q)]
    every = list(contexts(len(p), length))
    return Model(len(p), {c: laws[0] for c in every}, {c: laws[1] for c in every})


@dataclass
class Drawn(Sequence[int]):
    """The tokens of a tree, drawn as a drafter draws them: siblings one after the other, without replacement.

    shared: the nodes of a depth have the same q and share their noise, so that they have the same children
    """

    parents: list[int]
    model: Model
    choose: Choose
    shared: bool = False
    known: dict[int, int] = field(default_factory=dict)
    by_depth: dict[tuple[int, int], int] = field(default_factory=dict)
    paths: dict[int, Context] = field(default_factory=lambda: {0: ()})

    def __post_init__(self) -> None:
        self.children = Candidates.of([], self.parents).children

    def __len__(self) -> int:
        return len(self.parents)

    def __getitem__(self, node: int) -> int:  # type: ignore[override]
        if node not in self.known:
            siblings = self.children[self.parents[node]]
            rank = siblings.index(node)
            elders = [self[sibling] for sibling in siblings[:rank]]
            place = len(self.context(self.parents[node])), rank
            if self.shared and place in self.by_depth:
                self.known[node] = self.by_depth[place]
            else:
                self.known[node] = self.by_depth[place] = self.draw(self.q(self.parents[node]), elders)
        return self.known[node]

    def draw(self, law: Tensor, elders: Sequence[int]) -> int:
        for token in elders:
            law = without(law, token)
        if law.sum() > 0:
            return self.choose(law)
        return next(x for x in range(len(law)) if x not in elders)  # q has run out: top-k fills the tree with anything

    def context(self, node: int) -> Context:
        if node not in self.paths:
            self.paths[node] = (*self.context(self.parents[node]), self[node])
        return self.paths[node]

    def p(self, node: int) -> Tensor:
        return self.model.p[self.context(node)]

    def q(self, node: int) -> Tensor:
        context = self.context(node)
        return self.model.q[tuple(0 for _ in context) if self.shared else context]


def step(rule: RowRule, parents: list[int], of: Model, shared: bool = False) -> Run:
    """A rule on a freshly drawn tree."""

    def run(choose: Choose) -> Context:
        drawn = Drawn(parents, of, choose, shared)
        path, token = rule(Candidates(drawn, drawn.children), drawn.p, drawn.q, choose)
        return (*drawn.context(path[-1]), token)

    return run


def emitted(run: Run) -> dict[Context, float]:
    law: dict[Context, float] = {}
    for chance, tokens in outcomes(run):
        law[tokens] = law.get(tokens, 0.0) + chance
    return law


def distance(run: Run, of: Model, length: int) -> float:
    """The total variation between the text's law and p's, over all texts of ``length`` tokens."""
    found = torch.zeros((of.vocab,) * length, dtype=torch.float64)
    for tokens, chance in emitted(run).items():
        found[tokens] += chance * of.text_law(length, tokens)
    assert found.sum().item() == pytest.approx(1.0)
    return (found - of.text_law(length)).abs().sum().item() / 2


def committed(run: Run) -> float:
    """The mean number of tokens that a step emits."""
    return sum(chance * len(tokens) for tokens, chance in emitted(run).items())


def depth(parents: list[int]) -> int:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize(("rule", "shape"), CASES, ids=[" on ".join(case) for case in CASES])
def test_the_text_has_exactly_the_law_of_the_target(rule: str, shape: str, vocab: int) -> None:
    parents = SHAPES[shape]
    for kind in KINDS:
        of = model(kind, vocab, depth(parents) + 1)
        assert distance(step(RULES[rule][0], parents, of), of, depth(parents) + 1) < 1e-12, kind


@pytest.mark.parametrize("shape", CHAINS)
def test_on_a_chain_the_rules_for_trees_are_those_for_chains(shape: str) -> None:
    for kind in KINDS:
        of = model(kind, 3)
        for for_trees, for_chains in ((recursive_rejection, chain_rejection), (traversal, block_verification)):
            found, expected = (emitted(step(rule, CHAINS[shape], of)) for rule in (for_trees, for_chains))
            for tokens in {*found, *expected}:
                assert found.get(tokens, 0.0) == pytest.approx(expected.get(tokens, 0.0), abs=1e-14)


def test_the_longer_look_commits_more() -> None:
    for seed in range(2):
        of = model("dense", 3, seed=seed)
        chain = [committed(step(rule, CHAINS["chain of 3"], of)) for rule in (chain_rejection, block_verification)]
        assert chain[1] > chain[0] + 1e-3
        for shape in ("two by two", "a lone second child", "depth 3"):
            found = [committed(step(rule, TREES[shape], of)) for rule in (recursive_rejection, traversal)]
            assert found[1] >= found[0] - 1e-12
        assert found[1] > found[0] + 1e-3
    of = model("dense", 3)
    single = [committed(step(rule, CHAINS["chain of 1"], of)) for rule in (chain_rejection, block_verification)]
    assert single[0] == pytest.approx(single[1])  # there is nothing beyond the token to look at


def test_siblings_commit_more_than_one_child() -> None:
    of = model("dense", 4)
    one, three = ([-1, 0], TREES["three children"])
    assert committed(step(recursive_rejection, three, of)) > committed(step(recursive_rejection, one, of)) + 0.1


def test_four_tokens_at_an_acceptance_of_four_fifths_commit_3_36() -> None:
    of = flat([0.6, 0.3, 0.1], [0.4, 0.5, 0.1], 5)
    found = committed(step(chain_rejection, [-1, 0, 1, 2, 3], of))
    assert found == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert found == pytest.approx(3.3616)


def test_tokens_that_were_not_drawn_are_never_accepted() -> None:
    """q has one token and the tree asks for three children: the two others are fillers."""
    of = flat([0.2, 0.3, 0.5], [1.0, 0.0, 0.0], 2)
    for rule in (recursive_rejection, traversal):
        law = emitted(step(rule, TREES["three children"], of))
        assert {tokens[0] for tokens in law if len(tokens) == 2} == {0}


def test_a_residual_that_is_only_rounding_gives_way_to_p() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, p + torch.tensor([-1e-9, 1e-9, 0.0], dtype=torch.float64)), p)
    assert residual(p, torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)).tolist() == [1.0, 0.0, 0.0]


# What goes wrong in practice, each as the smallest change to a rule. The distances are quoted in docs/lossless.md.

CONTRARY = flat([0.6, 0.3, 0.1], [0.2, 0.5, 0.3], 4)


def resampled_from_p(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Chain rejection that draws from p after a rejection."""
    (child,) = tree.children[0]
    token = tree.tokens[child]
    accepted = torch.clamp(p(0)[token] / q(0)[token], max=1.0)
    if choose(torch.stack([accepted, 1 - accepted])) == 0:
        return [0, child], choose(p(child))
    return [0], choose(p(0))


def sorted_by_q(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Recursive rejection of siblings by falling q and not in the order of their draw."""
    children = [sorted(c, key=lambda node: -q(v)[tree.tokens[node]].item()) for v, c in enumerate(tree.children)]
    return recursive_rejection(Candidates(tree.tokens, children), p, q, choose)


def unsure_tokens_dropped(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """A chain that is cut before the first token of which the drafter, having drawn it, is not sure."""
    kept = [[c for c in children if q(v)[tree.tokens[c]] > 0.4] for v, children in enumerate(tree.children)]
    return chain_rejection(Candidates(tree.tokens, kept), p, q, choose)


def grown_by_q(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Of the drawn siblings only the likeliest becomes a node, as in a dynamic tree."""
    kept = [sorted(c, key=lambda node: -q(v)[tree.tokens[node]].item())[:1] for v, c in enumerate(tree.children)]
    return recursive_rejection(Candidates(tree.tokens, kept), p, q, choose)


def one_coin(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Chain rejection with one and the same number U at every token: i tokens pass if U is below all their ratios."""
    path = list(range(len(tree.children)))
    ratios = [min(1.0, (p(v)[tree.tokens[v + 1]] / q(v)[tree.tokens[v + 1]]).item()) for v in path[:-1]]
    passes = [min([1.0, *ratios[:i]]) for i in range(len(path))]
    cells = [a - b for a, b in zip(passes, [*passes[1:], 0.0], strict=True)]
    last = choose(torch.tensor(cells, dtype=torch.float64))
    law = p(last) if last == path[-1] else residual(p(last), q(last))
    return path[: last + 1], choose(law)


def all_or_nothing(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """One draw for the whole chain: it passes with the product of the ratios, or nothing does."""
    path = list(range(len(tree.children)))
    ratio = 1.0
    for v in path[:-1]:
        ratio *= min(1.0, (p(v)[tree.tokens[v + 1]] / q(v)[tree.tokens[v + 1]]).item())
    if choose(torch.tensor([ratio, 1 - ratio])) == 0:
        return path, choose(p(path[-1]))
    return [0], choose(residual(p(0), q(0)))


def first_failed_coin(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Block verification that stops at the first coin that fails and not at the last that succeeds."""
    nodes, chance = list(range(len(tree.children))), [1.0]
    for v in nodes[1:]:
        chance.append(min(1.0, chance[-1] * float(p(v - 1)[tree.tokens[v]] / q(v - 1)[tree.tokens[v]])))
    last = 0
    for v in nodes[1:]:
        mass = float((chance[v] * p(v) - q(v)).clamp(min=0).sum())
        accept = chance[v] if v == nodes[-1] else mass / (mass + (1 - chance[v])) if mass else float(chance[v] == 1)
        if choose(torch.tensor([accept, 1 - accept], dtype=torch.float64)) == 1:
            break
        last = v
    law = p(last) if last == nodes[-1] else residual(p(last), q(last), chance[last])
    return nodes[: last + 1], choose(law)


def full_support_behind_a_block(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Block verification whose residual forgets P: norm([p - q]+)."""
    path, token = block_verification(tree, p, q, choose)
    return (path, choose(residual(p(path[-1]), q(path[-1])))) if tree.children[path[-1]] else (path, token)


def chance_by_mass(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """Traversal that gives a node the chance S / (draft mass that is left) when its child is dropped."""

    def visit(path: list[int], chance: float) -> Outcome | None:
        rest, draft, left = p(path[-1]), q(path[-1]), 1.0
        for child in tree.children[path[-1]]:
            token = tree.tokens[child]
            found = visit([*path, child], min(1.0, chance * float(rest[token] / draft[token])))
            if found is not None:
                return found
            mass = float((chance * rest - draft).clamp(min=0).sum())
            left *= 1 - float(draft[token])
            rest, draft, chance = residual(rest, draft, chance), without(draft, token), min(1.0, mass / left)
        accept = 1.0 if len(path) == 1 else chance
        return (path, choose(rest)) if choose(torch.tensor([accept, 1 - accept])) == 0 else None

    outcome = visit([0], 1.0)
    assert outcome is not None
    return outcome


def noise_of_the_draft(choose: Choose) -> Context:
    """One draft whose coin is the very number U that drew it, by the inverse of q's distribution."""
    p, q = CONTRARY.p[()], CONTRARY.q[()]
    cells, events = [], []
    for token, upper in enumerate(q.cumsum(0).tolist()):
        lower, ratio = upper - q[token].item(), min(1.0, (p[token] / q[token]).item())
        below = min(max(ratio - lower, 0.0), upper - lower)
        cells += [below, upper - lower - below]
        events += [(token, True), (token, False)]
    token, accepted = events[choose(torch.tensor(cells, dtype=torch.float64))]
    return (token,) if accepted else (choose(residual(p, q)),)


def second_draw_alone(tree: Candidates, p: Law, q: Law, choose: Choose) -> Outcome:
    """A tree that has a node's second draw and not its first, as rank paths without rank 0 would give."""
    return recursive_rejection(Candidates(tree.tokens, [[2], [], []]), p, q, choose)


TWO, FOUR = [-1, 0, 0], TREES["two by two"]
OPPOSED = flat([0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], 4)
PEAKED = flat([0.5, 0.25, 0.25], [0.8, 0.02, 0.18], 4)
WRONG: dict[str, tuple[Run, Model, int, float]] = {
    "drawing from p after a rejection": (step(resampled_from_p, [-1, 0], CONTRARY), CONTRARY, 2, 0.160),
    "one coin for all tokens of a path": (step(one_coin, [-1, 0, 1], CONTRARY), CONTRARY, 3, 0.120),
    "one draw for the whole path": (step(all_or_nothing, [-1, 0, 1], CONTRARY), CONTRARY, 3, 0.160),
    "coins that share the noise of the draft": (noise_of_the_draft, CONTRARY, 1, 0.100),
    "a drawn token dropped for its low q": (step(unsure_tokens_dropped, [-1, 0], CONTRARY), CONTRARY, 2, 0.150),
    "siblings sorted by q": (step(sorted_by_q, TWO, OPPOSED), OPPOSED, 2, 0.1056),
    "a tree grown by the q of drawn tokens": (step(grown_by_q, TWO, OPPOSED), OPPOSED, 2, 0.1354),
    "a second draw without the first": (step(second_draw_alone, TWO, OPPOSED), OPPOSED, 2, 0.0315),
    "block, stopped by the first failed coin": (step(first_failed_coin, [-1, 0, 1], CONTRARY), CONTRARY, 3, 0.2571),
    "block, its residual without P": (step(full_support_behind_a_block, [-1, 0, 1], PEAKED), PEAKED, 3, 0.0254),
    "traversal by a ratio of masses": (step(chance_by_mass, [-1, 0, 1, 1], OPPOSED), OPPOSED, 3, 0.0238),
    "traversal of branches that share noise": (step(traversal, FOUR, CONTRARY, shared=True), CONTRARY, 3, 0.0122),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_known_mistake_changes_the_law_by_as_much_as_the_page_says(name: str) -> None:
    run, of, length, expected = WRONG[name]
    found = distance(run, of, length)
    assert found > 0.01
    assert found == pytest.approx(expected, abs=1e-4)
    assert f"| {name} | {found:.3f} |" in PAGE.read_text()


def test_the_rules_are_right_where_the_mistakes_are_wrong() -> None:
    for of in (CONTRARY, PEAKED):
        for rule, parents in (
            (chain_rejection, [-1, 0, 1]),
            (block_verification, [-1, 0, 1]),
            (recursive_rejection, FOUR),
            (traversal, FOUR),
        ):
            assert distance(step(rule, parents, of), of, 3) < 1e-12


def test_recursive_rejection_may_share_noise_between_branches() -> None:
    """It looks at the children of one node of a depth only."""
    for of in (CONTRARY, PEAKED, model("dense", 3)):
        assert distance(step(recursive_rejection, FOUR, of, shared=True), of, 3) < 1e-12


def most_likely_child(choose: Choose) -> Context:
    """Typical acceptance of the drafter's favourite, which p gives 0.3."""
    path, token = typical(Candidates([0, 1], [[1], []]), lambda _: CONTRARY.p[()], choose)
    return (1, token) if len(path) == 2 else (token,)


def test_typical_acceptance_is_lossy() -> None:
    found = distance(most_likely_child, CONTRARY, 2)
    assert found == pytest.approx(0.7)  # the favourite is accepted always, and not in three cases of ten
    assert f"| typical acceptance | {found:.3f} |" in PAGE.read_text()


def test_typical_acceptance_takes_the_longest_path_and_of_two_the_likelier() -> None:
    laws = [torch.tensor(law) for law in ([0.5, 0.4, 0.1], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1])]
    tokens, parents = [0, 0, 1, 0, 1], [-1, 0, 0, 1, 2]
    law = {0: laws[0], 1: laws[1], 2: laws[2], 3: laws[0], 4: laws[0]}.__getitem__
    first_option = torch.Tensor.argmax
    path, token = typical(Candidates.of(tokens, parents), law, lambda weights, stream=0: int(first_option(weights)))
    assert (path, token) == ([0, 2, 4], 0)  # 0.4 * 0.8 against 0.5 * 0.3
    strict = typical(Candidates.of(tokens, parents), law, lambda weights, stream=0: 0, epsilon=0.45, delta=10.0)
    assert strict[0] == [0, 1]
    nothing = typical(Candidates.of(tokens, parents), law, lambda weights, stream=0: 0, epsilon=0.6, delta=10.0)
    assert nothing[0] == [0]


def test_typical_acceptance_of_a_law_without_spread_is_greedy() -> None:
    certain = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    tree = Candidates.of([0, 0, 1, 2], [-1, 0, 0, 2])
    assert list(outcomes(lambda choose: typical(tree, lambda _: certain, choose))) == [(1.0, ([0, 2], 1))]


def test_the_examples_of_the_page_give_what_they_show() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.failed == 0
    assert result.attempted > 10
