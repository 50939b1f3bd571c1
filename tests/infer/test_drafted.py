"""Inside transformers' ``generate``: its own text, cut and streamed where it is, or refused by name."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from kit import any_head, build, markov_ring, ring_heads, target, tokenizer
from kit.families import MODELS
from treedraft.heads import NGram, card, save_head
from treedraft.infer import (
    Drafted,
    DraftedOutput,
    GenerationError,
    Sampling,
    Target,
    TargetError,
    autoregressive,
    drafted,
    row_seed,
)
from treedraft.tree import Tree

PROMPT = [20, 31, 44, 20, 31, 58, 44]
PADDED = torch.tensor([[3, 3, 3, 40, 41], [20, 31, 44, 20, 31], [3, 50, 51, 52, 60]])
MASK = (PADDED != 3).long()
TREE = Tree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
NEW = 24


@pytest.fixture(scope="module")
def llama() -> Any:
    return target("llama_gqa")


@pytest.fixture(scope="module")
def heads() -> Drafted:
    """Random heads: some drafts are accepted, most are not."""
    return drafted(lambda t: any_head(t, "eagle3").for_decoding(t.dtype), tree=TREE, compile="off")


@pytest.fixture(scope="module")
def ring() -> Any:
    return markov_ring()


@pytest.fixture(scope="module")
def exact() -> Drafted:
    """Heads that are right everywhere: rounds of six tokens, so that most cuts fall inside one."""
    return drafted(lambda t: ring_heads(t, 5).for_decoding(t.dtype), tree=Tree.chain(5), compile="off")


def _stoppable() -> Any:
    """A tokenizer that can say how its tokens read, which StopStringCriteria finds out by a word of its own."""
    words = tokenizer()
    words.add_tokens(["abcdef"])
    return words


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def both(model: Any, way: Drafted, inputs: Tensor, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """What plain generate writes, and what it writes with the one added argument."""
    options = {"max_new_tokens": NEW, **options}
    return model.generate(inputs, **options).tolist(), model.generate(inputs, **options, custom_generate=way).tolist()


@pytest.mark.parametrize("family", MODELS)
def test_greedy_text_is_that_of_generate_in_every_family(family: str) -> None:
    model = build(MODELS[family]())
    way = drafted(lambda t: any_head(t, "eagle3").for_decoding(t.dtype), tree=TREE, compile="off")
    plain, found = both(model, way, ids(PROMPT))
    assert found == plain


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle", "none", "ngram"])
def test_greedy_text_does_not_depend_on_the_head(llama: Any, kind: str) -> None:
    made: Any = {"none": None, "ngram": NGram()}
    head = made[kind] if kind in made else lambda t: any_head(t, kind).for_decoding(t.dtype)
    plain, found = both(llama, drafted(head, tree=Tree.chain(2), compile="off"), ids(PROMPT))
    assert found == plain


def test_rounds_of_many_tokens_are_counted_in_the_output(ring: Any, exact: Drafted) -> None:
    out = ring.generate(ids([20]), custom_generate=exact, max_new_tokens=19, return_dict_in_generate=True)
    assert isinstance(out, DraftedOutput)
    assert out.stats is not None
    assert (out.stats.rounds, out.stats.tau, out.seeds) == (3, 6.0, [0])
    assert out["sequences"].tolist() == [list(range(20, 40))]


def test_left_padded_rows_are_those_of_generate_and_end_in_padding(llama: Any, heads: Drafted) -> None:
    plain, found = both(llama, heads, PADDED, attention_mask=MASK)
    assert found == plain


def test_rows_that_end_early_are_padded_as_generate_pads_them(ring: Any, exact: Drafted) -> None:
    asked: Any = {"attention_mask": ids([1, 1], [0, 1]), "eos_token_id": 33, "pad_token_id": 3}
    plain, found = both(ring, exact, ids([30, 20], [3, 30]), **asked)
    assert found == plain
    assert found[1][-1] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_length": 13, "max_new_tokens": None},
        {"eos_token_id": 30},
        {"eos_token_id": [77, 31, 35]},
        {"stopping_criteria": [tf.StopStringCriteria(_stoppable(), ["w21 w22"])]},
    ],
    ids=lambda options: ", ".join(options),
)
def test_a_run_is_cut_where_generate_cuts_it(ring: Any, exact: Drafted, options: dict[str, Any]) -> None:
    plain, found = both(ring, exact, ids([20, 21]), **options)
    assert found == plain
    assert len(found[0]) < 2 + NEW


class _Sum(tf.StoppingCriteria):
    """Ends a row when its ids add up to a multiple of 23; keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.seen += input_ids.tolist()
        return input_ids.sum(1) % 23 == 0


def test_a_criterion_sees_every_token_once_with_the_prompt_in_front(ring: Any, exact: Drafted) -> None:
    plain, found = _Sum(), _Sum()
    one = ring.generate(ids([20, 21]), max_new_tokens=60, stopping_criteria=[plain])
    other = ring.generate(ids([20, 21]), max_new_tokens=60, stopping_criteria=[found], custom_generate=exact)
    assert one.tolist() == other.tolist()
    assert found.seen == plain.seen
    assert len(found.seen) < 60


def test_a_criterion_ends_each_row_of_a_batch_for_itself(ring: Any, exact: Drafted) -> None:
    rows, mask = ids([20, 21], [3, 50], [60, 44]), ids([1, 1], [0, 1], [1, 1])
    asked: Any = {"attention_mask": mask, "max_new_tokens": 60, "eos_token_id": 2, "pad_token_id": 3}
    one = ring.generate(rows, **asked, stopping_criteria=[_Sum()])
    other = ring.generate(rows, **asked, stopping_criteria=[_Sum()], custom_generate=exact)
    assert one.tolist() == other.tolist()
    assert len({row.index(3, 2) if 3 in row[2:] else None for row in other.tolist()}) > 1


def test_a_streamer_is_given_every_token_and_is_ended(ring: Any, exact: Drafted) -> None:
    streamer = tf.TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=20)  # type: ignore[arg-type]
    asked = {"max_new_tokens": 15, "streamer": streamer, "custom_generate": exact}
    thread = threading.Thread(target=ring.generate, args=(ids([20]),), kwargs=asked)
    thread.start()
    assert "".join(streamer).split() == [f"w{i}" for i in range(8, 23)]
    thread.join()


def test_the_streams_of_generate_and_of_drafting_are_the_same_puts(ring: Any, exact: Drafted) -> None:
    class Puts(tf.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, value: Tensor) -> None:
            self.seen.append(value.tolist())

        def end(self) -> None:
            self.seen.append("end")

    plain, found = Puts(), Puts()
    ring.generate(ids([20]), max_new_tokens=9, streamer=plain)
    ring.generate(ids([20]), max_new_tokens=9, streamer=found, custom_generate=exact)
    assert found.seen == plain.seen


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated n-grams": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[31, 44], *([i] for i in range(60, 96))]},
    "suppressed": {"suppress_tokens": list(range(40, 60)), "begin_suppress_tokens": [20, 21, 22]},
    "least length": {"eos_token_id": list(range(13, 60)), "min_new_tokens": 5, "pad_token_id": 3},
    "least length in all": {"eos_token_id": list(range(13, 60)), "min_length": 11, "pad_token_id": 3},
    "forced end": {"forced_eos_token_id": 30, "eos_token_id": 12, "pad_token_id": 3},
    "biased": {"sequence_bias": [[[30], 2.5], [[31, 32], -3.0]]},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, text: [13 + row, 14 + len(text) % 7, 40 + row]},
    "decaying": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 2, "pad_token_id": 3},
}


@pytest.mark.parametrize("rows", ["one", "left-padded"])
@pytest.mark.parametrize("name", PROCESSED)
def test_processors_judge_each_node_as_generate_judges_its_text(
    llama: Any, heads: Drafted, name: str, rows: str
) -> None:
    inputs, more = (ids(PROMPT), {}) if rows == "one" else (PADDED, {"attention_mask": MASK})
    plain, found = both(llama, heads, inputs, **PROCESSED[name], **more)
    assert found == plain
    assert plain != both(llama, heads, inputs, **more)[0]


LAWS: dict[str, tuple[dict[str, Any], Sampling]] = {
    "whole": ({"top_k": 0}, Sampling(temperature=1.0)),
    "top-k of Hugging Face": ({"temperature": 0.8, "top_k": 50}, Sampling(temperature=0.8, top_k=50)),
    "all four": (
        {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        Sampling(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02),
    ),
    "penalty": (
        {"temperature": 0.7, "top_k": 0, "repetition_penalty": 1.3},
        Sampling(temperature=0.7, repetition_penalty=1.3),
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_sampled_text_is_that_of_the_seed_by_the_obvious_reference(llama: Any, name: str) -> None:
    options, law = LAWS[name]
    way = drafted(lambda t: any_head(t, "eagle3").for_decoding(t.dtype), tree=TREE, seed=11, pack=False, compile="off")
    found = llama.generate(ids(PROMPT), do_sample=True, max_new_tokens=NEW, custom_generate=way, **options)
    chunks = autoregressive(Target(target("llama_gqa")), [PROMPT], sampling=law, seed=11, max_new_tokens=NEW)
    assert found[0].tolist() == [*PROMPT, *(i for chunk in chunks for i in chunk.ids)]


def test_a_law_that_sampling_cannot_say_is_applied_in_its_order(llama: Any) -> None:
    options: Any = {"do_sample": True, "temperature": 0.9, "top_k": 0, "typical_p": 0.6, "max_new_tokens": NEW}
    ways = [drafted(head, seed=5, compile="off", tree=Tree.chain(3)) for head in (None, NGram())]
    plain, found = (llama.generate(ids(PROMPT), custom_generate=way, **options).tolist() for way in ways)
    assert found == plain
    del options["typical_p"]
    assert llama.generate(ids(PROMPT), custom_generate=ways[0], **options).tolist() != plain


def test_the_first_token_is_drawn_from_the_law_that_generate_draws_from(llama: Any, heads: Drafted) -> None:
    options: Any = {"do_sample": True, "temperature": 1.5, "top_k": 4, "max_new_tokens": 1, "num_return_sequences": 400}
    torch.manual_seed(1)
    plain, found = both(llama, heads, ids(PROMPT), **options)
    first, second = (torch.bincount(torch.tensor(rows)[:, -1], minlength=96) for rows in (plain, found))
    assert set(first.nonzero().flatten().tolist()) == set(second.nonzero().flatten().tolist())
    assert float((first - second).abs().sum()) / 800 < 0.12


def test_the_seed_is_drawn_from_the_global_generator_unless_it_is_given(llama: Any, heads: Drafted) -> None:
    def sample(way: Drafted) -> Any:
        asked: Any = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "return_dict_in_generate": True}
        out = llama.generate(ids(PROMPT, PROMPT), custom_generate=way, **asked)
        return out.sequences.tolist(), out.seeds

    torch.manual_seed(7)
    first, second = sample(heads), sample(heads)
    torch.manual_seed(7)
    assert sample(heads) == first
    assert first != second
    assert first[0][0] != first[0][1]  # rows draw for themselves
    given = drafted(None, seed=first[1][0], compile="off")
    assert sample(given) == sample(given) == first
    assert first[1][1] == row_seed(first[1][0], 1)


def test_greedy_decoding_leaves_the_global_generator_alone(llama: Any, heads: Drafted) -> None:
    before = torch.get_rng_state()
    llama.generate(ids(PROMPT), custom_generate=heads, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_users_model_stays_trainable_saveable_and_in_its_mode(heads: Drafted, tmp_path: Path) -> None:
    model: Any = target("llama_gqa").train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.generate(ids(PROMPT), custom_generate=heads, max_new_tokens=3)
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    assert {type(m).__name__ for m in model.modules() if "Packed" in type(m).__name__} == set()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    model(ids(PROMPT), labels=ids(PROMPT)).loss.backward()
    model.save_pretrained(tmp_path)
    saved: Any = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.generate(ids(PROMPT), max_new_tokens=3).shape == (1, 10)


@pytest.mark.parametrize("pack", [True, False])
def test_weights_that_were_changed_since_decode_as_they_are_now(pack: bool) -> None:
    model = target("llama_gqa")
    way = drafted(None, pack=pack, compile="off")
    assert way.target(model) is way.target(model)
    first = both(model, way, ids(PROMPT))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1.5)
    plain, found = both(model, way, ids(PROMPT))
    assert first[1] != found == plain


def test_nothing_is_stored_twice_where_nothing_is_packed(llama: Any) -> None:
    wrapped = drafted(None, pack=False).target(llama).model
    pairs = zip(llama.parameters(), wrapped.parameters(), strict=True)
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in pairs)


def test_what_was_made_of_a_model_goes_with_it() -> None:
    model, way = target("llama_gqa"), drafted(None, compile="off")
    way.target(model)
    assert len(way._wrapped) == 1
    del model
    import gc

    gc.collect()
    assert len(way._wrapped) == 0


def test_hooks_of_the_user_are_called(heads: Drafted) -> None:
    model = target("llama_gqa")
    model.model.layers[2].register_forward_hook(lambda module, args, out: out * 0.5)
    plain, found = both(model, heads, ids(PROMPT))
    assert found == plain
    assert found != both(target("llama_gqa"), heads, ids(PROMPT))[0]


def test_a_dtype_of_its_own_decodes_the_same_weights_in_it() -> None:
    model: Any = target("llama_gqa").bfloat16()
    found = model.generate(
        ids(PROMPT), custom_generate=drafted(None, dtype="fp32", compile="off"), max_new_tokens=NEW
    ).tolist()
    assert model.dtype == torch.bfloat16
    assert found == model.float().generate(ids(PROMPT), max_new_tokens=NEW).tolist()


class _Odd(tf.LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.index_fill(1, torch.tensor([13 + (input_ids.shape[1] % 80)]), 50.0)


def test_a_processor_of_the_users_is_refused_by_name_until_it_is_vouched_for(llama: Any, heads: Drafted) -> None:
    with pytest.raises(GenerationError, match=r"_Odd: .* say drafted\(\.\.\., stateless=\[_Odd\]\)"):
        both(llama, heads, ids(PROMPT), logits_processor=[_Odd()])
    way = drafted(NGram(), tree=Tree.chain(3), stateless=[_Odd], compile="off")
    plain, found = both(llama, way, ids(PROMPT), logits_processor=[_Odd()])
    assert found == plain


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, r"num_beams=2"),
    "guidance": ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "logits": ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    "hidden": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    "assistant": ({"assistant_model": target("llama_3layers")}, "assistant_model"),
    "positions": ({"position_ids": torch.tensor([[3, 4, 5, 6, 7, 8, 9]])}, "position_ids"),
    "right padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}, "left padding"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 7, 64)}, "inputs_embeds"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(llama: Any, heads: Drafted, name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(GenerationError, match=message):
        llama.generate(ids(PROMPT), custom_generate=heads, max_new_tokens=4, **options)


def test_all_that_is_not_honoured_is_said_at_once(llama: Any, heads: Drafted) -> None:
    options: Any = {"num_beams": 2, "output_scores": True, "logits_processor": [_Odd()]}
    with pytest.raises(GenerationError, match=r"num_beams=2.*output_scores.*_Odd"):
        llama.generate(ids(PROMPT), custom_generate=heads, return_dict_in_generate=True, **options)


def test_a_cache_of_the_users_is_refused(llama: Any, heads: Drafted) -> None:
    cache = tf.DynamicCache(config=llama.config)
    name = Target(target("llama_gqa")).cache_argument
    llama(ids(PROMPT[:4]), **{name: cache})
    with pytest.raises(GenerationError, match="of your own"):
        llama.generate(ids(PROMPT), custom_generate=heads, **{name: cache})


def test_a_streamer_for_several_rows_is_refused(llama: Any, heads: Drafted) -> None:
    class Quiet(tf.generation.streamers.BaseStreamer):
        def put(self, value: Any) -> None: ...

        def end(self) -> None: ...

    with pytest.raises(GenerationError, match="a streamer for 2 rows"):
        llama.generate(ids(PROMPT, PROMPT), custom_generate=heads, streamer=Quiet())


def test_criteria_for_several_rows_need_an_end_token(heads: Drafted) -> None:
    model: Any = target("llama_gqa")
    model.generation_config.eos_token_id = None
    with pytest.raises(GenerationError, match="without an end token"):
        model.generate(ids(PROMPT, PROMPT), custom_generate=heads, stopping_criteria=[_Sum()], max_new_tokens=3)


def test_text_beyond_the_context_is_announced_to_be_cut(heads: Drafted) -> None:
    model: Any = target("llama_gqa")
    with pytest.warns(UserWarning, match="the model's context holds 256"):
        found = model.generate(ids(PROMPT * 36), custom_generate=heads, max_new_tokens=9, eos_token_id=None)
    assert found.shape[1] == 256


def test_an_unknown_dtype_is_refused_when_it_is_named() -> None:
    with pytest.raises(TargetError, match="fp32, bf16, fp16, got 'half'"):
        drafted(None, dtype="half")


@pytest.fixture
def folder(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wrapped = Target(target("llama_gqa"))
    save_head(any_head(wrapped, "eagle3"), tmp_path / "heads", wrapped.facts)
    card.write_card(tmp_path / "heads", card.model_card(tmp_path / "heads"))
    modules = str(tmp_path / "modules")  # where transformers copies the function to
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    return tmp_path / "heads"


def test_heads_come_from_their_folder(llama: Any, folder: Path) -> None:
    plain, found = both(llama, drafted(folder, compile="off"), ids(PROMPT))
    assert found == plain


def test_the_folder_itself_is_a_custom_generate(llama: Any, folder: Path) -> None:
    options: Any = {"max_new_tokens": NEW, "stop_strings": ["w11"], "tokenizer": _stoppable()}
    plain = llama.generate(ids(PROMPT), **options)
    asked = {"custom_generate": str(folder), "trust_remote_code": True, "return_dict_in_generate": True}
    found = llama.generate(ids(PROMPT), **options, **asked)
    assert found.sequences.tolist() == plain.tolist()
    assert found.stats.rounds > 0


def test_the_folder_is_not_run_without_trust(llama: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        llama.generate(ids(PROMPT), custom_generate=str(folder), trust_remote_code=False, max_new_tokens=3)
