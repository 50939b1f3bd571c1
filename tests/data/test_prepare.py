from typing import Any

import pytest

from kit import tokenizer
from treedraft.data import DataError, Encoded, prepare, show

OPENS = "opens with the assistant's turn: that turn is context and is not supervised"


def row(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"prompt": question, "answer": answer, **more}


def words(encoded: list[Encoded]) -> list[str]:
    return [" ".join(tokenizer().convert_ids_to_tokens(e.ids)) for e in encoded]


def test_odd_orders_of_turns_are_counted_and_named():
    rows = [
        {
            "conversations": [
                {"from": "gpt", "value": "w1 w2"},
                {"from": "human", "value": "w3"},
                {"from": "gpt", "value": "w4 w5"},
            ]
        },
        {"conversations": []},
        {"conversations": [{"from": "human", "value": "w6"}, {"from": "gpt", "value": "w7 w8"}]},
    ]
    encoded, summary = prepare(rows, tokenizer(), 64)
    assert [e.id for e in encoded] == ["record 1", "record 3"]
    assert [sum(e.mask) for e in encoded] == [3, 3]
    assert summary.to_dict() == {
        "max_length": 64,
        "read": 3,
        "used": 2,
        "truncated": 0,
        "tokens": 23,
        "supervised_tokens": 6,
        "skipped": {"the conversation is empty": {"count": 1, "records": ["record 2"]}},
        "notes": {OPENS: {"count": 1, "records": ["record 1"]}},
    }


def test_tool_calls_of_any_type_give_the_same_row():
    calls = [{"name": "f", "arguments": {"a": 1}}]
    texts = [calls, '[{"name": "f", "arguments": {"a": 1}}]', None]
    rows = [
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": value},
                {"role": "tool", "content": "w9"},
                {"role": "assistant", "content": "w1"},
            ]
        }
        for value in texts
    ]
    del rows[2]["messages"][0]["tool_calls"]
    encoded, summary = prepare(rows, tokenizer(), 64)
    spoken = "<|start|> assistant <|end|> <|start|> tool w9 <|end|> <|start|> assistant w1 <|end|>"
    assert words(encoded) == [spoken] * 3
    assert summary.supervised == 6


def test_a_source_with_nothing_left_to_supervise_is_refused_with_counts():
    long = [row(" ".join(["w0"] * 300), "w1 w2") for _ in range(8)]
    with pytest.raises(DataError, match="0 of 8 rows keep a supervised token at max length 64: 8 x no supervised"):
        prepare(long, tokenizer(), 64)
    encoded, summary = prepare(long + [row("w3", "w1 w2")] * 8, tokenizer(), 64)
    assert (len(encoded), summary.read, summary.used, summary.supervised) == (8, 16, 8, 24)
    assert summary.skipped == {
        "no supervised token is left at max length 64": tuple(f"record {i}" for i in range(1, 9)),
    }


def test_no_rows_at_all_are_refused():
    with pytest.raises(DataError, match="no rows to train on"):
        prepare([], tokenizer(), 64)


def test_own_tokens_are_used_unless_all_or_none_of_them_are_supervised():
    rows = [
        {"id": "a", "input_ids": [20, 21, 22], "loss_mask": [0, 1, 1]},
        {"id": "b", "input_ids": [20, 21], "loss_mask": [1, 1]},
        {"id": "c", "input_ids": [20, 21], "loss_mask": [0, 0]},
    ]
    encoded, summary = prepare(rows, tokenizer(), 2)
    assert encoded == [Encoded("a", [20, 21], [0, 1], truncated=True)]
    assert summary.skipped == {
        "every token is supervised: the mask leaves no prompt": ("b",),
        "no token is supervised": ("c",),
    }


def test_answers_that_loop_are_skipped():
    rows = [row("w1", "w2", repeat_share=0.6), row("w1", "w2", repeat_share=0.5), row("w1", "w2")]
    encoded, summary = prepare(rows, tokenizer(), 64)
    assert [e.id for e in encoded] == ["record 2", "record 3"]
    assert summary.skipped == {"the answer loops: its repeat_share is above 0.5": ("record 1",)}


def test_the_supervised_tokens_are_shown_in_colour():
    encoded, _ = prepare([row("w1", "w2 w3")], tokenizer(), 64)
    text = show(encoded[0], tokenizer())
    coloured = [text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style)]
    assert coloured == ["w2 w3 <|end|>"]
