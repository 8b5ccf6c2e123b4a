"""Rules of a grammar for JSON strings with lengths, patterns or formats.

The library's own rules for these let control characters, bare quotes and impossible dates through, so the strings of a
schema are replaced by marks before it converts the schema, and the marks by these rules afterwards.
"""

import json
import re
from hashlib import blake2b
from typing import Any

from slipstream.serve.grammar.regexes import escaped_in_json, for_automaton, parts_of, split_sequence

LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
ATOM = "[A-Za-z0-9!#$%&'*+/=?^_{|}~-]{1,64}"
HOST, LOCAL_PART = (rf"{part}(\.{part}){{0,8}}" for part in (LABEL, ATOM))
# These are rules of their own, with one for their part: an automaton of the whole would count each part anew, and takes
# the library ten times as long to compile.
DOTTED = {HOST: ("label", LABEL), LOCAL_PART: ("atom", ATOM)}
CENTURIES = "[02468][048]|[13579][26]"
LEAP = f"([0-9]{{2}}(0[48]|[2468][048]|[13579][26])|({CENTURIES})00)-02-29"
DAYS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
DATE = f"([0-9]{{4}}-({DAYS})|{LEAP})"
CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
TIME = f"{CLOCK}(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
HOURS = "T([0-9]{1,9}H([0-9]{1,9}M([0-9]{1,9}S)?)?|[0-9]{1,9}M([0-9]{1,9}S)?|[0-9]{1,9}S)"
YEARS = "([0-9]{1,9}Y([0-9]{1,9}M([0-9]{1,9}D)?)?|[0-9]{1,9}M([0-9]{1,9}D)?|[0-9]{1,9}D)"
OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
GROUP = "[0-9A-Fa-f]{1,4}"
PATH = "([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
FORMATS = {
    "email": f"{LOCAL_PART}@{HOST}",
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P({YEARS}({HOURS})?|{HOURS}|[0-9]{{1,9}}W)",
    "ipv4": rf"({OCTET}\.){{3}}{OCTET}",
    "ipv6": f"(({GROUP}:){{7}}{GROUP}|::({GROUP}(:{GROUP}){{0,6}})?|"
    + "|".join(f"({GROUP}:){{{n}}}(:{GROUP}){{1,{7 - n}}}" for n in range(1, 7))
    + f"|({GROUP}:){{1,7}}:)",
    "hostname": HOST,
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": f"[A-Za-z][A-Za-z0-9+.-]{{0,31}}://{HOST}(:[0-9]{{1,5}})?(/{PATH})?(\\?({PATH}))?(#{PATH})?",
}
HEX = "[0-9A-Fa-f]"
# One character. Escapes of half a surrogate pair are left out, since they are no character.
CHARACTER = rf"""([^\x00-\x1f"\\]|\\["\\/bfnrt]|\\u([0-9A-Ca-cE-Fe-f]{HEX}|[Dd][0-7]){HEX}{HEX})"""
# The most characters that the library counts in an automaton, where a mask takes microseconds. Longer counts go by
# groups of so many; a mask near a group's end takes far longer, since each token is tried that would go beyond it.
GROUP_SIZE = 128


class Strings:
    """Rules of strings and the marks that stand for them. The marks are named by a digest of `schema`, which is JSON:
    equal schemas have equal marks, and no schema contains its own marks by chance."""

    def __init__(self, schema: str) -> None:
        self._mark = f"string_{blake2b(schema.encode(), digest_size=8).hexdigest()}"
        self._rules = dict[str, str]()
        self._parts = dict[str, str]()  # of texts with dots, as rules by name
        self.patterns: set[str] = set()  # of the marked schemas

    def mark(self, schema: Any) -> Any:
        """Returns a rewritten schema with marks for strings that have bounds, patterns or formats."""
        if not isinstance(schema, dict):  # true or false
            return schema
        if schema.get("type") == "string" and len(schema) > 1:
            rule = self._rules.setdefault(self._rule(schema), f"{self._mark}_{len(self._rules)}")
            return {"enum": [rule]}
        result = dict(schema)
        for name in ("properties", "$defs"):
            if name in result:
                result[name] = {key: self.mark(part) for key, part in result[name].items()}
        for name in ("anyOf", "prefixItems"):
            if name in result:
                result[name] = [self.mark(part) for part in result[name]]
        for name in ("items", "additionalProperties", "propertyNames"):
            if name in result:
                result[name] = self.mark(result[name])
        return result

    def put(self, grammar: str) -> str:
        """Returns a converted schema, which is EBNF, with the rules of its marks."""
        grammar = re.sub(rf'"\\"({self._mark}_[0-9]+)\\""', r"\1", grammar)
        rules = [f'{name} ::= "\\"" ({rule}) "\\""' for rule, name in self._rules.items()]
        rules += [f"{name} ::= {rule}" for name, rule in self._parts.items()]
        return "\n".join((grammar, *rules, f"{self._mark}_group ::= {_characters(GROUP_SIZE, GROUP_SIZE)}"))

    def _rule(self, schema: dict[str, Any]) -> str:
        if "pattern" in schema:
            self.patterns.add(schema["pattern"])
            return _regex(schema["pattern"])
        if "format" in schema:
            pieces = re.split(f"({'|'.join(map(re.escape, DOTTED))})", FORMATS[schema["format"]])
            return " ".join(
                self._dotted(*DOTTED[piece]) if piece in DOTTED else _regex(piece) for piece in pieces if piece
            )
        return self._count(schema.get("minLength", 0), schema.get("maxLength"))

    def _dotted(self, name: str, part: str) -> str:
        """Returns a rule for parts with dots between them."""
        name = f"{self._mark}_{name}"
        self._parts[name] = _regex(part)
        return f'{name} ("." {name}){{0,8}}'

    def _count(self, min_count: int, max_count: int | None) -> str:
        """Returns a rule for so many characters. `max_count` None: no upper limit."""
        groups, rest = divmod(min_count, GROUP_SIZE)
        if max_count is None:
            return f"{self._groups(groups)} {_characters(rest, None)}"
        if max_count <= GROUP_SIZE:
            return _characters(min_count, max_count)
        if min_count:
            return f"{self._groups(groups)} {_characters(rest, rest)} ({self._count(0, max_count - min_count)})"
        groups, rest = divmod(max_count + 1, GROUP_SIZE)  # of n + 1 characters the last is not written
        fewer = f"{self._groups(0, groups - 1)} {_characters(0, GROUP_SIZE - 1)}"
        return f"{fewer} | {self._groups(groups)} {_characters(0, rest - 1)}" if rest else fewer

    def _groups(self, min_count: int, max_count: int | None = None) -> str:
        max_count = min_count if max_count is None else max_count
        return f"{self._mark}_group{{{min_count},{max_count}}}" if max_count else ""


def _regex(pattern: str) -> str:
    """Returns EBNF for what a pattern matches in the text of a JSON string. An automaton of the library takes no
    character that JSON escapes, so what stands around one gets an automaton of its own."""
    parts = parts_of(pattern)
    if any(map(escaped_in_json, parts)):
        return _rule_of(parts)
    return _automaton(pattern)


def _automaton(pattern: str) -> str:
    return f"Regex({json.dumps(for_automaton(pattern), ensure_ascii=False)}, json_string=true)"


def _rule_of(parts: list[str]) -> str:
    result = ['""']
    run = ""  # without characters that JSON escapes
    for atom, count in [*split_sequence(parts), ([], "")]:
        escapes = [*map(escaped_in_json, atom)]
        if atom and atom != ["|"] and not any(escapes):
            run += "".join(atom) + count
            continue
        result += [_regex(run)] if run else []
        run = ""
        if atom == ["|"]:
            result += ["|", '""']
        elif atom:
            texts = [json.dumps(text) for text in (escapes[0] if len(atom) == 1 else ())]
            texts += [_automaton(atom[0])] if atom[0][0] == "[" else []
            result.append(f"({' | '.join(texts) or _rule_of(atom[1:-1])}){count}")
    return " ".join(result)


def _characters(min_count: int, max_count: int | None) -> str:
    """Returns EBNF for so many characters, both counts up to GROUP_SIZE."""
    if max_count == 0:
        return '""'
    return f"Regex({json.dumps(f'{CHARACTER}{{{min_count},' + ('}' if max_count is None else f'{max_count}}}'))})"
