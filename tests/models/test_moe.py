"""Mixtures of experts: the layouts of their files, missing parts, and gpt-oss's layer."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from slipstream.models.files.weights import load_weights, public_tensors
from slipstream.models.layers.moe import MixtureOfExperts
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.tests.models.saved_drafts import CPU, CausalAttention
from slipstream.tests.random_targets import SHAPE, roughen
from slipstream.tests.user_errors import user_error


def load(path: Path) -> dict[str, Tensor]:
    return public_tensors(load_target(path, load_config(path), torch.float32, CPU))


def write(tensors: dict[str, Tensor], source: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe", "mixtral"])
def test_experts_are_read_apart_fused_and_from_shards(family, make_target, tmp_path):
    """As transformers writes them, as it holds them, and with an index."""
    path = make_target(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = load(path)
    names = load_file(path / "model.safetensors")
    assert any(re.search(r"experts\.0\.(gate_proj|w1)\.weight", name) for name in names)
    fused = write(dict(model.state_dict()), path, tmp_path / "fused")
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(fused / "model.safetensors")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    for folder in (fused, tmp_path / "shards"):
        tensors = load(folder)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_missing_and_unexpected_experts_are_named(make_target, tmp_path):
    path = make_target("qwen3-moe")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.2.mlp.experts.6.down_proj.weight"] = torch.ones(32, 24)
    tensors["model.layers.1.mlp.experts.1.down_proj.weight"] = torch.ones(24, 32)
    with user_error("does not fit its config") as error:
        load(write(tensors, path, tmp_path / "damaged"))
    for text in (
        "missing layers.0.mlp.experts.3.up_proj.weight; ",
        "unexpected layers.2.mlp.experts.6.down_proj.weight; ",
        "layers.1.mlp.experts.1.down_proj.weight is [24, 32], the config says [32, 24]",
    ):
        assert text in str(error.value)


def test_too_many_experts_per_token_are_refused(make_target):
    values = AutoModelForCausalLM.from_pretrained(make_target("mixtral")).config.to_dict()
    with user_error("num_experts_per_tok is 5; it must be 1 to 4"):
        TargetSpec.from_json(values | {"num_experts_per_tok": 5})


@torch.no_grad()
def test_gpt_oss_layer_equals_transformers():
    """With its transposed experts, biases, and gates and ups beyond the limit."""
    torch.manual_seed(0)
    config = GptOssConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2, architectures=["GptOssForCausalLM"])
    reference = GptOssMLP(config)
    for parameter in reference.parameters():
        parameter.data = torch.randn(parameter.shape)
    roughen(reference)
    spec = TargetSpec.from_json(config.to_dict()).layers[0].mlp
    with torch.device("meta"):
        ours = MixtureOfExperts(config.hidden_size, spec)
    tensors = {name.replace("router.", "gate."): tensor for name, tensor in reference.state_dict().items()}
    files = dict(tensors)
    load_weights(ours, tensors, torch.float32, CPU, Path("gpt-oss"))
    again = public_tensors(ours)
    assert again.keys() == files.keys()
    assert all(torch.equal(again[name], files[name]) for name in files)
    x = 3 * torch.randn(2, 7, config.hidden_size)
    torch.testing.assert_close(ours(x), reference(x)[0], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("family", "kinds"), [("qwen3-moe", [0, 1, 3]), ("mixtral", [0, 1]), ("qwen2-moe", [0, 1])])
def test_a_short_pass_runs_each_kind_of_layer(family, kinds, make_target):
    """So that every kernel is compiled, and what it keeps is allocated, before passes are captured."""
    path = make_target(family)
    target = load_target(path, load_config(path), torch.float32, CPU)
    ran = []
    for index, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    with target.short_run():
        target(torch.tensor([3, 4]), CausalAttention(RotaryEmbedding(target.config.rope, target.config.head_dim, 8), 2))
    assert ran == kinds
