"""A draft on disk, to be changed and loaded, and attention of one sequence for networks alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.kernels.kv.rope import rotate_halves
from slipstream.kernels.norm import norm_heads
from slipstream.models.drafts.base import Choices, load_draft, write_draft
from slipstream.models.layers.attention import Attention, AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import TargetSpec
from slipstream.tests.random_targets import change_json

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]
Values = dict[str, Any]
ORIGIN = {"target": "owner/model", "target_revision": "main", "target_fingerprint": "f00", "tokenizer_hash": "ba5"}


class SavedDraft:
    """A draft in a folder, for a tiny target: V 120, H 32, 4 heads, 2 KV heads, I 48."""

    def __init__(self, module: Any, target: TargetSpec, folder: Path):
        self.module = module.bfloat16()
        self.target = target
        self.folder = folder
        size = module.config.draft_vocab_size
        if size is not None:
            module.set_vocabulary(torch.arange(size) * (120 // size))
        write_draft(module, module.state_dict(), folder, {"argv": ["train"]})

    def change(self, tensors: Callable[[Tensors], Tensors] | None = None, values: Values | None = None):
        """`tensors` maps the file's; `values` replace those of config.json, and None deletes."""
        file = self.folder / "model.safetensors"
        if tensors:
            save_file(tensors(load_file(file)), file)
        change_json(self.folder / "config.json", **values or {})

    def load(
        self,
        dtype: torch.dtype | None = torch.bfloat16,
        shared: Tensors | None = None,
        **choices: Any,
    ) -> Any:
        return load_draft(type(self.module), self.folder, self.target, dtype, CPU, shared, Choices(**choices))

    def assert_loads_equal(self):
        loaded = self.load().state_dict()
        original = self.module.state_dict()
        assert loaded.keys() == original.keys()
        for key in original:
            assert torch.equal(loaded[key], original[key]), key

    def check_public(self, shapes: Values, fields: Values) -> Tensors:
        """Compares the file's tensors, which it returns, with `shapes`, and config.json with some `fields` of it."""
        tensors = load_file(self.folder / "model.safetensors")
        assert {key: list(tensor.shape) for key, tensor in tensors.items()} == shapes
        assert {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} == {torch.bfloat16}
        assert fields.items() <= json.loads((self.folder / "config.json").read_text()).items()
        return tensors

    def check_round_trip(self):
        """Exact in every dtype, config and run.json included."""
        self.assert_loads_equal()
        for dtype in (torch.float32, None):
            loaded = self.load(dtype)
            assert loaded.config == self.module.config
            assert not any(parameter.requires_grad for parameter in loaded.parameters())
            for key, tensor in self.module.state_dict().items():
                wide = tensor.float() if tensor.is_floating_point() and dtype else tensor
                assert torch.equal(loaded.state_dict()[key], wide), key
        assert json.loads((self.folder / "run.json").read_text()) == {"argv": ["train"]}


def fused(tensors: Tensors) -> Tensors:
    """q, k and v, gate and up in one tensor each, as in some trainers' files."""
    joined = dict(tensors)
    for name, first, *rest in (("qkv_proj", "q_proj", "k_proj", "v_proj"), ("gate_up_proj", "gate_proj", "up_proj")):
        for key in [key for key in tensors if f".{first}." in key]:
            parts = [joined.pop(key.replace(first, part)) for part in (first, *rest)]
            joined[key.replace(first, name)] = torch.cat(parts)
    return joined


class CausalAttention(Attention):
    """Every row of one sequence sees the rows before it and itself; keeps the last k and v."""

    def __init__(self, rope: RotaryEmbedding, length: int):
        self.cos = rope.cos[:length, None]
        self.sin = rope.sin[:length, None]

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer):
        self.k = rotate_halves(k, self.cos, self.sin)
        self.v = v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        assert mask == "causal"
        q, k, v = norm_heads(q, k, v, layer.norms)
        self.write(k, v, layer)
        q = rotate_halves(q, self.cos, self.sin)
        k = self.k
        group = q.shape[-2] // k.shape[-2]
        k = k.repeat_interleave(group, dim=-2)
        v = v.repeat_interleave(group, dim=-2)
        scores = torch.einsum("...ihd,...jhd->...hij", q, k) / q.shape[-1] ** 0.5
        pairs = torch.ones(q.shape[-3], q.shape[-3]).bool()
        window = layer.spec.window
        hidden = pairs.triu(1) if window is None else pairs.triu(1) | pairs.tril(-window)
        scores = scores.masked_fill(hidden, -torch.inf)
        return torch.einsum("...hij,...jhd->...ihd", scores.softmax(-1), v)
