"""Attention of training-time test: both implementations against loops over rows, heads and keys."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import packed as module
from slipstream.kernels.attention.packed import Runs
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import RopeConfig
from slipstream.tests.attention_layers import asking_layer
from slipstream.tests.naive_eagle3 import attended, turned
from slipstream.tests.train.conftest import random_document
from slipstream.train.batches import Batch, collate, moved
from slipstream.train.ttt import Rows, TTTAttention, find_rows

HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
MAX_LENGTH = 64
NUM_STEPS = 4
ONE_ASKING_ROW = [7] * 5, [False, False, True, True, False]
TWO_ANSWERS = [8] * 12, [False, True, True, True, False, False, True, True, True, True, False, False]


def packed(num_rows: int) -> Batch:
    """Rows of one to three documents, one with a single asking row and one with two answers; padding after them."""
    generator = torch.Generator().manual_seed(num_rows)
    special = [ONE_ASKING_ROW, TWO_ANSWERS]
    rows = [[random_document(generator) for _ in range(1 + row % 3)] + special for row in range(num_rows)]
    return collate(rows, MAX_LENGTH)


@dataclass(frozen=True, slots=True)
class Inputs:
    context: tuple[Tensor, Tensor]  # k, v (C, G, D)
    steps: list[tuple[Tensor, Tensor, Tensor]]  # q (N, Q, D), k and v (N, G, D) of each step
    towards: list[Tensor]  # (N, Q, D): the gradients of the outputs

    @classmethod
    def random(cls, rows: Rows, num_steps: int, dtype: torch.dtype, device: str = "cpu") -> "Inputs":
        """Values that bf16 holds: the same in every dtype, q's spread wide enough for uneven weights."""
        generator = torch.Generator().manual_seed(0)

        def random(count, heads, scale=1.0):
            values = scale * torch.randn(count, heads, HEAD_DIM, generator=generator)
            return values.bfloat16().to(device, dtype).requires_grad_()

        num_asking = len(rows.asking)
        num_context = len(rows.context)
        shapes = (HEADS, 2.0), (KV_HEADS, 1.0), (KV_HEADS, 1.0)
        return cls(
            context=(random(num_context, KV_HEADS), random(num_context, KV_HEADS)),
            steps=[tuple(random(num_asking, *shape) for shape in shapes) for _ in range(num_steps)],
            towards=[random(num_asking, HEADS).detach() for _ in range(num_steps)],
        )

    def results(self, outputs: list[Tensor]) -> list[Tensor]:
        """Outputs of all steps, then the gradients of every input."""
        total = sum((output * towards).sum() for output, towards in zip(outputs, self.towards, strict=True))
        leaves = [*self.context, *(x for step in self.steps for x in step)]
        assert isinstance(total, Tensor)
        return [*outputs, *torch.autograd.grad(total, leaves)]


def run(is_packed: bool, batch: Batch, num_steps: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    rows = find_rows(batch, num_steps)
    inputs = Inputs.random(rows, num_steps, dtype, device)
    rope = RotaryEmbedding(RopeConfig(), HEAD_DIM, MAX_LENGTH + num_steps).to(torch.device(device))
    attention = TTTAttention(moved(rows, torch.device(device)), rope, is_packed=is_packed)
    outputs = []
    attention.write(*inputs.context, asking_layer())
    for step in inputs.steps:
        outputs.append(attention.attend(*step, asking_layer(), "causal"))
        attention.next_step()
    return inputs.results(outputs)


def run_naive(batch: Batch, num_steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Row by row: the step-0 keys of its document up to its own, and its own key of every later step."""
    rows = find_rows(batch, num_steps)
    theta = RopeConfig().theta
    inputs = Inputs.random(rows, num_steps, dtype)
    documents = batch.documents.flatten().tolist()
    positions = batch.positions.flatten().tolist()
    stored = {}
    for k, v, numbers in ((*inputs.context, rows.context), (*inputs.steps[0][1:], rows.asking)):
        for index, row in enumerate(numbers.tolist()):
            stored[row] = turned(k[[index]], theta, positions[row])[0], v[index]
    outputs = []
    for step, (q, _, _) in enumerate(inputs.steps):
        attended_rows = []
        for n, row in enumerate(rows.asking.tolist()):
            key_values = [stored[other] for other in stored if documents[other] == documents[row] and other <= row]
            for i in range(1, step + 1):
                _, k, v = inputs.steps[i]
                key_values.append((turned(k[[n]], theta, positions[row] + i)[0], v[n]))
            keys, values = (torch.stack(rows).to(q.dtype) for rows in zip(*key_values, strict=True))
            query = turned(q[[n]], theta, positions[row] + step).to(q.dtype)
            attended_rows.append(attended(query, keys, values, torch.zeros(1, len(keys), dtype=torch.bool))[0])
        outputs.append(torch.stack(attended_rows))
    return inputs.results(outputs)


def assert_equal(outputs: list[Tensor], expected: list[Tensor], tolerance: float):
    assert len(outputs) == len(expected)
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.cpu().to(reference.dtype), reference, rtol=tolerance, atol=tolerance)
        assert float(reference.detach().abs().max()) > 0.1


def test_the_batch_holds_what_it_should():
    batch = packed(3)
    rows = find_rows(batch, NUM_STEPS)
    assert 1 in rows.num_asking
    assert max(rows.num_asking) > NUM_STEPS
    assert len(rows.context) > 0
    assert bool((batch.documents < 0).any())


def plain(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """FlashAttention's output and log-sum-exp for `runs`: (N, Q, D) and (Q, N), causal from the last key backwards."""
    outputs = []
    sums = []
    keys_and_values = (x.split(runs.key_ends.diff().tolist()) for x in (k, v))
    pairs = zip(q.split(runs.row_ends.diff().tolist()), *keys_and_values, strict=True)
    for rows, keys, values in pairs:
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        scores = torch.einsum("nqd,kqd->qnk", rows, keys) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
        outputs.append(torch.einsum("qnk,kqd->nqd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, dim=1)


def plain_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, runs: Runs
) -> tuple[Tensor, ...]:
    """FlashAttention's gradients: weights from any `lse`, and dS = P (dP - rowsum(dO O)) for any O."""
    gradients = []
    pairs = zip(
        *(x.split(runs.row_ends.diff().tolist()) for x in (upstream, q, output, lse.t())),
        *(x.split(runs.key_ends.diff().tolist()) for x in (k, v)),
        strict=True,
    )
    for upstream_rows, rows, output_rows, total, keys, values in pairs:
        repeated = [x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values)]
        scores = torch.einsum("nqd,kqd->qnk", rows, repeated[0]) * q.shape[-1] ** -0.5
        weights = (scores - total.t().unsqueeze(-1)).exp().tril(scores.shape[2] - scores.shape[1])
        from_output = (upstream_rows * output_rows).sum(-1).t().unsqueeze(-1)
        score_grad = (
            weights * (torch.einsum("nqd,kqd->qnk", upstream_rows, repeated[1]) - from_output) * q.shape[-1] ** -0.5
        )
        by_head = torch.einsum("qnk,nqd->kqd", score_grad, rows), torch.einsum("qnk,nqd->kqd", weights, upstream_rows)
        key_value_grads = [x.unflatten(1, (k.shape[1], -1)).sum(2) for x in by_head]
        gradients.append((torch.einsum("qnk,kqd->nqd", score_grad, repeated[0]), *key_value_grads))
    return tuple(torch.cat(parts) for parts in zip(*gradients, strict=True))


@pytest.fixture
def plain_flash(monkeypatch):
    """FlashAttention, which only GPUs have, by its formulas, for any dtype."""
    monkeypatch.setattr(module, "flash_forward", plain)
    monkeypatch.setattr(module, "flash_backward", plain_backward)
    monkeypatch.setattr(module, "DTYPES", (torch.float32, torch.float64))


@pytest.mark.usefixtures("plain_flash")
def test_both_equal_the_loops():
    """Outputs and gradients."""
    batch = packed(3)
    expected = run_naive(batch, NUM_STEPS, torch.float64)
    for is_packed in (False, True):
        for dtype, tolerance in ((torch.float64, 2e-6), (torch.float32, 2e-5)):
            assert_equal(run(is_packed, batch, NUM_STEPS, dtype), expected, tolerance)


@pytest.mark.usefixtures("plain_flash")
def test_documents_of_one_answer_share_their_keys():
    """Then nothing is copied: the runs' keys, one after another, are all keys."""
    batch = collate([[([3] * 20, [False] * 5 + [True] * 15)] * 3] * 2, MAX_LENGTH)
    rows = find_rows(batch, NUM_STEPS)
    assert Runs.of(rows.runs, len(rows.keys), rows.keys.device).keys is None
    assert_equal(run(True, batch, NUM_STEPS, torch.float64), run_naive(batch, NUM_STEPS, torch.float64), 2e-6)


@pytest.mark.usefixtures("plain_flash")
@pytest.mark.parametrize("is_packed", [False, True])
def test_queries_and_keys_take_the_dtype_of_values(is_packed, monkeypatch):
    """As those of a network without autocast may differ."""
    monkeypatch.setattr(module, "DTYPES", (torch.bfloat16,))
    rows = find_rows(packed(3), 2)
    rope = RotaryEmbedding(RopeConfig(), HEAD_DIM, 128)
    inputs = Inputs.random(rows, 2, torch.float32)
    attention = TTTAttention(rows, rope, is_packed=is_packed)
    with torch.no_grad():
        attention.write(inputs.context[0], inputs.context[1].bfloat16(), asking_layer())
        for q, k, v in inputs.steps:
            assert attention.attend(q, k, v.bfloat16(), asking_layer(), "causal").dtype == torch.bfloat16
            attention.next_step()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_attention_equals_documents(dtype):
    """Batches of other sizes and numbers of steps one after the other."""
    for num_rows, num_steps in ((20, 4), (30, 4), (26, 7), (2, 2)):
        batch = packed(num_rows)
        expected = run(False, batch, num_steps, torch.float32)
        assert_equal(run(True, batch, num_steps, dtype, "cuda"), expected, 0.1)


@pytest.mark.gpu
def test_fp32_goes_document_by_document():
    batch = packed(5)
    expected = run(False, batch, NUM_STEPS, torch.float32)
    assert_equal(run(True, batch, NUM_STEPS, torch.float32, "cuda"), expected, 1e-3)
