"""A format of weights is one class and a line of a table: nothing else knows this one."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.layers.formats import table
from slipstream.models.layers.formats.base import FileTensor, Format, Quantization, QuantizedLinear
from slipstream.models.layers.linear import Linear
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.models.targets.sizes import target_size
from slipstream.tests.models.test_quantization import logits
from slipstream.tests.quantized_targets import CONFIG, MOE_CONFIG, Layout, Quantized, reference, save_quantized
from slipstream.tests.random_targets import save_random_target

CPU = torch.device("cpu")
INT8 = (torch.int8,)


@dataclass(frozen=True, slots=True)
class Int8Format(Format):
    """8-bit integers times a scale of each output."""

    title = "8 bits"
    variants = "int8"
    tensors = {"codes": INT8}

    @classmethod
    def read(cls, method: str, values: Mapping[str, Any]) -> Quantization | None:
        return Quantization.uniform("int8", cls()) if method == "int8" and values else None

    @property
    def description(self) -> str:
        return "int8"

    def layer(self, linear: Linear, names: Sequence[str], tensors: Mapping[str, Tensor]) -> QuantizedLinear:
        return Int8Linear(linear)

    def stand_ins(self, num_inputs: int) -> dict[str, Tensor]:
        return {"codes": torch.empty(0, dtype=torch.int8, device="meta")}


class Int8Linear(QuantizedLinear):
    storage = {"scale": torch.float32}
    format = Int8Format()

    def __init__(self, like: Linear):
        super().__init__(like)
        self.register_buffer("codes", torch.empty(self.out_features, self.in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(self.out_features, 1))

    def _file_tensors(self, outputs: int) -> dict[str, FileTensor]:
        return {"codes": FileTensor(((outputs, self.in_features),), INT8), "scale": FileTensor(((outputs, 1),))}

    def load_part(self, part: str | None, tensors: Mapping[str, Tensor]):
        for name in ("codes", "scale"):
            self.get_buffer(name)[self.rows_of(part)] = tensors[name]
        self._load_bias(part, tensors)

    def stored_in(self, buffers: Mapping[str, Tensor]) -> Tensor:
        return buffers["codes"] * buffers["scale"]

    def dequantized(self) -> Tensor:
        return self.stored_in(dict(self.named_buffers()))

    def _multiply(self, x: Tensor, gated: bool) -> Tensor:
        return F.linear(x, self.dequantized(), self.bias)

    def _add_leaves(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._multiply(x, gated=False).to(dtype)


def int8(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {"codes": codes.to(torch.int8), "scale": scale}, codes * scale


LAYOUT = Layout(int8, {"quant_method": "int8"})


@pytest.mark.parametrize("config", [CONFIG, MOE_CONFIG], ids=["dense", "experts"])
@torch.no_grad()
def test_another_format_needs_a_class_and_a_line(config, monkeypatch, tmp_path):
    """Read from its config, loaded, also in the parts of two ranks, multiplied, and counted without files."""
    plain = tmp_path / "plain"
    folder = tmp_path / "int8"
    save_random_target(copy.deepcopy(config), plain)
    values = save_quantized(LAYOUT, plain, folder)
    with pytest.raises(ValueError, match="quant_method is 'int8'; known formats: fp8"):
        load_target(folder, load_config(folder), torch.float32, CPU)
    monkeypatch.setattr(table, "FORMATS", [*table.FORMATS, Int8Format])
    target = load_target(folder, load_config(folder), torch.float32, CPU)
    tokens = torch.randint(3, 120, (30,), generator=torch.Generator().manual_seed(1))
    expected = reference(LAYOUT, plain, folder, values)(tokens[None]).logits[0]
    torch.testing.assert_close(logits(target, tokens), expected, atol=1e-4, rtol=1e-3)
    num_bytes = sum(tensor.nbytes for tensor in (*target.parameters(), *target.buffers()))
    assert target_size(folder, load_config(folder), torch.float32).resident == num_bytes
    targets = [load_target(folder, load_config(folder), torch.float32, CPU, rank=rank, world=2) for rank in range(2)]
    sizes = [
        sum(layer.codes.numel() for layer in network.modules() if isinstance(layer, Int8Linear))
        for network in (target, *targets)
    ]
    assert sizes[0] == sum(sizes[1:])
