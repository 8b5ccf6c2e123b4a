"""`serve --dry-run` counts what loading then takes."""

import copy
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.models.drafts.source import source_of
from slipstream.models.files.checkpoint import read_json
from slipstream.models.layers.formats.int4 import Int4Linear
from slipstream.models.layers.formats.table import read_quantization
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.quantized import quantize_by_config
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.serve import cli
from slipstream.serve.drafters.registry import load_drafter
from slipstream.serve.dry_run import DryRun, gigabytes, report
from slipstream.serve.engine import memory
from slipstream.serve.engine.build import build_engine
from slipstream.serve.engine.engine_plan import read_plan
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.tests.quantized_targets import (
    LAYOUTS,
    MOE_CONFIG,
    save_gpt_oss,
    save_quantized,
)
from slipstream.tests.random_targets import change_json, save_random_target
from slipstream.tests.serve.engine_runs import bytes_of
from slipstream.tests.sources import HYBRID, TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error


def test_weights_and_kv_are_those_of_the_engine(target, draft):
    run = DryRun(ServeConfig(target=str(target), draft=str(draft), dtype="bfloat16", device="cpu"))
    loaded = load_target(target, load_config(target), torch.bfloat16, torch.device("cpu"))
    drafter = load_drafter(source_of(str(draft)), {}, loaded)[0]
    assert run.networks[0].size == bytes_of(loaded)
    weights = bytes_of(drafter.module)
    assert weights <= run.networks[1].size <= weights + loaded.embed_tokens.weight.nbytes, "it may share the embedding"
    assert run.plan.draft.layers == drafter.module.attention_specs
    config = EngineConfig(
        target=str(target), draft=str(draft), dtype="bfloat16", device="cpu", page_size=16, kv_cache_tokens=512
    )
    engine = build_engine(config)
    pages = sum(cache.pages.nbytes for kv in engine.runner.passes.kv for cache in kv.caches)
    assert pages == 33 * sum(run.plan.page_bytes)
    assert run.state_bytes() == engine.runner.state.nbytes


@pytest.mark.parametrize(
    ("family", "ep"), [("qwen3", False), ("qwen3-moe", False), ("qwen3-5", False), ("mixtral", True)]
)
def test_ranks_have_the_bytes_that_are_told(family, ep, make_target):
    """4 ranks share 2 KV heads; what all of them have is in the sum of their bytes as often as there are ranks."""
    target = make_target(family)
    config = ServeConfig(target=str(target), dtype="bfloat16", device="cpu", tp=4, ep=ep)
    run = DryRun(config)
    spec = load_config(target)
    load = partial(load_target, target, spec, torch.bfloat16, torch.device("cpu"), world=4, whole_experts=ep)
    parts = [load(rank=rank) for rank in range(4)]
    assert {bytes_of(part) for part in parts} == {run.networks[0].size}
    total = bytes_of(load_target(target, spec, torch.bfloat16, torch.device("cpu")))
    repeated = (4 * run.networks[0].size - total) // 3
    line = f"on each of 4 ranks; all have {gigabytes(repeated)} of the target's {gigabytes(total)}; 2 ranks"
    assert line in report(config)
    alone = DryRun(replace(config, tp=1, ep=False))
    assert [2 * size for size in run.plan.page_bytes[:1]] == alone.plan.page_bytes[:1]
    assert run.start_seconds()[1] >= alone.start_seconds()[1], "all ranks read from one disk"


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", None])
def test_a_quantised_draft_is_refused_as_the_server_would(weights, target, draft, tmp_path):
    folder = tmp_path / "quantised"
    shutil.copytree(draft, folder)
    change_json(folder / "config.json", quantization_config={"quant_method": "fp8"})
    config = ServeConfig(target=str(target), draft=str(folder), dtype="bfloat16", device="cpu")
    tensors = load_file(folder / "model.safetensors")
    reason = "its config.json has quantization_config"
    (folder / "model.safetensors").unlink()
    if weights is not None:
        save = save_file if weights.endswith("safetensors") else torch.save
        save(tensors, folder / weights)
        assert DryRun(config).networks[1].name == str(folder), "the tensors decide"
        name = next(name for name in tensors if name.endswith("down_proj.weight"))
        save(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / weights)
        reason = f"{name} is float8_e4m3fn"
    with user_error(rf"quantised \({reason}\), but drafts are loaded in 16 bits"):
        DryRun(config)


def test_a_draft_of_other_sizes_is_refused_as_the_server_would(target, draft, tmp_path):
    """Before memory is taken for them."""
    folder = tmp_path / "draft"
    shutil.copytree(draft, folder)
    config = ServeConfig(target=str(target), draft=str(folder), dtype="bfloat16", device="cpu")
    for size, fault in ((2**31 - 1, "up_proj.weight is .*, the config says .2147483647, "), (10**12, "below 2..31")):
        change_json(folder / "config.json", intermediate_size=size)
        with user_error(fault):
            DryRun(config)


def test_quantised_experts_are_counted_as_they_are_kept(tmp_path):
    save_gpt_oss(tmp_path / "mxfp4")
    save_random_target(copy.deepcopy(MOE_CONFIG), tmp_path / "plain")
    save_quantized(LAYOUTS["packed"], tmp_path / "plain", tmp_path / "packed")
    for name, quantization in (("mxfp4", None), ("packed", None), ("plain", "fp8")):
        path = tmp_path / name
        run = DryRun(ServeConfig(target=str(path), dtype="bfloat16", device="cpu", quantization=quantization))
        loaded = load_target(path, load_config(path), torch.bfloat16, torch.device("cpu"), quantization=quantization)
        assert run.weights == bytes_of(loaded)


@pytest.fixture(scope="module")
def plain(make_target) -> Path:
    return make_target("wide")


@pytest.mark.parametrize("name", LAYOUTS)
def test_quantised_weights_are_counted_as_they_are_kept(name, plain, tmp_path):
    """From the config files alone."""
    folder = tmp_path / name
    quantization = "fp8" if name == "on-the-fly" else None
    save_quantized(LAYOUTS[name], plain, folder)
    loaded = load_target(folder, load_config(folder), torch.bfloat16, torch.device("cpu"), quantization=quantization)
    (folder / "model.safetensors").unlink()
    config = ServeConfig(target=str(folder), dtype="bfloat16", device="cpu", quantization=quantization)
    (network,) = DryRun(config).networks
    assert network.size == bytes_of(loaded)
    assert f"{loaded.quantization.name}, bfloat16" in report(config)
    layers = [module for module in loaded.modules() if isinstance(module, Int4Linear)]
    assert network.dequantized == max((2 * layer.out_features * layer.in_features for layer in layers), default=0)
    assert ("of it for a 4-bit layer in 16 bits" in report(config)) == bool(layers)
    plain_bytes = bytes_of(load_target(plain, load_config(plain), torch.bfloat16, torch.device("cpu")))
    assert network.read == (plain_bytes if quantization else network.size)


@each_case()
def test_layers_that_a_config_excludes_keep_16_bits(config, plain_names, plain, tmp_path):
    path = tmp_path / "config.json"
    path.write_text((plain / "config.json").read_text())
    change_json(path, quantization_config=config)
    with torch.device("meta"):
        target = Target(load_config(tmp_path))
    formats = read_quantization(tmp_path)
    assert formats is not None
    quantize_by_config(target, formats)
    first = {name.split(".")[-1]: type(layer) for name, layer in target.layers[0].named_modules()}
    plain_ones = [name.removesuffix("_proj") for name, kind in first.items() if kind is Linear]
    assert plain_ones == plain_names.split()


def test_a_larger_gpu_holds_more_and_a_small_one_nothing(target):
    run = DryRun(ServeConfig(target=str(target), max_running=4))
    sizes = [run.cache_tokens(total) for total in (1e6, 24e9, 80e9)]
    assert sizes[0] < 0 < sizes[1] < sizes[2]
    assert sizes[2] - sizes[1] == pytest.approx(0.9 * 56e9 / sum(run.plan.page_bytes) * 16, rel=0.01)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_it_prints_and_exits(has_tokenizer, target, capsys):
    path = TINY if has_tokenizer else target
    with pytest.raises(SystemExit) as exit:
        cli.main(["--target", str(path), "--dry-run"])
    assert exit.value.code == (0 if has_tokenizer else 1)
    text, errors = capsys.readouterr()
    assert ("has no tokenizer" in errors) == (not has_tokenizer)
    assert text.strip() == report(ServeConfig(target=str(path), dry_run=True))
    for part in ("weights", "bytes a token", "a GPU of 80 GB", "Start-up"):
        assert part in text


def test_recurrent_layers_are_layers_of_a_target():
    lines = report(ServeConfig(target=str(HYBRID), dry_run=True)).splitlines()
    num_layers = read_json(HYBRID / "config.json")["num_hidden_layers"]
    assert f"Qwen3_5ForCausalLM, {num_layers} layers" in lines[0]
    assert lines[0].endswith("MB")


@pytest.mark.parametrize("free", [2**28, 2**30, 2**34])
def test_memory_is_left_for_states_of_texts_that_have_ended(free):
    """A hit needs the KV of a text and a state."""
    config = EngineConfig(target=str(HYBRID), device="cpu", draft="none", page_size=16)
    plan = read_plan(config)
    pages, states = memory.fitting_pools(plan, free, 2**30)
    sizes = dict(zip(plan.groups, plan.page_bytes, strict=True))
    size = pages * sizes["all"] + states * sizes["state"]
    assert 0 <= free - size < sizes["all"] + sizes["state"], "all memory is used"
    assert states - config.max_running == pages * 16 // memory.TEXT_TOKENS > 0
    plan = read_plan(replace(config, kv_cache_tokens=free))
    space = memory.find_space(plan, memory.Room(0, 0))
    assert space.num_pages == (1 + free // 16, 1 + 2 * config.max_running), (
        "a size that was chosen brings no more states"
    )


def test_wrong_options_are_refused_as_by_the_server(target, exits):
    with exits("max_model_len is 1000000", 1):
        cli.main(["--target", str(target), "--max-model-len", "1000000", "--dry-run"])
