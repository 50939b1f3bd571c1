"""One shape for conversations: OpenAI messages, ShareGPT turns and prompt/response columns become a Conversation.

What is done with odd rows, by rule:

* ``content: null`` is the empty text. A list of text parts is joined; a part that is not text skips the record.
* ``tool_calls``, and ``arguments`` inside them, may be given as JSON text: they are parsed, so that rows that say the
  same thing become the same tokens. They are handed to the chat template, which decides whether they show.
* A conversation that opens with the assistant's turn is used: the opening turn is context and is not supervised.
* A record is named by its ``id``, or else by its position: "record 3".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .records import Conversation, Message, Skipped, TokenRow, Unusable

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""ShareGPT's ``from`` to a role."""

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "instruction", "question", "query")
RESPONSE_COLUMNS = ("response", "completion", "answer", "output")
SYSTEM_COLUMNS = ("system", "system_prompt")


def normalise(row: Mapping[str, Any], position: int) -> Conversation | TokenRow | Skipped:
    """The record of ``row``, the ``position``-th of its source counted from 1; Skipped with a reason if it has none."""
    name = str(row["id"]) if row.get("id") not in (None, "") else f"record {position}"
    try:
        if row.get("input_ids") is not None and row.get("loss_mask") is not None:
            return _token_row(name, row["input_ids"], row["loss_mask"])
        messages = read_messages(_raw_messages(row))
        if not messages:
            raise Unusable("the conversation is empty")
        if not any(m["role"] == "assistant" for m in messages):
            raise Unusable("there is no assistant turn")
    except Unusable as fault:
        return Skipped(name, str(fault))
    return Conversation(name, messages, row.get("finish_reason"))


def opens_with_answer(messages: tuple[Message, ...]) -> bool:
    """Whether the assistant speaks before anybody asked."""
    spoken = [m["role"] for m in messages if m["role"] not in ("system", "developer")]
    return spoken[:1] == ["assistant"]


def read_messages(value: Any) -> tuple[Message, ...]:
    """Messages in either form (role/content or from/value), normalised. Raises Unusable with the reason."""
    if not isinstance(value, list):
        raise Unusable(f"messages must be a list, got {type(value).__name__}")
    return tuple(_message(m) for m in value)


def _raw_messages(row: Mapping[str, Any]) -> Any:
    for column in MESSAGE_COLUMNS:
        if row.get(column) is not None:
            return row[column]
    prompt, response = _first(row, PROMPT_COLUMNS), _first(row, RESPONSE_COLUMNS)
    if prompt is None or response is None:
        raise Unusable(
            f"none of the columns {', '.join(MESSAGE_COLUMNS)}, and no prompt ({', '.join(PROMPT_COLUMNS)}) "
            f"with a response ({', '.join(RESPONSE_COLUMNS)})"
        )
    if isinstance(prompt, str) and isinstance(row.get("input"), str) and row["input"].strip():
        prompt = f"{prompt}\n\n{row['input']}"  # Alpaca: an instruction and the text it is about
    system = _first(row, SYSTEM_COLUMNS)
    return [
        *([{"role": "system", "content": system}] if system else []),
        *(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]),
        *(response if isinstance(response, list) else [{"role": "assistant", "content": response}]),
    ]


def _first(row: Mapping[str, Any], columns: tuple[str, ...]) -> Any:
    return next((row[c] for c in columns if row.get(c) is not None), None)


def _message(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise Unusable(f"a message must be an object, got {type(raw).__name__}")
    if isinstance(raw.get("role"), str):
        role, content = raw["role"], raw.get("content")
    elif isinstance(raw.get("from"), str):
        role, content = SPEAKERS.get(raw["from"].lower(), ""), raw.get("value")
        if not role:
            raise Unusable(f"unknown speaker {raw['from']!r}: expected one of {', '.join(SPEAKERS)}")
    else:
        raise Unusable("a message has neither role nor from")
    rest = {k: v for k, v in raw.items() if v is not None and k not in ("role", "content", "from", "value")}
    if "tool_calls" in rest:
        rest["tool_calls"] = _tool_calls(rest["tool_calls"])
        if not rest["tool_calls"]:
            del rest["tool_calls"]
    return {"role": role, "content": _text(content), **rest}


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    raise Unusable(f"content must be text, null or a list of text parts, got {type(content).__name__}")


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise Unusable(f"content has a part that is not text ({kind})")


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    calls = _parsed(value) if isinstance(value, str) and value.strip() else value or []
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise Unusable("tool_calls is not a list of calls, nor the JSON text of one")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    made = {k: v for k, v in call.items() if v is not None}
    if isinstance(made.get("function"), Mapping):
        made["function"] = _tool_call(made["function"])
    if isinstance(made.get("arguments"), str) and isinstance(parsed := _parsed(made["arguments"]), dict):
        made["arguments"] = parsed
    return made


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _token_row(name: str, ids: Any, mask: Any) -> TokenRow:
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise Unusable("input_ids must be a list of token ids")
    if not isinstance(mask, list) or not all(m in (0, 1) for m in mask):
        raise Unusable("loss_mask must be a list of 0 and 1")
    if len(ids) != len(mask):
        raise Unusable("input_ids and loss_mask differ in length")
    return TokenRow(name, tuple(ids), tuple(int(m) for m in mask))
