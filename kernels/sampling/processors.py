"""Logits processors: what a request asks for changes the target's logits x before temperature, filters and noise.

In the order of vLLM (vllm/v1/sample/sampler.py) and transformers (generation/utils.py, _get_logits_processor):

  1. logit bias          x + bias[token]
  2. repetition penalty  x / r, x * r where x < 0, for tokens of prompt or answer (CTRL, arXiv 1909.05858)
  3. frequency penalty   x - f * times in the answer (OpenAI's definition, as the next)
  4. presence penalty    x - p for tokens of the answer
  5. grammar mask        -inf for tokens that it forbids

They compute in fp32 on top of logits of any type. Kernels process what they load (`load_logits`), so nothing as wide as
the vocabulary is written, and a row without processors costs one branch. A node of a draft tree counts the tokens of
its own path, too: its own and its ancestors' below the root, whose token is in the counts since it was emitted.
Letters: R rows of logits, V their vocabulary, E entries of parameters, B requests, N tokens of each, M masks.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.grid_sync import MAX_ROWS
from slipstream.kernels.launch import Op, pdl_options, wait_for_inputs

# Bits of an entry's flags; a kernel adds the last one for a row that has a mask.
PENALTIES = tl.constexpr(1)
BIAS = tl.constexpr(2)
MASK = tl.constexpr(4)


class Processors(NamedTuple):
    """Parameters by entry, and what belongs to one pass. All tensors are contiguous."""

    flags: Tensor  # (E,) int32 which processors an entry has; without its bit nothing of one is read
    repetition: Tensor  # (E,) fp32, 1 = off
    frequency: Tensor  # (E,) fp32, 0 = off
    presence: Tensor  # (E,) fp32, 0 = off
    counts: Tensor  # (E, V) int32: twice the times that the token is in the answer, plus 1 if it is in the prompt
    bias: Tensor  # (E, V) fp32
    # A request's nodes are neighbouring rows, root first, any number of them. None: no row has any.
    row_nodes: Tensor | None = None  # (R,) int32 index of each row among its request's nodes; 0 of rows of prompts
    nodes: Tensor | None = None  # (R or more,) int64 tokens, by row
    ancestors: Tensor | None = None  # (R or more,) int64 bit masks (kernels/speculation/verify.py); None: chains
    masks: Tensor | None = None  # (M, ceil(V / 32)) int32: bit i % 32 of word i // 32 allows token i, as in xgrammar
    mask_rows: Tensor | None = None  # (R,) int32 which mask a row has, -1: none

    def check(self, logits: Tensor) -> None:
        """Asserts that they fit logits (R, V)."""
        num_rows, vocab_size = logits.shape
        assert self.counts.shape[1] == self.bias.shape[1] == vocab_size
        assert (self.nodes is None) == (self.row_nodes is None)
        assert self.row_nodes is None or len(self.row_nodes) == num_rows
        assert self.ancestors is None or self.nodes is not None
        assert self.masks is None or self.masks.shape[1] == -(-vocab_size // 32)
        assert (self.mask_rows is None) == (self.masks is None)
        assert self.mask_rows is None or len(self.mask_rows) == num_rows
        assert all(x is None or x.is_contiguous() for x in self)

    def for_kernels(self) -> "Processors":
        """The same without None, so that there is one kernel for every kind of pass: without nodes every row is a root,
        a row whose ancestors are all nodes before it is a chain's, and no row has a mask. Nothing is read of
        the others."""
        zero = _filled(0, self.flags.device)
        minus_one = _filled(-1, self.flags.device)
        return self._replace(
            row_nodes=zero.view(torch.int32) if self.row_nodes is None else self.row_nodes,
            nodes=zero if self.nodes is None else self.nodes,
            ancestors=minus_one if self.ancestors is None else self.ancestors,
            masks=self.flags if self.masks is None else self.masks,
            mask_rows=minus_one.view(torch.int32) if self.mask_rows is None else self.mask_rows,
        )


@functools.cache
def _filled(value: int, device: torch.device) -> Tensor:
    """(MAX_ROWS,) int64."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capture"
    return torch.full((MAX_ROWS,), value, dtype=torch.int64, device=device)


def process_logits(logits: Tensor, processors: Processors, entries: Tensor) -> Tensor:
    """The processed logits (R, V) fp32 of logits (R, V), whose row r has the parameters of entries[r] (R,)."""
    processors.check(logits)
    flags = processors.flags[entries]
    if processors.masks is None and not flags.any():
        return logits.float()
    logits = logits.to(torch.float32, copy=True)
    biased = (flags & BIAS.value > 0).nonzero().flatten()
    logits[biased] += processors.bias[entries[biased]]
    rows = (flags & PENALTIES.value > 0).nonzero().flatten()
    logits[rows] = _penalised(logits[rows], processors, entries[rows], _counts_at(processors, entries[rows], rows))
    if processors.masks is not None and processors.mask_rows is not None:
        rows = (processors.mask_rows >= 0).nonzero().flatten()
        words = processors.masks[processors.mask_rows[rows]]
        ids = torch.arange(logits.shape[1], device=logits.device)
        logits[rows] = logits[rows].masked_fill(words[:, ids // 32] >> ids % 32 & 1 == 0, -torch.inf)
    return logits


def _counts_at(processors: Processors, entries: Tensor, rows: Tensor) -> Tensor:
    """Processors.counts (n, V) of some rows, with the tokens of their paths."""
    counts = processors.counts[entries]
    nodes = processors.nodes
    ancestors = processors.ancestors
    if nodes is None or processors.row_nodes is None or len(rows) == 0:
        return counts
    depth = processors.row_nodes[rows][:, None]  # (n, 1)
    other = torch.arange(1, int(depth.max()) + 1, device=rows.device)  # not the root
    on_path = other <= depth
    if ancestors is not None:
        on_path &= (ancestors[rows, None] >> other & 1).bool()
    tokens = nodes[torch.where(on_path, rows[:, None] - depth + other, 0)]
    return counts.scatter_add(1, tokens.long().clamp(min=0), 2 * on_path.int())


def _penalised(logits: Tensor, processors: Processors, entries: Tensor, counts: Tensor) -> Tensor:
    parameters = processors.repetition, processors.frequency, processors.presence
    repetition, frequency, presence = (parameter[entries, None] for parameter in parameters)
    divided = torch.where(logits < 0, logits * repetition, logits / repetition)
    times = counts >> 1
    return torch.where(counts > 0, divided, logits) - frequency * times - presence * (times > 0)


def register_limit(logits: Tensor, processors: Processors | None, max_registers: int) -> dict[str, Any]:
    """Launch keywords that leave as many programs on a multiprocessor as without processors. Code that lacks registers
    then spills, in the branch that rows without processors skip."""
    is_nvidia = logits.is_cuda and torch.version.hip is None
    return {"maxnreg": max_registers} if processors is not None and is_nvidia else {}


@Op
def count_tokens(counts: Tensor, flags: Tensor, requests: Tensor, tokens: Tensor) -> None:
    """Adds tokens (B, N), any integer type, -1 where there is none, to the answers of slots `requests` (B,) int64 in
    Processors.counts (E, V), for the requests that have penalties."""
    counted = (flags[requests] & PENALTIES.value > 0)[:, None] & (tokens >= 0)
    places = requests[:, None].expand_as(tokens), tokens.clamp(min=0).long()
    counts.index_put_(places, 2 * counted.int(), accumulate=True)


@count_tokens.kernel()
def count_tokens_triton(counts: Tensor, flags: Tensor, requests: Tensor, tokens: Tensor) -> None:
    (B, N), V = tokens.shape, counts.shape[1]
    assert counts.is_contiguous()
    assert tokens.is_contiguous()
    if B:
        _count_tokens[(B,)](
            counts, flags, requests, tokens, N, V,
            BLOCK=triton.next_power_of_2(N), num_warps=1, **pdl_options(counts.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def _count_tokens(
    counts_ptr, flags_ptr, requests_ptr, tokens_ptr, N, V, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    entry = tl.load(requests_ptr + request)
    if (tl.load(flags_ptr + entry) & PENALTIES) != 0:
        token = tl.load(tokens_ptr + request * N + node, mask=node < N, other=-1)
        address = counts_ptr + entry * V + token
        tl.atomic_add(address, tl.full((BLOCK,), 2, tl.int32), mask=token >= 0, sem="relaxed")  # a token may recur


@triton.jit
def parameter_entry(row, rows_ptr, repeats):
    """The entry of a row's parameters, see Sampling."""
    entry = row // repeats
    return entry if rows_ptr is None else tl.load(rows_ptr + entry)


@triton.jit
def row_flags(row, rows_ptr, repeats, processors):
    """Which processors a row has."""
    flags = 0
    if processors is not None:
        flags = tl.load(processors.flags + parameter_entry(row, rows_ptr, repeats))
        flags |= tl.where(tl.load(processors.mask_rows + row) >= 0, MASK, 0)
    return flags


@triton.jit
def load_logits(row_ptr, columns, V, row, flags, rows_ptr, repeats, processors):
    """Processed logits, fp32, of some columns of a row, whose logits begin at row_ptr; -inf beyond the last column."""
    x = tl.load(row_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    if processors is not None:  # noqa: SIM102  decided when the kernel is compiled, unlike the next
        if flags != 0:
            x = _process(x, columns, V, row, flags, rows_ptr, repeats, processors)
    return x


@triton.jit
def _process(x, columns, V, row, flags, rows_ptr, repeats, processors):
    """process_logits. Every kernel gets the same bits, or a threshold found by one would cut its own logit in another:
    so the product with a sum is one explicit fma, and the division is rounded correctly."""
    inside = columns < V
    entry = parameter_entry(row, rows_ptr, repeats).to(tl.int64)
    if (flags & BIAS) != 0:
        x += tl.load(processors.bias + entry * V + columns, mask=inside, other=0.0)
    if (flags & PENALTIES) != 0:
        counts = tl.load(processors.counts + entry * V + columns, mask=inside, other=0)
        node = tl.load(processors.row_nodes + row)
        for other in range(1, node + 1):  # ancestors' ids are below a node's own
            token = tl.load(processors.nodes + row - node + other)
            is_on_path = (tl.load(processors.ancestors + row) >> other) & 1
            counts += tl.where(columns == token, 2 * is_on_path.to(tl.int32), 0)
        repetition = tl.load(processors.repetition + entry)
        divided = tl.where(x < 0, x * repetition, tl.math.div_rn(x, repetition + tl.zeros_like(x)))
        x = tl.where(counts > 0, divided, x)
        frequency = tl.load(processors.frequency + entry) + tl.zeros_like(x)
        x = tl.fma(-frequency, (counts >> 1).to(tl.float32), x)
        x = tl.where(counts > 1, x - tl.load(processors.presence + entry), x)
    if (flags & MASK) != 0:
        words = processors.masks + tl.load(processors.mask_rows + row).to(tl.int64) * ((V + 31) // 32)
        word = tl.load(words + columns // 32, mask=inside, other=0)
        x = tl.where(((word >> (columns % 32)) & 1) != 0, x, float("-inf"))
    return x
