"""Logits processors against transformers' and loops over texts; the kernels against the reference."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from slipstream.kernels.sampling.filters import Filters, filter_thresholds_reference, filter_thresholds_triton
from slipstream.kernels.sampling.processors import (
    Processors,
    count_tokens,
    load_logits,
    process_logits,
    row_flags,
)
from slipstream.kernels.sampling.sample import Sampling, perturbed, perturbed_topk, sample
from slipstream.kernels.speculation.verify import ancestor_masks
from slipstream.tests.kernels.triton_runs import SLOW, each_device, keys_of, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating

PARENTS = {"chain": [-1, 0, 1, 2, 3], "tree": [-1, 0, 0, 1, 1]}


@dataclass(frozen=True)
class Request:
    """A request's parameters and texts."""

    prompt: list[int]
    answer: list[int]
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def flags(self) -> int:
        return ((self.repetition, self.frequency, self.presence) != (1, 0, 0)) + 2 * bool(self.bias)


ENTRIES = [
    Request([1, 2, 2, 7], [3, 3, 9]),  # nothing
    Request([1, 2, 2, 7], [3, 3, 9], repetition=1.3),
    Request([4], [4, 5, 5, 5, 6], frequency=0.7, presence=-0.4),
    Request([0, 9], [], bias=((0, -100.0), (8, 4.5), (29, 100.0))),
    Request([8, 8, 1], [8, 2], repetition=0.8, frequency=-1.5, presence=2.0, bias=((8, -3.0), (2, 1.0))),
]
REQUESTS = [4, 0, 2, 1, 3, 4]  # entries of the pass
COUNTS = [5, 2, 4, 1, 3, 2]  # nodes of each in a pass of trees or chains; rows of prompts, entries 2 and 1, follow


def rows_of(shape: str | None) -> list[tuple[int, int]]:
    """By row: entry, node."""
    if shape is None:
        return [(entry, 0) for entry in REQUESTS]
    nodes = [(entry, node) for entry, count in zip(REQUESTS, COUNTS, strict=True) for node in range(count)]
    return [*nodes, (2, 0), (1, 0)]


def processors_of(vocab: int, device: str, shape: str | None, masked: bool) -> Processors:
    """Entries that lack a processor hold garbage where its parameters would be."""
    generator = torch.Generator().manual_seed(vocab)
    counts = torch.randint(-(2**31), 2**31 - 1, (len(ENTRIES), vocab), dtype=torch.int32, generator=generator)
    bias = torch.full((len(ENTRIES), vocab), torch.nan)
    for entry, request in enumerate(ENTRIES):
        if request.flags & 1:
            counts[entry] = torch.tensor([2 * request.answer.count(t) + (t in request.prompt) for t in range(vocab)])
        if request.flags & 2:
            bias[entry] = torch.tensor([dict(request.bias).get(t, 0.0) for t in range(vocab)])
    pairs = rows_of(shape)
    nodes = torch.randint(10, (len(pairs) + 2,), generator=generator)  # a pass may have more rows than have logits
    parents = torch.tensor([PARENTS.get(shape or "chain")], dtype=torch.int32)
    paths = ancestor_masks(parents)[0][[node for _, node in pairs] + [0, 0]]
    masks = torch.randint(-(2**31), 2**31 - 1, (3, -(-vocab // 32)), dtype=torch.int32, generator=generator)
    mask_rows = torch.randint(-1, 3, (len(pairs),), dtype=torch.int32, generator=generator)
    tensors = Processors(
        torch.tensor([request.flags for request in ENTRIES], dtype=torch.int32),
        *torch.tensor(
            [(request.repetition, request.frequency, request.presence) for request in ENTRIES]
        ).T.contiguous(),
        counts,
        bias,
        None if shape is None else torch.tensor([node for _, node in pairs], dtype=torch.int32),
        None if shape is None else nodes,
        paths if shape == "tree" else None,
        masks if masked else None,
        mask_rows if masked else None,
    )
    return Processors(*(None if x is None else x.to(device) for x in tensors))


def texts_of(processors: Processors, shape: str | None) -> list[tuple[Request, list[int]]]:
    """By row: the request, and its answer with the row's path."""
    texts = []
    for row, (entry, node) in enumerate(rows_of(shape)):
        root = row - node
        path = []
        while node > 0:
            path.append(int(processors.nodes[root + node]))
            node = PARENTS[shape or "chain"][node]
        texts.append((ENTRIES[entry], ENTRIES[entry].answer + path))
    return texts


def oracle(logits: Tensor, processors: Processors, shape: str | None) -> Tensor:
    rows = []
    for row, (request, answer) in enumerate(texts_of(processors, shape)):
        x = logits[row : row + 1].float().cpu()
        text = torch.tensor([request.prompt + answer])
        if request.bias:
            x = SequenceBiasLogitsProcessor({(token,): bias for token, bias in request.bias})(text, x)
        if request.repetition != 1:
            x = RepetitionPenaltyLogitsProcessor(request.repetition)(text, x)
        times = np.bincount(answer, minlength=x.shape[1]).astype(np.float32)
        x = x.numpy()[0] - np.float32(request.frequency) * times - np.float32(request.presence) * (times > 0)
        if processors.mask_rows is not None and processors.mask_rows[row] >= 0:
            words = processors.masks[processors.mask_rows[row]].cpu().numpy()
            x[np.unpackbits(words.view(np.uint8), bitorder="little")[: len(x)] == 0] = -np.inf
        rows.append(torch.from_numpy(x))
    return torch.stack(rows)


def logits_of(processors: Processors, vocab: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = len(REQUESTS) if processors.row_nodes is None else len(processors.row_nodes)
    logits = torch.randn(rows, vocab + 8, generator=torch.Generator().manual_seed(vocab)) * 4
    return logits.to(device, dtype)[:, :vocab]


def sampling_of(processors: Processors, device: str, temperature: float, filters: bool) -> Sampling:
    E = len(ENTRIES)
    top_k = torch.tensor([5, 0, 0, 12, 0], device=device)
    top_p = torch.tensor([1.0, 0.8, 1.0, 0.9, 1.0], device=device)
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0], device=device)
    return Sampling(
        keys_of(range(E)).to(device),
        torch.full((E,), temperature, device=device),
        Filters(top_k, top_p, min_p) if filters else None,
        torch.tensor([entry for entry, _ in rows_of(None if processors.nodes is None else "tree")], device=device),
        processors=processors,
    )


@triton.jit
def store_processed(logits_ptr, rows_ptr, repeats, processors, out_ptr, stride, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    flags = row_flags(row, rows_ptr, repeats, processors)
    x = load_logits(logits_ptr + row * stride, columns, V, row, flags, rows_ptr, repeats, processors)
    tl.store(out_ptr + row * V + columns, x, mask=columns < V)


SCENES = list(product(["chain", "tree", None], [True, False]))


@grouped()
@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "masked"), SCENES)
def test_both_equal_transformers_and_loops(shape, masked, dtype, device):
    """Numbers of requests without a processor come through bit for bit."""
    for vocab in (30, 77):
        processors = processors_of(vocab, device, shape, masked)
        logits = logits_of(processors, vocab, device, dtype)
        sampling = sampling_of(processors, device, 1.0, filters=False)
        stored = torch.full(logits.shape, torch.nan, device=device)
        store_processed[(len(logits),)](
            logits,
            sampling.rows,
            sampling.repeats,
            processors.for_kernels(),
            stored,
            logits.stride(0),
            vocab,
            BLOCK=128,
        )
        expected = oracle(logits, processors, shape)
        reference = process_logits(logits, processors, sampling.entries())
        torch.testing.assert_close(reference.cpu(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(stored.cpu(), expected, rtol=1e-6, atol=1e-6)
        untouched = sampling.entries().cpu() == 0
        if not masked:
            assert torch.equal(stored.cpu()[untouched], logits.float().cpu()[untouched])


@grouped()
@each_device
@pytest.mark.parametrize(
    ("shape", "masked", "vocab"),
    rotating(["chain", "tree"], [True, False], [30, pytest.param(151_936, marks=pytest.mark.gpu)])
    + [pytest.param("tree", True, 5000, marks=SLOW), (None, True, 30)],
)
def test_tokens_are_those_of_processed_logits(shape, masked, vocab, device):
    """Greedy, plain and filtered: of the reference the very tokens, of the kernels as good ones."""
    processors = processors_of(vocab, device, shape, masked)
    logits = logits_of(processors, vocab, device)
    positions = torch.arange(len(logits), device=device) * 7
    for temperature, filters in ((0.0, True), (0.7, False), (0.7, True)):
        sampling = sampling_of(processors, device, temperature, filters)
        processed = process_logits(logits, processors, sampling.entries())
        bare = sampling.by_row()
        expected = sample.reference(processed, positions, bare)
        assert torch.equal(sample.reference(logits, positions, sampling), expected)
        with poisoned():
            tokens = sample.triton(logits, positions, sampling)
        scores = perturbed(processed, positions, bare)
        assert (scores.gather(1, expected[:, None]) - scores.gather(1, tokens[:, None]) < 2e-5).all()
    with poisoned():
        values, _ = perturbed_topk.triton(logits, 3, positions, sampling)
    torch.testing.assert_close(values, perturbed_topk(processed, 3, positions, bare)[0], atol=1e-4, rtol=0)


@each_device
@pytest.mark.parametrize("vocab", [40, pytest.param(5000, marks=SLOW), pytest.param(151_936, marks=pytest.mark.gpu)])
def test_thresholds_are_those_of_processed_logits(vocab, device):
    """Also where a row has so many equal logits that the whole of it is searched."""
    processors = processors_of(vocab, device, "tree", masked=True)
    logits = logits_of(processors, vocab, device).round()
    sampling = sampling_of(processors, device, 0.5, filters=True)
    entries = sampling.entries()
    processed = process_logits(logits, processors, entries)
    assert sampling.filters is not None
    assert sampling.temperature is not None
    with poisoned():
        thresholds = filter_thresholds_triton(
            logits, sampling.temperature, sampling.filters, sampling.rows, sampling.repeats, processors
        )
    expected = filter_thresholds_reference(processed / 0.5, sampling.filters.select(entries))
    assert torch.equal(processed >= thresholds[:, None], processed / 0.5 >= expected[:, None])


@each_device
@pytest.mark.parametrize("run", [sample.reference, sample.triton])
def test_rows_that_cannot_be_sampled(run, device):
    """NaN of either sign anywhere, or nothing but -inf, gives -1, and other rows their tokens."""
    vocab = 5000
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0))
    logits[1, 17] = torch.nan
    logits[3, 4999] = -torch.nan
    logits[4] = torch.nan
    logits[6] = -torch.inf
    logits[2, :-1] = -torch.inf
    logits[5, 9] = torch.inf
    failed = torch.tensor([False, True, False, True, True, False, True, False])
    logits = logits.to(device)
    positions = torch.arange(8, device=device)
    filters = Filters(*(torch.full((8,), value, device=device) for value in (20, 0.9, 0.0)))
    warm = torch.ones(8, device=device)
    for temperature, cut in ((None, None), (0 * warm, filters), (warm, None), (warm, filters)):
        sampling = Sampling(keys_of(range(8)).to(device), temperature, cut)
        tokens = run(logits, positions, sampling).cpu()
        assert torch.equal(tokens < 0, failed)
        assert tokens[failed].eq(-1).all()
        assert tokens[[2, 5]].tolist() == [vocab - 1, 9]
        alone = [run(logits[row : row + 1], positions[row : row + 1], of_row(sampling, row)) for row in (0, 7)]
        assert tokens[[0, 7]].tolist() == [int(token) for token in alone]


def of_row(sampling: Sampling, row: int) -> Sampling:
    if sampling.temperature is None:
        return sampling
    return Sampling(
        sampling.keys, sampling.temperature, sampling.filters, torch.tensor([row], device=sampling.keys.device)
    )


@each_device
@pytest.mark.parametrize("run", [sample.reference, sample.triton])
def test_a_mask_that_forbids_every_token(run, device):
    """Every bit counts, the sign of a word, too."""
    vocab = 70
    processors = processors_of(vocab, device, None, masked=False)
    allowed = [None, 0, 31, 32, 69, 63]
    masks = torch.zeros(6, 3, dtype=torch.int64)
    for row, token in enumerate(allowed):
        masks[row, (token or 0) // 32] = 0 if token is None else 1 << token % 32
    masks = (masks - ((masks >> 31) << 32)).int().to(device)
    rows = torch.arange(6, dtype=torch.int32, device=device)
    processors = processors._replace(flags=processors.flags * 0, masks=masks, mask_rows=rows)
    sampling = sampling_of(processors, device, 1.0, filters=True)
    logits = logits_of(processors, vocab, device)
    tokens = run(logits, torch.arange(6, device=device), sampling)
    assert tokens.tolist() == [-1 if token is None else token for token in allowed]


@each_device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 6])
def test_counting_equals_a_loop(width, dtype, device):
    """A token may come twice in a round, and requests without penalties are not written."""
    generator = torch.Generator().manual_seed(width)
    flags = torch.tensor([0, 1, 2, 3, 0], dtype=torch.int32, device=device)
    requests = torch.tensor([3, 0, 1, 2, 4, 4], device=device)
    tokens = torch.randint(-1, 3, (6, width), dtype=dtype, generator=generator).to(device)
    before = torch.randint(9, (5, 7), dtype=torch.int32, generator=generator)
    expected = before.clone()
    for request, row in zip(requests.tolist(), tokens.tolist(), strict=True):
        for token in row:
            expected[request, token] += 2 * (token >= 0 and request in (1, 3))
    for run in (count_tokens.reference, count_tokens.triton):
        counts = before.to(device, copy=True)
        run(counts, flags, requests, tokens)
        assert torch.equal(counts.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "masked"), SCENES)
def test_a_graph_replays_processed_samples(shape, masked):
    """Parameters that change between capture and replay are read anew."""
    vocab = 128_256
    processors = processors_of(vocab, "cuda", shape, masked)
    sampling = sampling_of(processors, "cuda", 0.7, filters=True)
    logits = logits_of(processors, vocab, "cuda")
    positions = torch.arange(len(logits), device="cuda")
    expected = sample.triton(logits, positions, sampling)
    assert torch.equal(replayed(lambda: sample.triton(logits, positions, sampling)), expected)
