"""After any commit the cache equals a fresh prefill; nothing else edits it."""

import pytest
import torch

from kit import TARGETS, random_heads, ring_heads, target, tokenizer
from treedraft.heads import NoHead
from treedraft.infer import (
    Clock,
    KVCache,
    Path,
    Sampler,
    Sampling,
    State,
    Stats,
    Target,
    decode_step,
    lossless,
    prefill,
)
from treedraft.infer.cache import LayerSizes, close_ranks
from treedraft.tree import Tree

PROMPTS = [[20, 30, 40], [50] * 9, [i % 83 + 13 for i in range(21)]]
TREE = Tree.from_paths([[i] for i in range(8)] + [[i, j] for i in range(4) for j in range(3)] + [[0, 0, 0], [2, 1, 0]])


def start(model: Target, head: object, prompts: list[list[int]], temperature: float = 1.5) -> State:
    sampler = Sampler(Sampling(temperature=temperature), torch.arange(len(prompts)) + 5)
    with torch.inference_mode():
        return prefill(model, head, prompts, 40, TREE.size, sampler)[0]  # type: ignore[arg-type]


def step(model: Target, head: object, state: State) -> tuple[State, Path]:
    with torch.inference_mode():
        return decode_step(model, head, TREE, lossless, state, Clock(Stats().phase_seconds, model.device))  # type: ignore[arg-type]


def check_equals_prefill(model: Target, state: State) -> None:
    for row, text in enumerate(state.text.rows()):
        held = state.cache.host_lengths[row]
        assert held == len(text) - 1  # everything but the root
        fresh = start(model, NoHead(), [text[:-1].tolist()]).cache
        for (keys, values), (fresh_keys, fresh_values) in zip(state.cache.stored(row), fresh.stored(0), strict=True):
            torch.testing.assert_close(keys, fresh_keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, fresh_values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_after_every_commit_the_cache_equals_a_fresh_prefill(name: str) -> None:
    model = Target(target(name), tokenizer())
    made = ring_heads(model) if name == "markov_ring" else random_heads(model)  # random ones are never right there
    head = made.for_decoding(torch.float32)
    state = start(model, head, PROMPTS)
    accepted = 0
    for _ in range(6):
        state, path = step(model, head, state)
        accepted += sum(count - 1 for count in path.host_counts)
        check_equals_prefill(model, state)
    assert accepted > 0  # some commits kept drafted nodes


def test_a_commit_moves_nodes_that_do_not_lie_in_front() -> None:
    """Row 0 keeps nodes 0, 4, 6 of a tree, row 1 the root alone, row 2 a prefix."""
    cache = KVCache({0: LayerSizes(2, 3, 4), 1: LayerSizes(2, 3, 4)}, 3, 12, torch.float32, torch.device("cpu"))
    cache.begin(2)
    for layer in (0, 1):
        cache.update(torch.randn(3, 2, 2, 3), torch.randn(3, 2, 2, 4), layer)
    cache.append([2, 1, 0])
    before = [cache.stored(row) for row in range(3)]
    cache.begin(7)
    keys, values = torch.randn(2, 3, 2, 7, 3), torch.randn(2, 3, 2, 7, 4)
    for layer in (0, 1):
        seen_keys, _ = cache.update(keys[layer], values[layer], layer)
        assert seen_keys.shape == (3, 2, 9, 3)
    nodes = torch.tensor([[0, 4, 6], [0, 0, 0], [0, 1, 1]])
    cache.commit(Path(nodes, torch.tensor([3, 1, 2]), torch.zeros_like(nodes), torch.ones(3, dtype=torch.bool)))
    assert cache.host_lengths == cache.lengths.tolist() == [5, 2, 2]
    for row, kept in enumerate(([0, 4, 6], [0], [0, 1])):
        for layer in (0, 1):
            stored_keys, stored_values = cache.stored(row)[layer]
            old_keys, old_values = before[row][layer]
            assert torch.equal(stored_keys, torch.cat([old_keys, keys[layer, row][:, kept]], 1))
            assert torch.equal(stored_values, torch.cat([old_values, values[layer, row][:, kept]], 1))


def test_layers_of_different_shapes_are_kept_apart() -> None:
    sizes = {0: LayerSizes(2, 3, 3), 2: LayerSizes(1, 5, 3)}
    cache = KVCache(sizes, 1, 4, torch.float32, torch.device("cpu"))
    cache.begin(3)
    parts = {
        i: (torch.randn(1, s.heads, 3, s.key_size), torch.randn(1, s.heads, 3, s.value_size)) for i, s in sizes.items()
    }
    for layer, (keys, values) in parts.items():
        cache.update(keys, values, layer)
    cache.append([3])
    for (keys, values), (stored_keys, stored_values) in zip(parts.values(), cache.stored(0), strict=True):
        assert torch.equal(stored_keys, keys[0])
        assert torch.equal(stored_values, values[0])


def test_a_full_cache_says_how_much_was_needed() -> None:
    cache = KVCache({0: LayerSizes(1, 2, 2)}, 1, 4, torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="5 new positions need 5 slots, there are 4"):
        cache.begin(5)


def test_rows_that_stay_keep_their_cache_when_others_leave() -> None:
    model = Target(target("llama_gqa"), tokenizer())
    head = random_heads(model).for_decoding(torch.float32)
    state = start(model, head, PROMPTS)
    state, _ = step(model, head, state)
    texts = [text.tolist() for text in state.text.rows()]
    with torch.inference_mode():
        state = state.select(close_ranks([False, True, True]))
    assert [text.tolist() for text in state.text.rows()] == [texts[2], texts[1]]
    check_equals_prefill(model, state)
    state, _ = step(model, head, state)
    check_equals_prefill(model, state)


def test_rows_that_join_take_the_places_of_those_that_left_and_others_keep_theirs() -> None:
    model = Target(target("llama_gqa"), tokenizer())
    head = random_heads(model).for_decoding(torch.float32)
    state, _ = step(model, head, start(model, head, PROMPTS))
    place = state.cache._store[0].data_ptr()
    for prompts, stays in (([[33] * 4], True), ([[60, 61], [i % 70 + 13 for i in range(70)]], False)):
        others, _ = step(model, head, start(model, head, prompts))
        with torch.inference_mode():
            state = state.select(close_ranks([False] + [True] * (state.cache.batch - 1)))
        texts = [text.tolist() for text in state.text.rows() + others.text.rows()]
        with torch.inference_mode():
            state = state.join(others)
        assert (state.cache._store[0].data_ptr() == place) == stays  # more rows or slots than there were: moved
        assert [text.tolist() for text in state.text.rows()] == texts
        check_equals_prefill(model, state)
    state, _ = step(model, head, state)
    check_equals_prefill(model, state)


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sw16", "qwen3_headdim"])
def test_tree_logits_equal_the_logits_of_each_path(name: str) -> None:
    model = Target(target(name), tokenizer())
    prompt = PROMPTS[2]
    state = start(model, NoHead(), [prompt])
    tokens = torch.randint(13, 96, (1, TREE.size), generator=torch.Generator().manual_seed(1))
    draft = TREE.draft(tokens)
    out = model.forward(
        tokens, state.cache.lengths[:, None] + draft.depth, draft.ancestors, state.cache, (model.num_layers,)
    )
    for node in range(TREE.size):
        path = tokens[0, draft.ancestors[0, node]]
        with torch.inference_mode():
            alone = model.model(torch.cat([torch.tensor(prompt), path])[None], output_hidden_states=True)
        torch.testing.assert_close(out.logits[0, node], alone.logits[0, -1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out.features[0, node], alone.hidden_states[-1][0, -1], atol=1e-4, rtol=1e-4)
