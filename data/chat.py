"""Conversations to token ids and a mask, through the tokenizer's own chat template.

Supervised is what the target itself would have written after the generation prompt: from the end of the prompt's
rendering to the turn's end token, that token included. So whatever a template puts into an answer (an empty think pair,
say) is supervised, and text it writes behind the end token (a newline) is not. The mask is by position, never by value.

Where the template marks answers with ``{% generation %}``, its marks hold. Otherwise the answer of turn i is what
rendering ``messages[:i + 1]`` adds to rendering ``messages[:i]`` with the generation prompt. Either way one
tokenisation of the final rendering gives the ids, and the spans are checked by decoding them back.

Not supervised: an assistant turn before anybody asked; the end token of an answer cut at a token limit
(``finish_reason: length``), since the model did not write it; an empty answer of which the template shows nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .records import Conversation, Encoded, Message, Skipped, Turns, Unusable, fit
from .rendering import Tokens, check_tokenizer, end_tokens, render, tokenise, turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REWRITES = "the chat template rewrites history: supervise only the last answer of a conversation"
OVERLAPS = "the chat template's generation marks reach into the prompt"
STRADDLES = "a token straddles the border between an answer and the text around it"
CHANGES = "the chat template changes the text of the answer"
LOSES = "decoding the supervised tokens does not give the answer's text back"

_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class _Span:
    """A supervised piece of the rendered text: characters [start, end), the first of them in token ``first``."""

    first: int
    start: int
    end: int


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, max_length: int, turns: Turns = "all"
) -> Encoded | Skipped:
    """The training row of a conversation, cut on the right at ``max_length`` tokens, or why there is none.

    Raises DataError if the tokenizer cannot be used for conversations at all.
    """
    check_tokenizer(tokenizer)
    try:
        ids, mask = supervise(tokenizer, conversation, turns)
    except Unusable as fault:
        return Skipped(conversation.id, str(fault))
    return fit(conversation.id, ids, mask, max_length)


def supervise(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, turns: Turns
) -> tuple[list[int], list[int]]:
    """Token ids of the conversation up to its last supervised turn, and 1 for every supervised one. Raises Unusable."""
    answers = _supervised_turns(conversation.messages, turns)
    messages = conversation.messages[: answers[-1] + 1]
    text = render(tokenizer, messages)
    tokens = tokenise(tokenizer, text)
    cut = conversation.finish_reason == "length"
    if _TAG.search(_template(tokenizer)):
        spans = _marked_spans(tokenizer, messages, answers, text, tokens, cut)
    else:
        spans = _added_spans(tokenizer, messages, answers, text, tokens, cut)
    mask = [0] * len(tokens.ids)
    for span in spans:
        stop = _stop(tokens, span)
        _check_decodes(tokenizer, tokens.ids[span.first : stop], text[span.start : span.end])
        mask[span.first : stop] = [1] * (stop - span.first)
    return tokens.ids, mask


def _supervised_turns(messages: Sequence[Message], turns: Turns) -> list[int]:
    asked = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer", "assistant")), None)
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and asked is not None and i > asked]
    if not answers:
        raise Unusable("no assistant turn follows a question")
    return answers if turns == "all" else answers[-1:]


def _added_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    answers: Sequence[int],
    text: str,
    tokens: Tokens,
    cut: bool,
) -> list[_Span]:
    """Spans by prefix rendering: what each answer adds to its prompt."""
    spans = []
    for i in answers:
        last = i == answers[-1]
        prompt = render(tokenizer, messages[:i], prompt=True)
        full = text if last else render(tokenizer, messages[: i + 1])
        if not full.startswith(prompt):
            raise Unusable(REWRITES)
        added = full[len(prompt) :]
        content = messages[i]["content"]
        if _squash(content) not in _squash(added):
            raise Unusable(CHANGES)
        answer, end = turn_end(added, _content_end(added, content), end_tokens(tokenizer))
        end = len(prompt) + (answer if cut and last else end)
        if not text.startswith(full[:end]):
            raise Unusable(REWRITES)
        if content.strip() or _shows(messages[i], added[:answer]):
            spans.append(_Span(_first_token(tokenizer, prompt, tokens), len(prompt), end))
    return spans


def _marked_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    answers: Sequence[int],
    text: str,
    tokens: Tokens,
    cut: bool,
) -> list[_Span]:
    """Spans that the template marks with {% generation %}, from the first supervised turn on."""
    marks = _marked_tokens(tokenizer, messages, tokens)
    firsts = _answer_starts(tokenizer, messages, answers, text, tokens)
    if any(all(marks[first - 1 : first + 1]) for first in firsts):
        raise Unusable(OVERLAPS)
    runs = [(a, b) for a, b in _runs(marks) if a >= firsts[0]]
    spans = [_Span(a, tokens.offsets[a][0], tokens.offsets[b - 1][1]) for a, b in runs]
    if not spans:
        return []
    content = messages[answers[-1]]["content"]
    ends = end_tokens(tokenizer)
    trimmed = [_trim(span, text, content, ends, cut and span is spans[-1]) for span in spans]
    if _squash(content) not in _squash("".join(text[s.start : s.end] for s in trimmed)):
        raise Unusable(CHANGES)
    return trimmed


def _answer_starts(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answers: Sequence[int], text: str, tokens: Tokens
) -> list[int]:
    """The token at which each answer starts; later answers whose history the template rewrites are left out."""
    prompts = [render(tokenizer, messages[:i], prompt=True) for i in answers]
    if not text.startswith(prompts[0]):
        raise Unusable(REWRITES)
    return [_first_token(tokenizer, prompt, tokens) for prompt in prompts if text.startswith(prompt)]


def _marked_tokens(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tokens: Tokens) -> list[int]:
    out: Any = tokenizer.apply_chat_template(
        [dict(m) for m in messages], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marks = list(out["assistant_masks"])
    return [0] * (len(tokens.ids) - len(marks)) + marks  # a BOS may have been added in front


def _runs(marks: Sequence[int]) -> list[tuple[int, int]]:
    """[first, stop) of every run of ones."""
    edges = [i for i in range(len(marks) + 1) if (marks[i - 1] if i else 0) != (marks[i] if i < len(marks) else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _trim(span: _Span, text: str, content: str, ends: tuple[list[str], list[str]], cut: bool) -> _Span:
    """The span without what follows its end token; without the end token too if the answer ``content`` was cut."""
    marked = text[span.start : span.end]
    answer, end = turn_end(marked, _content_end(marked, content) if cut else 0, ends)
    return _Span(span.first, span.start, span.start + (answer if cut else end))


def _content_end(rendered: str, content: str) -> int:
    """Where ``content`` ends in the rendering of its turn; 0 if it is empty or not there word for word."""
    for text in (content, content.strip()):
        found = rendered.rfind(text)
        if text and found >= 0:
            return found + len(text)
    return 0


def _first_token(tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: Tokens) -> int:
    """The token after the prompt. Raises Unusable unless the row begins with the tokens that decoding would feed."""
    ids = tokenise(tokenizer, prompt).ids
    if tokens.ids[: len(ids)] != ids or any(a < len(prompt) < b for a, b in tokens.offsets):
        raise Unusable(STRADDLES)
    return len(ids)


def _stop(tokens: Tokens, span: _Span) -> int:
    """The token after the span's last. Raises Unusable if a token reaches over the span's end."""
    stop = span.first
    while stop < len(tokens.ids) and tokens.offsets[stop][0] < span.end:
        stop += 1
    if any(end > span.end for _, end in tokens.offsets[span.first : stop]):
        raise Unusable(STRADDLES)
    return stop


def _check_decodes(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str) -> None:
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if _squash(str(decoded)) != _squash(text):
        raise Unusable(LOSES)


def _shows(message: Message, rendered: str) -> bool:
    """Whether the rendering of a turn without content shows its reasoning or the name of a tool it calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls", [])]
    signs = [message.get("reasoning_content"), message.get("reasoning"), message.get("thinking")]
    signs += [call.get("name") for call in calls if isinstance(call, dict)]
    return any(isinstance(sign, str) and sign.strip() and sign.strip() in rendered for sign in signs)


def _squash(text: str) -> str:
    """Text without spaces and in one Unicode form: tokenizers may normalise, and decoding may move spaces."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.get_chat_template()
    assert isinstance(template, str)
    return template
