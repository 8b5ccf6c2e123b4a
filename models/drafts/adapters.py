"""LoRA adapters of drafts (Hu et al. 2021, arXiv 2106.09685): low-rank changes of linear layers, in peft's files.

adapter_config.json         base_model_name_or_path, the draft that it changes; r, lora_alpha
adapter_model.safetensors   base_model.model.MODULE.lora_A.weight (r, I) and .lora_B.weight (O, r); metadata of ours:
                            draft_fingerprint, of the weights that it was trained on

The weight of MODULE, a linear layer as the draft's files name it, becomes W + lora_alpha / r * B A. Our folders have
the draft's config.json, too: they can be named in its place, and the weights are merged as they are read.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from slipstream.kernels.gemm.low_rank import LowRankChange, LowRankFactors, RowAdapters
from slipstream.models.drafts.heads.base import Head as BlockHead
from slipstream.models.files.atomic import put_json
from slipstream.models.files.checkpoint import (
    Values,
    read_json,
    read_tensors,
    resolve,
    weight_files,
    weights_fingerprint,
    write_tensors,
)
from slipstream.models.files.weights import Place, places_of, public_tensors
from slipstream.models.layers.linear import Head, Linear, remake_derived

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FINGERPRINT = "draft_fingerprint"
ALPHA = 2  # lora_alpha / r of adapters that are trained here
# Fields of peft that change more than low-rank factors can say; those that are absent or off change nothing.
UNSUPPORTED = (
    *("use_dora", "lora_bias", "modules_to_save", "alpha_pattern", "fan_in_fan_out", "layer_replication"),
    *("trainable_token_indices", "use_qalora", "target_parameters"),
)

logger = logging.getLogger(__name__)


class Factors(NamedTuple):
    """A change B A of a weight (O, I)."""

    a: Tensor  # (r, I)
    b: Tensor  # (O, r)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    folder: Path
    base: str  # the draft that it changes
    factors: Mapping[str, Factors]  # by module, in fp32, with the scale in b
    draft_fingerprint: str | None = None  # of the weights that it was trained on

    @property
    def draft(self) -> Path:
        """The folder of the draft that it changes."""
        if not self.base:
            raise ValueError(
                f"adapter {self.folder}: base_model_name_or_path is empty in {CONFIG}; name its draft there"
            )
        return resolve(self.base)

    def warn_if_changed(self, draft: Path) -> None:
        """Output stays right with another draft than the adapter was trained on, but fewer tokens are accepted."""
        if self.draft_fingerprint not in (None, weights_fingerprint(draft)):
            logger.warning(
                "adapter %s was trained on other weights than draft %s holds: expect fewer accepted tokens, or name "
                "the draft that it was trained on",
                self.folder,
                draft,
            )

    def places(self, network: nn.Module) -> Iterator[tuple[Place, Factors]]:
        """Yields where the factors belong in `network`. Raises ValueError for a module that it lacks or that has
        another shape."""
        places = places_of(network)
        tensors = public_tensors(network)
        for name, factors in self.factors.items():
            place = places.get(f"{name}.weight")
            shape = [len(factors.b), factors.a.shape[1]]
            if place is None or not isinstance(place.owner, Linear) or not place.owner.is_plain:
                raise ValueError(f"adapter {self.folder} changes {name}, which is no 16-bit linear layer of this draft")
            if list(tensors[f"{name}.weight"].shape) != shape:
                raise ValueError(
                    f"adapter {self.folder} changes {name} of shape {shape}; this draft's is "
                    f"{list(tensors[f'{name}.weight'].shape)}: name one that was trained on it"
                )
            yield place, factors

    @torch.no_grad()
    def merge(self, network: nn.Module) -> None:
        """Adds the changes to the weights of `network`."""
        for place, (a, b) in self.places(network):
            weight = place.rows(place.owner.get_parameter("weight"))
            weight.copy_(weight.float() + (b @ a).to(weight.device))
        remake_derived(network)


@torch.no_grad()
def add_adapters(network: nn.Module, adapters: Sequence[Adapter]) -> RowAdapters:
    """Lets the layers of `network` change each row by the adapter that the returned object names for it."""
    rows = RowAdapters()
    heads = parts_of_heads(network)
    changes: dict[Linear, list[tuple[int, Place, Factors]]] = {}
    for number, adapter in enumerate(adapters, 1):
        for place, factors in adapter.places(network):
            if place.owner in heads:
                raise ValueError(
                    f"adapter {adapter.folder} changes a head ({place.key}), which is not served by request; name the "
                    "adapter as draft, or train one without"
                )
            changes.setdefault(cast(Linear, place.owner), []).append((number, place, factors))
    for layer, members in changes.items():
        ranks = torch.tensor([len(factors.a) for _, _, factors in members])
        b = torch.zeros(layer.out_features, int(ranks.sum()))
        for (_, place, factors), end in zip(members, ranks.cumsum(0).tolist(), strict=True):
            place.rows(b)[:, end - len(factors.a) : end] = factors.b
        a = torch.cat([factors.a for _, _, factors in members])
        owners = torch.tensor([number for number, _, _ in members]).repeat_interleave(ranks)
        weight = layer.get_parameter("weight")
        joined = LowRankFactors(a.to(weight), b.to(weight), owners.to(weight.device))
        layer.change = LowRankChange(joined, rows)
    return rows


def is_adapter(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_chain(path: Path) -> tuple[Path, list[Adapter]]:
    """Returns the draft at the root of `path`, and the adapters from it to `path`, each trained on what comes before;
    none where `path` is a draft itself."""
    adapters: list[Adapter] = []
    while is_adapter(path):
        adapters.insert(0, read_adapter(path))
        path = adapters[0].draft
        if path.resolve() in [adapter.folder.resolve() for adapter in adapters]:
            raise ValueError(f"adapter {path}: base_model_name_or_path leads back to it; name its draft in {CONFIG}")
    return path, adapters


def read_adapter(path: Path) -> Adapter:
    """Reads an adapter in peft's files. Raises ValueError for one that is damaged, or of a kind that is not served."""
    values = read_json(path / CONFIG)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"adapter {path}: peft_type is {kind!r} in {CONFIG}; LORA alone is supported")
    faults = [f"{name} is {values[name]!r}" for name in UNSUPPORTED if values.get(name)]
    faults += [f"bias is {values['bias']!r}"] if values.get("bias", "none") != "none" else []
    if faults:
        raise ValueError(
            f"adapter {path}: {', '.join(faults)} in {CONFIG}, which is not supported; train it without, or merge it"
        )
    tensors = {name.removeprefix(PREFIX): tensor.float() for name, tensor in read_tensors(path).items()}
    names = sorted({name.rpartition(".lora_")[0] for name in tensors})
    expected = {f"{name}.lora_{letter}.weight" for name in names for letter in "AB"}
    if strange := sorted(expected ^ tensors.keys()):
        raise ValueError(f"adapter {path}: {WEIGHTS} has not both lora_A.weight and lora_B.weight at {strange[0]}")
    if infinite := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"adapter {path} has NaN or infinite values in {infinite[0]}; train it again")
    alpha = values.get("lora_alpha", 8)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"adapter {path}: lora_alpha is {alpha!r} in {CONFIG}; it must be a number")
    factors = {}
    for name in names:
        a, b = (tensors[f"{name}.lora_{letter}.weight"] for letter in "AB")
        if a.ndim != 2 or b.ndim != 2 or not 0 < len(a) == b.shape[1]:
            raise ValueError(f"adapter {path}: lora_A of {name} is {list(a.shape)} and lora_B {list(b.shape)}")
        rank = math.sqrt(len(a)) if values.get("use_rslora") else len(a)
        factors[name] = Factors(a, b * (alpha / rank))
    with safe_open(weight_files(path)[0], "pt") as file:
        fingerprint = (file.metadata() or {}).get(FINGERPRINT)
    return Adapter(path, str(values.get("base_model_name_or_path") or ""), factors, fingerprint)


def write_adapter(
    folder: Path,
    base: str,
    factors: Mapping[str, Factors],
    config: Values,
    run: Values,
    fingerprint: str,
) -> None:
    """Writes factors without their scale, ALPHA, into an existing folder; `config`: the draft's config.json,
    `fingerprint`: of its weights."""
    rank = len(next(iter(factors.values())).a)
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": ALPHA * rank,
        "target_modules": sorted(factors),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {
        f"{PREFIX}{name}.lora_{letter}.weight": tensor
        for name, pair in factors.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }
    write_tensors(folder / WEIGHTS, tensors, {FINGERPRINT: fingerprint})
    for name, content in ((CONFIG, values), ("config.json", config), ("run.json", run)):
        put_json(folder / name, content)


def layers_to_adapt(network: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yields paths and layers that training changes: linear ones, but for heads."""
    heads = parts_of_heads(network)
    for path, layer in network.named_modules():
        if isinstance(layer, Linear) and layer not in heads and layer.is_plain:
            yield path, layer


def parts_of_heads(network: nn.Module) -> set[nn.Module]:
    """Returns the modules of the head over the vocabulary and of a block draft's heads."""
    heads = [module for module in network.modules() if isinstance(module, Head | BlockHead)]
    return {part for head in heads for part in head.modules()}


def part_names(path: str, layer: Linear) -> list[str]:
    """Returns what files call the parts of a layer, in their order."""
    parent = path.rpartition(".")[0]
    return [f"{parent}.{part}".removeprefix(".") for part in layer.parts] or [path]
