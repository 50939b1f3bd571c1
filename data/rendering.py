"""Messages to text and text to tokens, the same way for training rows and for decode prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from .records import DataError, Message, Unusable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Tokens:
    """Token ids of a text, and for each the characters [start, end) it stands for; an added BOS stands for [0, 0)."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises DataError if the tokenizer has no chat template or gives no character offsets; both faults at once."""
    faults = []
    if not tokenizer.chat_template:
        faults.append(
            "it has no chat template: use an instruction-tuned model, or set tokenizer.chat_template and save it"
        )
    if not tokenizer.is_fast:
        faults.append("it gives no character offsets: a fast tokenizer (a tokenizer.json) is needed")
    if faults:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise DataError(f"the tokenizer {name} cannot be used for conversations: " + "; ".join(faults))


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: bool = False) -> str:
    """The chat template's text of ``messages``, with the generation prompt if asked. Raises Unusable if it refuses."""
    try:
        text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=prompt)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise Unusable(f"the chat template refuses it: {error}") from error
    assert isinstance(text, str)
    return text


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokens:
    """Tokens of a rendered text. A BOS that the tokenizer would add is added once, unless the text begins with it.

    Raises Unusable if two BOS stand at the front.
    """
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[Any] = list(out["input_ids"])
    offsets: list[tuple[int, int]] = [(a, b) for a, b in out["offset_mapping"]]
    bos: Any = tokenizer.bos_token_id
    if bos is not None and ids[:1] != [bos] and list(tokenizer("")["input_ids"][:1]) == [bos]:
        return Tokens([bos, *ids], [(0, 0), *offsets])
    if bos is not None and ids[:2] == [bos, bos]:
        raise Unusable(f"two BOS tokens ({tokenizer.bos_token}) stand at the front: the chat template writes both")
    return Tokens(ids, offsets)


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of ``messages`` and the generation prompt, as a target is asked and as training rows begin.

    Raises DataError if there is no chat template, or if it refuses the messages.
    """
    check_tokenizer(tokenizer)
    return tokenise(tokenizer, render(tokenizer, messages, prompt=True)).ids


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """Texts that may end a turn, longest first: the special tokens, and the other added tokens."""
    added = tokenizer.added_tokens_decoder.values()
    special = {str(t) for t in tokenizer.all_special_tokens} | {t.content for t in added if t.special}
    other = {t.content for t in added} - special
    return sorted(special, key=len, reverse=True), sorted(other, key=len, reverse=True)


def turn_end(text: str, floor: int, tokens: tuple[list[str], list[str]]) -> tuple[int, int]:
    """(end of the answer, end of the turn) in the rendering of an answer that reaches at least to ``floor``.

    A turn ends with the first of the special tokens that close the text, only spaces between and after them; with an
    added token if there is no special one; else with its last visible character.

    >>> turn_end("w5 <|end|> <eos> ", 2, (["<|end|>", "<eos>"], []))
    (2, 10)
    """
    for names in tokens:
        end, bare = None, _strip(text, floor, len(text))
        while name := next((n for n in names if text.endswith(n, floor, bare)), None):
            end, bare = bare, _strip(text, floor, bare - len(name))
        if end is not None:
            return bare, end
    bare = _strip(text, floor, len(text))
    return floor or bare, bare


def _strip(text: str, floor: int, end: int) -> int:
    return max(floor, len(text[:end].rstrip()))
