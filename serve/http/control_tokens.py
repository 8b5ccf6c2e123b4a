"""Encodes control tokens that clients write as plain text, and those that the chat template writes as control tokens.

A tokenizer splits text at special tokens whoever wrote them: `<|im_end|>` in a question ends the turn. Here a second
tokenizer reads special tokens as plain text and knows each by a random alias instead, which clients cannot guess. In a
rendered prompt the template's own special tokens are replaced by their aliases; those of clients are not.

Invariant: a prompt in which clients wrote no special token has the same ids as without this module.
"""

import copy
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerBase

PRIVATE_USE = range(0x100000, 0x10FFFE)  # code points of plane 16, which have no meaning
JsonList = Sequence[Any]
PLACES = ("{}", " {} ", "\n{}\n", "a{}a")


class PlainTextTokenizer:
    """Raises ValueError for a tokenizer that cannot read a special token as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ValueError("control_tokens_as_text needs a fast tokenizer (tokenizer.json); leave it off")
        special = {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.special and token.content}
        self._aliases = {token.content: random_word() for token in special.values()}
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._aliases, key=len, reverse=True))) or "(?!)")
        self._tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer.add_tokens([alias_of(token, self._aliases[token.content]) for token in special.values()])
        self._ids = {
            self._tokenizer.convert_tokens_to_ids(self._aliases[token.content]): id for id, token in special.items()
        }
        self._check(set(special) - {tokenizer.unk_token_id})

    def __call__(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of plain text or of the result of `render`. Thread-safe."""
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens, split_special_tokens=True).input_ids
        return [self._ids.get(token, token) for token in ids]

    def render(self, given: JsonList, template: Callable[[JsonList], str]) -> str:
        """Renders what clients give, messages or messages and tools, with `template`, whose own special tokens become
        aliases."""
        strings = list(strings_of(given))
        found = {token for text in strings for token in self._pattern.findall(text)}
        # For each token that a client wrote, the template sees a character that no client used.
        stand_ins = dict(zip(found, unused_characters(strings) if found else "", strict=False))
        if len(stand_ins) < len(found):
            raise ValueError(
                "messages hold too many private-use characters (Unicode's plane 16) besides control tokens"
            )
        hidden = [replaced(one, lambda text: self._replaced(text, stand_ins)) for one in given]
        text = self._replaced(template(hidden), self._aliases)
        return text.translate({ord(char): token for token, char in stand_ins.items()})

    def _replaced(self, text: str, replacements: Mapping[str, str]) -> str:
        return self._pattern.sub(lambda match: replacements[match[0]], text)

    def _check(self, special: set[int]) -> None:
        for token in self._aliases:
            ids = {id for place in PLACES for id in self(place.format(token), add_special_tokens=False)}
            if ids & special:
                fault = f"this tokenizer's vocabulary makes {token} a control token even as text"
                raise ValueError(f"control_tokens_as_text: {fault}; leave the option off")


def strings_of(value: Any) -> Iterator[str]:
    """At any depth, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from strings_of(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from strings_of(inner)


def replaced(value: Any, replace: Callable[[str], str]) -> Any:
    """With every string of it replaced."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {replace(name): replaced(inner, replace) for name, inner in value.items()}
    return [replaced(inner, replace) for inner in value] if isinstance(value, Sequence) else value


def random_word() -> str:
    """62 random bits. No longer than other tokens, so that limits.longest_text also holds for aliases."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(12))


def unused_characters(texts: Sequence[str]) -> list[str]:
    used = set().union(*texts)
    return [chr(code) for code in PRIVATE_USE if chr(code) not in used]


def alias_of(token: AddedToken, alias: str) -> AddedToken:
    return AddedToken(
        alias,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized,
        special=False,
    )
