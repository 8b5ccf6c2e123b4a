"""Common parts of all drafts: config, reduced vocabulary, and reading and writing of checkpoints.

A family is a subclass of DraftConfig, which says what its config.json holds, and one of DraftNetwork, whose class
attributes say how its tensors differ; `load_draft` and `write_draft` do the rest.

A reduced vocabulary is two buffers: d2t (Vd,) int64 offsets, target id = draft id + d2t[draft id], and t2d (V,) bool,
true for target ids that the draft has.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from slipstream.models.drafts.adapters import read_chain
from slipstream.models.drafts.speculators_layout import from_speculators
from slipstream.models.drafts.token_map import check_t2d, ids_of
from slipstream.models.files.checkpoint import Values, read_draft_tensors, read_json, write_checkpoint
from slipstream.models.files.weights import check_tensors, load_weights, public_tensors
from slipstream.models.layers.attention import SelfAttention
from slipstream.models.layers.formats.base import FLOATS, Tensors
from slipstream.models.layers.formats.table import tensor_dtypes
from slipstream.models.layers.linear import Embedding
from slipstream.models.targets.config import ROPE_TYPES, AttentionSpec, DecoderShape, LayerSpec, TargetSpec

MAP_REMEDY = "fetch the draft again, or write d2t as target id minus draft id"

logger = logging.getLogger(__name__)

# the target's tensors, which some files copy
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
ROWS = 4096  # compared at once: bounds the memory of dtype conversions
REQUIRED_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps"),
    "max_position_embeddings",
)
OWN_FIELDS = ("target", "target_revision", "target_fingerprint", "tokenizer_hash")

DRAFT_ROPES = tuple(kind for kind in ROPE_TYPES if kind != "longrope")
Network = TypeVar("Network", bound="DraftNetwork")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A user's choices where a draft's files leave them open; None: as the files say. Programs have options of these
    names (serve: --drafter.NAME)."""

    aux_layers: Sequence[int] | None = None  # layer outputs that it reads
    norm_output: bool | None = None  # whether an EAGLE3 draft's next step reads the state after the final norm
    sample_from_anchor: bool | None = None  # whether slot 0 of a block draft predicts the token after the anchor

    @classmethod
    def of(cls, options: Any) -> Self:
        """Takes the choices from the options of the same name."""
        return cls(**{field.name: getattr(options, field.name, None) for field in fields(cls)})

    def refuse(self, kind: str, *fields_of_kind: str) -> None:
        """Raises ValueError for a choice outside `fields_of_kind`: drafts of this kind leave no other open."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name not in fields_of_kind:
                raise ValueError(f"{field.name} is {value}; it is not for {kind} drafts, so leave it out")


UNCHOSEN = Choices()


class Evidence(NamedTuple):
    """A checkpoint's tensors, and what they are called in its files."""

    tensors: Tensors
    names: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(DecoderShape, ABC):
    """Shapes of a draft and the target it was trained for."""

    kind: ClassVar[str]
    """The kind's name in messages."""
    rotates_as_target: ClassVar[bool] = False
    """Whether it has the target's rotary embedding, whatever that is, and not one that every engine can serve."""
    target_hidden_size: int
    target_num_layers: int
    draft_vocab_size: int | None = None  # None: the target's
    sliding_window: int | None = None  # tokens that a windowed layer sees, its own included
    target: str = ""
    target_revision: str | None = None
    target_fingerprint: str = ""
    tokenizer_hash: str = ""

    def __post_init__(self) -> None:
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; the target has {self.vocab_size} tokens")
        if not self.rotates_as_target:
            self._check_rope()
        DecoderShape.__post_init__(self)

    def _check_rope(self) -> None:
        """RopeConfig.of_draft says why."""
        if self.rope.rope_type not in DRAFT_ROPES:
            raise ValueError(f"rope_type is {self.rope.rope_type!r}; supported in drafts: {', '.join(DRAFT_ROPES)}")
        if self.rope.partial != 1:
            raise ValueError(
                f"partial_rotary_factor is {self.rope.partial} in the draft; drafts have 1.0, whatever targets have"
            )

    @property
    def network(self) -> Self:
        """The fields on which the network depends, and not where it comes from or how it was calibrated: drafts with
        equal ones can take each other's weights."""
        return replace(self, target="", target_revision=None, target_fingerprint="", tokenizer_hash="")

    @classmethod
    def from_target(cls, model: TargetSpec, /, **fields: Any) -> Self:
        """A draft as wide as the target `model`. `fields` override or add others (intermediate_size, target, ...)."""
        return cls(**target_fields(model) | fields)

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerSpec, ...]:
        """The decoder's layers."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """config.json of a checkpoint."""

    @classmethod
    @abstractmethod
    def from_json(cls, values: Values, target: TargetSpec, tensors: Tensors | None = None) -> Self:
        """Reads our config.json or another trainer's, whose `tensors`, by public name, say what it leaves out.

        Raises ValueError for what the network here cannot run and for a draft that does not fit `target`.
        """

    @classmethod
    def settle(
        cls,
        values: Values,
        target: TargetSpec,
        choices: Choices,
        evidence: Evidence | None,
    ) -> Values:
        """A config.json, ours or another trainer's, as `from_json` reads it: fields by their public names, and what
        trainers mean differently decided by `choices` or by what the file shows. Without `evidence`, where the tensors
        have not been read, what they would decide takes its usual meaning. Here: of kinds whose files leave nothing
        open.

        Raises ValueError, with the option that decides, for what may be meant one way or another, and for a choice that
        the kind does not leave.
        """
        choices.refuse(cls.kind)
        return values


def target_fields(model: TargetSpec) -> dict[str, Any]:
    """Fields of a draft as wide as the target `model`."""
    sizes = {"target_hidden_size": model.hidden_size, "target_num_layers": model.num_layers}
    return model.shape() | {"rope": model.rope.of_draft} | sizes


class DraftNetwork(nn.Module):
    """A network that drafts. `embed_tokens` is its own embedding (V, H); None: it uses the target's. Has the buffers
    d2t and t2d if its vocabulary is reduced, initially to the first target ids."""

    Config: ClassVar[type[DraftConfig]]
    shared: ClassVar[tuple[str, ...]] = (EMBEDDING, HEAD)
    """Tensors of the target that it uses. A file may hold copies of them, which `load_draft` drops."""
    may_embed: ClassVar[bool] = False
    """Whether a file may have an embedding of its own instead."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """How other trainers begin the names of tensors -> the public beginning."""
    other_parts: ClassVar[Mapping[str, str]] = {}
    """How other trainers name a module within another -> its public name."""
    layers_field: ClassVar[str] = ""
    """The field of config.json that lists the target states which fc reads; empty: fc does not read any."""
    unsupported_files: ClassVar[Mapping[str, str]] = {}
    """Files of other trainers that change the network -> what they hold."""
    config: DraftConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.embed_tokens: Embedding | None = None
        self.config = config
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
            self.t2d[config.draft_vocab_size :] = False

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Specs of the layers' attention, in their order."""
        layers = [module for module in self.modules() if isinstance(module, SelfAttention)]
        return tuple(layer.spec for layer in sorted(layers, key=lambda layer: layer.id))

    def limit_window(self, window: int) -> None:
        """Lets layers that were trained to see all of a text see only its last `window` tokens. A block's slots and a
        tree's nodes see each other as before. Raises ValueError for a draft whose layers have windows."""
        for layer in (layer for layer in self.modules() if isinstance(layer, SelfAttention)):
            layer.spec = with_window(layer.spec, window)

    def set_vocabulary(self, ids: Tensor) -> None:
        """ids (Vd,) int64: the target ids that the draft can propose. Raises ValueError unless they are distinct,
        ascending and the target's."""
        d2t = self.d2t
        t2d = self.t2d
        if ids.shape != d2t.shape or not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0:
            raise ValueError(f"draft vocabulary: need {len(d2t)} distinct ascending ids")
        if int(ids[-1]) >= len(t2d):
            raise ValueError(f"draft vocabulary: id {int(ids[-1])} is outside the target's {len(t2d)} tokens")
        d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        t2d.zero_()[ids.to(t2d.device)] = True

    @property
    def target_ids(self) -> Tensor | None:
        """(Vd,) int64 target id of each draft id; None if they are equal."""
        return None if self.config.draft_vocab_size is None else ids_of(self.d2t)

    def adopt(self, config: DraftConfig) -> None:
        """Takes the config of weights that are loaded in place of its own, whose `network` is the same."""
        self.config = config

    @classmethod
    def read_tensors(cls, tensors: Tensors, target: TargetSpec) -> dict[str, Tensor]:
        """Returns a file's tensors by their public names."""
        return {_public_name(cls, key): tensor for key, tensor in tensors.items()}

    def file_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        """Returns tensors, by their public names, as files have them: in bf16."""
        return {key: x.to(torch.bfloat16) if x.is_floating_point() else x for key, x in tensors.items()}


def with_window(spec: AttentionSpec, window: int) -> AttentionSpec:
    """See DraftNetwork.limit_window."""
    if spec.window is not None:
        raise ValueError(f"window is {window}; this draft was trained with one of {spec.window}: leave the option out")
    return replace(spec, window=window)


def decoder_to_json(config: DraftConfig) -> dict[str, Any]:
    """The fields of config.json that all drafts have, by their public names, and ours."""
    reduced = {} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope.to_json(),
        "vocab_size": config.vocab_size,
        **reduced,
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in OWN_FIELDS},
    }


def decoder_from_json(values: Values, target: TargetSpec, *required: str, **expected: int) -> dict[str, Any]:
    """The inverse: fields of a DraftConfig. Other trainers' configs mostly do not name the target.

    Raises ValueError for a required field, these or `required`, that is missing or null, and as `check_target`.
    """
    missing = [name for name in (*REQUIRED_FIELDS, *required) if values.get(name) is None]
    if missing:
        raise ValueError(f"draft config lacks {', '.join(missing)}")
    check_target(values, vocab_size=target.vocab_size, **expected)
    reduced = values.get("draft_vocab_size") or values["vocab_size"]
    return {
        **DecoderShape.read(values),
        "draft_vocab_size": None if reduced == values["vocab_size"] else reduced,
        "target_hidden_size": target.hidden_size,
        "target_num_layers": target.num_layers,
        **{name: values[name] for name in OWN_FIELDS if values.get(name) is not None},
    }


def check_llama_layer(values: Values) -> None:
    """Raises ValueError unless the decoder's layers are plain ones."""
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"draft config: hidden_act is {values['hidden_act']!r}; it must be 'silu'")
    if values.get("mlp_bias"):
        raise ValueError("draft config sets mlp_bias, which is not supported")


def window_from_json(values: Values) -> int | None:
    """The window of an EAGLE draft's layers. Raises ValueError if some have one and others none.

    Llama's code has windows only where `layer_types` or `use_sliding_window` say so, as they do in our files.
    """
    types = values.get("layer_types")
    if types and len(set(types)) > 1:
        raise ValueError(f"draft config: layer_types is {list(types)}; the layers of an EAGLE draft must be alike")
    is_used = (
        "sliding_attention" in types if types else values.get("use_sliding_window", values.get("model_type") != "llama")
    )
    return (values.get("sliding_window") or None) if is_used else None


def window_to_json(config: DraftConfig, num_layers: int = 1) -> dict[str, Any]:
    """The inverse; nothing without a window."""
    if config.sliding_window is None:
        return {}
    types = ["sliding_attention"] * num_layers
    return {"layer_types": types, "use_sliding_window": True, "sliding_window": config.sliding_window}


def check_target(values: Values, **expected: int) -> None:
    """Raises ValueError for a given field of config.json that differs from `expected`, the target's."""
    for name, actual in expected.items():
        if values.get(name) not in (None, actual):
            raise ValueError(
                f"draft does not fit the target: {name} is {values[name]} in the draft and {actual} in the target; "
                "serve the target it was trained for"
            )


def write_draft(module: DraftNetwork, state: Tensors, path: Path, run: Values) -> None:
    """Writes a servable checkpoint into the existing folder `path` (see atomic.atomic_folder).

    `state` is the module's state_dict, gathered by the caller where it is sharded.
    """
    tensors = module.file_tensors(public_tensors(module, state))
    write_checkpoint(path, {**module.config.to_json(), "torch_dtype": "bfloat16"}, tensors, run)


def load_draft(
    network: type[Network],
    path: Path,
    target: TargetSpec,
    dtype: torch.dtype | None,
    device: torch.device,
    shared: Tensors | None = None,
    choices: Choices = UNCHOSEN,
) -> Network:
    """Reads a draft for `target`, strictly: the ValueError names every missing or unexpected key, and values that are
    not finite.

    dtype None keeps the file's. `shared`: the target's EMBEDDING and HEAD (V, H), by which copies of them are known;
    without it, every tensor of these names counts as a copy. Copies are dropped, another embedding becomes the draft's
    own if `network` allows one, and other tensors in their place are refused. `choices` say what the files leave open;
    those that contradict a file are refused. An adapter is merged into the draft that it names.
    """
    path, adapters = read_chain(path)
    check_files(network, path)
    files = DraftFiles(read_json(path / "config.json"), read_draft_tensors(path))
    module = build_draft(network, files, path, target, dtype, device, shared, choices)
    for adapter in adapters:
        adapter.warn_if_changed(adapter.draft)
        adapter.merge(module)
    return module


def read_draft_config(
    network: type[DraftNetwork], path: Path, target: TargetSpec, choices: Choices = UNCHOSEN
) -> DraftConfig:
    """Returns the config with which `load_draft` builds the network. Raises ValueError if weights have other shapes.
    Where `path` has none, which a draft on the hub need not have fetched, what they would decide takes its usual
    meaning."""
    path, _ = read_chain(path)
    check_files(network, path)
    values = read_json(path / "config.json")
    if any(path.glob("*.safetensors")) or (path / "pytorch_model.bin").exists():
        files = DraftFiles(values, read_draft_tensors(path))
        module, tensors = empty_draft(network, files, path, target, None, choices)
        check_tensors(module, tensors, path)
        return module.config
    if values.get("quantization_config"):
        raise quantized_draft(path, "its config.json has quantization_config")
    settled = network.Config.settle(from_speculators(values), target, choices, None)
    return network.Config.from_json(settled, target, None)


def check_files(network: type[DraftNetwork], path: Path) -> None:
    """Raises ValueError for a file that changes the network in a way that is not supported."""
    for name, content in network.unsupported_files.items():
        if (path / name).exists():
            raise ValueError(f"{path} has {content} ({name}), which is not supported")


class DraftFiles(NamedTuple):
    """A draft's checkpoint: config.json, and tensors by their names in the files."""

    values: Values
    tensors: Tensors


def settle_files(
    network: type[DraftNetwork], files: DraftFiles, path: Path, target: TargetSpec, choices: Choices
) -> tuple[Any, dict[str, Tensor]]:
    """Returns the network's config, and the tensors by their public names."""
    check_unquantized(files.tensors, path)
    tensors = network.read_tensors(files.tensors, target)
    values: Values = from_speculators(dict(files.values))
    values = network.Config.settle(values, target, choices, Evidence(tensors, files.tensors.keys()))
    config: Any = network.Config.from_json(values, target, tensors)
    if choices.aux_layers is not None and config.aux_layers != tuple(choices.aux_layers):
        raise ValueError(
            f"aux_layers is {list(choices.aux_layers)}, but the config.json of {path} names the layer outputs "
            f"{list(config.aux_layers)}; leave the option out"
        )
    if network.layers_field and getattr(config, "has_fc", True):
        check_fc(tensors, target.hidden_size, config.aux_layers, network.layers_field, path)
    return config, tensors


def build_draft(
    network: type[Network],
    files: DraftFiles,
    path: Path,
    target: TargetSpec,
    dtype: torch.dtype | None,
    device: torch.device,
    shared: Tensors | None = None,
    choices: Choices = UNCHOSEN,
) -> Network:
    """`load_draft` of files that are read already; `path` names them in errors."""
    module, tensors = empty_draft(network, files, path, target, shared, choices)
    if "d2t" in tensors:
        warn_of_map(tensors["d2t"], module.config, path, has_mask=any(key.endswith("t2d") for key in files.tensors))
    load_weights(module, tensors, dtype, device, path)
    check_finite(module.state_dict(), path)
    return module


def empty_draft(
    network: type[Network],
    files: DraftFiles,
    path: Path,
    target: TargetSpec,
    shared: Tensors | None,
    choices: Choices,
) -> tuple[Network, dict[str, Tensor]]:
    """Returns the network without memory, and the tensors that it is to be filled with."""
    config, tensors = settle_files(network, files, path, target, choices)
    if config.draft_vocab_size is not None:
        complete_vocabulary(tensors, config, path)
    with torch.device("meta"):
        module = network(config)
        for key in network.shared:
            if shared is not None and key == EMBEDDING and key in tensors and not tensors[key].any():
                logger.warning("%s: %s is all zeros, a placeholder; the draft reads the target's", path, key)
                del tensors[key]
            if not drop_copy(tensors, key, shared):
                continue
            if key != EMBEDDING or not network.may_embed:
                raise ValueError(f"{path}: {key} is not the target's; a draft with one of its own is not supported")
            module.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
    return module, tensors


def check_unquantized(tensors: Tensors, path: Path) -> None:
    """Raises ValueError for a draft whose weights are quantised, in whatever format."""
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] in tensor_dtypes() and tensor.dtype not in (*FLOATS, torch.float64):
            raise quantized_draft(path, f"{name} is {str(tensor.dtype).removeprefix('torch.')}")


def quantized_draft(path: Path, reason: str) -> ValueError:
    """The error for a draft with quantised weights; `reason` says by what they are known."""
    return ValueError(
        f"{path} is quantised ({reason}), but drafts are loaded in 16 bits (or fp32) only; take the draft as it was "
        "before, or dequantise its weights and leave quantization_config out of its config.json"
    )


def _public_name(network: type[DraftNetwork], key: str) -> str:
    key = key.removeprefix("model.")
    for prefix, public in network.other_names.items():
        if key.startswith(prefix):
            return public + key.removeprefix(prefix)
    return ".".join(network.other_parts.get(part, part) for part in key.split("."))


def complete_vocabulary(tensors: dict[str, Tensor], config: DraftConfig, path: Path) -> None:
    """Adds t2d, computed from d2t, as some files omit it, and both to a draft of the whole vocabulary that must have
    them. Raises ValueError for a d2t that does not fit the target or the file's t2d; `load_weights` names one of
    another size."""
    if config.draft_vocab_size == config.vocab_size:
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
    if "d2t" not in tensors:
        return
    d2t = tensors["d2t"] = whole_numbers(tensors["d2t"], path)
    if d2t.ndim != 1:
        return
    check_ids(d2t, config.vocab_size, path)
    ids = ids_of(d2t)
    t2d = tensors.setdefault("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True))
    if t2d.shape != (config.vocab_size,):
        raise ValueError(f"{path}: t2d is {list(t2d.shape)}, but the target has {config.vocab_size} tokens")
    if len(d2t) == config.draft_vocab_size:
        check_t2d(str(path), d2t, t2d, MAP_REMEDY)


def warn_of_map(d2t: Tensor, config: DraftConfig, path: Path, *, has_mask: bool) -> None:
    """`has_mask`: the file has a t2d, too."""
    if len(d2t) < config.vocab_size and not d2t.any():
        logger.warning(
            "%s: d2t is all zeros, so that the draft proposes the first %d tokens of the target alone; if few are "
            "accepted, the file lacks its map",
            *(path, len(d2t)),
        )
    elif not has_mask and 1 < len(d2t) < config.vocab_size and bool((d2t[1:] > d2t[:-1]).all()):
        logger.warning(
            "%s: d2t rises from each token to the next, as a list of target ids does; if few are accepted, it holds "
            "target ids where differences belong: %s",
            *(path, MAP_REMEDY),
        )


def check_ids(d2t: Tensor, vocab_size: int, path: Path) -> None:
    """Raises ValueError for differences d2t (Vd,) that do not lead to distinct ids of the target."""
    ids = ids_of(d2t)
    if are_distinct_ids(ids, vocab_size):
        return
    fault = f"d2t maps outside the target's {vocab_size} tokens or twice to one"
    if are_distinct_ids(d2t, vocab_size):
        fault += f", since it holds target ids where differences belong; {MAP_REMEDY}"
    raise ValueError(f"{path}: {fault}")


def are_distinct_ids(ids: Tensor, vocab_size: int) -> bool:
    return bool(((ids >= 0) & (ids < vocab_size)).all()) and len(ids.unique()) == len(ids)


def whole_numbers(d2t: Tensor, path: Path) -> Tensor:
    """`d2t` as int64. Raises ValueError for fractions."""
    if d2t.is_floating_point() and not torch.equal(d2t, d2t.round()):
        raise ValueError(f"{path}: d2t holds fractions ({d2t.dtype}); it must hold whole numbers")
    return d2t.long()


def drop_copy(tensors: dict[str, Tensor], key: str, shared: Tensors | None) -> bool:
    """Removes `key` from a draft's tensors if it is a copy of the target's, `shared` (V, H); True if it is not a copy.

    A head is compared at the rows that the draft's t2d (V,) names. Without `shared` any tensor counts as a copy.
    """
    if key in tensors and shared is not None:
        ids = tensors["t2d"].nonzero().flatten() if key == HEAD and "t2d" in tensors else None
        if not is_copy(tensors[key], shared[key], ids):
            return True
    tensors.pop(key, None)
    return False


def is_copy(tensor: Tensor, expected: Tensor, ids: Tensor | None = None) -> bool:
    """Whether `tensor` (N, H) equals `expected` (V, H), or its rows `ids` (N,), up to rounding.

    Rounding: all rows are equal in the dtype of either, or in bf16, since an fp32 file may have been converted from it.
    """
    count = len(expected) if ids is None else len(ids)
    if tensor.shape != (count, expected.shape[1]):
        return False
    dtypes = {tensor.dtype, expected.dtype, torch.bfloat16}
    for start in range(0, count, ROWS):
        rows = slice(start, start + ROWS)
        expected_rows = expected[rows] if ids is None else expected[ids[rows].to(expected.device)]
        tensor_rows = tensor[rows].to(expected.device)
        dtypes = {dtype for dtype in dtypes if torch.equal(tensor_rows.to(dtype), expected_rows.to(dtype))}  # sync
        if not dtypes:
            return False
    return True


def check_finite(tensors: Tensors, path: Path) -> None:
    """Raises ValueError that names the first tensor with NaN or infinite values."""
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        if not torch.stack(tensor.aminmax()).isfinite().all():  # sync
            raise ValueError(f"{path}: {key} holds NaN or infinite values; fetch the draft again or train it again")


def check_fc(tensors: Tensors, size: int, layers: Sequence[int], field: str, path: Path) -> None:
    """Raises ValueError unless fc.weight fits the states of `layers`, each of `size` numbers; `field` lists them."""
    columns = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else len(layers) * size
    if columns % size:
        raise ValueError(
            f"{path}: fc.weight has {columns} columns, not a multiple of the target's hidden size {size}; serve the "
            "target that the draft was trained for"
        )
    if columns != len(layers) * size:
        raise ValueError(
            f"{path}: fc.weight has {columns} columns, for {columns // size} target states of {size}, and the config "
            f"means {len(layers)}, those of layers {list(layers)}; list the layers of its training in {field}"
        )
