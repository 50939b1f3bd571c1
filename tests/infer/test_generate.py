"""Where runs end, what is streamed, what is counted, and what is refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from kit import WORD_ID, markov_ring, random_heads, ring_heads, target, tokenizer
from treedraft.heads import Drafter, Medusa
from treedraft.infer import (
    Chunk,
    Completion,
    GenerationError,
    Run,
    Sampling,
    Target,
    autoregressive,
    complete,
    generate,
)
from treedraft.tree import Tree

CHAIN = Tree.chain(5)


@pytest.fixture(scope="module")
def ring() -> Target:
    return Target(markov_ring(), tokenizer())


@pytest.fixture(scope="module")
def exact(ring: Target) -> Drafter:
    return ring_heads(ring, 5).for_decoding(torch.float32)


def words(*numbers: int) -> list[int]:
    return [WORD_ID[f"w{n}"] for n in numbers]


def one(ring: Target, exact: Medusa | None, **options: object) -> Completion:
    return complete(ring, [words(5)], head=exact, tree=CHAIN, **options)[0]


def test_exact_heads_accept_to_the_full_depth(ring: Target, exact: Medusa) -> None:
    done = one(ring, exact, max_new_tokens=19)
    assert done.ids == words(*range(6, 25))
    assert (done.stats.rounds, done.stats.kept, done.stats.tokens) == (3, 18, 19)
    assert done.stats.tau == 6.0
    assert done.stats.accepted_by_depth == [3, 3, 3, 3, 3, 3]


def test_an_end_token_inside_the_accepted_path_ends_ids_text_stream_and_counts(ring: Target, exact: Medusa) -> None:
    end = words(9)
    chunks = list(generate(ring, [words(5)], head=exact, tree=CHAIN, max_new_tokens=20, end_ids=end))
    ids = [i for chunk in chunks for i in chunk.ids]
    assert ids == words(6, 7, 8, 9)
    assert "".join(c.text for c in chunks) == "w6 w7 w8 w9"
    assert [c.reason for c in chunks] == [None, "end"]
    done = one(ring, exact, max_new_tokens=20, end_ids=end)
    assert (done.ids, done.reason) == (ids, "end")
    assert (done.stats.rounds, done.stats.kept, done.stats.tokens) == (1, 3, 4)
    assert done.stats.accepted_by_depth == [1, 1, 1, 1]  # three drafted tokens were kept, no bonus


@pytest.mark.parametrize("end", [7, 8, 11, 12])
def test_any_of_several_end_tokens_ends_the_run(ring: Target, exact: Medusa, end: int) -> None:
    done = one(ring, exact, max_new_tokens=20, end_ids=words(end, 30))
    assert done.ids == words(*range(6, end + 1))
    assert done.reason == "end"


def test_a_stop_string_inside_the_budget_wins_and_nothing_leaks(ring: Target, exact: Medusa) -> None:
    done = one(ring, exact, max_new_tokens=4, stop_strings=["w8"])
    assert (done.ids, done.text, done.reason) == (words(6, 7, 8), "w6 w7 w8", "stop")
    streamed = list(generate(ring, [words(5)], head=exact, tree=CHAIN, max_new_tokens=4, stop_strings=["w8"]))
    assert "".join(c.text for c in streamed) == "w6 w7 w8"
    assert streamed[-1].reason == "stop"


def test_a_stop_string_on_the_budgets_last_token_is_a_stop(ring: Target, exact: Medusa) -> None:
    assert one(ring, exact, max_new_tokens=3, stop_strings=["w8"]).reason == "stop"


def test_a_stop_string_may_span_tokens_and_end_within_one(ring: Target, exact: Medusa) -> None:
    done = one(ring, exact, max_new_tokens=20, stop_strings=["7 w"])
    assert (done.text, done.ids, done.reason) == ("w6 w7 w", words(6, 7, 8), "stop")


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 6, 7, 13])
@pytest.mark.parametrize("drafting", [True, False])
def test_a_budget_gives_exactly_that_many_tokens(ring: Target, exact: Medusa, budget: int, drafting: bool) -> None:
    done = one(ring, exact if drafting else None, max_new_tokens=budget)
    assert done.ids == words(*range(6, 6 + budget))
    assert done.reason == "length"
    assert done.stats.tokens == budget


def test_the_context_limits_the_budget_and_the_text_stays_the_references() -> None:
    model = Target(target("llama_gqa"), tokenizer())  # 256 positions
    head = random_heads(model).for_decoding(torch.float32)
    prompt = [20 + i % 60 for i in range(250)]
    done = complete(model, [prompt], head=head, tree=Tree.chain(3), max_new_tokens=40)[0]
    assert (len(done.ids), done.reason) == (6, "length")
    reference = [i for c in autoregressive(model, [prompt], max_new_tokens=40) for i in c.ids]
    assert done.ids == reference


def test_rows_of_a_batch_end_apart_and_chunks_say_whose_they_are(ring: Target, exact: Medusa) -> None:
    prompts = [words(5), words(60), words(1, 2, 3, 20)]
    chunks = list(
        generate(ring, prompts, head=exact, tree=CHAIN, max_new_tokens=20, end_ids=words(9, 70), batch_size=3)
    )
    by_row: dict[int, list[Chunk]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        by_row[chunk.row].append(chunk)
    assert [[i for c in by_row[r] for i in c.ids] for r in range(3)] == [
        words(*range(6, 10)),
        words(*range(61, 71)),
        words(*range(21, 41)),
    ]
    assert [by_row[r][-1].reason for r in range(3)] == ["end", "end", "length"]
    assert all(c.reason is None for r in range(3) for c in by_row[r][:-1])


def test_more_prompts_than_the_batch_holds_are_decoded_in_turn(ring: Target, exact: Medusa) -> None:
    prompts = [words(n) for n in range(7)]
    run = Run()
    done = complete(ring, prompts, head=exact, tree=CHAIN, max_new_tokens=7, batch_size=3, run=run)
    assert [c.ids for c in done] == [words(*range(n + 1, n + 8)) for n in range(7)]
    assert (run.stats.prompts, run.stats.tokens) == (7, 49)
    assert run.stats.rounds == sum(c.stats.rounds for c in done)


def test_two_interleaved_generators_do_not_disturb_each_other() -> None:
    model = Target(target("qwen3_headdim"), tokenizer())
    head = random_heads(model).for_decoding(torch.float32)
    settings = [
        {"prompts": [[20, 21, 22], [30] * 9], "sampling": Sampling(temperature=1.0), "seed": 1},
        {"prompts": [[40] * 5], "sampling": Sampling(repetition_penalty=1.2), "seed": 2},
    ]

    def begin(s: dict) -> object:
        return generate(
            model,
            s["prompts"],
            head=head,
            tree=Tree.chain(3),
            sampling=s["sampling"],
            seed=s["seed"],
            max_new_tokens=20,
        )

    alone = [[(c.row, c.ids) for c in begin(s)] for s in settings]  # type: ignore[attr-defined]
    runs = [begin(s) for s in settings]
    mixed: list[list[tuple[int, list[int]]]] = [[], []]
    open_runs = {0, 1}
    while open_runs:
        for i in sorted(open_runs):
            chunk = next(runs[i], None)  # type: ignore[call-overload]
            if chunk is None:
                open_runs.discard(i)
            else:
                mixed[i].append((chunk.row, chunk.ids))
    assert mixed == alone


def test_a_looping_round_is_counted_apart(ring: Target, exact: Medusa) -> None:
    """The ring repeats after 83 words: every round whose first token ends a known 4-gram loops."""
    done = one(ring, exact, max_new_tokens=1 + 6 * 20)
    stats = done.stats
    assert stats.rounds == 20
    # The answer starts at w6 and comes back to w6 with its 84th token, so w9, its 87th, ends the first repeated 4-gram.
    first_looping_round = -(-(87 - 1 - 1) // 6)  # rounds start with tokens 2, 8, 14, ...
    assert stats.loop_rounds == 20 - first_looping_round
    assert stats.loop_kept == 6 * stats.loop_rounds
    assert stats.tau_without_loops == 6.0


def test_phases_add_up_to_the_time_of_the_run(ring: Target, exact: Medusa) -> None:
    run = Run()
    complete(ring, [words(5)], head=exact, tree=CHAIN, max_new_tokens=60, run=run)
    assert set(run.stats.phase_seconds) == {"prefill", "draft", "forward", "verify", "commit", "rest"}
    assert all(seconds > 0 for seconds in run.stats.phase_seconds.values())


def test_all_faults_of_a_request_are_named_at_once(ring: Target, exact: Medusa) -> None:
    with pytest.raises(GenerationError) as error:
        complete(
            ring,
            [[], [1] * 600, [400]],
            head=exact,
            tree=Tree.chain(6),
            max_new_tokens=-1,
            row_seeds=[1, -2],
            batch_size=0,
            stop_strings=[""],
        )
    message = str(error.value)
    for fault in (
        "max_new_tokens must be at least 0, got -1",
        "batch_size must be at least 1, got 0",
        "2 row seeds for 3 prompts",
        "seeds must lie in 0..2^63-1",
        "a stop string must not be empty",
        "prompt 0 is empty",
        "prompt 1 has 600 tokens, the target's context holds 512",
        "prompt 2 has ids outside 0..95",
        "6 deep, but there are 5 heads",
    ):
        assert fault in message


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_p": 0.0, "min_p": 1.0}, "top_p must lie in .* min_p must lie in"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
    ],
)
def test_laws_that_cannot_be_are_refused(law: dict[str, float], fault: str) -> None:
    with pytest.raises(GenerationError, match=fault):
        Sampling(**law)  # type: ignore[arg-type]


@pytest.mark.parametrize("law", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)])
def test_logits_that_are_not_finite_stop_the_run(law: Sampling) -> None:
    model = target("llama_gqa")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(3e4)
    broken = Target(model.half(), tokenizer())
    with pytest.raises(GenerationError, match=r"logits are not finite.*fp32 or bf16"):
        complete(broken, [words(5)], sampling=law, max_new_tokens=5)


def test_streamed_text_equals_the_decoded_ids(ring: Target) -> None:
    model = Target(target("llama_gqa"), tokenizer())
    head = random_heads(model).for_decoding(torch.float32)
    for seed in range(5):
        chunks = list(
            generate(model, [[20, 21]], head=head, sampling=Sampling(temperature=1.5), seed=seed, max_new_tokens=30)
        )
        ids = [i for c in chunks for i in c.ids]
        assert "".join(c.text for c in chunks) == model.tokenizer.decode(ids, skip_special_tokens=True)


def test_a_user_given_processor_sees_every_nodes_own_path(ring: Target, exact: Medusa) -> None:
    class NoRepeatOfLast(LogitsProcessor):
        """Forbids the successor of the text's last token: it must see drafted tokens to do its work."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores = scores.clone()
            scores[torch.arange(len(scores)), scores.argmax(-1)] = torch.where(
                input_ids[:, -1] % 3 == 0, float("-inf"), scores.max(-1).values
            )
            return scores

    def texts(head: Medusa | None) -> Sequence[int]:
        return complete(
            ring, [words(5)], head=head, tree=CHAIN, max_new_tokens=30, logits_processor=[NoRepeatOfLast()]
        )[0].ids

    expected = [
        i
        for c in autoregressive(ring, [words(5)], max_new_tokens=30, logits_processor=[NoRepeatOfLast()])
        for i in c.ids
    ]
    assert texts(exact) == texts(None) == expected
    assert expected != words(*range(6, 36))
