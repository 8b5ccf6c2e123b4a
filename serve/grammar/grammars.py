"""Grammars of answers, by xgrammar: checks a client's grammar, compiles it once, and follows it token by token.

`translate` reads a grammar once for all. A server does so in a process that it can kill, where it tries to compile each
grammar (serve/grammar/trials.py). `Grammars` belongs to an engine and compiles on threads of its own, without Python's
lock. xgrammar is loaded with the first grammar, or by `Grammars.load`.
Letters: N nodes of a proposal, root included; V vocabulary.
"""

import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise, takewhile
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from slipstream import runtime
from slipstream.models.chat.quotes import PLACE_CHARS, quote, shorten
from slipstream.serve.grammar.json_schema import rewrite
from slipstream.serve.grammar.regexes import read_ebnf, read_regex, with_long_escapes
from slipstream.serve.grammar.spelling import Spelling
from slipstream.serve.grammar.strings import Strings
from slipstream.serve.grammar.work import Unsupported, Work
from slipstream.serve.request import Grammar, GrammarKind

MOST_CHARS = 64 * 2**10  # of a client's grammar
MOST_TRANSLATED = 8 * 2**20  # characters of xgrammar's own form, some 15 times longer
JSON_WHITESPACE = 1  # most characters in a row between two parts of JSON, by default
OPTIONAL_SPACE = '("" | ([ \\n\\r\\t]))'  # as the library writes it; in a schema's text the quotes would be escaped
MOST_COMPILED = 256  # grammars in the cache
NUM_THREADS = 2  # grammars that are compiled at a time
WORTH_SHARING_S = 5e-4  # work that pays for threads, which take about .1 ms to start
NUM_CORES = min(8, os.cpu_count() or 1)  # that compile a grammar
MOST_CHANGE = 4.0  # of the time of masks on threads, whose parts are not measured
# CPU time that a token of an answer may take, and the mask after it: other requests may wait. Grammars of common use
# take a tenth. Drafted tokens end no answer, which may go on without a draft: they are only given up.
MOST_SECONDS = 0.25
STEP_SECONDS = 0.05  # that a step waits for masks; requests without one by then resume in a later step
DRAFT_SECONDS = 0.1  # CPU time after which a step looks at no further drafted token of a request
CHEAP_SECONDS = 0.002  # mean time of masks up to which drafting pays for all
MASK_DECAY = 0.9  # weight of the masks before, in that mean, after one more
MOST_PREFIXES = 64  # tokens that may be beginnings of one forced text
LOOKAHEAD = 4  # further tokens to read, since the spelling of a word depends on its end
WORD_BITS = 32
NO_TEXT = b"\xff"  # no part of UTF-8
Masks = NDArray[np.uint32]  # of tokens: bit i of word w stands for token 32 * w + i


def check_length(grammar: Grammar) -> None:
    if len(grammar.text) > MOST_CHARS:
        raise ValueError(f"has {len(grammar.text)} characters; the limit is {MOST_CHARS}")


def translate(grammar: Grammar, json_whitespace: int = JSON_WHITESPACE) -> Grammar:
    """Translates a grammar into xgrammar's own form, an "ast". Raises ValueError, in a sentence, if it cannot be
    served. `json_whitespace`: most white-space characters in a row between two parts of JSON."""
    if grammar.kind == "ast":
        return grammar
    check_length(grammar)
    text = text_of(parse(grammar, json_whitespace))
    if len(text) > MOST_TRANSLATED:
        raise ValueError(f"has {len(text)} characters once it is translated; the limit is {MOST_TRANSLATED}")
    return Grammar("ast", text)


def text_of(grammar: Any) -> str:
    """Returns EBNF of xgrammar's Grammar. The library, which compiles a Grammar, reads another text than it writes."""
    return with_long_escapes(str(grammar))


def parse(grammar: Grammar, json_whitespace: int = JSON_WHITESPACE) -> Any:
    """Returns xgrammar's Grammar. Raises ValueError like `translate`."""
    import xgrammar

    kind, text = grammar
    from_schema = partial(_of_schema, xgrammar.Grammar, json_whitespace)
    try:
        if kind == "json_object":
            return from_schema({"type": "object"})
        if kind == "structural_tag":
            tag = _with_schemas(from_schema, json_whitespace, json.loads(text))
            return xgrammar.Grammar.from_structural_tag(json.dumps(tag))
        if kind == "json_schema":
            return from_schema(rewrite(json.loads(text)))
        if kind == "choice":
            tag = {"type": "structural_tag", "format": as_element(grammar)}
            return xgrammar.Grammar.from_structural_tag(json.dumps(tag))
        if kind == "regex":
            return xgrammar.Grammar.from_regex(read_regex(text))
        if kind == "ebnf":
            return xgrammar.Grammar.from_ebnf(read_ebnf(text))
    except Unsupported:
        raise
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"cannot be used: {_reason(error)}") from error
    raise ValueError(f"is of kind {quote(kind)}; choose one of {', '.join(get_args(GrammarKind))}")


def as_element(grammar: Grammar) -> dict[str, Any]:
    """Returns a grammar as an element of a structural tag, which is translated with the tag."""
    kind, text = grammar
    if kind == "structural_tag":
        return dict(json.loads(text)["format"])
    if kind in ("json_object", "json_schema"):
        return {"type": "json_schema", "json_schema": json.loads(text) if text else {"type": "object"}}
    if kind == "choice":
        parts = _texts(json.loads(text))
        return {"type": "or", "elements": [{"type": "const_string", "value": part} for part in parts]}
    if kind == "regex":
        return {"type": "regex", "pattern": text} if text else {"type": "const_string", "value": ""}
    return {"type": "grammar", "grammar": text}


def _with_schemas(of_schema: Callable[[Any], Any], json_whitespace: int, tag: Any) -> Any:
    """Rewrites the JSON schemas in a structural tag, which are enforced as strictly as those of whole answers. The
    library translates other notations than JSON, with line breaks between their tags even if JSON may have no white
    space."""
    work = Work()

    def rewritten(part: Any) -> Any:
        if isinstance(part, list):
            return [*map(rewritten, part)]
        if isinstance(part, str) and "\0" in part:  # the library ends a text there
            raise ValueError("a text has a null character; leave it out")
        if not isinstance(part, dict):
            return part
        kind = part.get("type")
        if kind == "json_schema" and part.get("style", "json") == "json":
            for name in sorted(part.keys() - {"type", "json_schema", "style"}):
                raise Unsupported("", f"{shorten(name)} of a json_schema in a structural tag")
            return {"type": "grammar", "grammar": text_of(of_schema(rewrite(part.get("json_schema"), work)))}
        if kind in ("regex", "grammar"):
            name, read = {"regex": ("pattern", read_regex), "grammar": ("grammar", read_ebnf)}[kind]
            return {**part, name: read(part[name])} if isinstance(part.get(name), str) else part
        if kind in ("json_schema", "qwen_xml_parameter"):
            rewrite(part.get("json_schema"), work)
            styled = {"style": "qwen_xml", **part, "type": "json_schema"}
            return {"max_whitespace_cnt": max(1, json_whitespace), **styled}
        return {name: rewritten(inner) for name, inner in part.items()}

    return rewritten(tag)


def _of_schema(kind: Any, json_whitespace: int, schema: Any) -> Any:
    """Converts a schema to a grammar with bounded white space, since small models may write it without end."""
    strings = Strings(json.dumps(schema))
    marked = json.dumps(strings.mark(schema))
    for pattern in strings.patterns:
        kind.from_regex(pattern)  # fails now rather than when the grammar is compiled
    converted = text_of(kind.from_json_schema(marked, strict_mode=False, max_whitespace_cnt=max(1, json_whitespace)))
    if json_whitespace == 0:  # which the library does not know; its fixed separators are not those asked for everywhere
        converted = converted.replace(OPTIONAL_SPACE, '("")')
    return kind.from_ebnf(strings.put(converted))


def _reason(error: Exception) -> str:
    """Returns the text of a library's error without the place in its source."""
    text = " ".join(re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).split())
    return shorten(text, PLACE_CHARS) or f"the grammar library fails with {type(error).__name__} and gives no reason"


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise ValueError("a choice must be a JSON list of texts, and not empty")
    if any("\0" in text for text in value):  # the library ends a text there
        raise ValueError("a choice has a null character; leave it out")
    return value


class Compiler(NamedTuple):
    """xgrammar's compiler for one vocabulary."""

    compiler: Any  # xgrammar's
    size: int  # ids from here on are padding rows of the head, without text
    spelling: Spelling


class Grammars:
    """Compiled grammars of one vocabulary. Calls `load_tokenizer` once, when it loads."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Any],
        vocab_size: int,
        end_ids: Collection[int],
        json_whitespace: int = JSON_WHITESPACE,
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._json_whitespace = json_whitespace
        self._compiled: OrderedDict[bytes, Future[Any]] = OrderedDict()  # by digest
        self._filler = Filler()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(NUM_THREADS, "grammar", runtime.lower_priority)

    @cached_property
    def _compiler(self) -> "Future[Compiler]":
        return self._threads.submit(self._make_compiler)

    def compile(self, grammar: Grammar) -> "Future[Any]":
        """Returns the compiled grammar, at once if it is cached. The future, which the caller holds as long as it needs
        it, raises ValueError, in a sentence, if the grammar cannot be compiled."""
        name = grammar.digest()
        if name not in self._compiled:
            compiler = self._compiler
            self._compiled[name] = self._threads.submit(
                lambda: compile_with(compiler.result().compiler, grammar, self._json_whitespace)
            )
        self._compiled.move_to_end(name)
        for other in [key for key, future in self._compiled.items() if future.done()]:
            if len(self._compiled) <= MOST_COMPILED:
                break
            del self._compiled[other]
        return self._compiled[name]

    def load(self) -> None:
        """Loads what a first grammar needs, and waits: it would hold Python's lock, and with it all requests."""
        self._compiler.result()

    def cancel(self, grammar: Grammar) -> None:
        """Drops a grammar that nobody waits for, unless its compilation has begun."""
        name = grammar.digest()
        if name in self._compiled and self._compiled[name].cancel():
            del self._compiled[name]

    def matcher(self, compiled: Any, ends: Collection[int]) -> "Matcher":
        """Returns a matcher of a compiled grammar, for an answer that any of the token ids `ends` ends. The target's
        end and control tokens are allowed where the grammar may end; other tokens where the grammar takes their text,
        so that a stop id changes no token before it."""
        import xgrammar

        compiler = self._compiler.result()
        controls = compiler.spelling.added.union(self._end_ids)
        stops = sorted(end for end in controls.intersection(ends) if end < compiler.size)
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops)
        return Matcher(matcher, ends, self._vocab_size, compiler.size, compiler.spelling)

    def allowed(
        self, matchers: "Sequence[Matcher]", trees: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Masks]:
        """Returns `Matcher.allowed` of several matchers at once."""
        return allowed_after(matchers, trees, self._filler)

    def close(self) -> None:
        for threads in (self._threads, self._filler.threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _make_compiler(self) -> Compiler:
        tokenizer = self._load_tokenizer()
        info = read_vocabulary(tokenizer, self._vocab_size, self._end_ids)
        return Compiler(make_compiler(info), info.vocab_size, Spelling(tokenizer, info.decoded_vocab))


def read_vocabulary(tokenizer: Any, vocab_size: int | None = None, end_ids: Collection[int] = ()) -> Any:
    """Returns xgrammar's TokenizerInfo without the ids from `vocab_size` on and without those after the last token,
    which have no text: the library would forbid them one by one in each mask. Tokens that no answer shows get a text
    that no grammar takes: the library would take their names for text, and an end for the text before it."""
    import xgrammar

    size = 1 + max((*tokenizer.get_vocab().values(), *end_ids))
    size = size if vocab_size is None else min(size, vocab_size)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=list(end_ids) or None)
    hidden = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}.union(info.stop_token_ids)
    texts = [NO_TEXT if id in hidden else text for id, text in enumerate(info.decoded_vocab)]
    return xgrammar.TokenizerInfo(
        texts,
        vocab_size=info.vocab_size,
        stop_token_ids=info.stop_token_ids,
        add_prefix_space=info.add_prefix_space,
    )


def make_compiler(vocabulary: Any) -> Any:
    """Returns xgrammar's compiler. `vocabulary`: a result of `read_vocabulary`."""
    import xgrammar

    return xgrammar.GrammarCompiler(vocabulary, max_threads=NUM_CORES, cache_enabled=False)


def compile_with(compiler: Any, grammar: Grammar, json_whitespace: int = JSON_WHITESPACE) -> Any:
    """Compiles a grammar. Raises ValueError, in a sentence, if that is impossible."""
    try:
        text = grammar.text if grammar.kind == "ast" else text_of(parse(grammar, json_whitespace))
        return compiler.compile_grammar(text)
    except RuntimeError as error:
        raise ValueError(f"the grammar cannot be used: {_reason(error)}") from error


class Matcher:
    """The state of one answer in its grammar. `size`: size of the matcher's vocabulary, at most `vocab_size`.
    `spelling`: of its tokens."""

    def __init__(self, matcher: Any, ends: Collection[int], vocab_size: int, size: int, spelling: Spelling) -> None:
        self.library = matcher
        self.is_slow = False  # a token of the answer has taken more than MOST_SECONDS: its request should end
        self.mask_seconds = 0.0  # CPU time of a mask, a decayed mean
        self.last_seconds = 0.0  # of the last mask
        self.root_seconds = 0.0  # of the last mask after the answer so far
        self.mask: Future[tuple[Any, float]] | None = None  # after the answer so far, where a thread fills it
        self._unread = list[int]()  # tokens of the answer that this thread is to take first
        self._ends = frozenset(ends)
        self._spelling = spelling
        self._size = size
        self._num_words, self.own_words = (-(-count // WORD_BITS) for count in (vocab_size, size))

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended."""
        return bool(self.library.is_terminated())

    @property
    def is_cheap(self) -> bool:
        """Whether masks take so little time lately that drafting pays."""
        return self.mask_seconds <= CHEAP_SECONDS

    def count_mask(self, seconds: float) -> None:
        self.last_seconds = seconds
        self.mask_seconds += (1 - MASK_DECAY) * (seconds - self.mask_seconds)

    @property
    def takes_long(self) -> bool:
        """Whether a thread should fill the next mask after the answer, or does so already."""
        return self.mask is not None or self.last_seconds > CHEAP_SECONDS

    def fill(self) -> tuple[Any, float]:
        """Returns the mask (1, words) after the answer so far, and the CPU time that it took. It allows nothing where
        the grammar does not take the answer."""
        import torch

        mask = torch.full((1, self.own_words), -1, dtype=torch.int32)
        if not self._take(self._unread):
            return mask.zero_(), 0.0
        self._unread = []
        _, seconds = (None, 0.0) if self.is_over else timed(self.library.fill_next_token_bitmask, mask)
        return mask, seconds

    def push(self, tokens: Sequence[int]) -> bool:
        """Advances by tokens, or leaves that to `fill`, and returns whether the grammar takes them. Tokens after an end
        are ignored, as are those after a slow one."""
        if self.mask is not None and tokens:  # drawn before the mask was asked for
            self.mask.result()
            self.mask = None
        if self.takes_long:
            self._unread += tokens
            return True
        return self._take(tokens)

    def _take(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if self.is_over or self.is_slow:
                return True
            is_taken, seconds = timed(self.library.accept_token, token)
            if not is_taken:
                return False
            self.is_slow = seconds > MOST_SECONDS
        return True

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Masks:
        """Returns (M, ceil(V / 32)) bits of the tokens that may follow the first M nodes of a tree, whose parents come
        first: all nodes, unless they take too long, and none if those of other matchers did. All bits are set after
        nodes that the grammar refuses and after an end, since these are never accepted."""
        return allowed_after([self], [(tokens, parents)], Filler())[0]

    def widened(self, masks: Masks) -> Masks:
        """Extends masks (N, words of the matcher's vocabulary) to the target's vocabulary; further tokens are
        forbidden."""
        if self._size % WORD_BITS:
            masks[:, -1] &= np.uint32((1 << self._size % WORD_BITS) - 1)
        if self.own_words == self._num_words:
            return masks
        wide_masks = np.zeros((len(masks), self._num_words), np.uint32)
        wide_masks[:, : self.own_words] = masks
        return wide_masks

    def may_follow(self, token: int) -> bool:
        """Whether the matcher can take this token and go on after it."""
        return token < self._size and token not in self._ends

    def forced(self, last: int, limit: int) -> tuple[list[int], Masks]:
        """Returns up to `limit` tokens after the token `last` that spell the only text that the grammar leaves, as the
        tokenizer spells it, and the masks (1 + their number, ceil(V / 32)) before and after each, as `allowed` does.

        Leaves out the last tokens of a forced text if longer tokens, which go beyond the text, may replace them. Treats
        a text as forced as long as all tokens that may come next are beginnings of the longest of them. In rare cases
        it is not, for instance if "sale", "sales" and "saleable" are allowed. Where masks take long, no text does. The
        library's own search for forced text does not end if the text has no end.
        """
        longest = self._longest(limit + LOOKAHEAD) if self.root_seconds <= CHEAP_SECONDS else []
        if not longest or self.takes_long:  # a thread would have to fill the first mask
            return [], np.empty((0, self._num_words), np.uint32)
        spelled = self._spelling.respell(last, longest)[:limit]
        masks = self.allowed([last, *spelled], range(-1, len(spelled)))
        count = 0
        while count < len(masks) - 1 and self._is_sure(masks[count], spelled[count:]):
            count += 1
        return spelled[:count], masks[: 1 + count]

    def _longest(self, limit: int) -> list[int]:
        """Returns up to `limit` tokens of a forced text, each the longest that may come next."""
        import torch

        tokens = list[int]()
        mask = torch.empty((1, self.own_words), dtype=torch.int32)
        row = mask.numpy().view(np.uint32)[0]
        total = 0.0
        while len(tokens) < limit and not self.is_over:
            mask.fill_(-1)
            _, seconds = timed(self.library.fill_next_token_bitmask, mask)
            self.count_mask(seconds)
            token = self._only(row)
            if token is None:
                break
            _, more_seconds = timed(self.library.accept_token, token)
            tokens.append(token)
            total += seconds + more_seconds
            if total > DRAFT_SECONDS:
                break
        self.library.rollback(len(tokens))
        return tokens if total <= DRAFT_SECONDS else []

    def _only(self, mask: Masks) -> int | None:
        """Returns the only token that may come next, or the longest if the others are its beginnings."""
        tokens = tokens_in(mask, MOST_PREFIXES)
        if len(tokens) < 2:
            return tokens[0] if tokens else None
        vocabulary = self._spelling.vocabulary
        longest = max(tokens, key=lambda token: len(vocabulary[token]))
        is_text = self._ends.isdisjoint(tokens) and self._spelling.added.isdisjoint(tokens)
        text = vocabulary[longest]
        return longest if is_text and all(text.startswith(vocabulary[token]) for token in tokens) else None

    def _is_sure(self, mask: Masks, following: Sequence[int]) -> bool:
        """Whether all tokens that may come next are beginnings of the text of the `following` tokens."""
        tokens = tokens_in(mask, MOST_PREFIXES)
        vocabulary = self._spelling.vocabulary
        if tokens == [following[0]]:
            return True
        text = self._spelling.bytes_of(following)
        return bool(tokens) and all(text.startswith(vocabulary[token]) for token in tokens)


class Walk:
    """Moves a matcher, which has taken the root of a tree, from node to node and back. Gives up nodes where these take
    too long, and all that come after them."""

    def __init__(self, matcher: Matcher, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.matcher = matcher
        self.num_nodes = len(tokens)  # up to the one that was given up
        self._tokens = tokens
        self._parents = parents
        self._path = [0]
        self._reached = {0}
        self._node = 0
        self._seconds = 0.0  # of the present node
        self._total = 0.0  # of drafted nodes

    @property
    def is_apart(self) -> bool:
        """Whether a thread fills the mask after the present node."""
        return self._node == 0 and self.matcher.takes_long

    def fill(self, masks: Any, row: int) -> None:
        """Fills a row of masks with the tokens after the present node."""
        _, seconds = timed(self.matcher.library.fill_next_token_bitmask, masks, row)
        self.count_mask(seconds)

    def count_mask(self, seconds: float) -> None:
        """Counts the CPU time of the mask after the present node."""
        self.matcher.count_mask(seconds)
        if self._node == 0:
            self.matcher.root_seconds = seconds
            self.matcher.is_slow |= seconds > MOST_SECONDS
            self.num_nodes = 1 if self.matcher.is_slow else self.num_nodes
        else:
            self._count(seconds)

    def _count(self, seconds: float) -> None:
        """Counts time for the present node, which was drafted. One that would end an answer is given up, so that it
        ends if it comes to that token, and only then."""
        self._seconds += seconds
        self._total += seconds
        if self._seconds > MOST_SECONDS:
            self.num_nodes = self._node
        elif self._total > DRAFT_SECONDS:
            self.num_nodes = self._node + 1

    def give_up(self) -> None:
        """Gives up the present node."""
        self.num_nodes = self._node

    def go_to(self, node: int) -> bool:
        """Moves to a node, after a call for each node before it. Returns whether the grammar takes the path."""
        self._node = node
        self._seconds = 0.0
        if node == 0:
            return True
        parent = self._parents[node]
        token = self._tokens[node]
        if parent not in self._reached or not self.matcher.may_follow(token):
            return False
        is_taken, seconds = timed(self._follow, parent, token)
        if is_taken:
            self._path.append(node)
            self._reached.add(node)
        self._count(seconds)
        return is_taken and node < self.num_nodes

    def _follow(self, parent: int, token: int) -> bool:
        """Moves to a node, and on by a token. Returns whether the grammar takes it there."""
        path = self._path_to(parent)
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(self._path, path, strict=False))
        self._go_back(len(list(shared)) - 1)
        for ancestor in path[len(self._path) :]:
            self.matcher.library.accept_token(self._tokens[ancestor])
        self._path = path
        return bool(self.matcher.library.accept_token(token))

    def end(self) -> None:
        self._go_back(0)

    def _go_back(self, place: int) -> None:
        """Rolls the matcher back to a place of the path."""
        if place + 1 < len(self._path):
            self.matcher.library.rollback(len(self._path) - place - 1)
            del self._path[place + 1 :]

    def _path_to(self, node: int) -> list[int]:
        path = [node]
        while path[-1]:
            path.append(self._parents[path[-1]])
        return path[::-1]


def allowed_after(
    matchers: Sequence[Matcher], trees: Sequence[tuple[Sequence[int], Sequence[int]]], filler: "Filler"
) -> list[Masks]:
    """Returns `Matcher.allowed` of each matcher for its tree. All matchers have the same vocabulary."""
    import torch

    walks = [Walk(matcher, *tree) for matcher, tree in zip(matchers, trees, strict=True)]
    sizes = [walk.num_nodes for walk in walks]
    starts = [0, *accumulate(sizes)]
    masks = torch.full((starts[-1], matchers[0].own_words), -1, dtype=torch.int32)
    filler.begin()
    for node in range(max(sizes)):
        rows = [(walk, start + node) for walk, start in zip(walks, starts, strict=False) if node < walk.num_nodes]
        filler.fill(masks, [(walk, row) for walk, row in rows if walk.go_to(node)])
    for walk in walks:
        walk.end()
    bits = masks.numpy().view(np.uint32)
    for start, end in pairwise(starts):
        drafted = bits[start + 1 : end]
        drafted[drafted.max(axis=1, initial=0) == 0] = 2**WORD_BITS - 1  # after nodes that allow none: never accepted
    bits = matchers[0].widened(bits)
    return [bits[start : start + walk.num_nodes] for start, walk in zip(starts, walks, strict=False)]


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Returns the result of some work, and the seconds of CPU time that it took."""
    start = time.thread_time()
    result = work(*arguments)
    return result, time.thread_time() - start


class Filler:
    """Writes masks one after the other, or on several threads if their last ones took long enough. Those that the time
    of a step does not suffice for are given up."""

    def __init__(self) -> None:
        self._is_certain = True  # how long masks take
        self._seconds = 0.0  # of the step

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(NUM_CORES, "masks", runtime.lower_priority)

    def begin(self) -> None:
        """Begins a step."""
        self._seconds = 0.0

    def fill_apart(self, masks: Any, entries: Sequence[tuple[Walk, int]]) -> None:
        """Fills masks after answers whose masks take long, on threads of low priority. The step waits STEP_SECONDS for
        them, less where it has waited before; a request whose mask comes later finds it in a later step."""
        if not entries:
            return
        is_new = any(walk.matcher.mask is None for walk, _ in entries)
        futures = [walk.matcher.mask or self.threads.submit(walk.matcher.fill) for walk, _ in entries]
        wait(futures, STEP_SECONDS if is_new else STEP_SECONDS / 10)
        for (walk, row), future in zip(entries, futures, strict=True):
            walk.matcher.mask = None if future.done() else future
            if not future.done():
                walk.give_up()
                continue
            mask, seconds = future.result()
            masks[row] = mask[0]
            walk.count_mask(seconds)

    def fill(self, masks: Any, entries: Sequence[tuple[Walk, int]]) -> None:
        """Fills masks (N, words) int32. `entries`: walks and their rows. If several threads take much longer than the
        masks before, the next masks come one after the other, which tells whose are slow."""
        slow = [entry for entry in entries if entry[0].is_apart]
        entries = [entry for entry in entries if not entry[0].is_apart]
        shared = [entry for entry in entries if self._is_certain and entry[0].matcher.last_seconds > 0]
        costs = [walk.matcher.last_seconds for walk, _ in shared]
        is_worth = len(shared) > 1 and sum(costs) > WORTH_SHARING_S
        self._is_certain = True
        for walk, row in entries:
            if is_worth and walk.matcher.last_seconds > 0:
                continue
            if self._seconds > STEP_SECONDS:
                walk.give_up()
                continue
            walk.fill(masks, row)
            self._seconds += walk.matcher.last_seconds
        if is_worth:
            self._fill_together(masks, self._within_step(shared))
        self.fill_apart(masks, slow)

    def _within_step(self, entries: Sequence[tuple[Walk, int]]) -> list[tuple[Walk, int]]:
        """Returns the first entries, for which the step has time, and gives up the others."""
        seconds = self._seconds
        fitting = []
        for walk, row in entries:
            if seconds > STEP_SECONDS:
                walk.give_up()
                continue
            fitting.append((walk, row))
            seconds += walk.matcher.last_seconds / NUM_CORES
        return fitting

    def _fill_together(self, masks: Any, shared: Sequence[tuple[Walk, int]]) -> None:
        if not shared:
            return
        costs = [walk.matcher.last_seconds for walk, _ in shared]
        start = time.perf_counter()
        handles = [walk.matcher.library for walk, _ in shared]
        _batch().batch_fill_next_token_bitmask(handles, masks, [row for _, row in shared])
        seconds = time.perf_counter() - start
        self._seconds += seconds
        ratio = seconds / max(*costs, sum(costs) / NUM_CORES)
        self._is_certain = ratio < MOST_CHANGE or seconds <= WORTH_SHARING_S
        for (walk, _), cost in zip(shared, costs, strict=True):
            walk.count_mask(cost * min(ratio, MOST_CHANGE))


@cache
def _batch() -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=NUM_CORES)


def tokens_in(mask: Masks, limit: int) -> list[int]:
    """Returns the tokens that a mask (ceil(V / 32),) allows; none if it allows more than `limit`."""
    words = np.flatnonzero(mask)
    if len(words) > limit:
        return []
    tokens = list[int]()
    for word, bits in zip(words.tolist(), mask[words].tolist(), strict=True):
        while bits:
            tokens.append(WORD_BITS * word + (bits & -bits).bit_length() - 1)
            bits &= bits - 1
    return tokens if len(tokens) <= limit else []
