"""A word-level tokenizer of 96 tokens and small chat templates: ``w0`` .. ``w82``, separated by single spaces."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = [
    "<unk>",
    "<s>",
    "<eos>",
    "<pad>",
    "<|start|>",
    "<|end|>",
    "system",
    "user",
    "assistant",
    "tool",
    "<think>",
    "</think>",
    "\n",
]
VOCAB = (*SPECIALS, *(f"w{i}" for i in range(83)))
WORD_ID = {word: i for i, word in enumerate(VOCAB)}

_TURN = "<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> "
_PROMPT = "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
TEMPLATES = {
    # ChatML-like, any order of roles.
    "plain": "{% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT,
    # Puts an empty think pair before an answer that has none, and keeps the whole history.
    "inserts": "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' not in c %}{% set c = '<think> </think> ' + c %}{% endif %}"
    "<|start|> {{ m['role'] }} {{ c }} <|end|> {% endfor %}" + _PROMPT,
    # Refuses roles that do not alternate, system allowed first.
    "strict": "{% set ns = namespace(k=0) %}{% for m in messages %}{% if m['role'] != 'system' %}"
    "{% if (m['role'] == 'user') != (ns.k % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.k = ns.k + 1 %}{% endif %}" + _TURN + "{% endfor %}" + _PROMPT,
    # Writes its own BOS, to which a tokenizer may add a second one.
    "bos": "<s> {% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT,
}


def tokenizer(
    template: str = "plain", pad: str | None = "<pad>", eos: str = "<|end|>", add_bos: bool = False
) -> PreTrainedTokenizerFast:
    """A fresh tokenizer. ``template`` is a name of TEMPLATES or a template; ``add_bos`` puts ``<s>`` in front."""
    words = Tokenizer(models.WordLevel(WORD_ID, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if add_bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", WORD_ID["<s>"])])
    names = {"bos_token": "<s>", "eos_token": eos, "unk_token": "<unk>", **({"pad_token": pad} if pad else {})}
    made = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    made.chat_template = TEMPLATES.get(template, template)
    return made
