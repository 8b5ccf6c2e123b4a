"""Ranks of tensor parallelism: their outputs add up to the whole target's, and each reads its own bytes alone."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3MoeConfig

from slipstream.kernels.collectives.ranks import Ranks, RankSum
from slipstream.kernels.collectives.tree import add_along_tree
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.gemm.fp8 import FEW_GATED_ROWS, quantize_weight
from slipstream.models.files.checkpoint import read_tensors
from slipstream.models.layers.formats.fp8 import FP8Format, FP8Linear
from slipstream.models.layers.linear import Head, Linear, cut_sums
from slipstream.models.layers.mlp import GatedMLP
from slipstream.models.layers.moe import Experts, MixtureOfExperts
from slipstream.models.layers.norm import RMSNorm, add_delta
from slipstream.models.targets import decoder
from slipstream.models.targets.config import DeltaNetSpec, MLPSpec, MoESpec
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.models.targets.packed_attention import PackedAttention
from slipstream.tests.models.saved_drafts import CPU
from slipstream.tests.pairwise import gate_of, grouped, rotating, some_of
from slipstream.tests.quantized_targets import (
    FP8,
    LAYOUTS,
    MOE_CONFIG,
    Tensors,
    blockwise,
    dequantized_weights,
    fuse_experts,
    per_channel,
    save_gpt_oss,
    save_quantized,
)
from slipstream.tests.random_targets import (
    CAPPED,
    FAMILIES,
    RELATIVES,
    SHAPE,
    change_json,
    muse_glimmer,
    save_random_target,
)
from slipstream.tests.recurrent_layers import AverageSpec
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

WIDE = LlamaConfig(**SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}, head_dim=128)
WIDE_MOE = Qwen3MoeConfig(
    **MOE_CONFIG.to_dict()
    | {
        "num_experts": 4,
        "num_local_experts": 4,
        "moe_intermediate_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 120,
    }
)
FUSED = ("fused", "fused fp8", "mxfp4", "gpt-oss")
PACKED_OUTPUTS = {"qweight": 1, "qzeros": 1, "scales": 1}  # axes of outputs that are not 0
NORMED_TOGETHER = (
    "olmo2",
    "olmo3",
    "olmo3-yarn",
    "olmoe",
    "olmoe-norm",
    "flex-olmo",
    "flex-olmo-norm",
    "minimax-m2",
)  # all heads
GATE = (
    "gemma4-shared",
    "glm4-moe",
    "granite",
    "hunyuan-moe",
    "laguna",
    "muse-glimmer",
    "qwen3-5-moe",
    "qwen3-next",
)  # of RELATIVES


class Sum(nn.Module):
    """Adds up the outputs of all ranks' modules, as an all-reduce will."""

    def __init__(self, modules: Sequence[nn.Module]):
        super().__init__()
        self.ranks = nn.ModuleList(modules)

    def forward(self, *inputs: Any) -> Tensor:
        return torch.stack([module(*inputs) for module in self.ranks]).sum(0)


class ExpertSum(Sum):
    share = None

    def added(self, *inputs: Any) -> Tensor:
        return self(*inputs)

    def least_rows(self, num_rows: int) -> int:
        return self.ranks[0].least_rows(num_rows)


class AttentionSum(Sum):
    """A sum over ranks, each of which keeps the keys and values of its heads for later layers."""

    def __init__(self, modules: Sequence[nn.Module], attentions: Sequence[PackedAttention]):
        super().__init__(modules)
        self.attentions = attentions

    def forward(self, x: Tensor, attention: PackedAttention, *inputs: Any) -> Tensor:
        outputs = []
        for module, rank_attention in zip(self.ranks, self.attentions, strict=True):
            rank_attention.plan(attention.positions[None])
            outputs.append(module(x, rank_attention, *inputs))
        return torch.stack(outputs).sum(0)


class SharedVocabulary(nn.Module):
    """Embeds tokens by the ranks that have their rows."""

    def __init__(self, embeddings: Sequence[nn.Embedding]):
        super().__init__()
        self.ranks = nn.ModuleList(embeddings)

    def forward(self, tokens: Tensor) -> Tensor:
        size = self.ranks[0].num_embeddings
        rows = [
            embedding(tokens.clamp(rank * size, (rank + 1) * size - 1) - rank * size)
            * (tokens // size == rank)[:, None]
            for rank, embedding in enumerate(self.ranks)
        ]
        return torch.stack(rows).sum(0)


class LockStep:
    """Runs the layers of all ranks together; norms are those of rank 0."""

    def __init__(self, ranks: Sequence[Target]):
        self.ranks = ranks
        self.target = copy.copy(ranks[0])
        self.target._modules = dict(ranks[0]._modules)
        self.target.embed_tokens = SharedVocabulary([rank.embed_tokens for rank in ranks])
        attentions = [PackedAttention() for _ in ranks]
        layers = []
        for parts in zip(*(rank.layers for rank in ranks), strict=True):
            layer = copy.copy(parts[0])
            layer._modules = dict(parts[0]._modules)
            setattr(layer, layer.mixer_name, AttentionSum([part.mixer for part in parts], attentions))
            layer.mlp = Sum([part.mlp for part in parts])
            if getattr(layer, "experts", None) is not None:
                layer.experts = ExpertSum([part.experts for part in parts])
            layers.append(layer)
        self.target.layers = nn.ModuleList(layers)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.cat([rank.logits(hidden) for rank in self.ranks], dim=-1)


def load(
    path: Path, rank: int = 0, world: int = 1, quantization: str | None = None, *, whole_experts: bool = False
) -> Target:
    options = {"quantization": quantization, "rank": rank, "world": world, "whole_experts": whole_experts}
    return load_target(path, load_config(path), torch.float32, CPU, **options)


@torch.no_grad()
def outputs(target: Target, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states, and the outputs of each mixer and MLP."""
    attention = PackedAttention()
    attention.plan(torch.arange(len(tokens))[None])
    added = {}
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, key=f"{index}.{name}": added.update({key: output})
        )
        for index, layer in enumerate(target.layers)
        for name, module in (("mixer", layer.mixer), ("mlp", layer.mlp))
    ]
    hidden, _ = target(tokens, attention)
    for hook in hooks:
        hook.remove()
    return hidden, added


def check_sums(path: Path, worlds: Sequence[int]):
    tokens = torch.randint(3, 120, (40,), generator=torch.Generator().manual_seed(1))
    target = load(path)
    hidden, added = outputs(target, tokens)
    for world in worlds:
        together = LockStep([load(path, rank, world) for rank in range(world)])
        local_hidden, local_added = outputs(together.target, tokens)
        torch.testing.assert_close(local_added, added, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(together.logits(local_hidden), target.logits(hidden), atol=1e-4, rtol=1e-4)


FAMILIES_OF_RANKS = sorted((FAMILIES | CAPPED | RELATIVES).keys() - {*NORMED_TOGETHER})


@grouped("family")
@pytest.mark.parametrize(
    ("family", "world"),
    gate_of(
        product(FAMILIES_OF_RANKS, (2, 4)), [*zip((*list(FAMILIES)[::2], *CAPPED, *GATE), cycle((4, 2)), strict=False)]
    ),
)
def test_ranks_add_up_to_the_target(family, world, make_target):
    """4 ranks share 2 KV heads, and 2 key heads of a delta net."""
    check_sums(make_target(family), [world])


def test_ranks_have_several_kv_heads(tmp_path):
    config = LlamaConfig(**SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2})
    save_random_target(config, tmp_path)
    check_sums(tmp_path, [2])


def test_mxfp4_experts_add_up(tmp_path):
    save_gpt_oss(tmp_path, size=128)
    check_sums(tmp_path, (2, 4))


def expected_part(name: str, weight: Tensor, rank: int, world: int) -> Tensor:
    """A rank's slice of a weight of a target with 2 KV heads."""
    axis = 1 if name.endswith((".o_proj.weight", ".down_proj.weight")) else 0
    count = min(world, 2) if name.endswith((".k_proj.weight", ".v_proj.weight")) else world
    return weight.chunk(count, axis)[rank * count // world]


def check_weights(folder: Path, values: Tensors, name: str, world: int):
    """Compares with slices of the target's weights; those that are quantised on the fly have scales of their slices."""
    on_the_fly = name == "on-the-fly"
    for rank in range(world):
        weights = dequantized_weights(load(folder, rank, world, "fp8" if on_the_fly else None))
        assert weights.keys() == {key for key in values if key.endswith("_proj.weight")}
        for key, weight in weights.items():
            expected = expected_part(key, values[key], rank, world)
            torch.testing.assert_close(weight, per_channel(expected)[1] if on_the_fly else expected)


@pytest.fixture(scope="module")
def wide_targets(tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for name, config in (("dense", WIDE), ("experts", WIDE_MOE)):
        folders[name] = tmp_path_factory.mktemp("wide") / name
        save_random_target(copy.deepcopy(config), folders[name])
    return folders


@grouped("kind")
@pytest.mark.parametrize(("kind", "name"), rotating(["dense", "experts"], LAYOUTS))
def test_quantised_ranks_have_slices_of_the_weights(kind, name, wide_targets, tmp_path):
    folder = tmp_path / name
    values = save_quantized(LAYOUTS[name], wide_targets[kind], folder)
    if name == "on-the-fly":
        values = load_file(wide_targets[kind] / "model.safetensors")
    if name == "gptq-order" and kind == "dense":
        with user_error(r"layers\.0\.self_attn\.o_proj has 512 inputs, which 2 ranks cut into 256"):
            load(folder, 0, 2)
    elif name == "gptq-order":
        with user_error("has act order"):
            load(folder, 0, 2)
    else:
        check_weights(folder, values, name, 2)
        if kind == "dense":
            check_weights(folder, values, name, 4)


@grouped()
@pytest.mark.parametrize(
    "name",
    some_of(
        [*(LAYOUTS.keys() - {"gptq-order"}), *FUSED],
        ["fp8-static", "compressed-channel", "awq", "gptq-v2", "packed-asymmetric", "on-the-fly", *FUSED],
    ),
)
def test_ranks_have_whole_experts(name, wide_targets, make_target, tmp_path):
    """All that a rank stores of its experts is what one rank stores of them."""
    folder = tmp_path / name
    if name == "gpt-oss":
        folder = make_target(name)
    elif name == "mxfp4":
        save_gpt_oss(folder)
    elif name == "fused":
        folder.mkdir()
        (folder / "config.json").write_text((wide_targets["experts"] / "config.json").read_text())
        save_file(
            fuse_experts(load_file(wide_targets["experts"] / "model.safetensors"), 4), folder / "model.safetensors"
        )
    else:
        layout = "fp8-blocks" if name == "fused fp8" else name
        save_quantized(LAYOUTS[layout], wide_targets["experts"], folder)
        if layout != name:
            save_file(fuse_experts(load_file(folder / "model.safetensors"), 4), folder / "model.safetensors")
    quantization = "fp8" if name == "on-the-fly" else None
    full = load(folder, quantization=quantization)
    layers = {path: layer for path, layer in full.named_modules() if isinstance(layer, Experts)}
    assert layers
    parts = [load(folder, rank, 2, quantization, whole_experts=True) for rank in range(2)]
    for path, layer in layers.items():
        expected = layer.state_dict()
        halves = [part.get_submodule(path).state_dict() for part in parts]
        assert halves[0].keys() == expected.keys()
        for key, tensor in expected.items():
            tensors = [half[key] for half in halves]
            stored = torch.cat([x.float() for x in tensors]) if tensor.dim() else torch.stack(tensors).max()
            assert torch.equal(stored, tensor.float()), key


@pytest.mark.skipif("qwen3-5" not in RELATIVES, reason="this transformers does not know it")
def test_quantised_delta_nets_have_slices_of_each_kind_of_heads(tmp_path):
    """FP8 blocks of q, k and v, which stand in one tensor; its slices are copied together."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    plain = RELATIVES["qwen3-5"]
    save_random_target(type(plain)(**plain.to_dict() | sizes), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    values = {}
    for name in [
        name for name in tensors if name.endswith(("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"))
    ]:
        stored, values[name.replace("language_model.", "")] = blockwise(tensors.pop(name))
        tensors |= {name.removesuffix("weight") + end: part.contiguous() for end, part in stored.items()}
    save_file(tensors, file)
    change_json(tmp_path / "config.json", quantization_config=dict(LAYOUTS["fp8-blocks"].config))
    for rank in range(2):
        weights = dequantized_weights(load(tmp_path, rank, 2))
        assert weights.keys() == values.keys()
        for name, weight in weights.items():
            axis = 1 if "out_proj" in name else 0
            kinds = values[name].split([256, 256, 512]) if "in_proj_qkv" in name else [values[name]]
            torch.testing.assert_close(weight, torch.cat([kind.chunk(2, axis)[rank] for kind in kinds], axis))


@pytest.mark.skipif("muse-glimmer" not in RELATIVES, reason="this transformers does not know it")
@pytest.mark.parametrize(
    ("name", "head_dim", "world"), [("fp8-blocks", 128, 2), ("packed", 128, 2), ("fp8-tensor", 64, 4)]
)
def test_gates_that_are_projected_with_queries_have_slices_of_their_own(name, head_dim, world, tmp_path):
    """Heads of 64 dims: a rank's queries, keys and values are no multiple of 128, which only blocks must be."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": head_dim}
    save_random_target(muse_glimmer(**sizes), tmp_path / "plain")
    values = save_quantized(LAYOUTS[name], tmp_path / "plain", tmp_path / name)
    assert "gate_proj" in load(tmp_path / name, 1, world).layers[0].mixer.qkv_proj.parts
    text = {key.replace("language_model.", ""): x for key, x in values.items() if "vision" not in key}
    check_weights(tmp_path / name, text, name, world)


def fuse_queries(tensors: Tensors) -> Tensors:
    """q, k and v in one tensor each."""
    fused = dict(tensors)
    for name, query in tensors.items():
        if ".q_proj." in name:
            parts = [fused.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            axis = PACKED_OUTPUTS.get(name.rpartition(".")[2], 0)
            joined = torch.cat([part.view(torch.uint8) for part in parts] if query.dtype == FP8 else parts, axis)
            fused[name.replace("q_proj", "qkv_proj")] = joined.view(query.dtype)
    return fused


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "packed-asymmetric"])
def test_fused_quantised_projections_come_apart(name, wide_targets, tmp_path):
    values = save_quantized(LAYOUTS[name], wide_targets["dense"], tmp_path / name)
    file = tmp_path / name / "model.safetensors"
    tensors = {key: x for key, x in load_file(file).items() if not key.endswith("weight_shape")}
    save_file(fuse_queries(tensors), file)
    check_weights(tmp_path / name, values, name, 4)


def test_fused_experts_come_apart(wide_targets, tmp_path):
    values = save_quantized(LAYOUTS["fp8-blocks"], wide_targets["experts"], tmp_path / "fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    save_file(fuse_experts(load_file(file), 4), file)
    check_weights(tmp_path / "fp8", values, "fp8-blocks", 2)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((wide_targets["experts"] / "config.json").read_text())
    save_file(fuse_experts(load_file(wide_targets["experts"] / "model.safetensors"), 4), plain / "model.safetensors")
    check_sums(plain, [2])


@pytest.mark.parametrize("name", ["fp8-blocks", "awq"])
def test_cut_blocks_and_groups_are_refused(name, tmp_path):
    """192 channels of an MLP would be one and a half of each."""
    config = LlamaConfig(**WIDE.to_dict() | {"intermediate_size": 384})
    save_random_target(config, tmp_path / "plain")
    save_quantized(LAYOUTS[name], tmp_path / "plain", tmp_path / name)
    with user_error(r"mlp\.\w+ has 384 \w+.*, which 2 ranks cut into 192; .* keeps 128 together"):
        load(tmp_path / name, 0, 2)


def test_cut_blocks_of_experts_are_refused(wide_targets, tmp_path):
    save_quantized(LAYOUTS["fp8-blocks"], wide_targets["experts"], tmp_path / "fp8")
    save_gpt_oss(tmp_path / "mxfp4")
    for folder, world, sizes in (
        ("fp8", 4, "256 channels in an expert, which 4 ranks cut into 64"),
        ("mxfp4", 2, "160 channels in an expert, which 2 ranks cut into 80"),
    ):
        with user_error(rf"layers\.0\.mlp\.experts has {sizes}.*: use --tp-exact, fewer"):
            load(tmp_path / folder, 0, world)


@pytest.mark.parametrize("family", ["llama", "phi3-window", "qwen3-moe"])
def test_a_rank_reads_its_own_bytes_alone(family, make_target, monkeypatch):
    """All that is loaded are views of the files, and each byte is that of one rank, but for norms and routers."""
    path = make_target(family)
    tensors = read_tensors(path)
    loads = []
    monkeypatch.setattr(decoder, "read_tensors", lambda _path: dict(tensors))
    monkeypatch.setattr(decoder, "load_weights", lambda _target, pieces, *_: loads.append(pieces))
    for rank in range(2):
        load(path, rank, 2)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    pieces = [tensor for rank in loads for tensor in rank.values()]
    assert storages == {tensor.untyped_storage().data_ptr() for tensor in pieces}
    repeated = sum(x.nbytes for name, x in tensors.items() if "norm" in name or name.endswith("mlp.gate.weight"))
    assert sum(tensor.nbytes for tensor in pieces) == repeated + sum(tensor.nbytes for tensor in tensors.values())


def test_cache_scales_are_those_of_the_heads(make_target, tmp_path):
    tensors = load_file(make_target("llama") / "model.safetensors")
    (tmp_path / "config.json").write_text((make_target("llama") / "config.json").read_text())
    scales = {"k": torch.tensor([1.0, 2.0]), "v": torch.tensor([3.0, 4.0])}
    tensors |= {f"model.layers.0.self_attn.{name}_scale": scale for name, scale in scales.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for world, heads in ((1, [slice(0, 2)]), (2, [slice(0, 1), slice(1, 2)])):
        for rank, head in enumerate(heads):
            first, *rest = load(tmp_path, rank, world).cache_scales
            assert rest == [None] * 3
            assert first.tolist() == [scale[head].tolist() for scale in scales.values()]


def test_a_rank_has_local_sizes(make_target):
    spec = load_config(make_target("qwen2-moe"))
    local = spec.shard(1, 4)
    assert local == spec.shard(0, 4)
    assert spec.shard(0, 1) is spec
    sizes = (local.vocab_size, local.intermediate_size, local.num_heads, local.num_kv_heads, local.hidden_size)
    assert sizes == (30, 12, 1, 1, 32)
    experts = local.layers[1].mlp
    assert isinstance(experts, MoESpec)
    assert (experts.num_experts, experts.intermediate_size, experts.shared_size) == (6, 6, 10)


@each_case()
def test_sizes_that_ranks_do_not_divide_are_refused(family, rank, world, fields, message, make_target):
    spec = replace(load_config(make_target(family)), **fields)
    with user_error(message):
        spec.shard(rank, world)


def test_heads_of_delta_nets_that_ranks_do_not_divide_are_refused():
    spec = DeltaNetSpec(num_key_heads=4, num_value_heads=12, key_dim=8, value_dim=8, taps=4)
    shard = spec.shard(4)
    assert (shard.num_key_heads, shard.num_value_heads) == (1, 3)
    assert spec.shard(12) == replace(spec, num_key_heads=1, num_value_heads=1)
    for world, message in (
        (3, "linear_num_key_heads is 4, and 3 ranks"),
        (8, "linear_num_value_heads is 12, and 8 ranks"),
    ):
        with user_error(message):
            spec.shard(world)
    with user_error("layers called average run on 1 rank, not on 2"):
        AverageSpec(size=4).shard(2)


def test_widths_of_experts_that_ranks_do_not_divide_are_refused(make_target):
    spec = load_config(make_target("qwen2-moe"))
    experts = spec.layers[1].mlp
    assert isinstance(experts, MoESpec)
    for name, label in (("intermediate_size", "the experts' intermediate size"), ("shared_size", "shared_expert_")):
        with user_error(f"{label}.* is 7, and 2 ranks do not divide it"):
            replace(experts, **{name: 7}).shard(2)
    assert experts.shard(2, whole_experts=True) == replace(experts, shares=2, shared_size=experts.shared_size // 2)
    with user_error("the number of experts is 6, and 4 ranks do not divide it"):
        experts.shard(4, whole_experts=True)


class Pretended(Ranks):
    """Two ranks that never meet."""

    def add(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        return partial.to(dtype)

    def gather(self, part: Tensor) -> Tensor:
        return part

    def collect(self, part: Tensor) -> Tensor:
        return part


def test_leaves_of_sums_are_the_same_on_all_ranks():
    """Layers that share inputs have their part of the leaves; layers without leaves are named."""
    network = nn.ModuleDict(
        {
            "q": Linear(512, 128),
            "o": Linear(256, 512),
            "odd": Linear(160, 8),
            "gated": Linear(512, {"gate_proj": 64, "up_proj": 64}),
            "head": Head(512, 64),
            "wide head": Head(64, 40_000),
            "wide": Linear(64, 8),
        }
    )
    network["o"].ranks = network["head"].ranks = network["wide head"].ranks = Pretended(0, 2)
    assert cut_sums(network, quantized=False) == ["odd", "wide"]
    assert {name: layer.leaves for name, layer in network.items()} == {
        "q": 4, "o": 2, "odd": 0, "gated": 0, "head": 4, "wide head": 0, "wide": 0
    }  # fmt: skip


@pytest.mark.parametrize(("shares", "world", "leaves"), [(1, 1, 4), (1, 2, 0), (2, 2, 2), (4, 4, 1), (8, 8, 0)])
def test_whole_experts_have_leaves(shares, world, leaves):
    experts = Experts(8, MoESpec(num_experts=8, top_k=2, intermediate_size=8, shares=shares))
    if world > 1:
        experts.join(Pretended(1, world))
    network = nn.ModuleDict({"experts": experts})
    assert cut_sums(network, quantized=False) == ([] if leaves else ["experts"])
    assert experts.num_leaves == leaves
    assert experts.share == (None if shares == 1 else (8 // shares, 8 // shares))


class Remembered(Ranks):
    """Ranks that run one after another, twice: each adds what the others had at their last call."""

    def __init__(self, rank: int, partials: list[Tensor]):
        super().__init__(rank, len(partials))
        self.partials = partials

    def add(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        self.partials[self.rank] = partial
        return add_along_tree(self.partials).to(dtype)

    def gather(self, part: Tensor) -> Tensor:
        raise NotImplementedError

    collect = gather


def new_mixture(spec: MoESpec, ranks: Ranks | None, values: Tensors) -> MixtureOfExperts:
    """A rank's part of a mixture with the whole one's `values`, whose sums are cut."""
    mixture = MixtureOfExperts(256, spec)
    for name, parameter in mixture.named_parameters():
        value = values[name]
        if ranks is not None:
            for axis, size in enumerate(parameter.shape):
                blocks = 2 if "shared_expert.gate_up" in name and axis == 0 else 1  # gates and ups have slices
                if size < value.shape[axis]:
                    parts = [block.chunk(ranks.world, axis)[ranks.rank] for block in value.chunk(blocks, axis)]
                    value = torch.cat(parts, axis)
        parameter.data.copy_(value)
    if ranks is not None:
        mixture.join(ranks)
    for module in mixture.modules():
        if isinstance(module, Linear):
            module.order = FixedOrder()
    assert cut_sums(mixture, quantized=False) == []
    return mixture.requires_grad_(False)


@pytest.mark.parametrize("gated", [True, False])
def test_mixtures_of_ranks_have_the_bits_of_one(gated):
    spec = MoESpec(num_experts=8, top_k=3, intermediate_size=64, shared_size=256, shared_gate=gated)
    values = {name: 0.1 * torch.randn(x.shape) for name, x in MixtureOfExperts(256, spec).named_parameters()}
    x = torch.randn(20, 256)
    expected = new_mixture(spec, None, values)(x)
    for world in (2, 4):
        partials = [torch.zeros_like(x)] * world
        shard = spec.shard(world, whole_experts=True)
        parts = [new_mixture(shard, Remembered(rank, partials), values) for rank in range(world)]
        for _ in range(2):
            sums = [part(x) for part in parts]
        assert torch.equal(add_along_tree([part.partial for part in sums]), expected)


def test_ranks_quantise_inputs_of_experts_alike(wide_targets, tmp_path):
    """By the largest of all experts' scales."""
    save_quantized(LAYOUTS["fp8-static"], wide_targets["experts"], tmp_path / "static")
    scales = []
    for rank in range(2):
        experts = load(tmp_path / "static", rank, 2, whole_experts=True).get_submodule("layers.0.mlp.experts")
        scales.append(experts.get_buffer("down_proj_largest_scale"))

    class Pair(Pretended):
        def collect(self, part):
            return torch.stack(scales) if part.item() in (scale.item() for scale in scales) else part

    largest = max(scale.item() for scale in scales)
    experts.join(Pair(1, 2))
    assert experts.get_buffer("down_proj_largest_scale").item() == largest


def test_sums_of_ranks_wait_for_the_next_norm():
    layer = Linear(8, 16)
    nn.init.normal_(layer.weight)
    layer.ranks = Pretended(0, 2)
    norm = RMSNorm(16, 1e-5)
    x = torch.randn(3, 8)
    delta = layer.added(x)
    assert isinstance(delta, RankSum)
    assert delta.partial.dtype == torch.float32
    residual = torch.randn(3, 16)
    expected = norm.add(residual, layer(x))
    for output, other in zip(norm.add(residual, delta), expected, strict=True):
        assert torch.equal(output, other)
    assert torch.equal(add_delta(residual, delta), residual + layer(x))
    assert torch.equal(norm.branch(delta).x, layer(x))
    assert isinstance(layer.added(x[None]), Tensor)


@pytest.mark.parametrize("rows", [3, FEW_GATED_ROWS + 1])
def test_fp8_mlps_of_ranks_add_up_to_one(rows):
    """Also where the activation's kernel quantises for the projection behind it."""
    torch.manual_seed(0)
    weights = [torch.randn(256, 128), torch.randn(256, 128), torch.randn(128, 256)]
    gates, ups, downs = (quantize_weight(weight)[0] for weight in weights)
    scales = torch.tensor([[0.5, 2.0]])  # of two blocks of 128 channels

    def mlp(rank, world):
        part = slice(256 * rank // world, 256 * (rank + 1) // world)
        network = GatedMLP(128, MLPSpec(intermediate_size=256 // world))
        for name, codes in (("gate_up_proj", torch.cat([gates[part], ups[part]])), ("down_proj", downs[:, part])):
            layer = FP8Format("block").layer(network.get_submodule(name), [], {})
            block_scales = scales[:, part.start // 128 : part.stop // 128]
            if name == "gate_up_proj":
                block_scales = torch.cat([block_scales, block_scales + 1], 1).t()
            layer.load_part(None, {"weight": codes, "weight_scale": block_scales})
            setattr(network, name, layer)
        network.gate_up_proj.quantize = network.down_proj.input_scaling()
        return network

    x = torch.randn(rows, 128)
    partials = []
    for rank in range(2):
        half = mlp(rank, 2)
        half.join(Pretended(rank, 2))
        delta = half(x)
        assert isinstance(delta, RankSum)
        partials.append(delta.partial)
    expected = mlp(0, 1)(x)
    torch.testing.assert_close(partials[0] + partials[1], expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_fp8_layers_scale_the_leaves_of_shared_inputs():
    """Ranks' sums are those of one rank, for which nothing quantises rows before the layer does."""
    weight = torch.randn(128, 1024)
    codes, scales = quantize_weight(weight)
    x = torch.randn(3, 1024)

    def layer(part):
        linear = Linear(part.stop - part.start, 128)
        linear.shares_inputs = True
        with torch.device("cpu"):
            quantized = FP8Format("channel").layer(linear, [], {})
        quantized.load_part(None, {"weight": codes[:, part], "weight_scale": scales[:, None]})
        return quantized

    full = layer(slice(0, 1024))
    mlp = nn.ModuleDict({"reader": layer(slice(0, 1024)), "down": full})
    mlp["reader"].quantize = full.input_scaling()
    assert cut_sums(mlp, quantized=False) == ["reader", "down"]
    assert cut_sums(mlp, quantized=True) == []
    assert mlp["reader"].quantize is None
    partials = []
    for rank in range(2):
        half = layer(slice(512 * rank, 512 * rank + 512))
        half.ranks = Pretended(rank, 2)
        assert cut_sums(nn.ModuleDict({"down": half}), quantized=True) == []
        assert half.leaves == 2
        partials.append(half.partial(x.chunk(2, 1)[rank]))
    assert torch.equal(partials[0] + partials[1], full(x))
    assert (full(x) - x @ weight.t()).norm() < 0.1 * full(x).norm()
    static = FP8Linear(Linear(1024, 128), FP8Format("tensor", static=True))
    assert not static.scales_leaves
