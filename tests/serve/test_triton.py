"""The Triton backend on the GPU; tests/serve/test_attention.py has it under the interpreter."""

from dataclasses import replace

import pytest
import torch

from slipstream.serve.attention.base import KVFormat
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.attention.triton import Backend
from slipstream.tests.attention_layers import asking_layer
from slipstream.tests.pairwise import grouped
from slipstream.tests.serve.attention_passes import PASSES, RAGGED, Scene

UNIFORM = [name for name, case in PASSES.items() if not case.prompt]


def test_head_dims_up_to_512_are_served():
    layers = {dim: (asking_layer(head_dim=dim).spec,) for dim in (8, 64, 80, 128, 256, 512, 1024)}
    faults = {
        dim: Backend.fault(KVFormat(torch.device("cuda"), torch.bfloat16, layer)) for dim, layer in layers.items()
    }
    assert faults.pop(1024) == "it has no kernels for head dim 1024, only up to 512"
    assert not any(faults.values())


@pytest.mark.gpu
@grouped("head_dim")
@pytest.mark.parametrize("name", UNIFORM)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)])
@torch.inference_mode()
def test_equals_sdpa_in_fp32(name, head_dim, dtype):
    expected, kv = Scene(PASSES[name], head_dim, torch.float32, "cuda").attend(SDPABackend)
    out, stored = Scene(PASSES[name], head_dim, dtype, "cuda").attend(Backend)
    torch.testing.assert_close(stored.float(), kv, atol=3e-2, rtol=1e-2)
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=1e-2)


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)])
@torch.inference_mode()
def test_ragged_passes_equal_the_references_in_fp32(name, head_dim, dtype):
    """And a replay, which plans its work anew, equals the pass."""
    case = RAGGED[name]
    reference = Scene(case, head_dim, torch.float32, "cpu")
    num_used = sum(case.query_lens)
    attention = Backend(reference.kv, reference.ropes)
    attention.plan(reference.ragged())
    expected = attention.attend(*reference.qkv, reference.layer(), case.mask)[:num_used]
    scene = Scene(case, head_dim, dtype, "cuda")
    attention = Backend(scene.kv, scene.ropes)
    metadata = scene.ragged()

    def attend():
        attention.plan(replace(metadata, works={}))
        qkv = (x.clone() for x in scene.qkv)  # in place of the embedding
        return attention.attend(*qkv, scene.layer(), case.mask)[:num_used]

    out = attend()
    torch.testing.assert_close(out.float().cpu(), expected, atol=3e-2, rtol=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = attend()
    replayed.fill_(torch.nan)
    graph.replay()
    assert torch.equal(replayed, out)
