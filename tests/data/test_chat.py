"""The mask, on word-level tokenizers: every expected span is written out in words."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kit import WORD_ID, tokenizer
from treedraft.data import Conversation, DataError, Encoded, Skipped, Turns, encode_conversation, render_prompt

TURN = "<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> "
PROMPT = "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
MARKED = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }} <|end|> {% endgeneration %}{% else %}{{ m['content'] }} <|end|> {% endif %}"
    "\n {% endfor %}" + PROMPT
)
MARKS_ALL = "{% for m in messages %}{% generation %}" + TURN + "{% endgeneration %}{% endfor %}" + PROMPT
# Keeps the thinking of the last turn only, as reasoning models do.
FORGETS_THOUGHTS = (
    "{% for m in messages %}{% set c = m['content'] %}{% if not loop.last %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}<|start|> {{ m['role'] }} {{ c }} <|end|> {% endfor %}" + PROMPT
)
# Closes a finished conversation with a second special token, as some templates close it with the tokenizer's eos.
CLOSES = "{% for m in messages %}" + TURN + "{% endfor %}{% if not add_generation_prompt %}<s> {% endif %}" + PROMPT


def talk(*turns: str, finish_reason: str | None = None, **last: Any) -> Conversation:
    """A conversation from "role: words"; ``last`` goes into the last message."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        role, content = turn.split(": ", 1)
        messages.append({"role": role, "content": content})
    messages[-1].update(last)
    return Conversation("row", tuple(messages), finish_reason)


def encoded(
    words: PreTrainedTokenizerFast, conversation: Conversation, turns: Turns = "all", length: int = 64
) -> Encoded:
    row = encode_conversation(words, conversation, length, turns)
    assert isinstance(row, Encoded), row
    return row


def supervised(words: PreTrainedTokenizerFast, conversation: Conversation, turns: Turns = "all") -> str:
    row = encoded(words, conversation, turns)
    return " ".join(words.convert_ids_to_tokens([t for t, m in zip(row.ids, row.mask, strict=True) if m]))


def reason(words: PreTrainedTokenizerFast, conversation: Conversation, length: int = 64) -> str:
    row = encode_conversation(words, conversation, length)
    assert isinstance(row, Skipped), row
    return row.reason


def test_the_answer_and_its_end_token_are_supervised():
    row = encoded(tokenizer(), talk("user: w1 w2", "assistant: w3 w4"))
    words = "<|start|> user w1 w2 <|end|> <|start|> assistant w3 w4 <|end|>"
    assert row.ids == [WORD_ID[w] for w in words.split()]
    assert row.mask == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert not row.truncated


@pytest.mark.parametrize("template", ["plain", MARKED])
def test_every_answer_or_only_the_last_is_supervised(template: str):
    conversation = talk("system: w0", "user: w1", "assistant: w2", "user: w3", "assistant: w4 w5")
    words = tokenizer(template)
    assert supervised(words, conversation) == "w2 <|end|> w4 w5 <|end|>"
    assert supervised(words, conversation, "last") == "w4 w5 <|end|>"


def test_what_follows_the_last_answer_is_left_out():
    row = encoded(tokenizer(), talk("user: w1", "assistant: w2", "user: w3"))
    assert row.ids[-1] == WORD_ID["<|end|>"]
    assert WORD_ID["w3"] not in row.ids


@pytest.mark.parametrize("template", ["plain", MARKED])
def test_an_opening_answer_is_context_and_not_supervised(template: str):
    conversation = talk("assistant: w1 w2", "user: w3", "assistant: w4 w5")
    words = tokenizer(template)
    assert supervised(words, conversation) == "w4 w5 <|end|>"
    assert WORD_ID["w1"] in encoded(words, conversation).ids
    assert reason(words, talk("system: w0", "assistant: w1")) == "no assistant turn follows a question"


def test_a_template_that_refuses_is_quoted():
    conversation = talk("assistant: w1", "user: w2", "assistant: w3")
    assert "roles must alternate" in reason(tokenizer("strict"), conversation)


def test_what_the_template_puts_into_an_answer_is_supervised():
    words = tokenizer("inserts")
    assert supervised(words, talk("user: w1 w2", "assistant: <think> w3 w4 </think> w5")) == (
        "<think> w3 w4 </think> w5 <|end|>"
    )
    assert supervised(words, talk("user: w1 w2", "assistant: w5")) == "<think> </think> w5 <|end|>"


def test_text_behind_the_end_token_is_not_supervised():
    conversation = talk("user: w1", "assistant: w2")
    spaced = tokenizer("{% for m in messages %}" + TURN + "\n {% endfor %}" + PROMPT)
    assert supervised(spaced, conversation) == "w2 <|end|>"
    assert encoded(spaced, conversation).ids[-1] == WORD_ID["\n"]
    two_turns = talk("user: w1", "assistant: w2", "user: w3", "assistant: w4")
    assert supervised(tokenizer(CLOSES), two_turns) == "w2 <|end|> w4 <|end|>"


@pytest.mark.parametrize("template", ["plain", "inserts", MARKED, CLOSES])
def test_the_end_token_of_a_cut_answer_is_not_supervised(template: str):
    cut = talk("user: w1", "assistant: w2", "user: w3", "assistant: w4 w5", finish_reason="length")
    tokens = supervised(tokenizer(template), cut).split()
    assert tokens[-1] == "w5"
    assert tokens.count("<|end|>") == 1  # the first answer's


def test_an_end_marker_that_is_no_special_token_is_found_too():
    words = tokenizer(eos="<eos>")
    assert supervised(words, talk("user: w1", "assistant: w2")) == "w2 <|end|>"
    assert supervised(words, talk("user: w1", "assistant: w2", finish_reason="length")) == "w2"


def test_an_empty_answer_of_which_nothing_shows_is_not_supervised():
    calls = [{"name": "f", "arguments": {"a": 1}}]
    call_then_answer = Conversation(
        "row",
        (
            {"role": "user", "content": "w1"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "w9"},
            {"role": "assistant", "content": "w2"},
        ),
    )
    for template in ("plain", "inserts"):
        assert supervised(tokenizer(template), call_then_answer).endswith("w2 <|end|>")
        assert supervised(tokenizer(template), call_then_answer).count("<|end|>") == 1
    assert reason(tokenizer(), talk("user: w1", "assistant: ")) == "no token is supervised"


def test_a_tool_call_that_the_template_shows_is_supervised():
    shows = "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} {% for c in m['tool_calls'] %}" + (
        "{{ c['name'] }} {% endfor %}<|end|> {% endfor %}" + PROMPT
    )
    called = talk("user: w1", "assistant: ", tool_calls=[{"name": "w7"}])
    assert supervised(tokenizer(shows), called) == "w7 <|end|>"


def test_a_template_that_rewrites_history_is_told_apart_and_its_last_turn_can_be_used():
    words = tokenizer(FORGETS_THOUGHTS)
    thinking = talk("user: w1", "assistant: <think> w2 </think> w3", "user: w4", "assistant: <think> w5 </think> w6")
    assert "rewrites history" in reason(words, thinking)
    assert supervised(words, thinking, "last") == "<think> w5 </think> w6 <|end|>"


def test_a_template_that_changes_the_answer_is_refused():
    shouts = TURN.replace("m['content']", "m['content'] | replace('w2', 'w3')")
    words = tokenizer("{% for m in messages %}" + shouts + "{% endfor %}" + PROMPT)
    assert reason(words, talk("user: w1", "assistant: w2")) == "the chat template changes the text of the answer"


def test_an_answer_with_unknown_words_is_refused():
    assert "does not give the answer's text back" in reason(tokenizer(), talk("user: w1", "assistant: w2 Hello"))


def test_generation_marks_that_reach_into_the_prompt_are_refused():
    assert "marks reach into the prompt" in reason(tokenizer(MARKS_ALL), talk("user: w1", "assistant: w2"))


def merging(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of letters that merges ":a" and "b|"."""
    letters = ["<unk>", *"abu:|", ":a", "b|"]
    model = models.BPE({t: i for i, t in enumerate(letters)}, [(":", "a"), ("b", "|")], unk_token="<unk>")
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<unk>")
    made.chat_template = template
    return made


def test_a_token_that_straddles_a_border_is_refused():
    words = merging(
        "{% for m in messages %}{{ 'u' if m['role'] == 'user' else 'a' }}:{{ m['content'] }}|{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    assert "straddles" in reason(words, talk("user: b", "assistant: ab"))  # the prompt's ":" and the answer's "a"
    assert "straddles" in reason(words, talk("user: a", "assistant: bb", finish_reason="length"))  # "b" and "|"
    row = encoded(words, talk("user: a", "assistant: bb"))
    assert words.convert_ids_to_tokens(row.ids) == ["u", ":a", "|", "a", ":", "b", "b|"]
    assert row.mask == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("template", ["plain", "bos"])
def test_one_bos_stands_in_front_of_rows_and_prompts_alike(template: str):
    words = tokenizer(template, add_bos=True)
    row = encoded(words, talk("user: w1", "assistant: w2"))
    prompt = render_prompt(words, [{"role": "user", "content": "w1"}])
    assert row.ids[0] == WORD_ID["<s>"]
    assert row.ids.count(WORD_ID["<s>"]) == 1
    assert row.ids[: len(prompt)] == prompt
    assert prompt == [WORD_ID[w] for w in ["<s>", "<|start|>", "user", "w1", "<|end|>", "<|start|>", "assistant"]]
    assert row.mask == [0] * len(prompt) + [1, 1]


def test_a_bos_is_added_in_front_of_marked_answers_too():
    assert supervised(tokenizer(MARKED, add_bos=True), talk("user: w1", "assistant: w2")) == "w2 <|end|>"


def test_two_bos_are_refused():
    words = tokenizer("<s> <s> {% for m in messages %}" + TURN + "{% endfor %}" + PROMPT)
    assert "two BOS tokens (<s>)" in reason(words, talk("user: w1", "assistant: w2"))
    with pytest.raises(DataError, match="two BOS tokens"):
        render_prompt(words, [{"role": "user", "content": "w1"}])


@pytest.mark.parametrize("pad", ["<pad>", "<|end|>"])
def test_the_mask_does_not_depend_on_the_pad_token(pad: str):
    words = tokenizer(pad=pad)
    assert supervised(words, talk("user: w1", "assistant: w2", "user: w3", "assistant: w4")) == "w2 <|end|> w4 <|end|>"


def test_a_row_is_cut_on_the_right():
    row = encoded(tokenizer(), talk("user: w1 w2", "assistant: w3 w4"), length=8)
    assert row.truncated
    assert row.ids[-1] == WORD_ID["w3"]
    assert sum(row.mask) == 1
    assert reason(tokenizer(), talk("user: w1 w2", "assistant: w3"), length=7) == (
        "no supervised token is left at max length 7"
    )


def test_a_tokenizer_without_a_template_is_refused_with_what_to_do():
    words = tokenizer()
    words.chat_template = None
    with pytest.raises(DataError, match=r"no chat template: use an instruction-tuned model, or set"):
        render_prompt(words, [{"role": "user", "content": "w1"}])
