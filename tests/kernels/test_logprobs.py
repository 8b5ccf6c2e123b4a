"""Log-probabilities of emitted tokens against log_softmax in fp64, row by row."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.sampling.filters import Filters, filter_logits
from slipstream.kernels.sampling.logprobs import COLUMNS, MOST_LOGPROBS, Emitted, emitted_logprobs, token_logprobs
from slipstream.kernels.sampling.processors import BIAS, Processors, process_logits
from slipstream.kernels.sampling.sample import TILE, Sampling
from slipstream.tests.kernels.triton_runs import each_device, keys_of, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating

RUNS = [emitted_logprobs.reference, emitted_logprobs.triton]
UNWRITTEN = -12345
SLOTS = [2, 0, 3, 5, 1, 4, 5]  # of each segment, the last two of them chunks of prompts; slot 5 is padding
COUNTS = [4, 1, 3, 0, 2]  # rows of each request
NODES = [[0, 1, 3, -1], [0, -1, -1, -1], [0, 2, -1, -1], [-1] * 4, [0, 1, -1, -1]]  # of its tokens
LENGTHS = [3, 1, 2, 0, 2, 1, 0]
WANTED = [5, MOST_LOGPROBS, -1, 0, 3, -1]  # by slot
ROWS = sum(COUNTS) + 2


def emitted_of(vocab: int, device: str) -> Emitted:
    generator = torch.Generator().manual_seed(vocab)
    tokens = torch.randint(vocab, (len(SLOTS), 4), generator=generator)
    starts = torch.tensor([0, *COUNTS, 1, 1]).cumsum(0)
    narrow = [x.int().to(device) for x in (starts, torch.tensor(NODES), tokens, torch.tensor(LENGTHS))]
    return Emitted(*narrow, torch.tensor(SLOTS, device=device))


def logits_of(vocab: int, device: str, dtype: torch.dtype) -> Tensor:
    logits = torch.randn(ROWS, vocab + 8, generator=torch.Generator().manual_seed(1)) * 4
    return logits.to(device, dtype)[:, :vocab]


def check(out: Tensor, logits: Tensor, emitted: Emitted):
    """`logits` (H, V): the distribution's."""
    expected = logits.double().log_softmax(dim=1)
    for segment, slot in enumerate(SLOTS):
        k = WANTED[slot]
        for index in range(LENGTHS[segment] if k >= 0 else 0):
            first = sum(COUNTS[:segment]) if segment < len(COUNTS) else sum(COUNTS) + segment - len(COUNTS)
            row = expected[first + (NODES[segment][index] if segment < len(COUNTS) else 0)]
            token = int(emitted.tokens[segment, index])
            column = out[: 2 + 2 * k, segment, index]
            values = column[2::2].view(torch.float32).double()
            ids = column[3::2].long()
            torch.testing.assert_close(column[:1].view(torch.float32).double(), row[[token]], atol=2e-5, rtol=1e-5)
            assert int(column[1]) == 1 + int((row > row[token]).sum())
            torch.testing.assert_close(values, row.sort(descending=True).values[:k], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(values, row[ids], atol=2e-5, rtol=1e-5)
            assert len(set(ids.tolist())) == k
    assert (out[:, [0, 3, 6]] == UNWRITTEN).all(), "nobody wants those"


SHAPES = [30, 2 * TILE + 7, pytest.param(151_936, marks=pytest.mark.gpu)]


@grouped()
@each_device
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("vocab", "dtype"), rotating(SHAPES, [torch.float32, torch.bfloat16]))
@torch.inference_mode()
def test_the_formula(vocab, dtype, run, device):
    logits = logits_of(vocab, device, dtype)
    emitted = emitted_of(vocab, device)
    out = torch.full((COLUMNS, len(SLOTS), 4), UNWRITTEN, dtype=torch.int32, device=device)
    with poisoned():
        run(logits, emitted, torch.tensor(WANTED, dtype=torch.int32, device=device), None, out)
    check(out, logits, emitted)


@each_device
@pytest.mark.parametrize("run", RUNS)
@torch.inference_mode()
def test_of_the_distribution_that_is_sampled_from(run, device):
    """Bias, filters, temperature; a greedy row has its bias alone."""
    vocab = 50
    E = len(WANTED)
    logits = logits_of(vocab, device, torch.float32)
    emitted = emitted_of(vocab, device)
    zeros = torch.zeros(E, device=device)
    bias = torch.randn(E, vocab, generator=torch.Generator().manual_seed(2)).to(device)
    flags = torch.tensor([BIAS.value, 0] * 3, dtype=torch.int32, device=device)
    counts = torch.zeros(E, vocab, dtype=torch.int32, device=device)
    processors = Processors(flags, zeros + 1, zeros, zeros, counts, bias)
    owners = [slot for slot, count in zip(SLOTS, [*COUNTS, 1, 1], strict=True) for _ in range(count)]
    rows = torch.tensor(owners, device=device)
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.3, 0.5, 0.0], device=device)
    filters = Filters(torch.full((E,), 30, device=device), zeros + 1, zeros)
    sampling = Sampling(keys_of(range(E), device), temperature, filters, rows, processors=processors)
    out = torch.full((COLUMNS, len(SLOTS), 4), UNWRITTEN, dtype=torch.int32, device=device)
    with poisoned():
        run(logits, emitted, torch.tensor(WANTED, dtype=torch.int32, device=device), sampling, out)
    warm = torch.where(temperature > 0, temperature, 1.0)[rows, None]
    scaled = process_logits(logits, processors, rows) / warm
    cut = torch.where(temperature[rows, None] > 0, filter_logits(scaled, filters.select(rows)), scaled)
    check(out, cut, emitted)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [4096, 151_936])
@torch.inference_mode()
def test_a_replay_gives_the_same(vocab):
    logits = logits_of(vocab, "cuda", torch.bfloat16)
    emitted = emitted_of(vocab, "cuda")
    counts = torch.tensor(WANTED, dtype=torch.int32, device="cuda")

    def run():
        out = torch.full((COLUMNS, len(SLOTS), 4), UNWRITTEN, dtype=torch.int32, device="cuda")
        emitted_logprobs.triton(logits, emitted, counts, None, out)
        return out

    check(replayed(run), logits, emitted)


def test_no_likeliest_tokens():
    logits = torch.tensor([[0.0, 1.0, 1.0]])
    tokens = torch.tensor([2])
    packed = token_logprobs(logits, tokens, 0)
    assert packed.shape == (2, 1)
    assert packed[1].tolist() == [1], "as likely is not likelier"
    assert float(packed[0].view(torch.float32)) == pytest.approx(float(logits.log_softmax(1)[0, 2]))
