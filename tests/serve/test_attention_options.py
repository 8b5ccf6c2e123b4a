"""Tests the values of `--attention`, the backends that `auto` picks, and the errors for all other values."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.serve.attention.base import PHASES, KVFormat
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.attention.triton import Backend as TritonBackend
from slipstream.serve.engine.engine_plan import DeviceFacts, pick_modes
from slipstream.serve.options import EngineConfig
from slipstream.tests.attention_layers import asking_layer, find_backends
from slipstream.tests.serve import fake_flashinfer
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

CPU = torch.device("cpu")
GPU = torch.device("cuda")
with_flashinfer = pytest.mark.usefixtures("flashinfer")


def formats(
    device: torch.device = GPU, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> dict[str, KVFormat]:
    return dict.fromkeys(PHASES, KVFormat(device, dtype, (asking_layer(head_dim=head_dim).spec,)))


def names(option: str, kv: dict[str, KVFormat] | None = None) -> list[str]:
    """Module and class of each phase's backend."""
    backends = find_backends(option, kv)
    assert tuple(backends) == PHASES
    return [f"{backend.__module__.rsplit('.', 1)[-1]} {backend.__name__}" for backend in backends.values()]


@pytest.fixture
def cuda_home(tmp_path) -> Path:
    """A folder with an nvcc in it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    return tmp_path


@pytest.fixture
def flashinfer(cuda_home) -> Iterator[None]:
    with fake_flashinfer.installed(cuda_home):
        yield


@pytest.fixture
def no_flashinfer() -> Iterator[None]:
    with fake_flashinfer.missing():
        yield


def test_a_name_stands_for_all_phases_or_for_its_own():
    assert find_backends("sdpa") == dict.fromkeys(PHASES, SDPABackend)
    mixed = find_backends("draft=triton,prefill=sdpa,verify=triton", formats())
    assert mixed == {"prefill": SDPABackend, "verify": TritonBackend, "draft": TritonBackend}


@with_flashinfer
def test_a_name_may_carry_a_variant():
    option = "prefill=flashinfer:fa2,verify=flashinfer,draft=flashinfer:fa2"
    assert names(option, formats()) == ["flashinfer FA2Backend", "flashinfer Backend", "flashinfer FA2Backend"]


@with_flashinfer
@each_case()
def test_wrong_options_name_the_fault(option, message):
    with user_error(f"^attention (backend )?{message}"):
        find_backends(option, formats())


@with_flashinfer
@pytest.mark.parametrize(
    ("option", "kv", "message"),
    [
        (
            "triton",
            formats(),
            "'triton' cannot serve the phase prefill: it has no kernels for that phase; "
            "backends that can: flashinfer, sdpa$",
        ),
        (
            "prefill=flashinfer,verify=triton,draft=triton",
            formats(dtype=torch.float32),
            "'flashinfer' cannot serve the phase prefill: it has no kernels for torch.float32, only for bfloat16 and "
            "float16; backends that can: sdpa$",
        ),
        (
            "prefill=sdpa,verify=sdpa,draft=flashinfer:fa2",
            formats(head_dim=96),
            "'flashinfer:fa2' cannot serve the phase draft: it has no kernels for head dim 96, only for 64, 128, 256; "
            "backends that can: sdpa, triton$",
        ),
        (
            "flashinfer",
            formats(CPU),
            "'flashinfer' cannot serve the phase prefill: it needs a GPU; backends that can: sdpa$",
        ),
    ],
)
def test_a_phase_without_kernels_says_what_lacks_and_who_has_it(option, kv, message):
    with user_error(f"^attention backend {message}"):
        find_backends(option, kv)


@with_flashinfer
def test_features_of_layers_are_served_or_refused_by_name(monkeypatch):
    for fields, lack in (({"softcap": 30.0}, "soft caps of scores"), ({"sinks": torch.zeros(1)}, "attention sinks")):
        layers = asking_layer().spec, asking_layer(head_dim=64, **fields).spec
        for device in (CPU, GPU):
            find_backends("auto", dict.fromkeys(PHASES, KVFormat(device, torch.bfloat16, layers[1:])))
        with monkeypatch.context() as patch:
            patch.setattr(SDPABackend, "features", SDPABackend.features - {lack})
            assert lack in SDPABackend.fault(KVFormat(CPU, torch.float32, layers)), "one layer is enough"
            formats_of_phases = dict.fromkeys(PHASES, KVFormat(CPU, torch.float32, layers))
            with user_error(f"'sdpa' cannot serve the phase prefill: .* {lack}; backends that"):
                find_backends("sdpa", formats_of_phases)


@with_flashinfer
def test_an_fp8_cache_is_read_by_our_kernels_and_sdpa():
    kv = {phase: form._replace(has_codes=True) for phase, form in formats().items()}
    assert names("auto", kv) == ["sdpa Backend", "triton Backend", "triton Backend"]
    with user_error("'flashinfer' cannot serve .*: it has no kernels for an FP8 KV cache .*: sdpa$"):
        find_backends("flashinfer", kv)


@pytest.mark.parametrize("fitting", [torch.bfloat16, torch.float16])
@with_flashinfer
def test_each_phase_is_checked_against_its_own_kv(fitting):
    draft_only = formats(dtype=fitting) | {"draft": KVFormat(GPU, fitting, (asking_layer(head_dim=80).spec,))}
    find_backends("prefill=flashinfer,verify=flashinfer,draft=sdpa", draft_only)
    with user_error("the phase draft: it has no kernels for head dim 80"):
        find_backends("flashinfer", draft_only)
    del draft_only["draft"]  # a drafter without KV
    find_backends("flashinfer", draft_only)


@with_flashinfer
@pytest.mark.parametrize(("capability", "fits"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_fa3_needs_hopper(capability, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if fits:
        assert names("flashinfer:fa3", formats()) == ["flashinfer FA3Backend"] * 3
        return
    with user_error("'flashinfer:fa3' cannot serve the phase prefill: FA3 kernels need a Hopper"):
        find_backends("flashinfer:fa3", formats())


@pytest.mark.usefixtures("no_flashinfer")
def test_a_missing_package_is_named_with_its_remedy():
    for option in ("flashinfer", "flashinfer:fa3", "prefill=flashinfer,verify=triton,draft=triton"):
        with user_error(r"'flashinfer' cannot be loaded .*; pip install flashinfer-python, or"):
            find_backends(option, formats())


def test_kernels_that_cannot_be_compiled_are_refused_at_the_start(tmp_path):
    with (
        fake_flashinfer.installed(tmp_path),
        user_error("finds no nvcc: install the CUDA toolkit or flashinfer-jit-cache; backends"),
    ):
        find_backends("flashinfer", formats())


@with_flashinfer
def test_auto_is_sdpa_on_the_cpu():
    assert find_backends("auto", formats(CPU)) == dict.fromkeys(PHASES, SDPABackend)
    assert find_backends("auto") == dict.fromkeys(PHASES, SDPABackend)


@with_flashinfer
def test_auto_is_flashinfer_and_triton_on_the_gpu(caplog):
    with caplog.at_level(logging.INFO):
        assert names("auto", formats()) == ["flashinfer Backend", "triton Backend", "triton Backend"]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "attention: prefill=flashinfer,verify=triton,draft=triton")
    ]


@with_flashinfer
@pytest.mark.parametrize(
    ("kv", "lack"), [(formats(dtype=torch.float32), "for torch.float32"), (formats(head_dim=16), "for head dim 16")]
)
def test_auto_passes_over_backends_without_kernels(kv, lack, caplog):
    assert names("auto", kv) == ["sdpa Backend", "triton Backend", "triton Backend"]
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith(f"attention: prefill by sdpa, not by flashinfer: it has no kernels {lack}")


@pytest.mark.usefixtures("no_flashinfer")
def test_auto_warns_where_flashinfer_is_missing(caplog):
    assert names("auto", formats()) == ["sdpa Backend", "triton Backend", "triton Backend"]
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "pip install flashinfer-python" in warning


@each_case()
def test_backends_that_plan_on_the_host_are_not_captured(backends, is_captured):
    assert pick_modes(EngineConfig(), DeviceFacts("cuda"), backends) == (is_captured, is_captured)
