"""Grammars of answers, by xgrammar: what a client asks for is checked, compiled once, and followed token by token.

`check` runs where requests are read, so that a client learns at once what is wrong. `Grammars` belongs to an engine and
compiles on threads of its own, without Python's lock. xgrammar is loaded with the first grammar.
Letters: N nodes of a proposal, root included; V vocabulary.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.grammar.json_schema import Unsupported, rewrite
from slipstream.serve.grammar.strings import Strings
from slipstream.serve.request import Grammar

MOST_CHARS = 64 * 2**10  # of a grammar as it is sent
MOST_SPACES = 64  # in a row, between two parts of JSON
MOST_COMPILED = 256  # grammars that are kept
NUM_THREADS = 2
WORD_BITS = 32


def check(grammar: Grammar) -> None:
    """Raises ValueError, in a sentence, for a grammar that cannot be served."""
    parse(grammar)


def parse(grammar: Grammar) -> Any:
    """xgrammar's Grammar. Raises ValueError as `check`."""
    import xgrammar

    kind, text = grammar
    from_schema = partial(_of_schema, xgrammar.Grammar)
    if len(text) > MOST_CHARS:
        raise ValueError(f"has {len(text)} characters; the limit is {MOST_CHARS}")
    try:
        if kind == "json_object":
            return from_schema({"type": "object"})
        if kind == "structural_tag":
            return xgrammar.Grammar.from_structural_tag(json.dumps(_with_schemas(from_schema, json.loads(text))))
        if kind == "json_schema":
            return from_schema(rewrite(json.loads(text)))
        if kind == "choice":
            return xgrammar.Grammar.from_ebnf(f"root ::= {' | '.join(map(_literal, json.loads(text)))}")
        return xgrammar.Grammar.from_regex(text) if kind == "regex" else xgrammar.Grammar.from_ebnf(text)
    except Unsupported:
        raise
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"cannot be used: {_reason(error)}") from error


def as_element(grammar: Grammar) -> dict[str, Any]:
    """Of a structural tag. Raises ValueError as `check`."""
    kind, given = grammar
    if kind == "structural_tag":
        return dict(json.loads(given)["format"])
    if kind in ("json_object", "json_schema"):
        return {"type": "json_schema", "json_schema": json.loads(given) if given else {"type": "object"}}
    return {"type": "grammar", "grammar": given if kind == "ebnf" else str(parse(grammar))}


def _with_schemas(of_schema: Callable[[Any], Any], tag: Any) -> Any:
    """A structural tag whose JSON schemas are kept to the letter, as those of whole answers. Other notations than JSON
    are the library's."""
    if isinstance(tag, list):
        return [_with_schemas(of_schema, one) for one in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and tag.get("style", "json") == "json":
        for name in sorted(tag.keys() - {"type", "json_schema", "style"}):
            raise Unsupported("", f"{name} of a json_schema in a structural tag")
        return {"type": "grammar", "grammar": str(of_schema(rewrite(tag.get("json_schema"))))}
    if tag.get("type") in ("json_schema", "qwen_xml_parameter"):
        rewrite(tag.get("json_schema"))
        return tag
    return {name: _with_schemas(of_schema, one) for name, one in tag.items()}


def _of_schema(kind: Any, schema: Any) -> Any:
    """JSON with white space where JSON may have it, but not without end, as small models like it."""
    strings = Strings()
    marked = json.dumps(strings.mark(schema))
    for pattern in strings.patterns:
        kind.from_regex(pattern)  # or it would be found out only when the grammar is compiled
    converted = kind.from_json_schema(marked, strict_mode=False, max_whitespace_cnt=MOST_SPACES)
    return kind.from_ebnf(strings.put(str(converted)))


def _reason(error: Exception) -> str:
    """Without the library's own place in its source."""
    return " ".join(re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).split())


def _literal(text: str) -> str:
    """A text as EBNF has it."""
    escaped = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escaped.get(c, c if c >= " " else f"\\x{ord(c):02x}") for c in text) + '"'


class Grammars:
    """Compiled grammars of one vocabulary. `load_tokenizer` is called with the first."""

    def __init__(self, load_tokenizer: Callable[[], Any], vocab_size: int, end_ids: Collection[int]) -> None:
        self._load_tokenizer, self._vocab_size, self._end_ids = load_tokenizer, vocab_size, sorted(end_ids)
        self._compiler: Any = None
        self._compiled: OrderedDict[Grammar, Future[Any]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None

    def compile(self, grammar: Grammar) -> "Future[Any]":
        """At once if it is known. The result raises ValueError, in a sentence, where a grammar cannot be compiled."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar")
            self._compiler = self._threads.submit(self._make_compiler)
        if grammar not in self._compiled:
            self._compiled[grammar] = self._threads.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        for other in [key for key, future in self._compiled.items() if future.done()]:
            if len(self._compiled) <= MOST_COMPILED:
                break
            del self._compiled[other]
        return self._compiled[grammar]

    def matcher(self, grammar: Grammar, ends: Collection[int]) -> "Matcher":
        """Of a compiled grammar, for an answer that one of the token ids `ends` ends."""
        import xgrammar

        compiled = self.compile(grammar).result()
        return Matcher(xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(ends)), ends, self._vocab_size)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_compiler(self) -> Any:
        import xgrammar

        tokenizer = self._load_tokenizer()
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._end_ids or None
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _compile(self, grammar: Grammar) -> Any:
        try:
            return self._compiler.result().compile_grammar(parse(grammar))
        except RuntimeError as error:
            raise ValueError(f"{grammar.kind} cannot be used: {_reason(error)}") from error


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any, ends: Collection[int], vocab_size: int) -> None:
        self._matcher, self._ends = matcher, frozenset(ends)
        self._num_words = -(-vocab_size // WORD_BITS)

    @property
    def is_over(self) -> bool:
        """The answer has ended."""
        return bool(self._matcher.is_terminated())

    def push(self, tokens: Sequence[int]) -> bool:
        """Whether the grammar takes these tokens. What follows an end is ignored."""
        for token in tokens:
            if self.is_over:
                return True
            if not self._matcher.accept_token(token):
                return False
        return True

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.uint32]:
        """(N, ceil(V / 32)) bits of the tokens that may follow each node of a tree, whose parents come first. After
        nodes that the grammar refuses, and after an end, all: these are never accepted."""
        import torch

        children, siblings = _links(tokens, parents, self._ends)
        masks = torch.full((len(tokens), self._num_words), -1, dtype=torch.int32)
        each = (torch.tensor(numbers, dtype=torch.int64) for numbers in (children, siblings, tokens))
        self._matcher.traverse_draft_tree(*each, masks)
        found = masks.numpy().view(np.uint32)
        found[1:][~found[1:].any(axis=1)] = 2**WORD_BITS - 1
        return found


def _links(tokens: Sequence[int], parents: Sequence[int], ends: Collection[int]) -> tuple[list[int], list[int]]:
    """The first child and the next sibling of each node, -1 where there is none. Ends and what follows them are left
    out: nothing may be asked of a grammar that has ended."""
    children, siblings, last = [-1] * len(tokens), [-1] * len(tokens), [-1] * len(tokens)
    reached = [True] + [False] * (len(tokens) - 1)
    for node in range(1, len(tokens)):
        parent = parents[node]
        if not reached[parent] or tokens[node] in ends:
            continue
        reached[node] = True
        if last[parent] < 0:
            children[parent] = node
        else:
            siblings[last[parent]] = node
        last[parent] = node
    return children, siblings
