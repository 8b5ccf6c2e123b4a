"""`slipstream convert` for EAGLE3 and EAGLE: layouts and back, bit by bit; layer ids in each reader's convention."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from slipstream.models.checkpoint import fuse
from slipstream.models.eagle import Eagle, EagleConfig, save_eagle
from slipstream.models.eagle3 import Eagle3, Eagle3Config, load_eagle3, save_eagle3
from slipstream.models.speculators_layout import AUX_LAYERS
from slipstream.models.target import load_config
from slipstream.serve.drafters.base import find_drafter
from slipstream.tests.data_tools.conversion import Runs, assert_equal_checkpoints, change
from slipstream.tests.random_targets import LLAMA3_ROPE, SHAPE, save_random_target

Make = Callable[[str], Path]


@pytest.fixture
def runs(make_target: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runs:
    return Runs(make_target("llama"), tmp_path, capsys)


@pytest.fixture
def deep_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runs:
    """With a target of 12 layers and scaled rotary embedding."""
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": 12}, rope_parameters=LLAMA3_ROPE)
    save_random_target(config, tmp_path / "target")
    return Runs(tmp_path / "target", tmp_path, capsys)


def save(runs: Runs, feature_layers: Sequence[int], draft_vocab_size: int = 50, **fields: Any) -> Path:
    target = load_config(runs.target)
    torch.manual_seed(7)
    config = Eagle3Config.from_target(
        target,
        draft_vocab_size=draft_vocab_size,
        feature_layers=tuple(feature_layers),
        **runs.own_fields() | fields,
    )
    module = Eagle3(config)
    for parameter in module.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    module.set_vocabulary(torch.randperm(target.vocab_size)[:draft_vocab_size].sort().values)
    folder = runs.root / "draft"
    folder.mkdir()
    save_eagle3(module, module.state_dict(), folder, {})
    return folder


def save_eagle_draft(runs: Runs, **fields: Any) -> Path:
    target = load_config(runs.target)
    torch.manual_seed(7)
    module = Eagle(EagleConfig.from_target(target, **runs.own_fields() | fields))
    if module.config.draft_vocab_size is not None:
        module.set_vocabulary(torch.randperm(target.vocab_size)[: module.config.draft_vocab_size].sort().values)
    folder = runs.root / "draft"
    folder.mkdir()
    save_eagle(module, module.state_dict(), folder, {})
    return folder


def values_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("draft_vocab_size", [50, 120])
@pytest.mark.parametrize("layers", [(1, 5, 8), (0, 5, 9), (2, 1), (11, 4, 0)])
def test_a_round_trip_is_bit_identical(layers: tuple[int, ...], draft_vocab_size: int, deep_runs: Runs) -> None:
    deep_runs.assert_round_trips(save(deep_runs, layers, draft_vocab_size))


def test_a_wider_mlp_makes_the_round_trip_too(runs: Runs) -> None:
    runs.assert_round_trips(save(runs, (0, 1, 2), intermediate_size=80))


@pytest.mark.parametrize(("layers", "outputs", "inputs"), [((1, 5, 8), None, None), ((0, 5, 9), [0, 5, 9], [1, 6, 10])])
def test_ids_stand_in_each_readers_convention_or_are_left_out(
    layers: tuple[int, ...], outputs: list[int] | None, inputs: list[int] | None, deep_runs: Runs
) -> None:
    """Servers take the outputs of layers 1, N/2 - 1 and N - 4 by themselves."""
    draft = save(deep_runs, layers)
    assert values_of(draft).get("eagle_config", {}).get(AUX_LAYERS) == outputs
    assert values_of(draft).get(AUX_LAYERS) == inputs
    folder, _ = deep_runs.convert(draft, "speculators")
    assert values_of(folder).get(AUX_LAYERS) == inputs
    assert "eagle_config" not in values_of(folder)
    assert load_eagle3(folder, load_config(deep_runs.target), None, torch.device("cpu")).config.feature_layers == layers


def test_the_layout_of_speculators(runs: Runs) -> None:
    draft = save(runs, (0, 1, 2))
    folder, printed = runs.convert(draft, "speculators")
    tensors, before = load_file(folder / "model.safetensors"), load_file(draft / "model.safetensors")
    embedding = load_file(runs.target / "model.safetensors")["model.embed_tokens.weight"]
    assert tensors.keys() == {key.replace("midlayer", "layers.0") for key in before} | {"embed_tokens.weight"}
    assert torch.equal(tensors["embed_tokens.weight"], embedding.bfloat16())
    values = values_of(folder)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
    assert [values[flag] for flag in flags] == [False] * 5, "vLLM takes a missing norm_before_residual as true"
    assert values["transformer_layer_config"]["model_type"] == "llama"
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": str(runs.target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert find_drafter(str(folder)) is find_drafter(str(draft)), "it can be served as it is"
    kept = len(tensors.keys() & before.keys())
    assert f"tensors  {len(tensors)}: {kept} of the {len(before)} that were read" in printed


def test_a_full_vocabulary_has_no_map_there(runs: Runs) -> None:
    folder, _ = runs.convert(save(runs, (0, 1, 2), 120), "speculators")
    assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()


def test_a_checkpoint_as_safeailab_publishes_it(runs: Runs) -> None:
    """A pickle in fp32, fused here, and a config that names neither a target nor a draft's architecture."""
    draft = save(runs, (1, 2, 3))
    file = draft / "model.safetensors"
    tensors = {key: x.float() if x.is_floating_point() else x for key, x in fuse(load_file(file)).items()}
    embedding = load_file(runs.target / "model.safetensors")["model.embed_tokens.weight"]
    torch.save(tensors | {"embed_tokens.weight": embedding}, draft / "pytorch_model.bin")
    file.unlink()
    absent = ("drafter", "target", "target_fingerprint", "target_num_layers", "torch_dtype", "tokenizer_hash")
    change(draft, **dict.fromkeys((*absent, "eagle_config", AUX_LAYERS)), architectures=["LlamaForCausalLM"])
    assert "the draft names no target; add --target" in runs.refused(draft, "sglang")
    folder, _ = runs.convert(draft, "sglang", "--target", str(runs.target))
    written = load_file(folder / "model.safetensors")
    assert torch.equal(
        fuse(written)["midlayer.self_attn.qkv_proj.weight"], tensors["midlayer.self_attn.qkv_proj.weight"]
    )
    assert {x.dtype for x in written.values() if x.is_floating_point()} == {torch.float32}, "as in the file"
    assert values_of(folder)["eagle_config"][AUX_LAYERS] == [1, 2, 3], "the default for 4 layers, which others lack"


def test_what_the_layout_of_speculators_cannot_hold_is_refused(runs: Runs) -> None:
    draft = save(runs, (0, 1, 4))
    assert "reads state 4, after the target's final norm" in runs.refused(draft, "speculators")
    _, printed = runs.convert(draft, "sglang")
    assert "note: it reads the last layer's output" in printed


def test_biases_are_refused_there(runs: Runs) -> None:
    draft = save(runs, (0, 1, 2), attention_bias=True)
    assert "speculators has one for o, too" in runs.refused(draft, "speculators")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm_before_residual": True}, "draft config sets norm_before_residual, which is not supported"),
        ({"norm_before_residual": None}, "draft config lacks norm_before_residual"),
        ({"fc_norm": True}, "draft config sets fc_norm"),
        (
            {"speculators_model_type": "peagle", "drafter": "peagle"},
            "is a draft of the kind peagle; kinds that convert",
        ),
        (
            {"transformer_layer_config": {"model_type": "qwen3", "vocab_size": 120}},
            "model_type is 'qwen3', whose norms",
        ),
        ({"transformer_layer_config": ["llama"]}, "transformer_layer_config is a list; it must be an object"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "draft config lacks hidden_size, intermediate_size"),
    ],
)
def test_other_networks_of_speculators_are_refused_by_name(values: dict[str, Any], message: str, runs: Runs) -> None:
    folder, _ = runs.convert(save(runs, (0, 1, 2)), "speculators")
    change(folder, **values)
    assert message in runs.refused(folder, "sglang")


def test_an_embedding_of_its_own_is_kept_in_every_layout(runs: Runs) -> None:
    folder, _ = runs.convert(save(runs, (0, 1, 2)), "speculators")
    tensors = load_file(folder / "model.safetensors")
    own = tensors["embed_tokens.weight"] + 1
    save_file(tensors | {"embed_tokens.weight": own}, folder / "model.safetensors")
    change(folder, embed_requires_grad=True)
    for layout in ("sglang", "speculators"):
        folder, _ = runs.convert(folder, layout)
        assert torch.equal(load_file(folder / "model.safetensors")["embed_tokens.weight"], own)


@pytest.mark.parametrize("fields", [{}, {"fc_bias": False}, {"qkv_bias": True}, {"draft_vocab_size": 40}])
def test_eagle_drafts_come_back_bit_by_bit(fields: dict[str, Any], runs: Runs) -> None:
    """From a file as EAGLE's authors publish it: a pickle with the target's embedding, prefixed names."""
    draft = save_eagle_draft(runs, **fields)
    foreign = runs.root / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text((draft / "config.json").read_text())
    tensors = {
        f"model.{key}" if "layers" in key else key: x for key, x in load_file(draft / "model.safetensors").items()
    }
    embedding = load_file(runs.target / "model.safetensors")["model.embed_tokens.weight"]
    torch.save(tensors | {"embed_tokens.weight": embedding.bfloat16()}, foreign / "pytorch_model.bin")
    folder, printed = runs.convert(foreign, "sglang")
    assert_equal_checkpoints(draft, folder)
    assert "note:" not in printed
    torch.save(tensors | {"embed_tokens.weight": embedding + 1}, foreign / "pytorch_model.bin")
    written = load_file(runs.convert(foreign, "sglang")[0] / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], embedding + 1)
    torch.save(tensors | {"lm_head.weight": embedding + 1}, foreign / "pytorch_model.bin")
    assert "lm_head.weight is not the target's" in runs.refused(foreign, "sglang")


def test_speculators_has_no_place_for_eagle(runs: Runs) -> None:
    assert "layout speculators has no place for drafts such as" in runs.refused(save_eagle_draft(runs), "speculators")
