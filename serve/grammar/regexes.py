"""Regular expressions and EBNF as the grammar library reads them. What it would take otherwise than it is meant is
written in another way, or refused with a sentence. Imports no library."""

import json
import re

# Two hex digits, half of a surrogate pair, or another escape.
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u\{?0*([Dd][89A-Fa-f][0-9A-Fa-f]{2})\}?|.)", re.DOTALL)
CLASS = r"\[(?:\\.|[^\]\\])*\]?"  # or what is not closed
NULL = r"\\(?:0|u0000|u\{0+\}|U0{8})"
NULL_OR_ESCAPE = re.compile(rf"({NULL})|\\.", re.DOTALL)
NULL_CLASS = re.compile(rf"\[{NULL}(?:-{NULL})?\]")  # which the library takes for a text
PARTS_OF_REGEX = re.compile(rf"{CLASS}|\((?:\?:|\?P?<\w+>)?|{NULL}|\\u[0-9A-Fa-f]{{4}}|\\.|.", re.DOTALL)
PARTS_OF_CLASS = re.compile(r"\\u[0-9A-Fa-f]{4}|\\.|.", re.DOTALL)
COUNT = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
CONTROLS = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\f": "\f", r"\v": "\v"}
PARTS_OF_EBNF = re.compile(rf'"(?:\\.|[^"\\])*"?|{CLASS}|#[^\n]*|.', re.DOTALL)
LETTER = re.compile(r"\\(?:([^\W_abBcdDefknpPrsStuvwWx0-9])|.)", re.ASCII | re.DOTALL)  # that is no escape
OPEN_GROUP = re.compile(r"\)\{\d+,\}")
MOST_COUNT = 32  # characters of a count
LARGE_COUNT = re.compile(r"\{[\d,\s]*\d{10}")
LARGE_COUNT_FAULT = "a count of ten digits or more; lower it"
REPEATS = ("*", "+", "?", "{")


def with_long_escapes(text: str) -> str:
    """Returns a regular expression or EBNF with four hex digits in place of two, since the library takes all that
    follow, though it writes two itself: größe as gr\\xf6\\xdfe, which ends in U+0DFE. Escapes of surrogate pairs become
    characters, since the library would write each half."""

    def long(match: re.Match[str]) -> str:
        if match[1]:
            return f"\\u00{match[1]}"
        return chr(int(match[2], 16)) if match[2] else match[0]

    return ESCAPE.sub(long, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def read_regex(text: str) -> str:
    """Returns a regular expression of whole answers as the library reads it. Raises ValueError for what it would
    ignore, such as anchors inside."""
    text = with_long_escapes(text)
    parts = parts_of(text)
    idle = "^ after its beginning or $ before its end; it is matched with the whole text"
    if fault := fault_of(parts) or has_idle_anchor(parts) * idle:
        raise ValueError(f"it has {fault}")
    return text


def parts_of(regex: str) -> list[str]:
    """Returns a regular expression in characters, escapes, classes and beginnings of groups."""
    return PARTS_OF_REGEX.findall(regex)


def escaped_in_json(part: str) -> list[str]:
    """Returns how JSON writes the characters that a part of a regular expression names, if not by themselves."""
    names = [part]
    if part[0] == "[":
        names = [] if part[:2] == "[^" else PARTS_OF_CLASS.findall(part[1:-1])
    letters = [chr(int(name[2:], 16)) if name[:2] == "\\u" else CONTROLS.get(name, name[-1]) for name in names]
    texts = [json.dumps(letter, ensure_ascii=False)[1:-1] for letter in letters]
    return [text for text, letter in zip(texts, letters, strict=True) if text != letter]


def split_sequence(parts: list[str]) -> list[tuple[list[str], str]]:
    """Splits a regular expression into its outermost atoms and groups, each with its count, and bars."""
    result: list[tuple[list[str], str]] = []
    start = 0
    while start < len(parts):
        end = start + 1
        depth = int(parts[start][0] == "(")
        while depth and end < len(parts):
            depth += (parts[end][0] == "(") - (parts[end] == ")")
            end += 1
        count = COUNT.match("".join(parts[end : end + MOST_COUNT]))
        size = len(count[0]) if count is not None else 0
        result.append((parts[start:end], count[0] if count is not None else ""))
        start = end + size
        start += size > 0 and parts[start : start + 1] == ["?"]  # lazy: the same texts
    return result


def read_ebnf(text: str) -> str:
    """Returns EBNF as the library reads it. Raises ValueError for a null character, where it would end a text, and for
    counts beyond its range."""
    text = with_long_escapes(text)
    parts = PARTS_OF_EBNF.findall(text)
    if has_null(parts):
        raise ValueError("it has a null character; leave it out")
    if has_large_count(parts):
        raise ValueError(f"it has {LARGE_COUNT_FAULT}")
    return text


def has_null(parts: list[str]) -> bool:
    """Whether a text of a regular expression or of EBNF has a null character. Classes may have one."""
    texts = [part for part in parts if part[0] not in "[#" or NULL_CLASS.match(part)]
    return "\0" in "".join(parts) or any(null for part in texts for null in NULL_OR_ESCAPE.findall(part))


def has_large_count(parts: list[str]) -> bool:
    """Whether a count is beyond 32 bits, which the library would cut off: a{4294967297} as a{1}."""
    return bool(LARGE_COUNT.search("".join(part if part[0] not in '[\\"#' else " " for part in parts)))


def fault_of(parts: list[str]) -> str:
    """Returns what the library would ignore or cut in a regular expression, with a remedy."""
    if has_null(parts):
        return "a null character; leave it out"
    if has_large_count(parts):
        return LARGE_COUNT_FAULT
    letter = next((letter for part in parts for letter in LETTER.findall(part) if letter), "")
    return letter and f"the escape \\{letter}, which is not known; leave it out"


def has_idle_anchor(parts: list[str]) -> bool:
    """Whether ^ may come after other characters, or $ before others, or either is repeated."""
    pairs = zip(parts, parts[1:], strict=False)
    is_repeated = any(part in "^$" and following in REPEATS for part, following in pairs)
    return is_repeated or _is_inside("^", parts, "(", ")") or _is_inside("$", parts[::-1], ")", "(")


def _is_inside(anchor: str, parts: list[str], opening: str, closing: str) -> bool:
    """Whether an anchor may come after other characters. `parts`: also from the end, with brackets exchanged."""
    at_edge = True
    groups = [(True, 0)]  # of each open group: whether it begins at the edge, and the anchors before it
    num_anchors = 0
    for part, following in zip(parts, [*parts[1:], ""], strict=False):
        if part[0] == opening:
            groups.append((at_edge, num_anchors))
        elif part == "|":
            at_edge = groups[-1][0]
        elif part[0] == closing and len(groups) > 1:
            _, num_before = groups.pop()
            at_edge = False
            if closing == ")" and following in REPEATS and num_anchors > num_before:
                return True
        elif part == anchor:
            num_anchors += 1
            if not at_edge:
                return True
        elif part not in "^$":
            at_edge = False
    return False


def for_automaton(pattern: str) -> str:
    """Returns an equal pattern of JSON strings that the library makes a right automaton of. Its automata skip the
    beginning of an optional group that ends in a loop: (ab*)? takes b, and (ab*|x?){2,} does. They join states before
    and after others that end: b|(a|b){1,2} takes aaa. Neither happens between edges, which cost time, so that only
    patterns with a bar, or with groups repeated without end, have them."""
    parts = parts_of(pattern)
    edge = '(|["])' if "|" in parts or OPEN_GROUP.search(pattern) else ""  # no text of JSON has a bare quote
    result = [edge]
    for part, before in zip(parts, ["", *parts], strict=False):
        if part[0] == "(" and edge:
            part = f"({edge}{part}"
        elif part == ")" and edge:
            part = f"){edge})"
        elif part == "?" and before == ")":
            part = "{0,1}"
        result.append(part)
    return "".join((*result, edge))
