"""Constraints that only the host can check: which tokens may follow each node of a proposal. Grammars, bad words, ends.

A token is forbidden by the answer before it, on whatever path of a proposal that lies, so the same tokens are allowed
with every draft and with none. Where a grammar leaves one text, its tokens replace the proposal. Imports no torch.
Letters: B requests, N nodes of a proposal, root included; V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.host_stages import Emitted, HostStage, Proposed
from slipstream.serve.engine.plan import FORCED, Edits, HostProposal, NodeMasks, Refusal
from slipstream.serve.request import Request

WORD_BITS = 32
MOST_WORDS = 32  # of a mask that allow tokens, where a text may be forced: its first tokens begin alike
NOTHING = Refusal("the grammar allows no token here, not even an end; correct it")
REFUSED = "the grammar does not take a token that this answer got; no token was allowed, or its logits are not finite"


class Matcher(Protocol):
    """Of serve/grammar/grammars.py."""

    @property
    def is_over(self) -> bool: ...

    def push(self, tokens: Sequence[int]) -> bool: ...

    def forced(self, last: int, most: int) -> tuple[list[int], NDArray[np.uint32]]: ...


class Grammars(Protocol):
    def matcher(self, compiled: Any, ends: Collection[int]) -> Matcher: ...

    def allowed(
        self, matchers: Sequence[Any], trees: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[NDArray[np.uint32]]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Constrained:
    """A running request: what it has answered, and what that must not go on with."""

    answer: list[int]
    max_tokens: int
    min_tokens: int
    end_ids: Collection[int]
    bad_words: Sequence[tuple[int, ...]]  # of two tokens or more: the logits' bias forbids single ones
    matcher: Matcher | None = None
    wants_drafts: bool = True

    @property
    def is_done(self) -> bool:
        """Nothing is forbidden from here on."""
        return len(self.answer) >= self.min_tokens and not self.bad_words and self.matcher is None

    def push(self, tokens: list[int]) -> bool:
        """The answer has grown. Whether it still obeys."""
        self.answer += tokens
        return self.matcher is None or self.matcher.push(tokens)

    def forbidden_after(self, path: list[int]) -> set[int]:
        """Tokens that must not follow the answer and a `path` of drafted tokens."""
        found = set[int]()
        if len(self.answer) + len(path) < self.min_tokens:
            found.update(self.end_ids)
        for *start, last in self.bad_words:
            if (self.answer[-len(start) :] + path)[-len(start) :] == start:
                found.add(last)
        return found


class Constraints(HostStage):
    """`grammar`, `min_tokens` and `bad_words` of requests that have them. `end_ids`: the target's end-of-text ids.
    `nodes`: of a proposal of forced tokens, at most; 1: there are none."""

    reads: ClassVar[Literal["emitted", "proposal"]] = "proposal"

    def __init__(
        self, end_ids: Collection[int], vocab_size: int, grammars: Grammars | None = None, nodes: int = 1
    ) -> None:
        self.grammars = grammars
        self.widths = (1, nodes)
        self._end_ids = frozenset(end_ids)
        self._num_words = -(-vocab_size // WORD_BITS)
        self._held: dict[int, Constrained] = {}  # by slot

    def admit(self, slot: int, request: Request, tokens: list[int]) -> None:
        params = request.params
        ends = self._end_ids.union(params.stop_token_ids) if not params.ignore_eos else params.stop_token_ids
        words = [word for word in params.bad_words if len(word) > 1]
        held = Constrained([], params.max_tokens, params.min_tokens, ends, words, wants_drafts=params.wants_drafts)
        if params.grammar is not None:
            assert self.grammars is not None
            held.matcher = self.grammars.matcher(request.compiled_grammar, ends)
        held.push(tokens[len(request.prompt) :])
        if not held.is_done:
            self._held[slot] = held

    def release(self, slot: int, tokens: list[int]) -> None:
        self._held.pop(slot, None)

    def wants(self, slots: list[int]) -> bool:
        return bool(self._held) and not self._held.keys().isdisjoint(slots)

    def run(self, given: Emitted | Proposed, width: int, *, late: bool = False) -> Edits:
        assert isinstance(given, Proposed)
        # by slot: the root, and what a grammar forces then
        errors = dict[int, str]()
        forced = dict[int, list[int]]()
        held = self._grown(given, errors)
        width = min(width, *self.widths[1:])
        masks = self._masks(held, given)
        for slot, index in held.items():
            own = self._held[slot]
            found = masks.get(slot)
            if own.matcher is not None and found is not None:
                if not found.allowed[0].any():
                    errors[slot] = NOTHING
                tokens, longer = self._forced(slot, own, given.nodes[:, index], found, width)
                if tokens:
                    forced[slot] = [int(given.nodes[0, index, 0]), *tokens]
                    masks[slot] = found if late else longer
        for slot in [slot for slot in given.slots if slot in self._held and self._held[slot].is_done]:
            del self._held[slot]
        return Edits(chains_of(forced), tuple(masks.values()), errors)

    def _grown(self, given: Proposed, errors: dict[int, str]) -> dict[int, int]:
        """Takes what the step has emitted. Returns the index of each slot that has constraints, but for those whose
        answers break them."""
        found = dict[int, int]()
        for index, slot in enumerate(given.slots):
            if slot not in self._held:
                continue
            if self._held[slot].push(given.results[index, 1 : 1 + given.results[index, 0]].tolist()):
                found[slot] = index
            else:
                errors[slot] = REFUSED
        return found

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()

    def _masks(self, held: dict[int, int], given: Proposed) -> dict[int, NodeMasks]:
        """Of slots, by their index in `given`, that something is forbidden to."""
        found = dict[int, NodeMasks]()
        slots = list[int]()
        used = list[list[int]]()
        matchers = list[Any]()
        trees = list[tuple[list[int], list[int]]]()
        for slot, index in held.items():
            nodes = given.nodes[:, index]
            matcher = self._held[slot].matcher
            if matcher is None:
                own = self._masks_of_words(slot, self._held[slot], nodes)
                found |= {slot: own} if own is not None else {}
            elif not matcher.is_over:
                slots.append(slot)
                matchers.append(matcher)
                used.append([0, *(np.flatnonzero(nodes[0, 1:] >= 0) + 1).tolist()])
                place = {node: index for index, node in enumerate(used[-1])}
                parents = [-1, *(place[parent] for parent in nodes[1, used[-1][1:]].tolist())]
                trees.append((nodes[0, used[-1]].tolist(), parents))
        if matchers:
            assert self.grammars is not None
            each = self.grammars.allowed(matchers, trees)
            found |= {
                slot: NodeMasks(slot, *own) for slot, own in zip(slots, zip(used, each, strict=True), strict=True)
            }
        return found

    def _forced(
        self, slot: int, held: Constrained, nodes: NDArray[np.int32], masks: NodeMasks, width: int
    ) -> tuple[list[int], NodeMasks]:
        """Tokens that a proposal of up to `width` nodes should have instead of `nodes` (2, N), and its masks. None
        where the grammar leaves a choice, or `nodes` already have them and more, or as many that it allows."""
        nothing: tuple[list[int], NodeMasks] = [], NodeMasks(slot, [], np.empty((0, self._num_words), np.uint32))
        most = min(width, held.max_tokens - len(held.answer)) - 1
        if held.matcher is None or not held.wants_drafts or most < 1:
            return nothing
        if np.count_nonzero(masks.allowed[0]) > MOST_WORDS:
            return nothing
        if allowed_depth(nodes, masks) >= most:
            return nothing
        tokens, allowed = held.matcher.forced(int(nodes[0, 0]), most)
        if not tokens or goes_beyond(nodes, tokens):
            return nothing
        return tokens, NodeMasks(slot, list(range(1 + len(tokens))), allowed)

    def _masks_of_words(self, slot: int, held: Constrained, nodes: NDArray[np.int32]) -> NodeMasks | None:
        paths: dict[int, list[int]] = {0: []}  # of drafted tokens, to each node
        for node, (token, parent) in enumerate(nodes.T.tolist()):
            if node and token >= 0:
                paths[node] = [*paths[parent], token]
        forbidden = {node: tokens for node, path in paths.items() if (tokens := held.forbidden_after(path))}
        if not forbidden:
            return None
        allowed = np.full((len(forbidden), self._num_words), 2**WORD_BITS - 1, np.uint32)
        for row, tokens in zip(allowed, forbidden.values(), strict=True):
            for token in tokens:
                row[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
        return NodeMasks(slot, list(forbidden), allowed)


def chains_of(tokens: dict[int, list[int]]) -> tuple[HostProposal, ...]:
    """Proposals of the slots' tokens, the root first."""
    if not tokens:
        return ()
    counts = [len(own) for own in tokens.values()]
    nodes = np.full((4, len(tokens), max(counts)), -1, np.int32)
    for row, own in enumerate(tokens.values()):
        nodes[0, row, : len(own)] = own
        nodes[1, row, : len(own)] = range(-1, len(own) - 1)
    return (HostProposal(list(tokens), nodes, counts, [FORCED] * len(tokens), source="grammar"),)


def allowed_depth(nodes: NDArray[np.int32], masks: NodeMasks) -> int:
    """Length of the longest path of a tree, nodes (2, N) as in Proposed, that its masks allow."""
    depths = {0: 0}
    allowed = dict(zip(masks.nodes, masks.allowed, strict=True))
    for node, (token, parent) in enumerate(nodes.T.tolist()):
        is_known = node > 0 and token >= 0 and parent in depths and parent in allowed
        if is_known and int(allowed[parent][token // WORD_BITS]) >> token % WORD_BITS & 1:
            depths[node] = depths[parent] + 1
    return max(depths.values())


def goes_beyond(nodes: NDArray[np.int32], tokens: Sequence[int]) -> bool:
    """Whether a tree, nodes (2, N) as in Proposed, has these tokens as a path from its root, and nodes after them."""
    children = {(parent, token): node for node, (token, parent) in enumerate(nodes.T.tolist()) if node and token >= 0}
    place = 0
    for token in tokens:
        if (place, token) not in children:
            return False
        place = children[place, token]
    return any(parent == place for parent, _ in children)
