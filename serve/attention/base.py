"""The interface of attention backends, and the choice of a backend for each phase."""

import importlib
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor

from slipstream.kernels.attention.tree import tree_attention
from slipstream.kernels.kv.rope import Rotation, rotate_and_store
from slipstream.models.layers.attention import Attention, AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import AttentionSpec
from slipstream.serve.runner.batch import AttentionMetadata, Phase
from slipstream.serve.runner.kv import NetworkKV
from slipstream.serve.runner.request_state import KVSlots

logger = logging.getLogger(__name__)

PHASES = get_args(Phase)
NO_BACKENDS = ("base", "parts")  # files of this folder that define none
FEATURES = {  # traits of layers that backends may lack kernels for
    "soft caps of scores": lambda layer: layer.softcap is not None,
    "attention sinks": lambda layer: layer.sinks,
}
GPU_PREFERENCES = {  # backends in the order of `auto`: each phase takes the first that has kernels for its KV
    "prefill": ("flashinfer", "sdpa"),
    "verify": ("triton", "sdpa"),
    "draft": ("triton", "sdpa"),
}


class KVFormat(NamedTuple):
    """The properties of a network's layers and their KV cache that a backend may lack kernels for."""

    device: torch.device
    dtype: torch.dtype  # of queries
    layers: tuple[AttentionSpec, ...]
    has_codes: bool = False  # KV is in e4m3, with scales of heads

    @property
    def head_dims(self) -> list[int]:
        return sorted({layer.head_dim for layer in self.layers})


class Backend(Attention):
    """Attention over one network's paged KV.

    A file of this folder defines one as its class `Backend`; and others, for NAME:VARIANT, in a dict `VARIANTS`.
    """

    phases: ClassVar[frozenset[str]]
    needs_host_lengths: ClassVar[bool]  # sizes or plans its work on the host: a CUDA graph cannot capture its passes
    supports_ragged_nodes: ClassVar[bool] = False  # requests of one pass may differ in their numbers of nodes
    is_exact: ClassVar[bool] = False  # a row's bits depend on nothing but its own text
    features: ClassVar[frozenset[str]] = frozenset()  # names in FEATURES that its kernels support,
    gpu_features: ClassVar[frozenset[str]] = frozenset()  # and those that were tested on a GPU
    reads_codes: ClassVar[bool] = False  # takes KV in e4m3

    def __init__(self, kv: NetworkKV, ropes: Sequence[RotaryEmbedding]) -> None:
        """`ropes`: one for each layer; layers may share it."""
        self.kv = kv
        self.ropes = ropes
        self.layers = kv.layers  # (2, num_pages, page_size, G, D) of each layer,
        self.groups = kv.groups  # and its group
        self.flat = [layer.flatten(1, 2) for layer in self.layers]  # the same by slots: (2, S, G, D)
        self.scales = kv.layer_scales  # (2, G) of each layer whose KV is in e4m3
        self.page_size = self.layers[0].shape[2]

    @classmethod
    def fault(cls, kv: KVFormat) -> str:
        """Returns the reason why it cannot serve such layers; empty if it can."""
        features = cls.features if kv.device.type == "cpu" else cls.gpu_features
        if kv.has_codes and not cls.reads_codes:
            return "it has no kernels for an FP8 KV cache with scales of heads"
        lacking = [name for name in FEATURES if name not in features and any(map(FEATURES[name], kv.layers))]
        return f"it has no kernels for {' and '.join(lacking)}" if lacking else ""

    @classmethod
    def prepare(cls, kv: KVFormat) -> None:
        """Starts what takes long and can be done in the background: compiling kernels."""

    @property
    def is_ready(self) -> bool:
        """Whether its kernels for prompts are compiled. Where they are not, a pass waits until they are."""
        return True

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepares one pass; `attend` of every layer follows."""
        self.plan_reads(metadata)
        self.plan_writes(metadata.positions, metadata.slots)

    def plan_reads(self, metadata: AttentionMetadata) -> None:
        """Prepares `attend_stored` of every layer alone."""
        self.metadata = metadata

    def plan_writes(self, positions: Tensor, slots: KVSlots) -> None:
        """Prepares `write` of every layer alone, for rows at positions (T,) int64 whose KV goes to these slots."""
        self.positions = positions
        self.slots = slots

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        return self.attend_stored(self.rotate_and_store(q, k, v, layer), layer, mask)

    @abstractmethod
    def attend_stored(self, q: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        """`attend` for queries (T, Q, D) that are rotated, as `rotate_and_store` gives them, where all KV is stored."""

    def attend_nodes(self, q: Tensor, layer: AttentionLayer, mask: Mask, **options: Any) -> Any:
        """`tree_attention` of q (T, Q, D), of requests that have as many queries each; `options` are its further ones.
        The output is (B, T / B, Q, D)."""
        metadata = self.metadata
        spec = layer.spec
        keys, values = self.layers[layer.id]  # (num_pages, page_size, G, D)
        return tree_attention(
            q.unflatten(0, (len(metadata.query_lens), -1)),
            keys,
            values,
            metadata.state.pages[self.groups[layer.id]],
            metadata.requests,
            metadata.lengths,
            metadata.ancestors,
            mask,
            spec.score_scale,
            first_node=metadata.first_node,
            window=spec.window,
            softcap=spec.softcap,
            starts=metadata.read_starts,
            **options,
        )

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        self.rotate_and_store(k[:, :0], k, v, layer._replace(norms=None))

    def rotate_and_store(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Norms and rotates q and k, stores k and v in their slots of a layer, and returns q (T, Q, D)."""
        to = self._rotation(layer)
        query_scales = self.ropes[layer.id].query_scales
        return rotate_and_store(
            q, k, v, to.cos, to.sin, to.positions, to.slots, to.keys, to.values, layer.norms, to.scales, query_scales,
            is_old_position=True,  # the tokens' embedding came after it
        )  # fmt: skip

    def rotation(self, layer: AttentionLayer) -> Rotation | None:
        has_norms = layer.norms is not None or layer.spec.projection_norm
        is_plain = not has_norms and self.ropes[layer.id].query_scales is None
        return self._rotation(layer) if is_plain and self.layers[layer.id].is_cuda else None

    def _rotation(self, layer: AttentionLayer) -> Rotation:
        rope = self.ropes[layer.id]
        keys, values = self.flat[layer.id]
        return Rotation(
            cos=rope.cos,
            sin=rope.sin,
            positions=self.positions,
            slots=self.slots.of(self.groups[layer.id]),
            keys=keys,
            values=values,
            scales=self.scales[layer.id],
        )


def choose_backends(option: str, formats: Mapping[str, KVFormat], *, is_present: bool = True) -> dict[str, str]:
    """Returns the name of each phase's backend, from `--attention`: auto, one name, or
    prefill=NAME,verify=NAME,draft=NAME.

    `formats`: the KV that each phase works on; a phase without one is not checked against any. Raises ValueError for
    an unknown name or variant, a missing package, and a phase or a cache that a named backend has no kernels for, if
    the device `is_present`; another machine may have other packages.
    """
    if not is_present:
        return {phase: names[0] for phase, names in GPU_PREFERENCES.items()} if option == "auto" else _parse(option)
    names = _choose(formats) if option == "auto" else _parse(option)
    backends = {phase: load_backend(name) for phase, name in names.items()}
    for phase, backend in backends.items():
        lack = _lack(backend, phase, formats.get(phase))
        if lack:
            able = [name for name in _found() if not _why_not(name, phase, formats.get(phase))]
            raise ValueError(
                f"attention backend {names[phase]!r} cannot serve the phase {phase}: {lack}; "
                f"backends that can: {', '.join(able) or 'none'}"
            )
    return names


def _parse(option: str) -> dict[str, str]:
    """Phase -> NAME or NAME:VARIANT."""
    if "=" not in option:
        return dict.fromkeys(PHASES, option)
    choices = [part.partition("=")[::2] for part in option.split(",")]
    if sorted(phase for phase, _ in choices) != sorted(PHASES):
        raise ValueError(f"attention is {option!r}; write one name or prefill=NAME,verify=NAME,draft=NAME")
    return dict(choices)


def _choose(formats: Mapping[str, KVFormat]) -> dict[str, str]:
    """Returns the backends that `auto` stands for: sdpa on the CPU, elsewhere the first of GPU_PREFERENCES that can
    serve the phase."""
    if all(kv.device.type == "cpu" for kv in formats.values()):
        return dict.fromkeys(PHASES, "sdpa")
    names = {}
    for phase, preferred in GPU_PREFERENCES.items():
        faults = {name: _why_not(name, phase, formats.get(phase)) for name in preferred}
        names[phase] = next((name for name, fault in faults.items() if not fault), preferred[0])
        if names[phase] != preferred[0]:
            logger.warning("attention: %s by %s, not by %s: %s", phase, names[phase], *list(faults.items())[0])
    logger.info("attention: %s", ",".join(f"{phase}={name}" for phase, name in names.items()))
    return names


def _why_not(name: str, phase: str, kv: KVFormat | None) -> str:
    try:
        return _lack(load_backend(name), phase, kv)
    except ValueError as error:  # a package that is not installed
        return str(error)


def _lack(backend: type[Backend], phase: str, kv: KVFormat | None) -> str:
    if phase not in backend.phases:
        return "it has no kernels for that phase"
    return backend.fault(kv) if kv else ""


def load_backend(choice: str) -> type[Backend]:
    """Returns the class of NAME or NAME:VARIANT. Raises ValueError if there is none, or if its package is missing."""
    name, colon, variant = choice.partition(":")
    if name not in _found():
        raise ValueError(f"attention backend {name!r} does not exist; found: {', '.join(_found())}")
    module = importlib.import_module(f"slipstream.serve.attention.{name}")
    if not colon:
        return module.Backend
    variants: dict[str, type[Backend]] = getattr(module, "VARIANTS", {})
    if variant not in variants:
        valid = ", ".join(f"{name}:{key}" for key in variants) or "(none)"
        raise ValueError(f"attention backend {name!r} has no variant {variant!r}; valid: {valid}")
    return variants[variant]


def _found() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NO_BACKENDS)
