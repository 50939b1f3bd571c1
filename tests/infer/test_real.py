"""On SmolLM2-135M-Instruct in fp32: drafts change no token, sampled or greedy, alone or in a ragged batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kit import compare, random_heads
from treedraft.data import render_prompt
from treedraft.heads import Drafter, Medusa, load_head
from treedraft.infer import SMOLLM2, Run, Sampling, Target, autoregressive, complete, drafted, load_model, load_target
from treedraft.tree import Tree, parse_tree

pytestmark = [pytest.mark.real, pytest.mark.slow]

SHIPPED = Path(__file__).parents[2] / "examples" / "smollm2-135m"
QUESTIONS = [
    "Name the planets.",
    "Write a short poem about a kettle that sings.",
    "What is 17 + 25? Explain your steps.",
    "Hi!",
    "Rewrite this sentence in a more formal way: the boss wants it done by Friday or we are in trouble.",
]
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]])
LAWS = {
    "greedy": Sampling(),
    "temperature 0.7, top-p 0.9": Sampling(temperature=0.7, top_p=0.9),
    "temperature 1.0, penalty 1.2": Sampling(temperature=1.0, repetition_penalty=1.2),
}
TOKENS = 20


@pytest.fixture(scope="module")
def smollm2() -> Target:
    return load_target(SMOLLM2, dtype="fp32")


@pytest.fixture(scope="module")
def heads(smollm2: Target) -> Drafter:
    """Heads that agree with the target now and then: small random weights around the identity."""
    made = random_heads(smollm2, 3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.05)
    return made.for_decoding(torch.float32)


@pytest.mark.parametrize("law", LAWS)
def test_drafts_change_no_token_of_a_real_model(smollm2: Target, heads: Medusa, law: str) -> None:
    prompts = [render_prompt(smollm2.tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS]
    expected: list[list[int]] = [[] for _ in prompts]
    for chunk in autoregressive(smollm2, prompts, sampling=LAWS[law], seed=5, max_new_tokens=TOKENS):
        expected[chunk.row] += chunk.ids
    for batch_size, count in ((5, 5), (1, 2)):
        done = complete(
            smollm2,
            prompts[:count],
            head=heads,
            tree=TREE,
            sampling=LAWS[law],
            seed=5,
            max_new_tokens=TOKENS,
            batch_size=batch_size,
        )
        for prompt, ids, found in zip(prompts, expected, done, strict=False):
            result = compare(smollm2, prompt, ids, found.ids, LAWS[law], found.seed)
            assert result.equal or result.near_tie is not None


def test_greedy_text_of_a_real_model_is_hugging_faces(smollm2: Target, heads: Medusa) -> None:
    stock, tokenizer = load_model(SMOLLM2, dtype="fp32")
    prompt = render_prompt(tokenizer, [{"role": "user", "content": QUESTIONS[2]}])
    with torch.inference_mode():
        theirs = stock.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)  # type: ignore[operator]
    found = complete(smollm2, [prompt], head=heads, tree=TREE, max_new_tokens=TOKENS)[0]
    result = compare(smollm2, prompt, theirs[0, len(prompt) :].tolist(), found.ids, Sampling(), 0)
    assert result.equal or result.near_tie is not None


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle", "eagle3"])
def test_heads_that_are_shipped_draft_well_and_change_no_token(smollm2: Target, kind: str) -> None:
    head = load_head(SHIPPED / kind, smollm2.facts, smollm2.layers()).for_decoding(torch.float32)
    prompts = [render_prompt(smollm2.tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS[:3]]
    plain = complete(smollm2, prompts, max_new_tokens=32)
    run = Run()
    found = complete(smollm2, prompts, head=head, tree=parse_tree("dynamic:16", head.depth), max_new_tokens=32, run=run)
    for prompt, expected, answer in zip(prompts, plain, found, strict=True):
        result = compare(smollm2, prompt, expected.ids, answer.ids, Sampling(), 0)
        assert result.equal or result.near_tie is not None
    assert run.stats.tau > 1.4


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_one_added_argument_to_generate_writes_the_same_text(kind: str) -> None:
    loaded, tokenizer = load_model(SMOLLM2, "fp32")
    model: Any = loaded
    way, target = drafted(SHIPPED / kind), Target(model)
    for question in QUESTIONS[:2]:
        ids = torch.tensor([render_prompt(tokenizer, [{"role": "user", "content": question}])])
        asked: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}
        plain = model.generate(ids, **asked)[0].tolist()
        out: Any = model.generate(ids, **asked, custom_generate=way, return_dict_in_generate=True)
        prompt, found = plain[: ids.shape[1]], out.sequences[0].tolist()
        verdict = compare(target, prompt, plain[len(prompt) :], found[len(prompt) :], Sampling(), 0)
        assert verdict.equal or verdict.near_tie is not None
        assert out.stats.tau > 1
