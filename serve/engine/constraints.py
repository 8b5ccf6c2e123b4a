"""Constraints that only the host can check: which tokens may follow each node of a proposal. Grammars, bad words, ends.

Whether a token is allowed depends on the answer before it and on the path to its node alone, so the same tokens are
allowed with any draft and without one. Where a grammar leaves one text, its tokens replace the proposal. Imports no
torch.

The stage runs between two steps. It adds the tokens that the first emitted to each answer, whose last token is the root
(node 0) of the proposal that the second verifies. It returns a bit mask of the vocabulary for each node: the tokens
that the target may sample after it.
Letters: B requests, N nodes of a proposal, root included; V vocabulary. A mask has ceil(V / 32) words of 32 bits.
"""

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.host_stages import Emitted, HostStage, Proposed
from slipstream.serve.engine.plan import FORCED, Edits, HostProposal, NodeMasks, Refusal, Restart
from slipstream.serve.grammar.grammars import MOST_SECONDS, Grammars, Matcher
from slipstream.serve.request import Request

WORD_BITS = 32
# Where a text is forced, only beginnings of this text are allowed: few tokens, in at most so many words of a mask.
MAX_FORCED_WORDS = 32
NO_TOKEN_ALLOWED = Refusal("the grammar allows no token here, not even an end; correct it")
TOO_SLOW = Refusal(
    f"the grammar takes more than {MOST_SECONDS:g} s of CPU time for a token of this answer: repeat nothing that "
    "repeats itself, and leave fewer readings of a text"
)
MOST_PREEMPTED = 256  # requests whose states are kept; some may be aborted before they resume
GIVEN_UP = Restart("the masks of its drafted tokens take too long")
CROWDED_OUT = Restart("the masks of other requests take the time of a step")
TOKEN_REFUSED = (
    "the grammar does not take a token that this answer got; no token was allowed, or its logits are not finite"
)


class TokenSet(NamedTuple):
    """Tokens that are forbidden together: the words of a mask that hold them, and the bits of these that stay."""

    words: NDArray[np.int64]
    bits: NDArray[np.uint32]

    @classmethod
    def of(cls, tokens: Iterable[int]) -> "TokenSet":
        bits: dict[int, int] = {}
        for token in tokens:
            bits[token // WORD_BITS] = bits.get(token // WORD_BITS, 0) | 1 << token % WORD_BITS
        return cls(np.array([*bits], np.int64), ~np.array([*bits.values()], np.uint32))


@dataclass(slots=True)
class BadWords:
    """Bad words by their tokens before the last, read backwards: however many words there are, those that a text has
    begun are found in its last tokens alone."""

    before: dict[int, "BadWords"] = field(default_factory=dict)  # by the token before
    lasts: TokenSet | None = None  # tokens that complete a word after those read so far

    @staticmethod
    @lru_cache(maxsize=16)
    def of(words: tuple[tuple[int, ...], ...]) -> "BadWords":
        """`words` of one token are left out: the logits' bias forbids them."""
        lasts = defaultdict[tuple[int, ...], list[int]](list)
        for *start, last in words:
            lasts[tuple(start)].append(last)
        root = BadWords()
        for beginning, tokens in lasts.items():
            node = root
            for token in reversed(beginning):
                node = node.before.setdefault(token, BadWords())
            node.lasts = TokenSet.of(tokens)
        return root


@dataclass(slots=True)
class ConstrainedRequest:
    """The answer of a request so far, and rules for the tokens after it."""

    answer: list[int]
    max_tokens: int
    min_tokens: int
    ends: TokenSet  # forbidden before `min_tokens`
    bad_words: BadWords
    matcher: Matcher | None = None
    wants_drafts: bool = True
    request: Request | None = None
    masked_at: int = 0  # the last run that had time for its mask

    @property
    def is_done(self) -> bool:
        """Whether all tokens are allowed from here on."""
        return len(self.answer) >= self.min_tokens and not self.bad_words.before and self.matcher is None

    def push(self, tokens: list[int]) -> bool:
        """Adds tokens to the answer; returns whether its grammar takes them."""
        self.answer += tokens
        return self.matcher is None or self.matcher.push(tokens)

    def forbidden_after(self, path: list[int]) -> list[TokenSet]:
        """Returns the tokens that must not follow the answer and a `path` of drafted tokens."""
        forbidden = [self.ends] if len(self.answer) + len(path) < self.min_tokens else []
        words = self.bad_words
        for token in itertools.chain(reversed(path), reversed(self.answer)):
            if token not in words.before:
                break
            words = words.before[token]
            forbidden += [] if words.lasts is None else [words.lasts]
        return forbidden


class Constraints(HostStage):
    """Masks tokens by `grammar`, `min_tokens` and `bad_words` of requests. `end_ids`: the target's end-of-text ids.
    `nodes`: most nodes of a proposal of forced tokens; 1: no such proposals."""

    reads: ClassVar[Literal["emitted", "proposal"]] = "proposal"

    def __init__(self, end_ids: Collection[int], vocab_size: int, grammars: Grammars, nodes: int) -> None:
        self.grammars = grammars
        self.widths = (1, nodes)
        self._end_ids = frozenset(end_ids)
        self._num_words = -(-vocab_size // WORD_BITS)
        self._states: dict[int, ConstrainedRequest] = {}  # by slot
        self._preempted = OrderedDict[str, ConstrainedRequest]()  # by request id, those with a grammar
        self.slots = self._states.keys()
        self._num_runs = 0

    def admit(self, slot: int, request: Request, tokens: list[int]) -> None:
        params = request.params
        ends = self._end_ids.union(params.stop_token_ids) if not params.ignore_eos else params.stop_token_ids
        state = ConstrainedRequest(
            answer=[],
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            ends=TokenSet.of(ends if params.min_tokens else ()),
            bad_words=BadWords.of(params.bad_words),
            wants_drafts=params.wants_drafts,
            request=request,
        )
        answer = tokens[len(request.prompt) :]
        preempted = self._preempted.pop(request.id, None)
        is_same = preempted is not None and preempted.request is request  # not a later one of its name
        if preempted is not None and is_same and answer[: len(preempted.answer)] == preempted.answer:
            state = preempted
        elif params.grammar is not None:
            state.matcher = self.grammars.matcher(request.compiled_grammar, ends)
        state.push(answer[len(state.answer) :])
        if not state.is_done:
            self._states[slot] = state

    def release(self, slot: int, tokens: list[int], *, resumes: bool = False) -> None:
        state = self._states.pop(slot, None)
        if resumes and state is not None:
            self._keep(state)

    def _keep(self, state: ConstrainedRequest) -> None:
        """Keeps the state of a preempted request, for a grammar may take long to follow its text again."""
        if state.matcher is not None and state.request is not None:
            self._preempted[state.request.id] = state
        if len(self._preempted) > MOST_PREEMPTED:
            self._preempted.popitem(last=False)

    @property
    def undrafted(self) -> Set[int]:
        """Slots of requests whose masks take long, so that masks after drafted tokens would hold up others."""
        return {
            slot for slot, state in self._states.items() if state.matcher is not None and not state.matcher.is_cheap
        }

    def run(self, inputs: Emitted | Proposed, width: int, *, late: bool = False) -> Edits:
        assert isinstance(inputs, Proposed)
        errors = dict[int, str]()
        chains = dict[int, list[int]]()  # by slot: the root, and the tokens that a grammar forces after it
        indices = self._take_emitted(inputs, errors)
        width = min(width, *self.widths[1:])
        masks = self._masks(indices, inputs, late=late)
        for slot, index in indices.items():
            state = self._states[slot]
            node_masks = masks.get(slot)
            if state.matcher is None or node_masks is None:
                continue
            nodes = inputs.nodes[:, index]
            if not len(node_masks.allowed):
                errors[slot] = CROWDED_OUT
                del masks[slot]
                continue
            is_cut = len(node_masks.nodes) < 1 + np.count_nonzero(nodes[0, 1:] >= 0)
            if state.matcher.is_slow:
                errors[slot] = TOO_SLOW
            elif not node_masks.allowed[0].any():
                errors[slot] = NO_TOKEN_ALLOWED
            elif is_cut and late:
                errors[slot] = GIVEN_UP
            elif is_cut:
                chains[slot] = [int(nodes[0, 0])]
                masks[slot] = NodeMasks(slot, [0], node_masks.allowed[:1])
            else:
                tokens, forced_masks = self._forced(slot, state, nodes, node_masks, width)
                if tokens:
                    chains[slot] = [int(nodes[0, 0]), *tokens]
                    # Late, the pass already verifies the old nodes: the forced ones only tell the policy of a chance.
                    masks[slot] = node_masks if late else forced_masks
        for slot in [slot for slot in inputs.slots if slot in self._states]:
            if slot in errors or self._states[slot].is_done:
                state = self._states.pop(slot)
                if isinstance(errors.get(slot), Restart):
                    self._keep(state)
        return Edits(chains_of(chains), tuple(masks.values()), errors)

    def _take_emitted(self, proposed: Proposed, errors: dict[int, str]) -> dict[int, int]:
        """Adds the tokens that the step emitted to the answers. Returns the index of each slot that has constraints. A
        slot whose answer breaks them gets an entry in `errors` instead."""
        indices = dict[int, int]()
        for index, slot in enumerate(proposed.slots):
            if slot not in self._states:
                continue
            state = self._states[slot]
            if not state.push(proposed.results[index, 1 : 1 + proposed.results[index, 0]].tolist()):
                errors[slot] = TOKEN_REFUSED
            elif state.matcher is not None and state.matcher.is_slow:
                errors[slot] = TOO_SLOW
            else:
                indices[slot] = index
        return indices

    def close(self) -> None:
        self.grammars.close()

    def _masks(self, indices: dict[int, int], proposed: Proposed, *, late: bool) -> dict[int, NodeMasks]:
        """Returns the masks of slots for which tokens are forbidden. `indices`: their places in `proposed`. One call
        fills the masks of all grammars, which share the time of a step; threads fill slow ones. Of nodes whose masks
        take too long there are none. `late`: a pass verifies the nodes already."""
        self._num_runs += 1
        masks = dict[int, NodeMasks]()
        slots = list[int]()
        node_lists = list[list[int]]()
        matchers = list[Any]()
        trees = list[tuple[list[int], list[int]]]()
        for slot in sorted(indices, key=self._turn):
            nodes = proposed.nodes[:, indices[slot]]
            matcher = self._states[slot].matcher
            if matcher is None:
                node_masks = self._masks_without_grammar(slot, self._states[slot], nodes)
                masks |= {slot: node_masks} if node_masks is not None else {}
            elif not matcher.is_over:
                slots.append(slot)
                matchers.append(matcher)
                drafted = np.flatnonzero(nodes[0, 1:] >= 0) + 1 if late or matcher.is_cheap else np.empty(0, np.intp)
                node_lists.append([0, *drafted.tolist()])
                place = {node: order for order, node in enumerate(node_lists[-1])}  # unused nodes are left out
                parents = [-1, *(place[parent] for parent in nodes[1, node_lists[-1][1:]].tolist())]
                trees.append((nodes[0, node_lists[-1]].tolist(), parents))
        if matchers:
            for slot, node_list, allowed in zip(slots, node_lists, self.grammars.allowed(matchers, trees), strict=True):
                masks[slot] = NodeMasks(slot, node_list[: len(allowed)], allowed)
                if len(allowed):
                    self._states[slot].masked_at = self._num_runs
        return masks

    def _turn(self, slot: int) -> tuple[bool, int]:
        """Orders requests: quick masks first, then those that have waited longest."""
        state = self._states[slot]
        return state.matcher is not None and not state.matcher.is_cheap, state.masked_at

    def _forced(
        self, slot: int, state: ConstrainedRequest, nodes: NDArray[np.int32], masks: NodeMasks, width: int
    ) -> tuple[list[int], NodeMasks]:
        """Returns the tokens that a proposal of up to `width` nodes should have after its root instead of `nodes`
        (2, N), whose `masks` are given, and the masks of the new nodes. No tokens where the grammar leaves a choice, or
        where `nodes` have them and more, or as many that it allows."""
        nothing: tuple[list[int], NodeMasks] = [], NodeMasks(slot, [], np.empty((0, self._num_words), np.uint32))
        limit = min(width, state.max_tokens - len(state.answer)) - 1
        if state.matcher is None or not state.wants_drafts or limit < 1:
            return nothing
        if np.count_nonzero(masks.allowed[0]) > MAX_FORCED_WORDS:
            return nothing
        if allowed_depth(nodes, masks) >= limit:
            return nothing
        tokens, allowed = state.matcher.forced(int(nodes[0, 0]), limit)
        if not tokens or goes_beyond(nodes, tokens):
            return nothing
        return tokens, NodeMasks(slot, list(range(1 + len(tokens))), allowed)

    def _masks_without_grammar(
        self, slot: int, state: ConstrainedRequest, nodes: NDArray[np.int32]
    ) -> NodeMasks | None:
        """Returns masks by min_tokens and bad words for nodes (2, N) that forbid something; None: none does."""
        paths: dict[int, list[int]] = {0: []}  # drafted tokens up to each node
        for node, (token, parent) in enumerate(nodes.T.tolist()):
            if node and token >= 0:
                paths[node] = [*paths[parent], token]
        forbidden = {node: sets for node, path in paths.items() if (sets := state.forbidden_after(path))}
        if not forbidden:
            return None
        allowed = np.full((len(forbidden), self._num_words), 2**WORD_BITS - 1, np.uint32)
        for row, sets in zip(allowed, forbidden.values(), strict=True):
            for words, bits in sets:
                row[words] &= bits
        return NodeMasks(slot, list(forbidden), allowed)


def chains_of(tokens: dict[int, list[int]]) -> tuple[HostProposal, ...]:
    """Returns proposals that are chains, of each slot's tokens, the root first. The planner fills in the other two rows
    of `nodes`."""
    if not tokens:
        return ()
    counts = [len(chain) for chain in tokens.values()]
    kinds = [FORCED if count > 1 else 0 for count in counts]
    nodes = np.full((4, len(tokens), max(counts)), -1, np.int32)
    for row, chain in enumerate(tokens.values()):
        nodes[0, row, : len(chain)] = chain
        nodes[1, row, : len(chain)] = range(-1, len(chain) - 1)
    return (HostProposal(list(tokens), nodes, counts, kinds, source="grammar"),)


def allowed_depth(nodes: NDArray[np.int32], masks: NodeMasks) -> int:
    """Returns the length of the longest path of a tree, nodes (2, N) as in Proposed, that its masks allow."""
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
