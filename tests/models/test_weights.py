"""Loading: parts of fused projections, tied heads, weights that do not fit, memory, loading again."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.models.drafts.dflash import DFlash
from slipstream.models.files.checkpoint import read_tensors
from slipstream.models.files.weights import load_weights, public_tensors
from slipstream.models.layers import linear
from slipstream.models.layers.linear import Head, Linear
from slipstream.models.layers.mlp import GatedMLP
from slipstream.models.targets.config import MLPSpec
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.tests.models.saved_drafts import CPU, fused
from slipstream.tests.random_drafts import random_dflash

HERE = Path("draft")


class Block(nn.Module):
    def __init__(self, size: int = 8):
        super().__init__()
        self.qkv_proj = Linear(size, {"q_proj": size, "k_proj": size // 2, "v_proj": size // 2}, bias=True)
        self.mlp = GatedMLP(size, MLPSpec(intermediate_size=12))
        self.lm_head = Head(size, 5)
        self.register_buffer("d2t", torch.zeros(5, dtype=torch.int64))


def empty_block(size: int = 8) -> Block:
    with torch.device("meta"):
        return Block(size)


def file_of(block: Block) -> dict[str, Tensor]:
    """Random tensors as a file of this block holds them."""
    tensors = {name: torch.randn(tensor.shape) for name, tensor in public_tensors(block).items()}
    return tensors | {"d2t": torch.arange(5)}


def load(tensors: dict[str, Tensor], dtype: torch.dtype | None = torch.float32) -> Block:
    return load_weights(empty_block(), dict(tensors), dtype, CPU, HERE)


@pytest.mark.parametrize("change", [dict, lambda tensors: fused({f".{name}": x for name, x in tensors.items()})])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_parts_of_a_projection_are_joined_and_taken_apart_again(change, chunk, monkeypatch):
    """For files with apart and with joined projections, and for any number of rows converted at once."""
    monkeypatch.setattr(linear, "CHUNK", chunk)
    tensors = file_of(empty_block())
    rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "mlp.gate_proj": 12, "mlp.up_proj": 12}
    assert {name: len(tensors[f"{name}.weight"]) for name in rows} == rows
    assert {name for name in tensors if name.endswith("bias")} == {f"{part}_proj.bias" for part in "qkv"}
    block = load({name.removeprefix("."): tensor for name, tensor in change(tensors).items()}, torch.bfloat16)
    parts = [tensors[f"{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(block.qkv_proj.weight, torch.cat(parts).bfloat16())
    again = public_tensors(block)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name].to(again[name].dtype)) for name in tensors)
    assert not any(parameter.requires_grad for parameter in block.parameters())
    states = {name: 2 * tensor for name, tensor in block.state_dict().items()}
    assert all(torch.equal(x, 2 * again[name]) for name, x in public_tensors(block, states).items())


def test_without_a_dtype_tensors_keep_theirs_and_integers_always_do():
    tensors = file_of(empty_block())
    halves = {name: x.half() for name, x in tensors.items() if name in ("lm_head.weight", "q_proj.bias")}
    block = load(tensors | halves | {"d2t": torch.arange(5, dtype=torch.int32)}, None)
    assert block.lm_head.weight.dtype == torch.float16
    assert block.qkv_proj.bias.dtype == block.qkv_proj.weight.dtype == torch.float32, "the widest of its parts"
    assert block.d2t.dtype == load(tensors, torch.bfloat16).d2t.dtype == torch.int64


def test_a_linear_says_in_which_dtype_it_stores_a_parameter(monkeypatch):
    monkeypatch.setattr(Linear, "dtypes", {"bias": torch.float64})
    tensors = file_of(empty_block())
    for dtype in (torch.bfloat16, None):
        block = load(tensors, dtype)
        assert block.qkv_proj.bias.dtype == torch.float64
        assert block.qkv_proj.weight.dtype == block.lm_head.weight.dtype == (dtype or torch.float32)
        assert torch.equal(public_tensors(block)["k_proj.bias"], tensors["k_proj.bias"].double())


def test_every_fault_is_named_before_anything_is_filled():
    tensors = file_of(empty_block())
    del tensors["k_proj.weight"], tensors["mlp.down_proj.weight"]
    tensors |= {"q_proj.bias": torch.ones(9), "gru.weight": torch.ones(1), "mlp.up_proj.weight": torch.ones(12, 9)}
    block = empty_block()
    count = len(tensors)
    message = (
        r"draft does not fit its config: missing k_proj.weight; missing mlp.down_proj.weight; unexpected gru.weight; "
        r"mlp.up_proj.weight is \[12, 9\], the config says \[12, 8\]; q_proj.bias is \[9\], the config says \[8\]"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        load_weights(block, tensors, torch.float32, CPU, HERE)
    assert len(tensors) == count
    assert all(tensor.is_meta for tensor in block.state_dict().values())


@pytest.mark.parametrize("copied", [None, torch.float32, torch.float64])
def test_a_tied_head_is_the_embedding(copied, make_target, tmp_path):
    """Also where a file has it once more."""
    tensors = load_file(make_target("llama") / "model.safetensors")
    config = load_config(make_target("llama"))
    object.__setattr__(config, "tie_word_embeddings", True)
    embedding = tensors["model.embed_tokens.weight"]
    copies = {} if copied is None else {"lm_head.weight": embedding.to(copied, copy=True)}
    rest = {name: x for name, x in tensors.items() if name != "lm_head.weight"}
    save_file(rest | copies, tmp_path / "model.safetensors")
    target = load_target(tmp_path, config, torch.float32, CPU)
    assert target.lm_head.weight is target.embed_tokens.weight
    assert torch.equal(target.embed_tokens.weight, embedding)
    assert "lm_head.weight" not in public_tensors(target)
    assert (target.dtype, target.device) == (torch.float32, CPU)
    hidden = torch.randn(3, config.hidden_size)
    torch.testing.assert_close(target.logits(hidden), hidden @ embedding.T)


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at once in storages that operators made."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(args, is_new=False)
        out = func(*args, **(kwargs or {}))
        self.note(out, is_new=True)
        self.most = max(self.most, sum(size for storage, size in self.sizes.items() if not storage.expired()))
        return out

    def note(self, values: Any, is_new: bool):
        for storage in (x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor) and not x.is_meta):
            self.sizes.setdefault(StorageWeakRef(storage), storage.nbytes() if is_new else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_needs_the_weights_and_one_tensor_more(dtype, tmp_path):
    block = empty_block(64)
    tensors = {name: x.bfloat16() if x.is_floating_point() else x for name, x in file_of(block).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = sum(x.numel() * (dtype.itemsize if x.is_floating_point() else 8) for x in tensors.values())
    read = read_tensors(tmp_path)
    with LiveBytes() as memory:
        load_weights(block, read, dtype, CPU, tmp_path)
    largest = max(x.nbytes for x in tensors.values())
    assert weights <= memory.most <= weights + largest


def test_a_file_is_released_once_its_tensors_are_loaded(tmp_path, monkeypatch):
    """Tensors of earlier files are no longer alive."""
    tensors = file_of(empty_block())
    names = sorted(tensors)
    for index in range(3):
        file = tmp_path / f"model-{index + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[index::3]}, file)
    tensors_of_files = read_tensors(tmp_path)
    assert list(tensors_of_files) == [name for index in range(3) for name in names[index::3]]
    references = {name: weakref.ref(tensor) for name, tensor in tensors_of_files.items()}
    alive_names = []
    load_part = Linear.load

    def load_and_look(*arguments):
        alive_names.append([name for name, reference in references.items() if reference() is not None])
        load_part(*arguments)

    monkeypatch.setattr(Linear, "load", load_and_look)
    load_weights(empty_block(), tensors_of_files, torch.bfloat16, CPU, tmp_path)
    order = list(references)
    assert len(alive_names) > 5
    assert all(alive == order[order.index(alive[0]) :] for alive in alive_names)
    assert not tensors_of_files


def test_loading_again_fills_the_same_storage_and_what_is_derived_of_it(make_target):
    """Captured graphs hold on to the pointers."""
    draft = random_dflash(make_target("qwen3"), attention_bias=True, context_norms=True)
    with torch.device("meta"):
        module = DFlash(draft.config)
        module.lm_head = Head(32, 5)
    pointers = []
    for _ in range(2):
        for parameter in draft.parameters():
            parameter.data.normal_()
        head = torch.randn(5, 32)
        load_weights(module, public_tensors(draft) | {"lm_head.weight": head}, torch.bfloat16, CPU, HERE)
        if not pointers:
            stacked = module.stack_context(range(len(module.layers)))
            ids = torch.tensor([3, 0])
            cut = module.lm_head.cut(ids).weight
            uncut = module.lm_head.whole().weight
        pointers.append([tensor.data_ptr() for tensor in (*module.state_dict().values(), *stacked[:4], cut, uncut)])
    assert pointers[0] == pointers[1]
    weights = {name: tensor.bfloat16() for name, tensor in public_tensors(draft).items()}
    for part, stack in (("weight", stacked.weight), ("bias", stacked.bias)):
        rows = []
        for layer in range(2):
            factor = weights[f"layers.{layer}.input_layernorm.weight"] if part == "weight" else 1
            rows += [weights[f"layers.{layer}.self_attn.{kind}_proj.{part}"] * factor for kind in "kv"]
        assert torch.equal(stack, torch.cat(rows))
    assert torch.equal(stacked.k_norm, torch.stack([weights[f"layers.{i}.self_attn.k_norm.weight"] for i in range(2)]))
    assert torch.equal(cut, head.bfloat16()[ids])
    assert torch.equal(uncut, head.bfloat16())
