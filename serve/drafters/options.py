"""Options of drafters, shown as --drafter.*, and the table of drafters.

Imports no torch, so that `serve --draft DRAFT --help` and a wrong option are answered at once.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.kernels.limits import MAX_K, MAX_NODES, MOST_SORTED
from slipstream.kernels.speculation.tree_shape import TreeShape
from slipstream.models.drafts.source import DraftSource
from slipstream.models.files.names import check_checkpoint
from slipstream.models.files.outputs import begins_with, check_output_file
from slipstream.serve.options import NoOptions, check_draft_cache
from slipstream.serve.request import NO_ADAPTER

if TYPE_CHECKING:
    from slipstream.models.drafts.dflash import DFlashConfig
    from slipstream.serve.drafters.ngram.ngram_core import NgramCore

TREE_NODES = 16  # nodes of a tree that is drafted level by level, unless options say otherwise
BLOCK_NODES = 32  # nodes of a tree from one block
NGRAM = "ngram"  # no drafter but a host stage (ngram/stage.py), alone or before a draft network
SAVED_MAGIC = b"GMTRIE1"  # csrc/snapshot.cpp
LONGEST_MATCH = 12  # last tokens that are looked up, unless options say otherwise
CORE_OPTIONS = ("capacity", "branch_length", "min_match", "max_match", "breadth", "queue_tokens")
ADAPTER_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
AdmitBy = Literal["confidence", "candidates", "position"]
Window = int | Literal["auto", "all"]


def widths_up_to(nodes: int) -> tuple[int, ...]:
    """Returns the powers of two below `nodes`, up to 32, and `nodes`: widths that an engine can choose from."""
    return (*(2**power for power in range(6) if 2**power < nodes), nodes)


def check_window(window: Window) -> None:
    if isinstance(window, int) and not 0 < window < 1 << 31:  # kernels read 32 bits
        raise ValueError(f"drafter.window is {window}; give 1 to 2147483647 tokens, auto or all")


@dataclass(frozen=True)  # without slots: it is a second base of others
class TokenMapOptions:
    """Options of drafters that read the target's own head."""

    token_map: str | None = None
    """Token map (slipstream frequency-map) of the tokens that the draft can propose. Default: all."""
    token_map_size: int | None = None
    """How many of the map's tokens, the most frequent first. Default: as many as it was made for."""
    token_map_dynamic: int = 0
    """How many tokens besides the map's: the most frequent ones of recent prompts and answers."""

    def __post_init__(self) -> None:
        if self.token_map_dynamic < 0:
            raise ValueError(f"drafter.token_map_dynamic is {self.token_map_dynamic}; give 0 (off) or more")
        if self.token_map is None and (self.token_map_size is not None or self.token_map_dynamic):
            raise ValueError("drafter.token_map_size and drafter.token_map_dynamic need drafter.token_map, a file")


@dataclass(frozen=True)  # without slots, as above
class AdapterOptions:
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters of the draft (folders or hub ids, in peft's files) by the names that requests give in
    draft_adapter."""
    ab: dict[str, float] = field(default_factory=dict)
    """Share of the requests without a draft_adapter that take an adapter, by its name; the others take none."""

    def __post_init__(self) -> None:
        for name in ("adapters", "ab"):  # YAML reads a name such as 1 as a number
            object.__setattr__(self, name, {str(key): value for key, value in getattr(self, name).items()})
        for name, folder in self.adapters.items():
            if not ADAPTER_NAME.fullmatch(name) or name == NO_ADAPTER:
                raise ValueError(
                    f"drafter.adapters has the name {name!r}; give up to 64 letters, digits, _, - or ., and not "
                    f"{NO_ADAPTER}"
                )
            check_checkpoint(f"drafter.adapters.{name}", folder)
        for name, share in self.ab.items():
            if name not in self.adapters or not 0 <= share <= 1:
                raise ValueError(
                    f"drafter.ab gives {name} the share {share}; give shares from 0 to 1 to names of drafter.adapters: "
                    f"{', '.join(self.adapters) or 'none are there'}"
                )
        if sum(self.ab.values()) > 1 + 1e-9:
            raise ValueError(f"drafter.ab is {self.ab}, more than 1 together; give shares of at most 1")


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    depth: int = 3
    """Depth of a proposal: tokens drafted one after the other."""
    topk: int = 1
    """Continuations drafted for each token of a tree, which proposals of more than depth + 1 nodes are; 1: chains
    alone."""
    nodes: int | None = None
    """Most nodes that the target verifies, root included. Default: depth + 1 for a chain, up to 16 for a tree."""

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MAX_NODES - 1:
            raise ValueError(f"drafter.depth is {self.depth}; it must be between 1 and {MAX_NODES - 1}")
        if not 1 <= self.topk <= MAX_K:
            raise ValueError(f"drafter.topk is {self.topk}; it must be between 1 and {MAX_K}")
        if self.topk > 1 and self.shape.expanded > MAX_NODES:
            raise ValueError(
                f"drafter.topk is {self.topk} and drafter.depth {self.depth}: topk * (depth - 1) is "
                f"{self.shape.expanded} and must be at most {MAX_NODES}; lower one of them"
            )
        if self.nodes is not None and not 2 <= self.nodes <= self.most_nodes:
            raise ValueError(
                f"drafter.nodes is {self.nodes}; with topk {self.topk} and depth {self.depth} it must be between 2 and "
                f"{self.most_nodes}"
            )

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.topk, self.depth)

    @property
    def most_nodes(self) -> int:
        return min(MAX_NODES, 1 + self.shape.candidates)

    @property
    def verified_nodes(self) -> int:
        return self.nodes or (min(TREE_NODES, self.most_nodes) if self.topk > 1 else self.depth + 1)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of nodes that an engine can choose from, the whole chain's among them."""
        nodes = self.verified_nodes
        return tuple(sorted({*widths_up_to(nodes), min(self.depth + 1, nodes)}))

    @property
    def chain_nodes(self) -> int:
        """Nodes up to which proposals are chains, wider ones trees: as many as a chain has, but the widest is a tree.
        Chains cost the draft less, since a level of theirs has one node and not `topk`."""
        nodes = self.verified_nodes
        if self.topk == 1:
            return nodes
        return max(2, *(width for width in self.widths if width < min(self.depth + 2, nodes)))


@dataclass(frozen=True, slots=True)
class TreeOptions(AdapterOptions, ShapeOptions):
    window: Window = "auto"
    """Tokens that the draft's layers see at most, of a draft that was trained to see all; auto: all, or of long texts
    the last 2,048 where that turns out to pay."""
    kv_cache_dtype: str = "auto"
    """Numbers in the draft's KV cache: auto, as the target computes, or fp8, calibrated at start-up."""

    def __post_init__(self) -> None:
        AdapterOptions.__post_init__(self)
        check_draft_cache(self.kv_cache_dtype)
        check_window(self.window)
        ShapeOptions.__post_init__(self)


@dataclass(frozen=True, slots=True)
class EagleOptions(TokenMapOptions, TreeOptions):
    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        TokenMapOptions.__post_init__(self)


@dataclass(frozen=True, slots=True)
class MTPOptions(EagleOptions):
    hidden: Literal["after_norm", "before_norm"] | None = None
    """State that the head reads, after or before the final norm, in families whose files leave it open. Default: tried
    at start-up on a short text."""

    def __post_init__(self) -> None:
        EagleOptions.__post_init__(self)
        if self.hidden not in (None, "after_norm", "before_norm"):
            raise ValueError(f"drafter.hidden is {self.hidden!r}; choose after_norm or before_norm, or leave it out")


@dataclass(frozen=True, slots=True)
class Eagle3Options(TreeOptions):
    token_map: str | None = None
    """Refused: EAGLE3 drafts have their own vocabulary and head."""
    aux_layers: tuple[int, ...] | None = None
    """Target states that the draft reads, as layer outputs, e.g. [1, 3, 5]; for files that do not name them."""
    norm_output: bool | None = None
    """Whether the draft's next step reads the state after the final norm; for files that may mean another thing."""

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        if self.token_map is not None:
            raise ValueError(
                f"drafter.token_map is {self.token_map}; an EAGLE3 draft has its own vocabulary (d2t) and head: "
                "train it with --draft.vocabulary instead"
            )


@dataclass(frozen=True, slots=True)
class DFlashOptions(AdapterOptions, TokenMapOptions):
    block: int | None = None
    """Depth of a proposal + 1: of a chain the most nodes that the target verifies. Default: what the draft was trained
    on."""
    full_block: bool = False
    """Draft the whole block even where a step verifies fewer nodes."""
    topk: int = 1
    """Continuations considered after each token; 1: a chain."""
    nodes: int | None = None
    """Most nodes that the target verifies, root included. Default: block for a chain, up to 32 for a tree."""
    markov_candidates: int = MOST_SORTED
    """Tokens of each slot among which a draft's Markov head chooses."""
    admit_by: AdmitBy | None = None
    """Scores that decide which nodes of all requests a step verifies, and how a tree grows: confidence, those of the
    draft's confidence head; candidates, the probabilities of its tokens; position, places in the proposal alone, of
    nodes that grew by the candidates. Default: confidence for drafts that have the head, else candidates."""
    window: Window = "auto"
    """Committed tokens that the draft's layers see at most, of a draft that was trained to see all; auto: all, or of
    long texts the last 2,048 where that turns out to pay."""
    sample_from_anchor: bool | None = None
    """Whether slot 0, the anchor, predicts the token after it; for files that do not say it."""
    kv_cache_dtype: str = "auto"
    """Numbers in the draft's KV cache: auto, as the target computes, or fp8, calibrated at start-up."""

    def __post_init__(self) -> None:
        AdapterOptions.__post_init__(self)
        TokenMapOptions.__post_init__(self)
        check_draft_cache(self.kv_cache_dtype)
        check_window(self.window)
        if self.block is not None and not 2 <= self.block <= MAX_NODES:
            raise ValueError(f"drafter.block is {self.block}; it must be between 2 and {MAX_NODES}")
        if not 1 <= self.topk <= MAX_K:
            raise ValueError(f"drafter.topk is {self.topk}; it must be between 1 and {MAX_K}")
        if not self.topk <= self.markov_candidates <= MOST_SORTED:
            raise ValueError(
                f"drafter.markov_candidates is {self.markov_candidates}; it must be between drafter.topk {self.topk} "
                f"and {MOST_SORTED}"
            )

    def depth(self, config: "DFlashConfig") -> int:
        """Returns the most tokens of a path."""
        trained = config.num_proposals + 1
        if self.block is not None and self.block > trained:
            raise ValueError(
                f"drafter.block is {self.block}; this draft was trained on blocks of {config.block_size} and offers at "
                f"most {trained} nodes"
            )
        return (self.block or min(trained, MAX_NODES)) - 1

    def num_nodes(self, config: "DFlashConfig") -> int:
        """Returns the most nodes of a proposal."""
        depth = self.depth(config)
        if self.topk == 1:
            if self.nodes is not None and not 2 <= self.nodes <= depth + 1:
                raise ValueError(
                    f"drafter.nodes is {self.nodes}; a chain of this draft has between 2 and {depth + 1} nodes"
                )
            return self.nodes or depth + 1
        max_nodes = min(MAX_NODES, 1 + sum(self.topk**level for level in range(1, depth + 1)))
        if self.nodes is not None and not 2 <= self.nodes <= max_nodes:
            raise ValueError(
                f"drafter.nodes is {self.nodes}; with topk {self.topk} and {depth} slots it must be between 2 and "
                f"{max_nodes}"
            )
        return self.nodes or min(BLOCK_NODES, max_nodes)

    def num_slots(self, config: "DFlashConfig", width: int) -> int:
        """Returns the block size needed for `width` nodes."""
        depth = self.depth(config)
        return config.first_slot + (depth if self.full_block else min(width - 1, depth))


@dataclass(frozen=True, slots=True)
class AssistantOptions(ShapeOptions):
    depth: int = 4
    """Depth of a proposal: tokens drafted one after the other."""


@dataclass(frozen=True, slots=True)
class NgramOptions:
    nodes: int = 16
    """Most nodes per proposal, root included."""
    min_match: int = 1
    """Fewest last tokens that count as a match."""
    max_match: int = LONGEST_MATCH
    """Most last tokens that are looked up; the longest match wins."""
    breadth: int = 4
    """Most children of a node; 1 drafts chains."""
    capacity: int = 1_000_000
    """Nodes kept of all texts, about 60 bytes each; the least recently used ones are evicted first."""
    branch_length: int = 18
    """Longest sequence of tokens that is kept."""
    queue_tokens: int = 65_536
    """Most tokens queued for insertion; further ones are dropped and counted."""
    share_between_keys: bool = False
    """Draft from texts of clients with other API keys, too, which measured speed and counts can tell them."""
    corpus: str | None = None
    """Texts to insert at the start: a prepared dataset (slipstream prepare), or .jsonl with `tokens` in each line."""
    load: str | None = None
    """File to load at the start, written by an earlier `save`."""
    save: str | None = None
    """File to write when the engine ends."""

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= MAX_NODES:
            raise ValueError(f"drafter.nodes is {self.nodes}; it must be between 2 and {MAX_NODES}")
        if self.load and not Path(self.load).is_file():
            raise ValueError(f"drafter.load {self.load} is not a file; name one written by drafter.save")
        if self.save and not Path(self.save).absolute().parent.is_dir():
            raise ValueError(f"drafter.save {self.save} is in a folder that does not exist; create it first")
        if self.save:
            inputs = {"drafter.corpus": [self.corpus]}
            check_output_file(
                self.save,
                begins_with(SAVED_MAGIC),
                "a file of saved n-grams",
                inputs,
                overwrite=True,
                option="drafter.save",
            )
        if self.corpus and not Path(self.corpus).exists():
            raise ValueError(f"drafter.corpus {self.corpus} does not exist; name a prepared dataset or a .jsonl file")
        self.core(1)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of nodes that a proposal may have."""
        return widths_up_to(self.nodes)

    @property
    def branches(self) -> bool:
        return self.breadth > 1

    def core(self, slots: int) -> "NgramCore":
        """Raises ValueError for an option out of range."""
        from slipstream.serve.drafters.ngram.ngram_core import NgramCore

        values = asdict(self)
        try:
            return NgramCore(rows=slots, **{name: values[name] for name in CORE_OPTIONS})
        except ValueError as error:
            raise ValueError(f"drafter.{error}") from error


@dataclass(frozen=True)  # without slots: it is a second base of others
class NgramFirstOptions:
    """Options that every draft network has besides its own."""

    ngram_first: int = 0
    """Verify n-gram lookahead where at least so many last tokens have occurred before; 0: never."""
    ngram_nodes: int = 16
    """Most nodes of an n-gram proposal, root included."""
    ngram_breadth: int = 4
    """Most children of a node of an n-gram proposal; 1 drafts chains."""
    ngram_capacity: int = 1_000_000
    """Nodes kept of all texts."""
    ngram_share_between_keys: bool = False
    """Draft n-grams from texts of clients with other API keys, too."""

    def __post_init__(self) -> None:
        if not 0 <= self.ngram_first <= LONGEST_MATCH:
            bounds = f"between 0 (never) and {LONGEST_MATCH}"
            raise ValueError(f"drafter.ngram_first is {self.ngram_first}; it must be {bounds}")
        if self.ngram_first:
            self.ngram_options()

    def ngram_options(self) -> NgramOptions:
        """Raises ValueError for a value out of range, with the name that it has here."""
        try:
            return NgramOptions(
                nodes=self.ngram_nodes,
                breadth=self.ngram_breadth,
                capacity=self.ngram_capacity,
                share_between_keys=self.ngram_share_between_keys,
            )
        except ValueError as error:
            raise ValueError(str(error).replace("drafter.", "drafter.ngram_", 1)) from error


def with_ngram_first(options: type) -> type:
    """The options of a network's drafter together with NgramFirstOptions."""

    def check(self: Any) -> None:
        NgramFirstOptions.__post_init__(self)
        if hasattr(options, "__post_init__"):
            options.__post_init__(self)

    bases = (NgramFirstOptions, options)
    return make_dataclass(options.__name__, [], bases=bases, namespace={"__post_init__": check}, frozen=True)


DRAFTERS: Mapping[str, type] = {  # files of this folder, each with a class `Drafter`, and their options
    "dflash": DFlashOptions,
    "eagle": EagleOptions,
    "eagle3": Eagle3Options,
    "gemma4_assistant": AssistantOptions,
    "mtp": MTPOptions,
    "none": NoOptions,
    NGRAM: NgramOptions,
}


def options_for(source: DraftSource) -> type:
    """Returns the options of the draft's drafter; of a network together with those of n-gram lookahead."""
    options = options_of(source.drafter)
    return with_ngram_first(options) if source.has_network else options


def options_of(drafter: str) -> type:
    """Returns the options of a drafter. Raises ValueError for a name that no drafter has."""
    if drafter not in DRAFTERS:
        raise ValueError(
            f"drafter {drafter!r} does not exist; name a checkpoint folder or one of: {', '.join(DRAFTERS)}"
        )
    return DRAFTERS[drafter]
