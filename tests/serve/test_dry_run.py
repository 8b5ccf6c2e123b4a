"""`serve --dry-run` counts what loading then takes."""

import copy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models.targets.decoder import load_config, load_target
from slipstream.serve import cli
from slipstream.serve.drafters.registry import load_drafter
from slipstream.serve.dry_run import DryRun, report
from slipstream.serve.engine.build import Builder
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.runner.kv import page_bytes
from slipstream.tests.quantized_targets import LAYOUTS, MOE_CONFIG, save_gpt_oss, save_quantized
from slipstream.tests.random_targets import save_random_target


def bytes_of(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


def test_weights_and_kv_are_those_of_the_engine(target: Path, draft: Path) -> None:
    run = DryRun(ServeConfig(target=str(target), draft=str(draft), dtype="bfloat16", device="cpu"))
    loaded = load_target(target, load_config(target), torch.bfloat16, torch.device("cpu"))
    drafter: Any = load_drafter(str(draft), {}, loaded)[0]
    assert run.networks[0].weights == bytes_of(loaded)
    own = bytes_of(drafter.module)
    assert own <= run.networks[1].weights <= own + loaded.embed_tokens.weight.nbytes, "it may share the embedding"
    config = EngineConfig(target=str(target), draft=str(draft), dtype="bfloat16", device="cpu", page_size=16)
    builder = Builder(config)
    networks = [(layers, torch.bfloat16) for layers in builder.networks]
    assert [16 * size for size in run.kv_bytes()] == page_bytes(networks, builder.windows, 16)


def test_quantised_weights_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    save_gpt_oss(tmp_path / "mxfp4")
    save_random_target(copy.deepcopy(MOE_CONFIG), tmp_path / "plain")
    save_quantized(LAYOUTS["packed"], tmp_path / "plain", tmp_path / "packed")
    for name, asked in (("mxfp4", None), ("packed", None), ("plain", "fp8")):
        path = tmp_path / name
        run = DryRun(ServeConfig(target=str(path), dtype="bfloat16", device="cpu", quantization=asked))
        loaded = load_target(path, load_config(path), torch.bfloat16, torch.device("cpu"), quantization=asked)
        assert run.weights == bytes_of(loaded)


def test_a_larger_gpu_holds_more_and_a_small_one_nothing(target: Path) -> None:
    run = DryRun(ServeConfig(target=str(target), max_running=4))
    sizes = [run.cache_tokens(total) for total in (1e6, 24e9, 80e9)]
    assert sizes[0] < 0 < sizes[1] < sizes[2]
    assert sizes[2] - sizes[1] == pytest.approx(0.9 * 56e9 / sum(run.kv_bytes()), rel=0.01)


def test_it_prints_and_exits(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--target", str(target), "--dry-run"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert text.strip() == report(ServeConfig(target=str(target), dry_run=True))
    for part in ("weights", "bytes a token", "a GPU of 80 GB", "Start-up"):
        assert part in text


def test_wrong_options_are_refused_as_by_the_server(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--target", str(target), "--max-model-len", "1000000", "--dry-run"])
    assert exit.value.code == 1
    assert "max_model_len is 1000000" in capsys.readouterr().err
