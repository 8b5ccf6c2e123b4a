"""The FlashInfer backend: on the CPU what it plans and merges, with a stand-in for the package; on the GPU itself."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from slipstream.serve.attention.base import Backend, KVFormat
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.runner.batch import AttentionMetadata
from slipstream.serve.runner.request_state import KVSlots
from slipstream.tests.attention_layers import asking_layer, find_backends
from slipstream.tests.pairwise import grouped
from slipstream.tests.serve import fake_flashinfer
from slipstream.tests.serve.attention_passes import GROUP, LAYER, PASSES, Scene


@pytest.fixture
def backend(tmp_path, monkeypatch) -> Iterator[type[Backend]]:
    monkeypatch.setattr(torch.cuda, "Event", fake_flashinfer.Event)
    monkeypatch.setattr(fake_flashinfer.Wrapper, "instances", [])
    with fake_flashinfer.installed(tmp_path):
        backends = find_backends("flashinfer")["verify"]
        monkeypatch.setattr(sys.modules[backends.__module__], "WORKSPACE_BYTES", 1)
        yield backends


@grouped()
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_plans_and_merges_give_what_sdpa_gives(backend, name, dtype, tolerance):
    expected, kv = Scene(PASSES[name], 16, torch.float32, "cpu").attend(SDPABackend)
    out, stored = Scene(PASSES[name], 16, dtype, "cpu").attend(backend)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(stored.float(), kv, atol=tolerance, rtol=tolerance)


def test_a_pass_is_planned_once_and_only_if_it_attends(backend):
    scene = Scene(PASSES["chain"], 16, torch.float32, "cpu")
    attention = backend(scene.kv, scene.ropes)
    q, k, v = scene.qkv
    attention.plan(scene.metadata())
    attention.write(k, v, scene.layer())
    assert not fake_flashinfer.Wrapper.instances
    for num_plans in (1, 2):
        attention.plan(scene.metadata())
        for layer in (0, LAYER):
            attention.attend(q, k, v, scene.layer(id=layer), "causal")
        (wrapper,) = fake_flashinfer.Wrapper.instances  # made once for all passes of a kind
        assert wrapper.num_plans == num_plans


def test_prompts_do_not_wait_for_the_device(backend, monkeypatch):
    """Their lengths follow from the host's bounds; those of nodes are read from the device, once per pass."""
    for name, expected in (("prompts with prefix", 0), ("chain", 1), ("tree", 1), ("decode", 1)):
        scene = Scene(PASSES[name], 16, torch.float32, "cpu")
        reads = []
        attention = backend(scene.kv, scene.ropes)
        metadata = scene.metadata()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", lambda self, reads=reads: reads.append(self) or self)
            attention.plan(metadata)
            for layer in (0, LAYER):
                attention.attend(*scene.qkv, scene.layer(id=layer), PASSES[name].mask)
        assert len(reads) == expected, name


@pytest.mark.parametrize(
    ("option", "prompt", "chain"), [("flashinfer", "auto", "fa2"), ("flashinfer:fa2", "fa2", "fa2")]
)
@pytest.mark.usefixtures("backend")
def test_prompts_and_nodes_take_their_kernels(option, prompt, chain):
    for name, kernels in (("prompts", prompt), ("chain", chain), ("tree", chain)):
        Scene(PASSES[name], 16, torch.float32, "cpu").attend(find_backends(option)["verify"])
        assert fake_flashinfer.Wrapper.instances.pop().backend == kernels


@pytest.mark.parametrize(("name", "tensor_cores"), [("decode", True), ("decode, two heads share", False)])
def test_decoding_takes_tensor_cores_for_large_groups(backend, name, tensor_cores):
    Scene(PASSES[name], 16, torch.float32, "cpu").attend(backend)
    assert fake_flashinfer.Wrapper.instances.pop().use_tensor_cores is tensor_cores


@pytest.mark.gpu
@grouped("option")
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("option", ["flashinfer", "flashinfer:fa2", "flashinfer:fa3"])
@pytest.mark.parametrize("head_dim", [64, 128])
@torch.inference_mode()
def test_the_package_gives_what_sdpa_gives_in_fp32(option, name, head_dim):
    expected, kv = Scene(PASSES[name], head_dim, torch.float32, "cuda").attend(SDPABackend)
    out, stored = Scene(PASSES[name], head_dim, torch.bfloat16, "cuda").attend(find_backends(option)["verify"])
    torch.testing.assert_close(stored.float(), kv, atol=3e-2, rtol=1e-2)
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=1e-2)


@pytest.mark.gpu
@torch.inference_mode()
def test_passes_may_follow_each_other_without_waiting():
    """Plans reach the device through one buffer, which the next plan must not change too early."""
    case = PASSES["prompts with prefix"]
    expected = Scene(case, 128, torch.float32, "cuda").attend(SDPABackend, with_norms=False)[0].split(case.query_lens)
    scene = Scene(case, 128, torch.bfloat16, "cuda")
    attention = find_backends("flashinfer")["prefill"](scene.kv, scene.ropes)
    passes = [one_request(scene.metadata(), index) for index in range(len(case.lengths))]
    tokens = list(zip(*(x.split(case.query_lens) for x in scene.qkv), strict=True))
    outputs = []
    for warm_up in (True, False):
        outputs.clear()
        if not warm_up:
            torch.cuda._sleep(10**9)  # about half a second
        for metadata, qkv in list(zip(passes, tokens, strict=True)) * 5:
            attention.plan(metadata)
            outputs.append(attention.attend(*qkv, scene.layer(), "causal"))
    for out, reference in zip(outputs, expected * 5, strict=True):
        torch.testing.assert_close(out.float(), reference, atol=3e-2, rtol=1e-2)


def test_kernels_for_prompts_are_compiled_in_the_background(backend, monkeypatch, caplog):
    module = sys.modules[backend.__module__]
    dtype = torch.bfloat16
    for window, softcap in ((None, None), (9, None), (None, 30.0)):  # each has kernels of its own
        layer = asking_layer(head_dim=64, window=window, softcap=softcap).spec
        backend.prepare(KVFormat(torch.device("cpu"), dtype, (layer,)))
        variant = module.Variant(head_dim=64, has_window=window is not None, has_softcap=softcap is not None)
        build = module._build(dtype, variant, "auto")
        build.join()
        assert build.is_done
        options = variant.has_window, variant.has_softcap
        assert fake_flashinfer.compiled[-1] == ("fa3", *[dtype] * 3, torch.int32, 64, 64, 0) + options + (False,)

    def fail(*_):
        raise RuntimeError("nvcc: no such option")

    monkeypatch.setattr(module, "get_batch_prefill_module", fail)
    build = module._build(dtype, module.Variant(128, False, False), "auto")
    build.join()
    assert not build.is_done
    assert "nvcc: no such option" in caplog.text


def one_request(prompts: AttentionMetadata, index: int) -> AttentionMetadata:
    """A prompt's part of several."""
    assert prompts.phase == "prefill"
    row = slice(index, index + 1)
    positions, slots = (x.split(prompts.query_lens)[index] for x in (prompts.positions, prompts.slots.of(GROUP)))
    return replace(
        prompts,
        requests=prompts.requests[row],
        lengths=prompts.lengths[row],
        positions=positions,
        slots=KVSlots(lambda _: slots),
        query_lens=prompts.query_lens[row],
        kv_bounds=prompts.kv_bounds[row],
    )
