"""Markers of forms as a tokenizer has them.

If the tokenizer has a marker as an added token, only that token is the marker; a text that spells it is not. Decoded
answers hold a character that no text has, half of a surrogate pair, in place of such a token.
"""

import re
from collections.abc import Iterable
from typing import Any

FIRST_STAND_IN = 0xDC00
# An added token that may be (part of) a marker, unlike a space or `json`.
MARKER = re.compile(r"[<\[｜].*\w|<\|.+\|>")

PLACEHOLDERS = {
    "$name": r"(?P<name>[a-zA-Z0-9_-]{1,64})",
    "$key": r'(?P<key>[^<>"\n]{1,256})',
    "$type": r"(?P<type>true|false)",
    "$id": r"[a-zA-Z0-9_-]{1,64}",
}
SPACE = r"\s*+"


class Markers:
    """Added tokens that occur in the given forms."""

    def __init__(self, tokenizer: Any, forms: Iterable[str]) -> None:
        text = "\n".join(forms)
        added = {str(token): id for id, token in tokenizer.added_tokens_decoder.items()}
        names = [name for name in added if MARKER.match(name) and name in text]
        names.sort(key=len, reverse=True)
        self.ids = {name: added[name] for name in names}
        self._stand_ins = {name: chr(FIRST_STAND_IN + index) for index, name in enumerate(names)}
        self._names = {ord(character): name for name, character in self._stand_ins.items()}
        self.by_id = {added[name]: character for name, character in self._stand_ins.items()}
        inner = [*map(re.escape, names), *map(re.escape, PLACEHOLDERS), r"\s+", "."]
        self._parts = re.compile("|".join(inner), re.DOTALL)

    def shown(self, text: str) -> str:
        """Returns a decoded text with its markers spelled out."""
        return text.translate(self._names)

    def hidden(self, text: str) -> str:
        """Returns a text with stand-ins for the markers that it spells."""
        for name, character in self._stand_ins.items():
            text = text.replace(name, character)
        return text

    def pattern(self, form: str) -> str:
        """Returns the regular expression that finds a form, or a part of one, in decoded text."""
        pieces = []
        for part in self._parts.findall(form):
            if part in self._stand_ins:
                pieces.append(self._stand_ins[part])
            elif part.isspace():
                pieces.append(SPACE)
            elif part in "{}[],:" and not is_name(form, part):
                pieces.append(SPACE + re.escape(part) + SPACE)
            else:
                pieces.append(PLACEHOLDERS.get(part) or re.escape(part))
        return "".join(pieces).replace(SPACE + SPACE, SPACE).replace(SPACE + SPACE, SPACE)

    def any_of(self, forms: Iterable[str]) -> str:
        return "(?:" + "|".join(map(self.pattern, forms)) + ")"

    def elements(self, form: str) -> list[dict[str, Any]]:
        """Returns a text as elements of a structural tag: tokens for markers, strings for the rest."""
        elements = list[dict[str, Any]]()
        text = ""
        for part in self._parts.findall(form):
            if part not in self.ids:
                text += part
                continue
            elements += [{"type": "const_string", "value": text}] if text else []
            elements.append({"type": "token", "token": self.ids[part]})
            text = ""
        return elements + ([{"type": "const_string", "value": text}] if text else [])


def is_name(form: str, part: str) -> bool:
    """Whether brackets are part of a marker's spelling, such as [ARGS], that the tokenizer does not know."""
    return part in "[]" and re.search(r"\[/?[A-Z_]+\]", form) is not None
