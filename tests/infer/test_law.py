"""Sampled text follows the target's law for any draft: checked against a target whose law is known exactly."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from kit import markov_rand, medusa_config, random_heads, tokenizer
from treedraft.heads import Accepted, Drafter, DraftScores, Medusa, Memory, build_head
from treedraft.infer import RULES, GenerationError, Sampling, Target, complete, gumbel, lossy_typical
from treedraft.infer.draft_model import DraftModel
from treedraft.infer.noise import COINS, RESIDUALS, stream_seeds
from treedraft.infer.rows import uniforms
from treedraft.tree import Draft, DynamicTree, Shape, Tree

SAMPLES = 4000
PROMPT = [14]  # w1


@pytest.fixture(scope="module")
def known() -> tuple[Target, torch.Tensor]:
    model, law = markov_rand()
    return Target(model, tokenizer()), law.double()


def contrary_heads(target: Target, law: torch.Tensor) -> Medusa:
    """Always proposes the rarest tokens: the output layer with its sign turned."""
    head = random_heads(target, 2)
    assert isinstance(head, Medusa)
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


# Rules that weigh p against q, with heads that know as much as position-wise heads can.

FEW = 1000
SMALL_TREE = Tree.from_paths([[0], [0, 0], [0, 1], [1], [1, 0], [2]])


def knowing_heads(target: Target, law: Tensor, draft_ids: Tensor | None = None) -> Medusa:
    """Head k's law is P^(k + 2) of the token before the root, which is all that it sees; perhaps over some ids only."""
    size = None if draft_ids is None else len(draft_ids)
    head = build_head(medusa_config(target, 2, output="own", draft_vocab_size=size), target.layers(), draft_ids)
    scale = math.sqrt(1.0 / len(law) + target.config.rms_norm_eps)  # the target's output layer carries it too
    assert isinstance(head, Medusa)
    assert head.own_output is not None
    with torch.no_grad():
        for k, own in enumerate(head.own_output):
            logits = torch.linalg.matrix_power(law, k + 2).clamp_min(1e-30).log().T * scale
            own.copy_(logits if draft_ids is None else logits[draft_ids])
    return head


def decoded(target: Target, head: Drafter, rule: str, tree: Tree) -> Tensor:
    """[FEW, 4] tokens of FEW requests. The first is the prefill's own, the others are the rule's."""
    done = complete(
        target,
        [PROMPT] * FEW,
        head=head,
        tree=tree,
        sampling=Sampling(temperature=1.0),
        seed=11,
        max_new_tokens=4,
        batch_size=250,
        end_ids=(),
        rule=rule,
    )
    accepted = sum((c.stats.accepted for c in done), Counter[int]())
    assert accepted[1] > FEW / 20  # else nothing was put to the test
    assert accepted[2] > FEW / 20
    return torch.tensor([c.ids for c in done])


def check_moves(tokens: Tensor, law: Tensor) -> None:
    """Two moves in a row are as likely as the law has them, by the rank of each: 0, 1, 2, 3-5, 6-11, others."""
    ranks = law.argsort(1, descending=True).argsort(1)
    classes = torch.bucketize(ranks, torch.tensor([0, 1, 2, 5, 11]))  # [V, V], of a move from x to y
    moves = law[:, :, None] * torch.nn.functional.one_hot(classes, 6)
    before = law[PROMPT[-1]]
    for first, second, third in zip(tokens.T, tokens.T[1:], tokens.T[2:], strict=False):
        observed = torch.bincount(classes[first, second] * 6 + classes[second, third], minlength=36).double()
        expected = torch.einsum("x,xyk,yzl->kl", before, moves, moves)
        check_fit(observed, FEW * expected.flatten())
        before = before @ law


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.lossless == "in law"])
def test_rules_that_weigh_p_against_q_fit_the_known_law(known: tuple[Target, Tensor], rule: str) -> None:
    target, law = known
    tree = Tree.chain(2) if RULES[rule].chains_only else SMALL_TREE
    check_moves(decoded(target, knowing_heads(target, law), rule, tree), law)


def test_branches_with_laws_of_their_own_keep_the_law(known: tuple[Target, Tensor]) -> None:
    """A model whose law is flatter than the target's drafts: q depends on the drafted path, and much is accepted."""
    target, law = known
    flatter, _ = markov_rand()
    with torch.no_grad():
        flatter.get_parameter("lm_head.weight").mul_(0.6)
    check_moves(decoded(target, DraftModel(Target(flatter, tokenizer())), "traversal", SMALL_TREE), law)


def test_a_reduced_draft_vocabulary_keeps_the_law(known: tuple[Target, Tensor]) -> None:
    target, law = known
    head = knowing_heads(target, law, torch.arange(14, 96, 2))
    tokens = decoded(target, head, "recursive-rejection", SMALL_TREE)
    check_moves(tokens, law)
    assert (tokens % 2 == 1).any()  # a token that is never drafted


def test_a_rule_that_draws_from_p_after_a_rejection_is_found_out(
    known: tuple[Target, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, law = known
    monkeypatch.setattr("treedraft.infer.rejection.residual", lambda p, q, chance=1.0: p)
    with pytest.raises(AssertionError):
        check_moves(decoded(target, knowing_heads(target, law), "chain-rejection", Tree.chain(2)), law)


def test_no_random_number_is_used_twice(known: tuple[Target, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are drafted again after a rejection meet new noise, and so do branches, coins and residuals."""
    target, law = known
    used: Counter[Any] = Counter()
    drafted: Counter[int] = Counter()

    def counted_gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        used.update(zip(seeds.tolist(), positions.tolist(), strict=True))
        drafted.update(positions.tolist())
        return gumbel(seeds, positions, ids)

    def counted_uniforms(seeds: Tensor, count: int) -> Tensor:
        used.update((seed, counter) for seed in seeds.tolist() for counter in range(count))
        return uniforms(seeds, count)

    monkeypatch.setattr("treedraft.infer.sampling.gumbel", counted_gumbel)
    monkeypatch.setattr("treedraft.infer.rows.uniforms", counted_uniforms)
    options: Any = {"head": knowing_heads(target, law), "tree": SMALL_TREE, "max_new_tokens": 60, "end_ids": ()}
    complete(target, [PROMPT], sampling=Sampling(temperature=1.0), rule="traversal", **options)
    assert max(drafted.values()) > 1
    assert max(used.values()) == 1
    used.clear()
    complete(target, [PROMPT], sampling=Sampling(temperature=1.0), rule="coupled", **options)
    assert max(used.values()) > 1  # the coupled rule shares its noise with the drafts, and must


def test_coins_are_uniform_and_independent_of_each_other() -> None:
    """Along the counter, along seeds, and between the streams of a step."""
    seeds, roots = torch.arange(20_000), torch.full((20_000,), 9)
    coins, residuals = (uniforms(stream_seeds(seeds, stream, roots), 4) for stream in (COINS, RESIDUALS))
    other_root = uniforms(stream_seeds(seeds, COINS, roots + 1), 4)
    assert 0.0 <= coins.min() <= coins.max() < 1.0
    assert stats.kstest(coins.flatten().numpy(), "uniform").pvalue > 0.001
    for other in (residuals, other_root, coins.roll(1, 0), coins.roll(1, 1)):
        assert abs(((coins - 0.5) * (other - 0.5)).mean().item() * 12) < 5 / coins.numel() ** 0.5


def test_a_row_is_repeated_by_its_seed_whatever_is_decoded_beside_it(known: tuple[Target, Tensor]) -> None:
    target, law = known
    options: Any = {"head": knowing_heads(target, law), "tree": SMALL_TREE, "max_new_tokens": 20}
    options |= {"sampling": Sampling(temperature=1.0, top_k=30, repetition_penalty=1.1), "rule": "traversal"}
    together = complete(target, [PROMPT, [20, 30], [40]], seed=5, batch_size=3, **options)
    alone = complete(target, [[20, 30]], row_seeds=[together[1].seed], **options)
    assert alone[0].ids == together[1].ids
    other = complete(target, [[20, 30]], row_seeds=[together[1].seed + 1], **options)
    assert other[0].ids != alone[0].ids


class NoLaws:
    """A drafter that does not say what it drew from."""

    taps, depth, candidates = (), 1, 96

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        return Tree.chain(1).draft(torch.stack([accepted.root, accepted.root], 1)), None


def test_rules_name_all_that_they_cannot_use(known: tuple[Target, Tensor]) -> None:
    target, law = known
    head = knowing_heads(target, law)
    sampled = Sampling(temperature=1.0)

    def refusal(**options: Any) -> str:
        with pytest.raises(GenerationError) as refused:
            complete(target, [PROMPT], head=options.pop("head", head), sampling=sampled, **options)
        return str(refused.value)

    assert "no rule called 'blocks': expected one of coupled, chain-rejection" in refusal(rule="blocks")
    assert "no drafts called 'topk': expected one of coupled, top-k, sampled" in refusal(drafts="topk")
    both = refusal(rule="block", drafts="top-k", tree=SMALL_TREE, max_new_tokens=-1)
    assert "needs sampled drafts, got top-k" in both
    assert "rule block reads chains only, got a tree that branches; use chain:2" in both
    assert "max_new_tokens must be at least 0" in both
    dynamic = DynamicTree(4, 2, 2)
    assert "growing by the drawn tokens' own probability would bias the law" in refusal(rule="traversal", tree=dynamic)
    assert "ranks 0, 1, 2" in refusal(rule="recursive-rejection", tree=Tree.from_paths([[0], [2]]))
    assert "ranks 0, 1, 2" in refusal(rule="chain-rejection", tree=Tree.from_paths([[1]]))
    assert "ranks 0, 1, 2" in refusal(rule="recursive-rejection", tree=Tree((-1, 0, 0), (0, 1, 0)))
    chain: Any = {"tree": Tree.chain(1), "rule": "chain-rejection"}
    assert "chain-rejection cannot be used with NoLaws" in refusal(head=NoLaws(), **chain)
    for bad in ({"epsilon": 0.0}, {"epsilon": 1.0}, {"delta": 0.0}):
        with pytest.raises(GenerationError, match=next(iter(bad))):
            lossy_typical(**bad)


def test_what_is_refused_at_a_temperature_is_what_would_be_wrong(known: tuple[Target, Tensor]) -> None:
    target, law = known
    greedy = complete(target, [PROMPT], max_new_tokens=6)[0].ids
    chain: Any = {"tree": Tree.chain(1), "rule": "chain-rejection", "max_new_tokens": 6}
    assert complete(target, [PROMPT], head=NoLaws(), **chain)[0].ids == greedy  # no q is needed to be greedy
    head, sampled = knowing_heads(target, law), Sampling(temperature=1.0)
    plain = complete(target, [PROMPT], sampling=sampled, max_new_tokens=6)[0].ids
    undrafted = complete(target, [PROMPT], sampling=sampled, max_new_tokens=6, rule="block")[0].ids
    assert undrafted == plain  # nothing is weighed
    for tree in (DynamicTree(6, 2, 2), Tree.from_paths([[0], [2]])):
        complete(target, [PROMPT], head=head, tree=tree, sampling=sampled, rule="lossy-typical", max_new_tokens=6)


def test_thresholds_change_what_typical_acceptance_accepts(known: tuple[Target, Tensor]) -> None:
    target, law = known
    head, sampled = knowing_heads(target, law), Sampling(temperature=1.0)
    taus = []
    for rule in (lossy_typical(epsilon=0.01, delta=0.05), "lossy-typical", lossy_typical(epsilon=0.9, delta=30.0)):
        done = complete(target, [PROMPT] * 8, head=head, sampling=sampled, rule=rule, end_ids=(), max_new_tokens=40)
        taus.append(sum(c.stats.kept for c in done) / sum(c.stats.rounds for c in done))
    assert taus[0] > taus[1] > taus[2]
