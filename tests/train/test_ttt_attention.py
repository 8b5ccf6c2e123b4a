"""Attention of training-time test: both implementations against loops over rows, heads and keys."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

from slipstream.models.config import RopeConfig
from slipstream.models.layers import RotaryEmbedding
from slipstream.tests.train.conftest import random_document
from slipstream.tests.train.naive_draft import attended, turned
from slipstream.train.batches import Batch, collate
from slipstream.train.ttt import Rows, find_rows
from slipstream.train.ttt_attention import DocumentTTTAttention, FlexTTTAttention, TTTAttention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
MAX_LENGTH, NUM_STEPS = 64, 4
ONE_ASKING_ROW = [7] * 5, [False, False, True, True, False]


def packed(num_rows: int) -> Batch:
    """Rows of one to three documents and one with a single asking row; padding behind them."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = [[random_document(generator) for _ in range(1 + row % 3)] + [ONE_ASKING_ROW] for row in range(num_rows)]
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

        def random(count: int, heads: int, scale: float = 1.0) -> Tensor:
            values = scale * torch.randn(count, heads, HEAD_DIM, generator=generator)
            return values.bfloat16().to(device, dtype).requires_grad_()

        num_asking, num_context = len(rows.asking), len(rows.context)
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


def run(
    kind: type[TTTAttention], batch: Batch, num_steps: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    rows = find_rows(batch, num_steps)
    inputs = Inputs.random(rows, num_steps, dtype, device)
    rope = RotaryEmbedding(RopeConfig(), HEAD_DIM, MAX_LENGTH + num_steps).to(torch.device(device))
    attention, outputs = kind(rows.to(torch.device(device)), rope), []
    attention.write(*inputs.context, layer=0)
    for step in inputs.steps:
        outputs.append(attention.attend(*step, layer=0, mask="causal"))
        attention.next_step()
    return inputs.results(outputs)


def run_naive(batch: Batch, num_steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Row by row: the step-0 keys of its document up to its own, and its own key of every later step."""
    rows, theta = find_rows(batch, num_steps), RopeConfig().theta
    inputs = Inputs.random(rows, num_steps, dtype)
    documents, positions = batch.documents.flatten().tolist(), batch.positions.flatten().tolist()
    stored: dict[int, tuple[Tensor, Tensor]] = {}
    for k, v, numbers in ((*inputs.context, rows.context), (*inputs.steps[0][1:], rows.asking)):
        for index, row in enumerate(numbers.tolist()):
            stored[row] = turned(k[index], positions[row], theta), v[index]
    outputs = []
    for step, (q, _, _) in enumerate(inputs.steps):
        attended_rows = []
        for n, row in enumerate(rows.asking.tolist()):
            seen = [stored[other] for other in stored if documents[other] == documents[row] and other <= row]
            for i in range(1, step + 1):
                _, k, v = inputs.steps[i]
                seen.append((turned(k[n], positions[row] + i, theta), v[n]))
            keys, values = zip(*seen, strict=True)
            attended_rows.append(attended(turned(q[n], positions[row] + step, theta), list(keys), list(values)))
        outputs.append(torch.stack(attended_rows))
    return inputs.results(outputs)


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().to(other.dtype), other, rtol=tolerance, atol=tolerance)
        assert float(other.detach().abs().max()) > 0.1


def test_the_batch_holds_what_it_should() -> None:
    batch = packed(3)
    rows = find_rows(batch, NUM_STEPS)
    assert 1 in rows.num_asking
    assert max(rows.num_asking) > NUM_STEPS
    assert len(rows.context) > 0
    assert bool((batch.documents < 0).any())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", [DocumentTTTAttention, FlexTTTAttention])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 2e-5)])
def test_both_equal_the_loops(
    kind: type[TTTAttention], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients. Flex uncompiled: torch would refuse gradients on a CPU, where only tests want them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    batch = packed(3)
    assert_equal(run(kind, batch, NUM_STEPS, dtype), run_naive(batch, NUM_STEPS, dtype), tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_documents_over_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    batch = packed(30)
    rows = find_rows(batch, NUM_STEPS)
    assert len(rows.asking) > 2 * 128
    expected = run(DocumentTTTAttention, batch, NUM_STEPS, torch.float64)
    assert_equal(run(FlexTTTAttention, batch, NUM_STEPS, torch.float64), expected, 1e-9)


def test_tiles_of_other_documents_are_skipped() -> None:
    """Documents with 61 asking rows and 62 keys: 128 queries reach four of them, and so four tiles of keys at most."""
    document = [3] * MAX_LENGTH, [False] * 2 + [True] * (MAX_LENGTH - 2)
    rows = find_rows(collate([[document]] * 100, MAX_LENGTH), 1)
    attention = FlexTTTAttention(rows, RotaryEmbedding(RopeConfig(), HEAD_DIM, 128))
    assert set(rows.num_asking) == {61}
    assert set(rows.num_keys) == {62}
    tiles = attention.tiles.to_dense()[0, 0]
    assert tiles.shape == (-(-len(rows.asking) // 128), -(-len(rows.keys) // 128))
    assert int(tiles.sum(dim=1).max()) <= 4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", [DocumentTTTAttention, FlexTTTAttention])
def test_queries_and_keys_take_the_dtype_of_values(kind: type[TTTAttention]) -> None:
    """Under autocast norms of heads give fp32 queries and keys beside bf16 values."""
    rows = find_rows(packed(3), 2)
    inputs, attention = Inputs.random(rows, 2, torch.float32), kind(rows, RotaryEmbedding(RopeConfig(), HEAD_DIM, 128))
    with torch.no_grad():
        attention.write(inputs.context[0], inputs.context[1].bfloat16(), layer=0)
        for q, k, v in inputs.steps:
            assert attention.attend(q, k, v.bfloat16(), layer=0, mask="causal").dtype == torch.bfloat16
            attention.next_step()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-2), (torch.bfloat16, 0.1)])
def test_compiled_flex_equals_documents(dtype: torch.dtype, tolerance: float) -> None:
    """Batches of other sizes and numbers of steps one after the other, so that what is compiled is used again."""
    for num_rows, num_steps in ((20, 4), (30, 4), (26, 7), (2, 2)):
        batch = packed(num_rows)
        expected = run(DocumentTTTAttention, batch, num_steps, torch.float32)
        assert_equal(run(FlexTTTAttention, batch, num_steps, dtype, "cuda"), expected, tolerance)
