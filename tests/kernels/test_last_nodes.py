"""Attention of the last of a request's nodes, those before being in the cache: what all nodes' gives for these."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.tree_attention import tree_attention_reference, tree_attention_triton
from slipstream.tests.kernels.attention_scenes import CASES, GPU_CASES, Case, Scene
from slipstream.tests.kernels.test_tree_attention import DEVICES, check

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter, in rows that pad
LAST = {
    "tree": (1, 5, 8),
    "33 nodes": (17, 32),
    "64 nodes of a tree": (60,),
    "pages of one token": (4,),
    "parts whose last holds nodes only": (3,),
    "new nodes only": (6,),
    "chain": (2, 4),
    "block": (5,),
    "window": (3,),
    "window within the nodes": (30,),
    "window, pages of 64 tokens": (16,),
}


def last_of(case: Case, first_node: int, kernel: object, dtype: torch.dtype, device: str) -> None:
    scene = Scene(case, dtype, device)
    expected = tuple(x[:, first_node:] for x in scene.expected())
    scene.q = scene.q[:, first_node:].contiguous()
    if scene.ancestors is not None:
        scene.ancestors = scene.ancestors[:, first_node:].contiguous()
    results: tuple[Tensor, Tensor] = scene.run(kernel, first_node=first_node)  # type: ignore[arg-type]
    check(results, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAST)
def test_the_reference(name: str) -> None:
    for first_node in LAST[name]:
        last_of(CASES[name], first_node, tree_attention_reference, torch.float32, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAST)
def test_the_kernel(name: str, device: str) -> None:
    for first_node in LAST[name]:
        last_of(CASES[name], first_node, tree_attention_triton, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("nodes", "first_node"), [(8, 4), (16, 12), (64, 54)])
@pytest.mark.parametrize("name", ["batch 1, 16 nodes", "batch 32", "batch 32, pages of one token"])
def test_levels_of_real_trees(name: str, nodes: int, first_node: int) -> None:
    last_of(replace(GPU_CASES[name], N=nodes), first_node, tree_attention_triton, torch.bfloat16, "cuda")
