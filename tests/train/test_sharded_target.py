"""A target that two processes share: the same training as with a whole one each, and shares that are shares."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models.targets import sharded
from slipstream.models.targets.sharded import sharding_mesh
from slipstream.tests.expert_targets import EXPERT_FAMILIES
from slipstream.tests.random_targets import RELATIVES, save_random_target
from slipstream.tests.train.runs import end_program, records, refusal, start_program, weights

WORKER = Path(__file__).with_name("sharded_worker.py")
# For dflash in place of the two that it does not know.
DFLASH = {"draft__num_layers": 2, "draft__block_size": 5, "draft__mask_token_id": 7, "draft__anchors": 6}


def without(flags: list[str], *names: str) -> list[str]:
    return [flag for flag in flags if not flag.startswith(tuple(f"--{name}=" for name in names))]


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def ran(request, tmp_path_factory, arguments, target_path, make_target) -> Path:
    """The folder with the output of two processes (sharded_worker.py), the runs by program and sharding."""
    if request.param == "gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp(f"sharded-{request.param}")
    later = [name for name in ("gemma4-shared", "laguna", "muse-glimmer") if name in RELATIVES]
    targets = [target_path, *map(make_target, ("qwen3-tied", *later))]
    for family in EXPERT_FAMILIES:
        targets.append(folder / family)
        save_random_target(EXPERT_FAMILIES[family], targets[-1])
    runs = []
    for sharding in ("none", "all"):
        runs.append(("eagle3", arguments(folder / "eagle3" / sharding, target_sharding=sharding, optim__steps=4)))
    for sharding in ("none", "machine"):
        flags = arguments(folder / "dflash" / sharding, target_sharding=sharding, optim__steps=4, **DFLASH)
        runs.append(("dflash", without(flags, "draft.ttt_steps")))
    jobs = {"runs": runs, "targets": targets, "stranger": [target_path, make_target("llama")]}
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    end_program(start_program(WORKER, str(folder / "jobs.json"), num_processes=2, on_cpu=request.param == "cpu"))
    return folder


def found(ran: Path) -> list[dict[str, Any]]:
    """Results by process."""
    return [json.loads((ran / f"jobs.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("program", "sharding"), [("eagle3", "all"), ("dflash", "machine")])
def test_training_is_that_of_a_whole_target(ran, program, sharding):
    """Loss curve, evaluations and weights, up to rounding: transformers runs the shared target, our decoder the whole
    one; and a GPU does not sum in the same order twice."""
    runs = [ran / program / name for name in (sharding, "none")]
    curves = [records(run) for run in runs]
    assert len(curves[0]) == 4
    tolerance = 1e-4 if "cpu" in ran.name else 1e-2
    for shared_line, whole_line in zip(*curves, strict=True):
        assert shared_line == pytest.approx(whole_line, rel=tolerance, abs=tolerance)
    sharded_weights, unsharded = (weights(run, 4) for run in runs)
    for name, tensor in unsharded.items():
        # AdamW's first steps have one size: where a gradient is mere rounding, its sign may differ.
        share = ((sharded_weights[name].double() - tensor.double()).abs() > tolerance).double().mean()
        assert share < 0.01, f"{name}: {share}"


def test_every_family_gives_the_same_states_embeddings_logits_and_weights(ran):
    for process in found(ran):
        assert all(target["equal"] for target in process["targets"])


def test_each_process_holds_half_of_a_layer(ran):
    for targets in zip(*(process["targets"] for process in found(ran)), strict=True):
        for target in targets:
            assert target["shares"].keys() == target["sizes"].keys()
            assert set(target["outside"]) == {"Parameter"}
        for name, size in targets[0]["sizes"].items():
            shares = [target["shares"][name] for target in targets]
            assert sum(shares) == size
            assert max(shares) <= size // 2, name


def test_weights_that_the_config_does_not_name_are_refused_by_every_process(ran):
    """As those of a quantized model would be: here q and k norms are missing."""
    for process in found(ran):
        assert "Qwen3ForCausalLM cannot be sharded: its files and its config disagree" in process["refusal"]
        assert "set target_sharding to none" in process["refusal"]


@pytest.mark.parametrize("sharding", ["machine", "all"])
def test_one_process_is_refused(tmp_path, arguments, sharding):
    message = f"target_sharding is '{sharding}', but there is one process"
    assert message in refusal(arguments(tmp_path, target_sharding=sharding))


@pytest.mark.parametrize(
    ("world", "local", "within_machine", "shape"),
    [(16, 8, True, (2, 8)), (16, 8, False, (1, 16)), (8, 8, True, (1, 8)), (12, 8, True, None), (8, 1, True, None)],
)
def test_who_shares_with_whom(monkeypatch, world, local, within_machine, shape):
    """Each machine holds the layers once, or all machines together."""
    mesh_shapes = []

    def mesh(_device, sizes, mesh_dim_names):
        mesh_shapes.append(sizes)
        return dict.fromkeys(mesh_dim_names)

    monkeypatch.setattr(sharded, "init_device_mesh", mesh)
    monkeypatch.setattr(sharded.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(sharded.distributed, "get_world_size", lambda: world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    if shape is None:
        with pytest.raises(ValueError, match="target_sharding is 'machine', but"):
            sharding_mesh(torch.device("cpu"), within_machine=within_machine)
    else:
        sharding_mesh(torch.device("cpu"), within_machine=within_machine)
        assert mesh_shapes == [shape]
