"""Conversations to token ids and a loss mask, prompts, batches, self-distillation and the draft vocabulary."""

from .batches import Batch, collate, plan_epoch, slice_step
from .chat import encode_conversation
from .conversations import normalise
from .distill import Answer, Distilled, distill, repeat_share
from .journal import append_row, open_journal, read_journal
from .prepare import Summary, prepare, show
from .prompts import read_prompts
from .records import Conversation, DataError, Encoded, Message, Prompt, Skipped, TokenRow, Turns
from .rendering import render_prompt
from .sources import read_rows
from .vocabulary import DraftVocabulary, draft_vocabulary

__all__ = [
    "Answer",
    "Batch",
    "Conversation",
    "DataError",
    "Distilled",
    "DraftVocabulary",
    "Encoded",
    "Message",
    "Prompt",
    "Skipped",
    "Summary",
    "TokenRow",
    "Turns",
    "append_row",
    "collate",
    "distill",
    "draft_vocabulary",
    "encode_conversation",
    "normalise",
    "open_journal",
    "plan_epoch",
    "prepare",
    "read_journal",
    "read_prompts",
    "read_rows",
    "render_prompt",
    "repeat_share",
    "show",
    "slice_step",
]
