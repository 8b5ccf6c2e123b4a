"""A target without its weights: tokenizer, chat template, vocabulary size, special tokens."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from slipstream.data_tools.options import ConversationOptions
from slipstream.models.chat.messages import Message
from slipstream.models.chat.template import ARGUMENTS, QUESTION, PromptTemplate, TemplateRefused
from slipstream.models.files.checkpoint import resolve, tokenizer_hash
from slipstream.models.files.text import read_text_file
from slipstream.models.targets.config import most_positions
from slipstream.models.targets.pretrained import end_of_text_ids, load_tokenizer, read_config
from slipstream.serve.chat.forms import AUTO, REASONING_FORMS, ReasoningForm, find_form, template_source


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTokenizer:
    tokenizer: PreTrainedTokenizerBase
    hash: str
    vocab_size: int  # V: the model's, which may exceed the tokenizer's; without a model config the tokenizer's
    end_ids: frozenset[int]  # end of text or turn, as in the server (models/targets/pretrained.py)
    special_ids: frozenset[int]  # special and added tokens
    context: int | None  # maximum tokens of prompt and answer; None without a model config


def load_target_tokenizer(options: ConversationOptions) -> TargetTokenizer:
    """Raises ValueError if the target is missing or its files contradict each other."""
    if not options.target:
        raise ValueError("target is empty; name a model, as a folder or a hub id")
    trust = options.trust_remote_code
    folder = resolve(options.target, options.revision, trust_remote_code=trust, weights=False)
    tokenizer = load_tokenizer(folder, trust)
    if options.chat_template is not None:
        tokenizer.chat_template = read_text_file("chat_template", options.chat_template)
    end_ids = end_of_text_ids(folder, trust)
    special_ids = frozenset({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})
    text = read_config(folder, trust).get_text_config() if (folder / "config.json").exists() else None
    vocab_size = len(tokenizer) if text is None else int(text.vocab_size)
    highest = max(len(tokenizer) - 1, *special_ids, *end_ids, 0)
    if highest >= vocab_size:
        raise ValueError(
            f"target {options.target}: its tokenizer has token id {highest}, its config.json a vocab_size of "
            f"{vocab_size}; they do not belong together"
        )
    return TargetTokenizer(
        tokenizer=tokenizer,
        hash=tokenizer_hash(tokenizer),
        vocab_size=vocab_size,
        end_ids=end_ids,
        special_ids=special_ids,
        context=None if text is None else context_of(text),
    )


def context_of(config: PretrainedConfig) -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return None if positions is None else most_positions(positions, rope.get("full_attention") or rope)


class RowDropped(Exception):
    """A well-formed row that cannot be used. `reason` is a name under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class ChatTemplate(PromptTemplate):
    """Raises ValueError without a template, and RowDropped for messages that it refuses."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        date: str,
        variables: Mapping[str, Any],
        tokenizer_hash: str = "",  # taken before first use, which may change the tokenizer
    ) -> None:
        super().__init__(tokenizer, date=date, variables=variables)
        self.tokenizer_hash = tokenizer_hash

    @property
    def date_note(self) -> str:
        """Clause for messages: the date that the template sees as today's, if it asks."""
        return f"; today's date in the template is frozen at {self._date}" if self.inserts_date else ""

    def render(self, *arguments: Any, **options: Any) -> str:
        try:
            return super().render(*arguments, **options)
        except TemplateRefused as error:
            raise RowDropped("template_refuses", str(error)) from error

    @functools.cached_property
    def reasoning(self) -> ReasoningForm | None:
        """The form of reasoning that the template shows, if any."""
        return find_form(REASONING_FORMS, AUTO, template_source(self.tokenizer))

    @functools.cached_property
    def first_ids(self) -> Mapping[str, Sequence[int]]:
        """The tokens with which the template begins a message after an answer, by its role: `user`, or `tool` after a
        call. Empty where that cannot be told."""
        call = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
        answer: Message = {"role": "assistant", "content": "4"}
        result: Message = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        texts = {"user": ([QUESTION, answer], QUESTION), "tool": ([QUESTION, {**answer, "tool_calls": [call]}], result)}
        return {role: self._first_ids(before, message) for role, (before, message) in texts.items()}

    def _first_ids(self, before: Sequence[Message], message: Message) -> Sequence[int]:
        try:
            text, longer = (self.render(messages) for messages in (before, [*before, message]))
        except RowDropped:
            return []
        return self.encode([longer.removeprefix(text)])[0] if longer.startswith(text) else []

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
