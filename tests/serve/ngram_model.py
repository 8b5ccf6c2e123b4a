"""The n-gram drafter's core in plain Python, insertion done at once.

It says what the C++ core does, decision by decision, so that random operations can be compared; what those decisions
are worth is tested against brute force in test_ngram_core.py.
"""

import math
from bisect import insort
from dataclasses import dataclass, field

from slipstream.tests.serve.ngram_trie_model import Node, Place, Trie, Writer

LONG_GRAM = 3
MAX_VISITED = 16
MAX_OCCURRENCES = 4
MAX_PLACES = 4
VISITS_PER_NODE = 4


@dataclass(slots=True)
class History:
    """The occurrences of a request's last tokens in a namespace."""

    root: Node
    num_read: int = 0
    places: list[Place] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    tokens: list[int]
    writer: Writer
    histories: list[History]
    private: list[int] = field(default_factory=list)  # the last tokens, of which others do not know yet


# What comes next: ("node", node), ("log", frequency, position, skip) or ("text", index, period).
Cursor = tuple


class NgramModel:
    """NgramCore with an insertion that is always done at once."""

    def __init__(self, capacity: int, branch_length: int, min_match: int, max_match: int, breadth: int):
        self.trie = Trie(capacity, branch_length)
        self.min_match = min_match
        self.max_match = max_match
        self.breadth = breadth
        self.requests: dict[int, Request] = {}
        self.scores: list[list[float]] = []  # of the trees that `advance` returned last
        self.foreign: list[list[bool]] = []  # likewise

    def admit(self, row: int, tokens: list[int], name: str, common: str | None = None):
        names = [name, *([common] if common not in (None, name) else [])]
        histories = [History(self.trie.root(name)) for name in names if name is not None]
        self.requests[row] = Request(list(tokens), Writer(histories[0].root), histories)
        for token in tokens[-self.trie.branch_length :]:
            self.trie.append(self.requests[row].writer, token)

    def advance(
        self, gained: dict[int, list[int]], width: int, dropped: bool = False
    ) -> list[tuple[list[int], list[int], int]]:
        """Returns what `propose` returns, by row. `dropped`: the queue has no room for the tokens gained before."""
        for row, tokens in gained.items():
            self.requests[row].tokens += tokens
        self.scores = []
        self.foreign = []
        trees = [self.propose(row, width) for row in gained]
        for row, tokens in gained.items():
            self.share(row, 0 if dropped else len(self.requests[row].private))
            if dropped:
                self.requests[row].writer = Writer(self.requests[row].writer.root)
            self.requests[row].private = tokens
        return trees

    def share(self, row: int, count: int):
        request = self.requests[row]
        for token in request.private[:count]:
            self.trie.append(request.writer, token)
        request.private = []

    def insert(self, tokens: list[int], name: str):
        writer = Writer(self.trie.root(name))
        for token in tokens:
            self.trie.append(writer, token)

    def release(self, row: int, num_tokens: int):
        request = self.requests[row]
        num_beyond = max(0, len(request.tokens) - num_tokens)
        self.share(row, max(0, len(request.private) - num_beyond))
        del self.requests[row]

    def occurrences(self, tokens: list[int]) -> list[tuple[int, int]]:
        """(length of the match, index of the token behind it) of earlier ends like the text's, best first."""
        last = len(tokens) - 1
        matches = set()
        for gram in {max(self.min_match, min(LONG_GRAM, self.max_match)), self.min_match}:
            visited = 0
            for end in range(last - 1, gram - 2, -1):
                if visited < MAX_VISITED and last + 1 >= gram and tokens[end + 1 - gram : end + 1] == tokens[-gram:]:
                    visited += 1
                    length = gram
                    while length < min(self.max_match, end + 1) and tokens[end - length] == tokens[last - length]:
                        length += 1
                    matches.add((length, end + 1))
        return sorted(matches, reverse=True)[:MAX_OCCURRENCES]

    def follow(self, history: History, tokens: list[int]):
        start = max(history.num_read, len(tokens) - self.max_match)
        if start > history.num_read:
            history.places = []
        history.num_read = len(tokens)
        for index in range(start, len(tokens)):
            text = tokens[:index]
            places = [place for place in history.places if place.depth < self.max_match]
            history.places = [place for place in places if self.trie.step(place, tokens[index], text)]
            child = history.root.find(tokens[index])
            if child is not None:
                history.places.append(Place(child, child.birth, 1))
        places = [place for place in history.places if self.trie.settle(place, tokens)]
        history.places = [place for place in places if self.trie.continues(place)]

    def propose(self, row: int, width: int) -> tuple[list[int], list[int], int]:
        """tokens (N,), parents (N,), length of the longest match."""
        request = self.requests[row]
        for history in request.histories:
            self.follow(history, request.tokens)
        starts = [
            (length, ("text", index, len(request.tokens) - index)) for length, index in self.occurrences(request.tokens)
        ]
        for history in request.histories:
            starts += [(place.depth, self.at(place)) for place in self.informed_places(history)]
        if width == 1:
            starts = []
        tree = Tree(self, request.tokens, starts, width)
        grown = tree.grow()
        self.scores.append([*map(math.log, tree.probabilities), *[-math.inf] * (width - len(tree.probabilities))])
        self.foreign.append([*tree.foreign, *[True] * (width - len(tree.foreign))])
        return grown

    def informed_places(self, history: History) -> list[Place]:
        places = []
        for place in history.places:
            frequency = places[-1].node.frequency if places else 0
            if place.depth >= self.min_match and len(places) < MAX_PLACES and place.node.frequency > frequency:
                places.append(place)
        return places

    def at(self, place: Place) -> Cursor:
        node = place.node
        return ("node", node) if node.children else ("log", node.frequency, node.tail, place.depth - node.depth)


class Tree:
    def __init__(self, model: NgramModel, text: list[int], starts: list[tuple[int, Cursor]], width: int):
        self.model = model
        self.text = text
        self.starts = starts
        self.width = width
        self.tokens = [text[-1]]
        self.parents = [-1]
        self.probabilities = [1.0]
        self.foreign = [False]
        # -probability, order, token, parent, length, probability, behind
        self.waiting: list[tuple[float, int, int, int, int, float, Cursor]] = []
        self.num_pushed = 0

    def grow(self) -> tuple[list[int], list[int], int]:
        longest = max((length for length, _ in self.starts), default=0)
        for length, cursor in self.starts:
            self.follow(cursor, 0, length, length / longest)
        visits = VISITS_PER_NODE * self.width
        while visits > 0 and len(self.tokens) < self.width and self.waiting:
            visits -= 1
            _, _, token, parent, length, probability, next_cursor = self.waiting.pop(0)
            siblings = [node for node, above in enumerate(self.parents) if above == parent]
            node = next((node for node in siblings if self.tokens[node] == token), None)
            if node is None:
                if len(siblings) >= self.model.breadth:
                    continue
                node = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self.probabilities.append(probability)
                self.foreign.append(True)
            if next_cursor[0] == "text":
                self.foreign[node] = False
            self.follow(next_cursor, node, length, probability)
        padding = [-1] * (self.width - len(self.tokens))
        return self.tokens + padding, self.parents + padding, longest

    def follow(self, cursor: Cursor, parent: int, length: int, probability: float):
        if cursor[0] == "node":
            node = cursor[1]
            weight = probability * length / (node.frequency * length + len(node.children))
            for child in node.children[: self.model.breadth]:
                next_cursor = ("node", child) if child.children else ("log", child.frequency, child.tail, 0)
                self.push(child.token, parent, length, weight * child.frequency, next_cursor)
        elif cursor[0] == "log":
            _, frequency, position, skip = cursor
            token = self.model.trie.log.read(position, skip)
            if token is not None:
                weight = frequency * length
                next_cursor = ("log", frequency, position, skip + 1)
                self.push(token, parent, length, probability * (weight / (weight + 1)), next_cursor)
        else:
            _, index, period = cursor
            while index >= len(self.text):
                index -= period
            probability_of_text = probability * (length / (length + 1))
            self.push(self.text[index], parent, length, probability_of_text, ("text", index + 1, period))

    def push(self, token: int, parent: int, length: int, probability: float, cursor: Cursor):
        insort(self.waiting, (-probability, self.num_pushed, token, parent, length + 1, probability, cursor))
        self.num_pushed += 1
