from typing import Any

import pytest

from treedraft.data import Conversation, Skipped, TokenRow, normalise

ASKED = {"role": "user", "content": "w1"}
ANSWERED = {"role": "assistant", "content": "w2"}


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    record = normalise(row, 1)
    assert isinstance(record, Conversation), record
    return [dict(m) for m in record.messages]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]},
        {"conversation": [{"from": "user", "value": "w1"}, {"from": "ChatGPT", "value": "w2"}]},
        {"conversations": [ASKED, ANSWERED]},
        {"prompt": "w1", "response": "w2"},
        {"instruction": "w1", "input": "", "output": "w2"},
        {"question": "w1", "answer": "w2"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}, ANSWERED]},
    ],
)
def test_every_known_shape_becomes_the_same_messages(row: dict[str, Any]):
    assert messages(row) == [ASKED, ANSWERED]


def test_an_instruction_is_joined_with_the_text_it_is_about():
    asked = messages({"instruction": "w1", "input": "w9", "output": "w2", "system": "w0"})
    assert asked == [{"role": "system", "content": "w0"}, {"role": "user", "content": "w1\n\nw9"}, ANSWERED]


def test_null_content_is_the_empty_text():
    turn = messages({"messages": [ASKED, {"role": "assistant", "content": None}]})[1]
    assert turn == {"role": "assistant", "content": ""}


def test_tool_calls_in_json_text_are_the_same_as_parsed_ones():
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    texts: list[Any] = [
        [call],
        '[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]',
        [{"type": "function", "id": None, "function": {"name": "f", "arguments": '{"a": 1}'}}],
    ]
    read = [messages({"messages": [ASKED, {**ANSWERED, "tool_calls": calls}]})[1]["tool_calls"] for calls in texts]
    assert read == [[call]] * 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": []}, "the conversation is empty"),
        ({"messages": [ASKED]}, "there is no assistant turn"),
        ({"messages": "w1"}, "messages must be a list, got str"),
        ({"messages": [{"content": "w1"}]}, "a message has neither role nor from"),
        ({"messages": [{"from": "bard", "value": "w1"}]}, "unknown speaker 'bard'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "not text (image)"),
        ({"messages": [{"role": "user", "content": 3}]}, "content must be text"),
        ({"messages": [ASKED, {**ANSWERED, "tool_calls": "f(1)"}]}, "tool_calls is not a list of calls"),
        ({"text": "w1"}, "none of the columns messages"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids and loss_mask differ in length"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask must be a list of 0 and 1"),
    ],
)
def test_a_record_that_cannot_be_read_is_skipped_with_a_reason(row: dict[str, Any], reason: str):
    record = normalise(row, 3)
    assert isinstance(record, Skipped)
    assert record.id == "record 3"
    assert reason in record.reason


def test_a_record_is_named_by_its_id_before_its_position():
    assert normalise({"id": 0, "prompt": "w1", "answer": "w2"}, 3).id == "0"


def test_own_tokens_and_mask_are_taken_as_they_are():
    assert normalise({"input_ids": [5, 6], "loss_mask": [0, 1]}, 1) == TokenRow("record 1", (5, 6), (0, 1))
