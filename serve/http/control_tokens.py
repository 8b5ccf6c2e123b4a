"""Encodes control tokens that clients write as plain text, and those that the chat template writes as control tokens.

A tokenizer splits text at special tokens whoever wrote them: `<|im_end|>` in a question ends the turn. Here a second
tokenizer reads special tokens as plain text and knows each by a random alias instead, which clients cannot guess. The
aliases stand in the source of the chat template, and in its variables such as `bos_token`: whatever a template does
with text of clients, joins, cuts or replaces it, none of it becomes an alias.

Some templates join a token from its parts and a role, `'<|' + message.role + '|>'`. There marks stand beside the parts,
and what is between two marks must be a role.

Invariant: a prompt in which clients wrote no special token has the same ids as without this module.
"""

import copy
import re
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from transformers import AddedToken, PreTrainedTokenizerBase

from slipstream.models.chat.messages import Message
from slipstream.models.chat.template import PromptTemplate, TemplateRefused

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "ab"}],
    [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "ef"},
        {"role": "user", "content": "gh"},
    ],
)
LEXER = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # otherwise transformers'
PLACES = ("{}", " {} ", "\n{}\n", "a{}a")


class PlainTextTokenizer:
    """Raises ValueError for a tokenizer that cannot read a special token as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ValueError("control_tokens_as_text needs a fast tokenizer (tokenizer.json); leave it off")
        special = {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.special and token.content}
        self._aliases = {token.content: random_word() for token in special.values()}
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._aliases, key=len, reverse=True))) or "(?!)")
        self._opening = random_word()
        self._closing = random_word()
        parts = [token.partition(role) for token in self._aliases for role in ROLES if role in token]
        parts = [part for part in parts if part[0] and part[2]]
        self._before = tuple({part[0] for part in parts})
        self._after = tuple({part[2] for part in parts})
        joined = (f"{re.escape(p)}{self._opening}{r}{self._closing}{re.escape(q)}" for p, r, q in parts)
        self._joined = re.compile("|".join(joined) or "(?!)")
        self._tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer.add_tokens([alias_of(token, self._aliases[token.content]) for token in special.values()])
        self._ids = {
            self._tokenizer.convert_tokens_to_ids(self._aliases[token.content]): id for id, token in special.items()
        }
        self._check(set(special) - {tokenizer.unk_token_id})

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of plain text or of what `template` renders. Thread-safe."""
        text = self._joined.sub(lambda match: self._aliases[self._unmarked(match[0])], text)
        ids = self._tokenizer(
            self._unmarked(text), add_special_tokens=add_special_tokens, split_special_tokens=True
        ).input_ids
        return [self._ids.get(token, token) for token in ids]

    def template(self, tokenizer: PreTrainedTokenizerBase, *, date: str) -> PromptTemplate:
        """The chat template of `tokenizer`, which writes aliases."""
        source = tokenizer.chat_template
        aliased = copy.copy(tokenizer)
        if isinstance(source, str):
            aliased.chat_template = self._aliased(source)
        else:
            aliased.chat_template = {name: self._aliased(text) for name, text in source.items()}
        variables = {name: replaced(value, self._replaced) for name, value in tokenizer.special_tokens_map.items()}
        template = PromptTemplate(aliased, date=date, variables=variables)
        self._check_template(template, tokenizer, date)
        return template

    def _check_template(self, template: PromptTemplate, tokenizer: PreTrainedTokenizerBase, date: str) -> None:
        """Raises ValueError for a template that makes control tokens of parts that cannot be told from text."""
        plain = PromptTemplate(tokenizer, date=date, variables={})
        for messages in PROBES:
            try:
                expected = tokenizer(plain.render(messages, prompt=True), add_special_tokens=False).input_ids
            except TemplateRefused:
                continue
            if self(template.render(messages, prompt=True), add_special_tokens=False) != expected:
                fault = "the chat template joins control tokens from parts, which cannot be told from text"
                raise ValueError(f"control_tokens_as_text: {fault}; leave the option off")

    def _aliased(self, source: str) -> str:
        """The source of a template, with aliases in its text and in its string literals."""
        try:
            tokens = [*LEXER.lex(source)]
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        return "".join(self._part(kind, text) for _, kind, text in tokens)

    def _part(self, kind: str, text: str) -> str:
        if kind == "data":
            return self._marked(text)
        if kind != "string":
            return text
        # As jinja2 reads a literal.
        value = text[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
        marked = self._marked(value)
        return text if marked == value else repr(marked)

    def _marked(self, text: str) -> str:
        text = self._replaced(text)
        text = f"{text}{self._opening}" if text.endswith(self._before) else text
        return f"{self._closing}{text}" if text.startswith(self._after) else text

    def _unmarked(self, text: str) -> str:
        return text.replace(self._opening, "").replace(self._closing, "")

    def _replaced(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._aliases[match[0]], text)

    def _check(self, special: set[int]) -> None:
        for token in self._aliases:
            ids = {id for place in PLACES for id in self(place.format(token), add_special_tokens=False)}
            if ids & special:
                fault = f"this tokenizer's vocabulary makes {token} a control token even as text"
                raise ValueError(f"control_tokens_as_text: {fault}; leave the option off")


def replaced(value: Any, replace: Callable[[str], str]) -> Any:
    """A text or a list of texts, with each replaced."""
    if isinstance(value, str):
        return replace(value)
    return [replaced(inner, replace) for inner in value] if isinstance(value, Sequence) else value


def random_word() -> str:
    """62 random bits. No longer than other tokens, so that limits.longest_text also holds for aliases."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(12))


def alias_of(token: AddedToken, alias: str) -> AddedToken:
    return AddedToken(
        alias,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized,
        special=False,
    )
