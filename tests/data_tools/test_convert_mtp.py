"""`slipstream convert` of MTP heads: into a copy of the target, whose files transformers and the server read, and
back."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from slipstream.data_tools.convert import main
from slipstream.data_tools.convert_mtp import link
from slipstream.models.drafts.base import load_draft, write_draft
from slipstream.models.drafts.mtp import MTP, MTPConfig, load_mtp
from slipstream.models.files.checkpoint import INDEX, read_tensors
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.models.targets.families import MTP_FORMS
from slipstream.tests.mtp_targets import KINDS, module_tensors
from slipstream.tests.pairwise import some_of
from slipstream.tests.quantized_targets import LAYOUTS, save_quantized
from slipstream.tests.random_targets import change_json, load_model
from slipstream.tests.serve.engine_runs import build_engine, plain_answers, run, sized_requests, tokens_of
from slipstream.tests.serve.test_draft_adapters import save_adapter
from slipstream.train.mtp import copy_weights

IGNORED = {"glm4-moe": r"model\.layers\.4\..*", "hy-v3": r"model\.layers\.4\..*"}


def save_trained(target: Path, folder: Path) -> dict[str, Tensor]:
    """Saves a draft with the target's head, changed; returns its tensors."""
    spec = load_config(target)
    module = load_mtp(load_target(target, spec, torch.float32, torch.device("cpu")))
    draft = MTP(MTPConfig.from_target(spec, target=str(target)))
    copy_weights(module, draft)
    torch.manual_seed(0)
    for name, parameter in draft.named_parameters():
        if name != "norm.weight" or MTP_FORMS[spec.architecture].has_norm:
            parameter.data += 0.05 * torch.randn_like(parameter)
    folder.mkdir()
    write_draft(draft, draft.state_dict(), folder, {})
    return load_file(folder / "model.safetensors")


def transformers_tensors(kind: str, folder: Path) -> dict[str, Tensor]:
    """The head's tensors that transformers reads in the target's files, by their names there."""
    model = load_model(folder, dtype=torch.float32)
    for field, value in {"num_mtp_layers": 1, **KINDS[kind].module}.items():
        setattr(model.config, field, value)
    return module_tensors(kind, MtpModel.from_pretrained(model))


def convert(source: Path, output: Path, *words: str) -> Path:
    main([f"--input={source}", f"--output={output}", *words])
    return output


@pytest.mark.parametrize(
    "kind", some_of(["ernie", "glm4-moe", "hy-v3", "mellum", "qwen3-next", "qwen3-5"], ["ernie", "glm4-moe", "qwen3-5"])
)
def test_a_copy_of_the_target_has_the_trained_head(kind, make_mtp, tmp_path, monkeypatch):
    target = make_mtp(kind)
    save_trained(target.folder, tmp_path / "draft")
    before = load_file(target.folder / "model.safetensors")
    copy = convert(tmp_path / "draft", tmp_path / "copy", "--layout=target")
    tensors = load_file(copy / "model.safetensors")
    changed = {name for name in before if not torch.equal(tensors[name], before[name])}
    assert tensors.keys() == before.keys()
    assert changed == module_tensors(kind, target.module).keys()
    assert load_file(target.folder / "model.safetensors").keys() == before.keys()
    monkeypatch.setattr(type(target.model), "_keys_to_ignore_on_load_unexpected", [IGNORED.get(kind, r"^mtp\.")])
    if kind not in ("ernie", "hy-v3"):  # whose tensors transformers looks for under other names
        loaded = transformers_tensors(kind, copy)
        assert all(torch.equal(loaded[name], tensors[name]) for name in changed)
    requests = sized_requests((9, 33))
    engines = build_engine(target.folder, str(tmp_path / "draft")), build_engine(copy, "mtp")
    from_draft, from_copy = (run(engine, requests) for engine in engines)
    assert tokens_of(from_draft) == tokens_of(from_copy) == plain_answers(target.folder, requests)
    counts, counts_of_copy = (
        [replace(answer.counts, weight_version="") for answer in answers.values()]
        for answers in (from_draft, from_copy)
    )
    assert counts == counts_of_copy


@pytest.mark.parametrize(("kind", "count"), [("ernie", 1), ("ernie", 2), ("glm4-moe", 3), ("qwen3-next", 1)])
def test_the_way_back_gives_the_same_draft(kind, count, make_mtp, tmp_path):
    target = make_mtp(kind, count)
    draft = save_trained(target.folder, tmp_path / "draft")
    assert draft.keys() >= set().union(*(module_tensors(kind, target.module, index) for index in range(count)))
    copy = convert(tmp_path / "draft", tmp_path / "copy", "--layout=target")
    back = load_file(convert(copy, tmp_path / "back", "--layout=slipstream") / "model.safetensors")
    assert back.keys() == draft.keys()
    assert all(torch.equal(back[name].to(draft[name].dtype), draft[name]) for name in draft)
    values, expected = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("back", "draft"))
    assert values["target"] == str(copy)
    assert {name for name in values if values[name] != expected[name]} == {"target", "target_fingerprint"}


def test_an_adapter_is_merged_into_the_head(make_mtp, tmp_path):
    target = make_mtp("qwen3-5").folder
    draft = save_trained(target, tmp_path / "draft")
    adapter = save_adapter(target, tmp_path / "draft", tmp_path / "adapter", 2, seed=1)
    module = load_draft(MTP, adapter, load_config(target), torch.bfloat16, torch.device("cpu"))
    expected = module.file_tensors(public_tensors(module))
    copied = read_tensors(convert(adapter, tmp_path / "copy", "--layout=target"))
    assert all(torch.equal(copied[name].bfloat16(), expected[name].bfloat16()) for name in draft)
    assert any(not torch.equal(expected[name], draft[name]) for name in draft)


def test_files_without_the_head_are_shared_and_nothing_else_is_copied(make_mtp, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(make_mtp("glm4-moe").folder, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"model-a.safetensors": {}, "model-b.safetensors": {}}
    for name, tensor in tensors.items():
        parts["model-b.safetensors" if "layers.4." in name or "layers.3." in name else "model-a.safetensors"][name] = (
            tensor
        )
    for name, content in parts.items():
        save_file(content, folder / name, {"format": "pt"})
    files = {name: file for file, content in parts.items() for name in content}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "consolidated.safetensors").write_bytes(b"x")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    draft = save_trained(folder, tmp_path / "draft")
    copy = convert(tmp_path / "draft", tmp_path / "copy", "--layout=target")
    assert os.path.samefile(copy / "model-a.safetensors", folder / "model-a.safetensors")
    assert not os.path.samefile(copy / "model-b.safetensors", folder / "model-b.safetensors")
    small = {"config.json", "generation_config.json", "chat_template.jinja"}
    assert {file.name for file in copy.iterdir()} == {*parts, *small, INDEX, "run.json"}
    copied = read_tensors(copy)
    assert all(torch.equal(copied[name], draft.get(name, tensors[name]).float()) for name in tensors)
    with pytest.raises(SystemExit):
        convert(tmp_path / "draft", copy, "--layout=target")
    convert(tmp_path / "draft", copy, "--layout=target", "--overwrite")


@pytest.mark.parametrize("has_index", [False, True])
def test_a_target_that_has_lost_its_head_gets_one(has_index, make_mtp, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(make_mtp("qwen3-5").folder, folder)
    draft = save_trained(folder, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(rest, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", mtp_num_hidden_layers=None)
    if has_index:
        weight_map = dict.fromkeys(rest, "model.safetensors")
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    copy = convert(tmp_path / "draft", tmp_path / "copy", "--layout=target")
    assert json.loads((copy / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    copied = read_tensors(copy)
    assert copied.keys() == tensors.keys()
    assert all(torch.equal(copied[name], draft.get(name, copied[name])) for name in copied)
    loaded = load_model(copy, dtype=torch.float32).state_dict()
    assert torch.equal(loaded["model.norm.weight"], rest["model.norm.weight"])
    assert torch.equal(transformers_tensors("qwen3-5", copy)["mtp.fc.weight"], draft["mtp.fc.weight"].float())


def test_experts_in_one_tensor_are_replaced_together(make_mtp, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(make_mtp("qwen3-next").folder, folder)
    tensors = load_file(folder / "model.safetensors")
    path = "mtp.layers.0.mlp.experts"
    count = len({name for name in tensors if name.startswith(path) and name.endswith("down_proj.weight")})

    def matrices(source, part):
        return torch.stack([source[f"{path}.{expert}.{part}_proj.weight"] for expert in range(count)])

    together = {
        f"{path}.gate_up_proj": torch.cat((matrices(tensors, "gate"), matrices(tensors, "up")), dim=1),
        f"{path}.down_proj": matrices(tensors, "down"),
    }
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(path)}
    save_file(rest | together, folder / "model.safetensors", {"format": "pt"})
    draft = save_trained(folder, tmp_path / "draft")
    copied = load_file(convert(tmp_path / "draft", tmp_path / "copy", "--layout=target") / "model.safetensors")
    expected = torch.cat((matrices(draft, "gate"), matrices(draft, "up")), dim=1)
    assert torch.equal(copied[f"{path}.gate_up_proj"], expected.float())
    assert torch.equal(copied[f"{path}.down_proj"], matrices(draft, "down").float())


def test_a_copy_takes_the_place_of_a_link_that_cannot_be(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_text("x")
    link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "x"


def test_what_cannot_be_stitched_is_refused(make_mtp, make_target, tmp_path, exits):
    target = make_mtp("glm4-moe").folder
    draft = tmp_path / "draft"
    save_trained(target, draft)
    save_quantized(LAYOUTS["compressed-channel"], target, tmp_path / "fp8")
    llama = make_target("llama")
    plain = MTP(MTPConfig.from_target(load_config(llama), target=str(llama)))
    (tmp_path / "plain").mkdir()
    write_draft(plain, plain.state_dict(), tmp_path / "plain", {})
    for source, words, message in (
        (draft, f"--output={target}/copy --layout=target", "lies in target"),
        (draft, "--output=o", f"layout sglang cannot hold drafts such as {draft}; use target"),
        (draft, f"--output=o --layout=target --target={tmp_path}/fp8", "of a quantised MTP layer, which a trained one"),
        (draft, f"--output=o --layout=target --target={llama}", "mtp_form is 'Glm4MoeForCausalLM', an MTP layer of"),
        (tmp_path / "plain", "--output=o --layout=target", "is an MTP head in no target's form, since files of Llama"),
        (make_target("glm4-moe"), "--output=o --layout=slipstream", "is a target without an MTP layer; name"),
        (
            target,
            "--output=o --layout=target",
            "is a target, whose MTP head only layout slipstream holds; set --layout",
        ),
    ):
        with exits(message, 1):
            main([f"--input={source}", *words.split()])
    assert not Path("o").exists()
