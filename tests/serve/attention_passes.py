"""Random passes over a random paged cache: one set of data for two backends that must agree."""

import itertools
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.attention.ragged import Segments
from slipstream.kernels.norm import HeadNorms
from slipstream.kernels.speculation.verify import ancestor_masks
from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import RopeConfig
from slipstream.serve.attention.base import Backend
from slipstream.serve.runner.batch import AttentionMetadata
from slipstream.serve.runner.kv import LayerCache, NetworkKV
from slipstream.serve.runner.request_state import KVSlots, RequestState
from slipstream.tests.attention_layers import asking_layer
from slipstream.tests.tables import objects_of

NUM_LAYERS = 2
LAYER = 1
GROUP = 1  # whose pages hold the KV
STALE = 1e3  # fills slots that hold nothing: whoever reads them shows it
UNUSED = 3  # rows that fill up a ragged pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Committed lengths and new queries of each request, and who sees whom."""

    mask: Mask
    lengths: tuple[int, ...]
    query_lens: tuple[int, ...]
    prompt: bool = False
    num_heads: int = 8
    num_kv_heads: int = 2
    page_size: int = 16
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    reach: int = 4  # a node's parent is at most so many nodes before it, trees only
    starts: tuple[int, ...] | None = None  # first committed token that each request reads
    num_decoding: int | None = None  # of a ragged pass: its first requests ask for nodes, the others for chunks

    def mask_of(self, request: int) -> Mask:
        """Chunks of prompts are causal."""
        return self.mask if self.num_decoding is None or request < self.num_decoding else "causal"


PASSES = objects_of(__file__, "passes", Pass)
RAGGED = objects_of(__file__, "ragged", Pass)
PASSES |= {
    f"{name}, pages of {size}": replace(PASSES[name], page_size=size)
    for name in ("decode", "chain", "window", "window, tree", "block", "tree", "prompts with prefix")
    for size in (1, 64)
}


class Scene:
    """The data of a pass, always the same numbers: in fp64 rounded to `dtype`, on `device`."""

    def __init__(self, case: Pass, head_dim: int, dtype: torch.dtype, device: str):
        self.case = case
        self.device = torch.device(device)
        generator = torch.Generator().manual_seed(3)
        self.ends = [length + count for length, count in zip(case.lengths, case.query_lens, strict=True)]
        num_rows = len(case.lengths) + 2
        capacity = -(-max(self.ends) // case.page_size) + 1
        num_pages = num_rows * capacity + 1
        shape = (NUM_LAYERS, 2, num_pages, case.page_size, case.num_kv_heads, head_dim)
        self.state = RequestState(num_rows, capacity, case.page_size, 1, self.device, num_groups=2)
        pages = torch.randperm(num_pages - 1, generator=generator) + 1
        self.state.pages[GROUP, :num_rows] = pages.view(num_rows, capacity).to(self.device)
        self.rows = torch.randperm(num_rows, generator=generator)[: len(case.lengths)].to(self.device)
        num_queries = sum(case.query_lens) + (0 if case.num_decoding is None else UNUSED)
        fused = torch.randn(num_queries, case.num_heads + 2 * case.num_kv_heads, head_dim, generator=generator)
        self.qkv = fused.to(self.device, dtype).split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
        cache = torch.full(shape, STALE)
        committed = torch.cat([self.slots(request, 0, length) for request, length in enumerate(case.lengths)])
        kv = torch.randn(NUM_LAYERS, 2, len(committed), *shape[4:], generator=generator)
        cache.flatten(2, 3)[:, :, committed.cpu()] = kv
        self._give_pages_back(cache)
        self.cache = cache.to(self.device, dtype)
        self.ropes = [RotaryEmbedding(RopeConfig(10000.0), head_dim, max(self.ends)).to(self.device)] * NUM_LAYERS
        weights = 1 + 0.3 * torch.randn(2, head_dim, generator=generator)
        self.sinks = 2 * torch.randn(case.num_heads, generator=generator).to(self.device) if case.sinks else None
        rng = random.Random(5)
        reach = case.reach
        self.parents = [
            [-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, count))] for count in case.query_lens
        ]
        self.norms = HeadNorms(*weights.to(self.device, dtype), 1e-6)
        self.kv = NetworkKV((LayerCache(GROUP, self.cache),), ((0, 0), (0, 1)), (self.layer().spec,) * NUM_LAYERS)

    def metadata(self, spare: int = 9) -> AttentionMetadata:
        """`spare`: how far the host's bounds lie above the true lengths; a prompt's are exact."""
        case = self.case
        ancestors = self._ancestors()
        lengths = torch.tensor(case.lengths, device=self.device)
        positions = torch.cat([torch.arange(length, end) for length, end in zip(case.lengths, self.ends, strict=True)])
        positions = positions.to(self.device)
        if ancestors is not None:
            bits = ancestors[..., None] >> torch.arange(64, device=self.device) & 1
            positions = (lengths[:, None] + bits.sum(-1) - 1).flatten()
        spare = 0 if case.prompt else spare
        starts = None
        if case.starts is not None:
            starts = torch.zeros_like(self.state.lengths, dtype=torch.int64)
            starts[self.rows] = torch.tensor(case.starts, device=self.device)
        spans = zip(range(len(self.ends)), case.lengths, self.ends, strict=True)
        self.written = torch.cat([self.slots(*span) for span in spans])
        return AttentionMetadata(
            phase="prefill" if case.prompt else "verify",
            state=self.state,
            requests=self.rows,
            lengths=lengths,
            positions=positions,
            slots=KVSlots(lambda _: self.written),
            query_lens=case.query_lens,
            kv_bounds=tuple(end + spare for end in self.ends),
            ancestors=ancestors,
            read_starts=starts,
        )

    def ragged(self) -> AttentionMetadata:
        """Returns the metadata of a ragged pass, whose unused rows write to the dump page."""
        case = self.case
        device = self.device
        assert case.num_decoding is not None
        unused = torch.zeros(UNUSED, dtype=torch.int64, device=device)
        spans = list(zip(range(len(self.ends)), case.lengths, self.ends, strict=True))
        self.written = torch.cat([*(self.slots(*span) for span in spans), unused])
        lengths = torch.tensor(case.lengths, device=device)
        starts = [0, *itertools.accumulate(case.query_lens)]
        masks = [self._masks(request) for request in range(len(spans))]
        bits = torch.cat([*masks, torch.full((UNUSED,), -1)]).to(device)
        places = torch.cat([torch.arange(start, end) for _, start, end in spans])
        depths = torch.cat([mask.new_tensor([bin(x).count("1") - 1 for x in mask.tolist()]) for mask in masks])
        is_node = torch.arange(len(places)) < starts[case.num_decoding]
        starting = lengths.cpu().repeat_interleave(torch.tensor(case.query_lens))
        positions = torch.where(is_node & (case.mask == "tree"), starting + depths, places).to(device)
        first_rows = torch.tensor(starts, dtype=torch.int32, device=device)
        return AttentionMetadata(
            phase="verify",
            state=self.state,
            requests=self.rows,
            lengths=lengths,
            positions=torch.cat((positions, unused)),
            slots=KVSlots(lambda _: self.written),
            query_lens=(),
            kv_bounds=(),
            ancestors=bits if case.mask == "tree" else None,
            segments=Segments(first_rows, self.rows, lengths, case.num_decoding, 16),
        )

    def attend(self, backend: type[Backend], with_norms: bool = True) -> tuple[Tensor, Tensor]:
        """Output (T, Q, D) and the slots' new KV (2, T, G, D)."""
        attention = backend(self.kv, self.ropes)
        metadata = self.metadata()
        attention.plan(metadata)
        out = attention.attend(*self.qkv, self.layer(with_norms), self.case.mask)
        return out, self.cache[LAYER].flatten(1, 2)[:, self.written]

    def layer(self, with_norms: bool = False, id: int = LAYER) -> AttentionLayer:
        return asking_layer(
            self.case.num_heads,
            self.case.num_kv_heads,
            self.cache.shape[-1],
            id=id,
            window=self.case.window,
            norms=self.norms if with_norms else None,
            sinks=self.sinks,
            scale=self.case.scale,
            softcap=self.case.softcap,
        )

    def slots(self, request: int, start: int, end: int) -> Tensor:
        return self.state.slots(self.rows[request], torch.arange(start, end, device=self.device), GROUP)

    def _give_pages_back(self, cache: Tensor):
        """Fills the pages behind windows and starts with NaN, as another request may."""
        for request, length in enumerate(self.case.lengths):
            start = 0 if self.case.starts is None else self.case.starts[request]
            num_gone = max(start, length + 1 - (self.case.window or length + 1)) // self.case.page_size
            cache[:, :, self.state.pages[GROUP, self.rows[request], :num_gone].cpu()] = torch.nan

    def _masks(self, request: int) -> Tensor:
        """(n,) int64 of a request's queries in a ragged pass."""
        if self.case.mask_of(request) != "tree":
            return torch.full((self.case.query_lens[request],), -1)
        return ancestor_masks(torch.tensor([self.parents[request]], dtype=torch.int32))[0]

    def _ancestors(self) -> Tensor | None:
        if self.case.mask != "tree":
            return None
        return ancestor_masks(torch.tensor(self.parents, dtype=torch.int32, device=self.device))
