"""Text of clients in which nothing is a control token, inside prompts whose template writes control tokens.

A tokenizer cuts a text at its special tokens wherever they come from: `<|im_end|>` in a question ends the turn. Here a
second tokenizer reads special tokens as plain text and knows each by an alias instead, which nobody can guess. In a
rendered prompt the template's own special tokens are replaced by their aliases; those of clients never are.

Invariant: the ids of a prompt in which clients wrote no special token are those of the tokenizer itself.
"""

import copy
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence

from transformers import AddedToken, PreTrainedTokenizerBase

from slipstream.models.messages import Message

PRIVATE_USE = range(0x100000, 0x10FFFE)  # code points without a meaning: Unicode's plane 16
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
        """The ids of plain text, or of what `render` returned. Safe to call from several threads at once."""
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens, split_special_tokens=True).input_ids
        return [self._ids.get(token, token) for token in ids]

    def render(self, messages: Sequence[Message], template: Callable[[Sequence[Message]], str]) -> str:
        """The text that `template` makes of `messages`, its own special tokens replaced by their aliases."""
        strings = [value for message in messages for value in message.values() if isinstance(value, str)]
        found = {token for text in strings for token in self._pattern.findall(text)}
        # The template sees a character instead of each token that a client wrote: one that no client wrote.
        stand_ins = dict(zip(found, unused_characters(strings) if found else "", strict=False))
        if len(stand_ins) < len(found):
            raise ValueError("messages hold too many private-use characters (Unicode's plane 16) beside control tokens")
        hidden = [
            {name: self._replaced(value, stand_ins) if isinstance(value, str) else value for name, value in fields}
            for fields in (message.items() for message in messages)
        ]
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


def random_word() -> str:
    """62 bits, and no longer than other tokens: what bounds a text's length by its tokens' holds for aliases, too."""
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
