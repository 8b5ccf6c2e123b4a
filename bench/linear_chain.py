"""The layers of an 8B target in one CUDA graph: torch's linears against ours, launched as usual or ahead."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.bench.kernel_times import graph_us
from slipstream.kernels import launch
from slipstream.kernels.activation import silu_mul
from slipstream.kernels.norm import add_rms_norm
from slipstream.kernels.rope import rotate_and_store
from slipstream.kernels.small_m_gemm import gated_linear_few_rows_triton, linear_few_rows_triton
from slipstream.kernels.tree_attention import tree_attention

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 4096, 14336, 32, 8, 128, 16


@dataclass(frozen=True, slots=True)
class Layer:
    norms: Tensor  # (2, H)
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """One request's cache, in place of every layer's: small beside the weights."""

    keys: Tensor  # (pages, PAGE, G, D)
    values: Tensor
    pages: Tensor  # (1, P)
    lengths: Tensor  # (1,)
    positions: Tensor  # (rows,), the slots too
    angles: Tensor  # (positions, D)


Product = Callable[[Tensor, Tensor], Tensor]


def time_chains(row_counts: list[int], context: int) -> list[dict[str, Any]]:
    """Milliseconds of the layers, with the bytes of their weights per second."""
    layers, results = [random_layer() for _ in range(LAYERS)], []
    num_bytes = sum(weight.nbytes for layer in layers for weight in (layer.qkv, layer.o, layer.gate_up, layer.down))
    torch.cuda.synchronize()
    for rows in row_counts:
        cache = random_context(rows, context)
        for name, product, gated, ahead in variants():
            with launched(ahead):
                time_us = graph_us([partial(run_layers, layers, cache, rows, product, gated)])
            assert time_us is not None
            results.append({"chain": name, "rows": rows, "ms": round(time_us / 1000, 3)})
            print(f"{rows} rows, {name:40}{time_us / 1000:8.3f} ms, {num_bytes / time_us / 1e3:7,.0f} GB/s", flush=True)
    return results


def variants() -> list[tuple[str, Product, Product, bool]]:
    def gated_apart(product: Product) -> Product:
        return lambda x, weight: silu_mul(product(x, weight))

    return [
        ("torch", F.linear, gated_apart(F.linear), False),
        ("torch, small kernels launched ahead", F.linear, gated_apart(F.linear), True),
        ("ours", linear_few_rows_triton, gated_apart(linear_few_rows_triton), False),
        ("ours, launched ahead", linear_few_rows_triton, gated_apart(linear_few_rows_triton), True),
        ("ours, gate fused", linear_few_rows_triton, gated_linear_few_rows_triton, False),
        ("ours, gate fused, launched ahead", linear_few_rows_triton, gated_linear_few_rows_triton, True),
    ]


@contextmanager
def launched(ahead: bool) -> Iterator[None]:
    """Kernels inside start before the ones before them end, or do not."""
    with mock.patch.object(launch, "has_pdl", return_value=ahead):
        yield


def run_layers(layers: list[Layer], cache: Context, rows: int, product: Product, gated: Product) -> Tensor:
    residual = torch.ones(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    delta, first = residual, torch.zeros(1, dtype=torch.int64, device="cuda")
    keys, values = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
    for layer in layers:
        x, residual = add_rms_norm(residual, delta, layer.norms[0], 1e-5)
        heads = product(x, layer.qkv).view(rows, -1, HEAD_DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        where = cache.angles, cache.angles, cache.positions, cache.positions
        q = rotate_and_store(q, k, v, *where, keys, values).view(1, rows, HEADS, HEAD_DIM)
        paged = cache.keys, cache.values, cache.pages, first, cache.lengths
        out = tree_attention(q, *paged, None, "causal", HEAD_DIM**-0.5)
        assert isinstance(out, Tensor)
        delta = product(out.view(rows, -1), layer.o)
        x, residual = add_rms_norm(residual, delta, layer.norms[1], 1e-5)
        delta = product(gated(x, layer.gate_up), layer.down)
    return residual + delta


def random_layer() -> Layer:
    def weight(outputs: int, inputs: int) -> Tensor:
        return torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_(std=inputs**-0.5)

    return Layer(
        norms=torch.ones(2, HIDDEN, dtype=torch.bfloat16, device="cuda"),
        qkv=weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        o=weight(HIDDEN, HEADS * HEAD_DIM),
        gate_up=weight(2 * INTERMEDIATE, HIDDEN),
        down=weight(HIDDEN, INTERMEDIATE),
    )


def random_context(rows: int, length: int) -> Context:
    num_pages = -(-(length + rows) // PAGE)
    keys, values = torch.randn(2, num_pages, PAGE, KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
    return Context(
        keys=keys,
        values=values,
        pages=torch.arange(num_pages, device="cuda")[None],
        lengths=torch.tensor([length], device="cuda"),
        positions=torch.arange(length, length + rows, device="cuda"),
        angles=torch.rand(num_pages * PAGE, HEAD_DIM, device="cuda"),
    )
