"""LoRA adapters: only factors are trained, runs continue, and files mean what peft means by them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.models.drafts.adapters import CONFIG, PREFIX, WEIGHTS, add_adapters, read_adapter, write_adapter
from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.files.checkpoint import weights_fingerprint
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import load_config
from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.tables import each_case
from slipstream.tests.train.runs import assert_same_run, weights
from slipstream.tests.user_errors import user_error
from slipstream.train import dflash, eagle, eagle3
from slipstream.train.low_rank import adapt_layers, factors_of

DRAFT = ROOT / "tests" / "assets" / "eagle3"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> TargetSpec:
    return load_config(TINY)


def tensors_of(path: Path, target: TargetSpec) -> dict[str, Tensor]:
    return public_tensors(load_draft(Eagle3, path, target, torch.float32, CPU))


@pytest.fixture
def adapter(tmp_path, tiny) -> Path:
    """An adapter of random factors, of a draft with fused and other projections."""
    draft = load_draft(Eagle3, DRAFT, tiny, torch.float32, CPU)
    adapt_layers(draft, 4, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 20
    folder = tmp_path / "adapter"
    folder.mkdir()
    factors = factors_of(draft, draft.state_dict())
    write_adapter(folder, str(DRAFT), factors, draft.config.to_json(), {}, weights_fingerprint(DRAFT))
    torch.testing.assert_close(
        draft.midlayer.self_attn.qkv_proj.weight,
        load_draft(Eagle3, folder, tiny, torch.float32, CPU).midlayer.self_attn.qkv_proj.weight,
    )
    return folder


def test_a_run_trains_factors_alone_and_continues(tmp_path, run_flags, target_path):
    """A checkpoint, merged into the draft, is what the run has trained."""
    base = tmp_path / "base"
    eagle3.main(run_flags(base))
    run = tmp_path / "run"
    flags = run_flags(run, init_from=base / "best", draft__lora_rank=2)
    eagle3.main(flags)
    reference = shutil.copytree(run, tmp_path / "whole")
    shutil.rmtree(run / "step-6")
    eagle3.main(flags)
    assert_same_run(run, reference)
    target = load_config(target_path)
    before = tensors_of(base / "best", target)
    merged = tensors_of(run / "step-6", target)
    trained = weights(run)
    originals = {name for name in trained if name.endswith(".original") or "parametrizations" not in name}
    first = weights(run, 4)
    assert all(torch.equal(trained[name], first[name]) for name in originals)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, merged[name])}
    assert changed == {f"{name}.weight" for name in read_adapter(run / "step-6").factors}
    key = "draft.fc.parametrizations.weight"
    expected = trained[f"{key}.original"] + 2 * trained[f"{key}.0.b.0"] @ trained[f"{key}.0.a.0"]
    torch.testing.assert_close(merged["fc.weight"], expected)
    assert {path.name for path in (run / "best").iterdir()} == {CONFIG, WEIGHTS, "config.json", "run.json"}


@pytest.mark.parametrize(
    ("program", "options"),
    [(eagle, {}), (dflash, {"draft__block_size": 4, "draft__mask_token_id": 3, "draft__markov_rank": 4})],
    ids=["eagle", "dspark"],
)
def test_other_kinds_are_adapted(program, options, tmp_path, run_flags, target_path):
    base = tmp_path / "base"
    options = {**options, "optim__steps": 2, "evaluation__every": 2}
    program.main(run_flags(base, **options))
    program.main(run_flags(tmp_path / "run", init_from=base / "best", draft__lora_rank=2, **options))
    factors = read_adapter(tmp_path / "run" / "best").factors
    assert all(pair.b.any() for name, pair in factors.items()), "each layer has learnt"
    assert not any("head" in name for name in factors)
    network = program.program.keywords["kind"].Network
    load_draft(network, tmp_path / "run" / "best", load_config(target_path), torch.float32, CPU)


@each_case()
def test_what_is_not_supported_is_refused_by_name(fields, message, adapter):
    values = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(values | fields))
    with user_error(re.escape(message)):
        read_adapter(adapter)


def test_an_adapter_that_names_no_draft_is_not_merged(adapter, tiny):
    values = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**values, "base_model_name_or_path": None}))
    with user_error("base_model_name_or_path is empty"):
        load_draft(Eagle3, adapter, tiny, torch.float32, CPU)


def test_a_head_is_merged_and_not_served_by_request(adapter, tiny):
    tensors = load_file(adapter / WEIGHTS)
    draft = load_draft(Eagle3, DRAFT, tiny, torch.float32, CPU)
    outputs, inputs = draft.lm_head.weight.shape
    change = {"A": torch.ones(1, inputs), "B": torch.ones(outputs, 1)}
    save_file({**tensors, **{f"{PREFIX}lm_head.lora_{x}.weight": y for x, y in change.items()}}, adapter / WEIGHTS)
    merged = load_draft(Eagle3, adapter, tiny, torch.float32, CPU)
    torch.testing.assert_close(merged.lm_head.weight, draft.lm_head.weight + 8)  # alpha 8, rank 1
    with user_error(r"changes a head \(lm_head.weight\)"):
        add_adapters(draft, [read_adapter(adapter)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("fc.lora_A.weight"), "has not both lora_A.weight and lora_B.weight at fc"),
        (lambda x: x.update({"fc.lora_magnitude_vector": torch.ones(2)}), "at fc"),
        (lambda x: x.update({"fc.lora_A.weight": torch.ones(3, 7)}), r"lora_A of fc is \[3, 7\]"),
        (
            lambda x: x.update({"fc.lora_A.weight": torch.ones(4, 7)}),
            r"changes fc of shape \[256, 7\]; this draft's is",
        ),
        (lambda x: x.update({"gone.lora_A.weight": torch.ones(4, 7), "gone.lora_B.weight": torch.ones(7, 4)}), "gone"),
        (lambda x: x["fc.lora_B.weight"].fill_(float("nan")), "NaN or infinite values in fc"),
    ],
)
def test_damaged_files_are_refused_by_name(change, message, adapter, tiny):
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(adapter / WEIGHTS).items()}
    change(tensors)
    save_file({f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}, adapter / WEIGHTS)
    with user_error(message):
        load_draft(Eagle3, adapter, tiny, torch.float32, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "lora_alpha": 3}], ids=str)
def test_peft_reads_the_same_weights(options, adapter, tiny, tmp_path_factory, monkeypatch):
    library = tmp_path_factory.mktemp("peft")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--no-deps", "--target", library]
    if subprocess.run([*install, "peft"], capture_output=True).returncode:
        pytest.skip("peft cannot be installed: no package index that has it can be reached")
    monkeypatch.syspath_prepend(library)
    peft = __import__("peft")
    values = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(values | options))
    before = tensors_of(DRAFT, tiny)
    merged = tensors_of(adapter, tiny)
    root = nn.Module()
    names = read_adapter(adapter).factors
    for name in names:
        node = root
        *path, last = name.split(".")
        for part in path:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        weight = before[f"{name}.weight"]
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.clone()
        node.add_module(last, layer)
    model = peft.PeftModel.from_pretrained(root, str(adapter)).merge_and_unload()
    for name in names:
        torch.testing.assert_close(model.get_submodule(name).weight.data, merged[f"{name}.weight"])
