"""The n-gram drafter's core in plain Python: objects, lists and dicts in place of pools, links and hash tables.

It says what the C++ core does, decision by decision, so that random operations can be compared; what those decisions
are worth is tested against brute force in test_ngram_trie.py.
"""

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field

CHUNK_TOKENS = 15
NODES_PER_CHUNK = 6
MIN_CHUNKS = 16
LONG_GRAM = 3
MAX_VISITED = 16
MAX_OCCURRENCES = 4
MAX_PLACES = 4
VISITS_PER_NODE = 4


@dataclass(eq=False, slots=True)
class Text:
    """One inserted text. `serials` are the numbers of its chunks, which age with every chunk of any text."""

    tokens: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)


Position = tuple[Text, int] | None


class TextLog:
    def __init__(self, num_chunks: int) -> None:
        self.num_chunks, self.newest = num_chunks, 0

    def alive(self, position: Position) -> bool:
        return position is not None and self.newest - position[0].serials[position[1] // CHUNK_TOKENS] < self.num_chunks

    def open(self, text: Text) -> None:
        self.newest += 1
        text.serials.append(self.newest)

    def append(self, text: Text, token: int) -> Text:
        """The text that now ends in `token`: a new one if the old one's end is overwritten."""
        if not text.serials or not self.alive((text, len(text.tokens))):
            text = Text()
            self.open(text)
        text.tokens.append(token)
        if len(text.tokens) % CHUNK_TOKENS == 0:
            self.open(text)
        return text

    def read(self, position: Position, skip: int = 0) -> int | None:
        if position is None or not self.alive(position):
            return None
        text, index = position
        return text.tokens[index + skip] if index + skip < len(text.tokens) else None


@dataclass(eq=False, slots=True)
class Node:
    token: int
    parent: "Node | None"
    depth: int
    frequency: int = 1
    children: list["Node"] = field(default_factory=list)  # last used first
    tail: Position = None
    birth: object = field(default_factory=object)

    def find(self, token: int) -> "Node | None":
        return next((child for child in self.children if child.token == token), None)


@dataclass(slots=True)
class Place:
    node: Node
    birth: object
    depth: int


@dataclass(slots=True)
class Writer:
    root: Node
    text: Text = field(default_factory=Text)
    positions: list[tuple[Text, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


class Trie:
    def __init__(self, capacity: int, branch_length: int) -> None:
        self.capacity, self.branch_length = capacity, branch_length
        num_chunks = 1
        while num_chunks <= capacity // NODES_PER_CHUNK // 2:
            num_chunks *= 2
        self.log = TextLog(max(MIN_CHUNKS, num_chunks))
        self.roots: dict[str, Node] = {}
        self.leaves: OrderedDict[Node, None] = OrderedDict()  # the one used longest ago first
        self.size = self.num_evicted = 0

    def root(self, name: str) -> Node:
        return self.roots.setdefault(name, Node(-1, None, 0))

    def append(self, writer: Writer, token: int) -> None:
        writer.text = self.log.append(writer.text, token)
        writer.tokens.append(token)
        writer.positions.append((writer.text, len(writer.text.tokens) - 1))
        writer.places = [place for place in writer.places if self.advance(place, writer)]
        child = writer.root.find(token)
        if child is None:
            self.create_leaf(writer.root, token, 1, self.end(writer))
        elif self.descend(place := Place(child, child.birth, 1), child, writer):
            writer.places.append(place)

    def end(self, writer: Writer) -> Position:
        return (writer.text, len(writer.text.tokens))

    def advance(self, place: Place, writer: Writer) -> bool:
        if not self.settle(place, writer.tokens[:-1]):
            return False
        token = writer.tokens[-1]
        if not place.node.children:
            return self.advance_in_tail(place, writer)
        child = place.node.find(token)
        if child is not None:
            return self.descend(place, child, writer)
        self.create_leaf(place.node, token, 1, self.end(writer))
        return False

    def advance_in_tail(self, place: Place, writer: Writer) -> bool:
        leaf, num_shared = place.node, place.depth - place.node.depth
        expected = self.log.read(leaf.tail, num_shared)
        if expected not in (None, writer.tokens[-1]):
            self.split(leaf, num_shared, writer)
            return False
        if expected is not None:
            place.depth += 1
            if place.depth < self.branch_length:
                return True
        if not self.log.alive(leaf.tail):
            leaf.birth = object()
        leaf.tail = writer.positions[len(writer.positions) - 1 - num_shared]
        return False

    def split(self, leaf: Node, num_shared: int, writer: Writer) -> None:
        assert leaf.tail is not None
        text, index = leaf.tail
        frequency, node = leaf.frequency, leaf
        self.leaves.pop(leaf)
        for shared in range(num_shared):
            node = self.create(node, text.tokens[index + shared], frequency)
        rest = (text, index + num_shared + 1)
        self.create_leaf(node, text.tokens[index + num_shared], max(1, frequency - 1), rest)
        self.create_leaf(node, writer.tokens[-1], 1, self.end(writer))

    def create(self, parent: Node, token: int, frequency: int) -> Node:
        self.leaves.pop(parent, None)
        if self.size == self.capacity:
            self.evict()
        self.leaves.pop(parent, None)
        parent.tail = None
        child = Node(token, parent, parent.depth + 1, frequency)
        parent.children.insert(0, child)
        self.size += 1
        return child

    def create_leaf(self, parent: Node, token: int, frequency: int, tail: Position) -> None:
        leaf = self.create(parent, token, frequency)
        leaf.tail = tail
        self.leaves[leaf] = None

    def descend(self, place: Place, child: Node, writer: Writer) -> bool:
        assert child.parent is not None
        if child.depth == 1 or child.frequency < child.parent.frequency:
            child.frequency += 1
        child.parent.children.remove(child)
        child.parent.children.insert(0, child)
        if not child.children:
            self.leaves.move_to_end(child)
        place.node, place.birth, place.depth = child, child.birth, child.depth
        if child.depth == self.branch_length:
            child.tail = self.end(writer)
        return child.depth < self.branch_length

    def evict(self) -> None:
        leaf, _ = self.leaves.popitem(last=False)
        assert not leaf.children, "only a leaf is given up"
        assert leaf.parent is not None
        self.num_evicted += 1
        self.size -= 1
        leaf.birth = object()
        leaf.parent.children.remove(leaf)
        if not leaf.parent.children and leaf.parent.depth > 0:
            leaf.parent.birth, leaf.parent.tail = object(), None
            self.leaves[leaf.parent] = None
            self.leaves.move_to_end(leaf.parent, last=False)

    def settle(self, place: Place, text: list[int]) -> bool:
        """`text` ends like the place's string."""
        if place.node.birth is not place.birth:
            return False
        while place.node.children and place.depth > place.node.depth:
            child = place.node.find(text[len(text) - (place.depth - place.node.depth)])
            if child is None:
                return False
            place.node, place.birth = child, child.birth
        return True

    def step(self, place: Place, token: int, text: list[int]) -> bool:
        if not self.settle(place, text):
            return False
        node, place.depth = place.node, place.depth + 1
        if not node.children:
            return self.log.read(node.tail, place.depth - 1 - node.depth) == token
        child = node.find(token)
        if child is not None:
            place.node, place.birth = child, child.birth
        return child is not None

    def continues(self, place: Place) -> bool:
        node = place.node
        return bool(node.children) or self.log.read(node.tail, place.depth - node.depth) is not None

    def branches(self) -> list[tuple[str, list[int], list[int]]]:
        """As NgramCore.branches."""
        names = {root: name for name, root in self.roots.items()}
        result = []
        for leaf in self.leaves:
            path = [leaf]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            tokens = [node.token for node in path[-2::-1]]
            skip = 0
            while len(tokens) < self.branch_length and (token := self.log.read(leaf.tail, skip)) is not None:
                tokens.append(token)
                skip += 1
            result.append((names[path[-1]], tokens, [node.frequency for node in path[-2::-1]]))
        return result


@dataclass(slots=True)
class Request:
    tokens: list[int]
    writer: Writer
    seen: int = 0
    places: list[Place] = field(default_factory=list)


# What comes next: ("node", node), ("log", frequency, position, skip) or ("text", index, period).
Cursor = tuple


class NgramModel:
    """NgramCore with an insertion that is always done at once."""

    def __init__(
        self, capacity: int, branch_length: int, min_match: int, max_match: int, order: str, breadth: int
    ) -> None:
        self.trie = Trie(capacity, branch_length)
        self.min_match, self.max_match, self.order, self.breadth = min_match, max_match, order, breadth
        self.requests: dict[int, Request] = {}

    def admit(self, row: int, tokens: list[int], name: str) -> None:
        self.requests[row] = Request(list(tokens), Writer(self.trie.root(name)))
        for token in tokens[-self.trie.branch_length :]:
            self.trie.append(self.requests[row].writer, token)

    def extend(self, row: int, tokens: list[int], dropped: bool = False) -> None:
        request = self.requests[row]
        request.tokens += tokens
        if dropped:
            request.writer = Writer(request.writer.root)
            return
        for token in tokens:
            self.trie.append(request.writer, token)

    def insert(self, tokens: list[int], name: str) -> None:
        writer = Writer(self.trie.root(name))
        for token in tokens:
            self.trie.append(writer, token)

    def release(self, row: int) -> None:
        del self.requests[row]

    def occurrences(self, tokens: list[int]) -> list[tuple[int, int]]:
        """(length of the match, index of the token behind it) of earlier ends like the text's, best first."""
        last, found = len(tokens) - 1, set()
        for gram in {max(self.min_match, min(LONG_GRAM, self.max_match)), self.min_match}:
            visited = 0
            for end in range(last - 1, gram - 2, -1):
                if visited < MAX_VISITED and last + 1 >= gram and tokens[end + 1 - gram : end + 1] == tokens[-gram:]:
                    visited += 1
                    length = gram
                    while length < min(self.max_match, end + 1) and tokens[end - length] == tokens[last - length]:
                        length += 1
                    found.add((length, end + 1))
        return sorted(found, reverse=True)[:MAX_OCCURRENCES]

    def follow(self, request: Request) -> None:
        tokens = request.tokens
        start = max(request.seen, len(tokens) - self.max_match)
        if start > request.seen:
            request.places = []
        request.seen = len(tokens)
        for index in range(start, len(tokens)):
            text = tokens[:index]
            places = [place for place in request.places if place.depth < self.max_match]
            request.places = [place for place in places if self.trie.step(place, tokens[index], text)]
            child = request.writer.root.find(tokens[index])
            if child is not None:
                request.places.append(Place(child, child.birth, 1))
        places = [place for place in request.places if self.trie.settle(place, tokens)]
        request.places = [place for place in places if self.trie.continues(place)]

    def propose(self, row: int, width: int) -> tuple[list[int], list[int], int]:
        """tokens (N,), parents (N,), length of the longest match."""
        request = self.requests[row]
        self.follow(request)
        starts: list[tuple[int, Cursor]] = [
            (length, ("text", index, len(request.tokens) - index)) for length, index in self.occurrences(request.tokens)
        ]
        starts += [(place.depth, self.at(place)) for place in self.informed_places(request)]
        if width == 1:
            starts = []
        return Tree(self, request.tokens, starts, width).grow()

    def informed_places(self, request: Request) -> list[Place]:
        chosen: list[Place] = []
        for place in request.places:
            known = chosen[-1].node.frequency if chosen else 0
            if place.depth >= self.min_match and len(chosen) < MAX_PLACES and place.node.frequency > known:
                chosen.append(place)
        return chosen

    def at(self, place: Place) -> Cursor:
        node = place.node
        return ("node", node) if node.children else ("log", node.frequency, node.tail, place.depth - node.depth)


class Tree:
    def __init__(self, model: NgramModel, text: list[int], starts: list[tuple[int, Cursor]], width: int) -> None:
        self.model, self.text, self.starts, self.width = model, text, starts, width
        self.tokens, self.parents, self.depths = [text[-1]], [-1], [0]
        self.waiting: list[
            tuple[float, int, int, int, int, Cursor]
        ] = []  # -score, order, token, parent, length, behind
        self.num_pushed = 0

    def grow(self) -> tuple[list[int], list[int], int]:
        longest = max((length for length, _ in self.starts), default=0)
        for length, cursor in self.starts:
            self.follow(cursor, 0, length, length / longest)
        visits = VISITS_PER_NODE * self.width
        while visits > 0 and len(self.tokens) < self.width and self.waiting:
            visits -= 1
            score, _, token, parent, length, behind = self.waiting.pop(0)
            siblings = [node for node, above in enumerate(self.parents) if above == parent]
            node = next((node for node in siblings if self.tokens[node] == token), None)
            if node is None:
                if len(siblings) >= self.limit(parent):
                    continue
                node = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self.depths.append(self.depths[parent] + 1)
            self.follow(behind, node, length, -score)
        padding = [-1] * (self.width - len(self.tokens))
        return self.tokens + padding, self.parents + padding, longest

    def limit(self, node: int) -> int:
        if self.model.order == "probability":
            return self.model.breadth
        return max(1, self.model.breadth - self.depths[node])

    def follow(self, cursor: Cursor, parent: int, length: int, score: float) -> None:
        if cursor[0] == "node":
            node = cursor[1]
            weight = score * length / (node.frequency * length + len(node.children))
            for child in node.children[: self.limit(parent)]:
                behind = ("node", child) if child.children else ("log", child.frequency, child.tail, 0)
                self.push(child.token, parent, length, weight * child.frequency, behind)
        elif cursor[0] == "log":
            _, frequency, position, skip = cursor
            token = self.model.trie.log.read(position, skip)
            if token is not None:
                weight = frequency * length
                behind = ("log", frequency, position, skip + 1)
                self.push(token, parent, length, score * (weight / (weight + 1)), behind)
        else:
            _, index, period = cursor
            while index >= len(self.text):
                index -= period
            self.push(self.text[index], parent, length, score * (length / (length + 1)), ("text", index + 1, period))

    def push(self, token: int, parent: int, length: int, score: float, behind: Cursor) -> None:
        if self.model.order == "breadth":
            score = (length - self.depths[parent]) * 64 - self.depths[parent]
        insort(self.waiting, (-score, self.num_pushed, token, parent, length + 1, behind))
        self.num_pushed += 1
