"""The trie of the n-gram core in plain Python: objects, lists and dicts in place of pools, links and hash tables."""

from collections import OrderedDict
from dataclasses import dataclass, field

CHUNK_TOKENS = 15
NODES_PER_CHUNK = 6
MIN_CHUNKS = 16


@dataclass(eq=False, slots=True)
class Text:
    """One inserted text. `serials` are the numbers of its chunks, which age with every chunk of any text."""

    tokens: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)


Position = tuple[Text, int] | None


class TextLog:
    def __init__(self, num_chunks: int):
        self.num_chunks = num_chunks
        self.newest = 0

    def alive(self, position: Position) -> bool:
        return position is not None and self.newest - position[0].serials[position[1] // CHUNK_TOKENS] < self.num_chunks

    def open(self, text: Text):
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
    def __init__(self, capacity: int, branch_length: int):
        self.capacity = capacity
        self.branch_length = branch_length
        num_chunks = 1
        while num_chunks <= capacity // NODES_PER_CHUNK // 2:
            num_chunks *= 2
        self.log = TextLog(max(MIN_CHUNKS, num_chunks))
        self.roots: dict[str, Node] = {}
        self.leaves: OrderedDict[Node, None] = OrderedDict()  # the one used longest ago first
        self.size = self.num_evicted = 0

    def root(self, name: str) -> Node:
        return self.roots.setdefault(name, Node(-1, None, 0))

    def append(self, writer: Writer, token: int):
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
        leaf = place.node
        num_shared = place.depth - place.node.depth
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

    def split(self, leaf: Node, num_shared: int, writer: Writer):
        assert leaf.tail is not None
        text, index = leaf.tail
        frequency = leaf.frequency
        node = leaf
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

    def create_leaf(self, parent: Node, token: int, frequency: int, tail: Position):
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
        place.node = child
        place.birth = child.birth
        place.depth = child.depth
        if child.depth == self.branch_length:
            child.tail = self.end(writer)
        return child.depth < self.branch_length

    def evict(self):
        leaf, _ = self.leaves.popitem(last=False)
        assert not leaf.children, "only a leaf is given up"
        assert leaf.parent is not None
        self.num_evicted += 1
        self.size -= 1
        leaf.birth = object()
        leaf.parent.children.remove(leaf)
        if not leaf.parent.children and leaf.parent.depth > 0:
            leaf.parent.birth = object()
            leaf.parent.tail = None
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
            place.node = child
            place.birth = child.birth
        return True

    def step(self, place: Place, token: int, text: list[int]) -> bool:
        if not self.settle(place, text):
            return False
        node = place.node
        place.depth = place.depth + 1
        if not node.children:
            return self.log.read(node.tail, place.depth - 1 - node.depth) == token
        child = node.find(token)
        if child is not None:
            place.node = child
            place.birth = child.birth
        return child is not None

    def continues(self, place: Place) -> bool:
        node = place.node
        return bool(node.children) or self.log.read(node.tail, place.depth - node.depth) is not None

    def branches(self) -> list[tuple[str, list[int], list[int]]]:
        """Returns the branches as NgramCore.branches does."""
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
