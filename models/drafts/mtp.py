"""MTP heads (multi-token prediction, DeepSeek-V3, arXiv 2412.19437): a module in a target's files that drafts.

Row t reads the embedding of token t + 1 and the target's state at t, each normed. A layer of the target's kind and a
final norm make of them the state that the head turns into logits of token t + 2. The next step of a chain reads the
module's state in the place of the target's: both after the final norms, or both before them (`MTPConfig.hidden`).

Files may have several modules. Row t of module i reads the embedding of token t + 1 + i and the state of module i - 1
at t, and predicts token t + 2 + i: the first drafted token comes from the first module, the next one from the second,
and those beyond the last module from the last, whose next row reads its own state.

Names of tensors here; families.MTP_FORMS says what files call them (N: the target's number of layers):

enorm.weight, hnorm.weight             norms of embedding and state
eh_proj.weight                         (H, 2 * H): reads [embedding ; state]
layers.N.*                             the layer
norm.weight                            the final norm; that of some is the target's
embed_tokens.weight, lm_head.weight    mostly copies of the target's, which are left out
later.I.*                              the same of module I + 1, whose layer is layers.{N + I + 1}

A draft checkpoint (train/mtp.py) holds the same module alone, its tensors called as in the target's files. For a target
of a family without such modules it has the form above, with a plain layer.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from slipstream.models.drafts.base import (
    EMBEDDING,
    HEAD,
    OWN_FIELDS,
    DraftConfig,
    DraftNetwork,
    check_llama_layer,
    decoder_from_json,
    decoder_to_json,
    drop_copy,
    target_fields,
)
from slipstream.models.files.checkpoint import Values, read_tensors, tensor_names
from slipstream.models.files.weights import load_weights
from slipstream.models.layers.attention import Attention, Mask
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.formats.base import Quantization, Tensors
from slipstream.models.layers.linear import Embedding, Head, Linear
from slipstream.models.layers.moe import Router
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.layers.quantized import CACHE_SCALES, dequantize_head, quantize
from slipstream.models.targets.adapt import (
    NAMES,
    adapt_values,
    mtp_file_names,
    mtp_file_tensors,
    mtp_names,
    mtp_tensors,
    renamed,
)
from slipstream.models.targets.config import DecoderShape, LayerSpec, TargetSpec
from slipstream.models.targets.decoder import Target, target_name
from slipstream.models.targets.families import MTP_FORMS, Hidden

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(DraftConfig):
    """As wide as the target."""

    kind: ClassVar[str] = "MTP"
    rotates_as_target: ClassVar[bool] = True
    layer_spec: LayerSpec
    norm_offset: bool = False
    zero_first: bool = False
    """Row 0 reads zeros in place of an embedding."""
    form: str = ""
    """Architecture of the target whose files have such modules; empty: none have."""
    hidden: Hidden = "after_norm"
    """The states that it reads: after the final norm, or before it."""
    num_modules: int = 1

    @classmethod
    def of(cls, target: TargetSpec, path: Path) -> Self:
        """Returns the config of the module in the target's files, which lie in `path`. Raises ValueError where they
        have none."""
        if target.architecture not in MTP_FORMS:
            raise ValueError(
                f"draft is 'mtp', but no MTP head of {target.architecture}, the architecture of {path}, is served; "
                f"those of {', '.join(MTP_FORMS)} are. Name a draft checkpoint, ngram or none instead"
            )
        if target.mtp is None:
            raise ValueError(
                f"draft is 'mtp', but the config.json of {path} has no MTP layers "
                f"({MTP_FORMS[target.architecture].count}); name a draft checkpoint, ngram or none instead"
            )
        return cls.from_target(target)

    @classmethod
    def from_target(cls, model: TargetSpec, /, **fields: Any) -> Self:
        """Returns the config of the module that the target's family has, or of a plain one for others. `fields`
        override those of the target or add others."""
        num_modules = fields.pop("num_modules", model.mtp_modules)
        values = target_fields(model) | fields
        if model.mtp is None:
            return cls(**values, layer_spec=plain_layer(values))
        attention = model.mtp.attention
        heads = {name: getattr(attention, name) for name in ("num_heads", "num_kv_heads", "head_dim", "rope")}
        return cls(
            **values | heads,
            layer_spec=model.mtp,
            norm_offset=model.norm_offset,
            zero_first=MTP_FORMS[model.architecture].zero_first,
            form=model.architecture,
            num_modules=num_modules,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["MTPDraftModel"],
            "num_hidden_layers": self.num_modules,
            **decoder_to_json(self),
            "num_target_layers": self.target_num_layers,
            "mtp_form": self.form or None,
            "drafter": "mtp",
        }

    @classmethod
    def from_json(cls, values: Values, target: TargetSpec, tensors: Tensors | None = None) -> Self:
        sizes = {"hidden_size": target.hidden_size, "num_target_layers": target.num_layers}
        decoder = decoder_from_json(values, target, **sizes)
        form = values.get("mtp_form") or ""
        num_modules = values.get("num_hidden_layers", 1)
        limit = target.mtp_modules if form else 1
        if isinstance(num_modules, bool) or not isinstance(num_modules, int) or not 1 <= num_modules <= limit:
            raise ValueError(
                f"draft config: num_hidden_layers, the number of MTP modules, is {num_modules!r}; it must be an "
                f"integer from 1 to {limit}, the number of the target's"
            )
        if not form:
            check_llama_layer(values)
            return cls(**decoder, layer_spec=plain_layer(decoder))
        if form != target.architecture or target.mtp is None:
            has = "has none by its config.json" if form == target.architecture else f"is {target.architecture}"
            raise ValueError(
                f"draft config: mtp_form is {form!r}, an MTP layer of that architecture, but the target {has}; serve "
                "the target that the draft was trained for"
            )
        origin = {name: decoder[name] for name in (*OWN_FIELDS, "draft_vocab_size") if name in decoder}
        return cls.from_target(target, num_modules=num_modules, **origin)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """One state (models/targets/config.py): the last layer's output, or that after the final norm."""
        return (self.target_num_layers - (self.hidden == "before_norm"),)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (self.layer_spec,) * self.num_modules


def plain_layer(fields: Values) -> LayerSpec:
    """Returns the layer of a module in no target's form, by the `fields` of its config: of Qwen3's kind."""
    names = (field.name for field in dataclass_fields(DecoderShape))
    return DecoderShape(**{name: fields[name] for name in names}).layer(qk_norm=True)


class MTPModule(nn.Module):
    """A module, any leading dims. The network itself is the first one."""

    config: MTPConfig

    def build(self, config: MTPConfig, index: int) -> Self:
        """Makes the layers of module `index`."""
        self.config = config
        size = config.hidden_size
        eps = config.rms_norm_eps
        assert config.layer_spec.norms == "pre", "the layers of families.MTP_FORMS"
        self.enorm = RMSNorm(size, eps, config.norm_offset)
        self.hnorm = RMSNorm(size, eps, config.norm_offset)
        self.eh_proj = Linear(2 * size, size)
        # Called as in files, whose config may say by names how layers are quantised.
        layer = DecoderLayer(config.layer_spec, index, size, eps)
        self.layers = nn.ModuleDict({str(config.target_num_layers + index): layer})
        self.norm = RMSNorm(size, eps, config.norm_offset)
        return self

    @property
    def layer(self) -> DecoderLayer:
        (layer,) = self.layers.values()
        assert isinstance(layer, DecoderLayer)
        return layer

    def write_context(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> None:
        """Stores keys and values of rows (..., H) without computing their output."""
        normed, _ = self.layer.norm_input(self.join(embeds, hidden), None, None)
        self.layer.mixer.write(normed, attention)

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        """embeds and hidden (..., H) -> the state (..., H) that `head_input` and the next step read."""
        residual, delta = self.layer(self.join(embeds, hidden), None, attention, mask)
        normed, state = self.norm.add(residual, delta)
        return normed if self.config.hidden == "after_norm" else state

    def head_input(self, hidden: Tensor) -> Tensor:
        """States (..., H) as the head reads them: after the final norm."""
        return hidden if self.config.hidden == "after_norm" else self.norm(hidden)

    def join(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(self.enorm.pair(embeds, self.hnorm, hidden))


class MTP(DraftNetwork, MTPModule):
    """All modules; the first one's methods are its own."""

    Config = MTPConfig
    config: MTPConfig

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config)
        self.build(config, 0)
        self.later = nn.ModuleList(MTPModule().build(config, index) for index in range(1, config.num_modules))
        self.lm_head: Head | None = None  # the target's

    @property
    def in_turn(self) -> tuple[MTPModule, ...]:
        """The modules in the order in which they draft."""
        return (self, *(module for module in self.later if isinstance(module, MTPModule)))

    def read_states(self, hidden: Hidden) -> None:
        """Lets all modules read these states."""
        for module in self.in_turn:
            module.config = replace(module.config, hidden=hidden)

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Target states (..., H) as `forward` reads them: unchanged."""
        return aux_states

    @classmethod
    def read_tensors(cls, tensors: Tensors, target: TargetSpec) -> dict[str, Tensor]:
        tensors = {target_name(key): tensor for key, tensor in tensors.items()}
        names = mtp_names(tensors, target)
        rest = {key: tensor for key, tensor in tensors.items() if key not in names}
        return rest | adapt_values(mtp_tensors(tensors, target), target)

    def file_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        modules = dict(self.named_modules())
        offset = {f"{path}.weight" for path, norm in modules.items() if isinstance(norm, RMSNorm) and norm.offset}
        routers = {path: router for path, router in modules.items() if isinstance(router, Router)}
        wide_names = {f"{path}.{name}" for path, router in routers.items() for name in router.dtypes}
        wide = {key: tensor for key, tensor in tensors.items() if key in wide_names}
        stored = {key: tensor - 1 if key in offset else tensor for key, tensor in tensors.items()}
        config = self.config
        return mtp_file_tensors(
            super().file_tensors(stored) | wide,
            config.form,
            config.target_num_layers,
            config.layer_spec,
            config.num_modules,
        )


def file_keys(keys: Iterable[str], target: TargetSpec) -> dict[str, str]:
    """Maps public names of the module's tensors to those in files that have the tensors `keys`."""
    files = {target_name(key): key for key in keys}
    names = {name: files[key] for key, name in mtp_names(files, target).items()}
    return renamed(names, NAMES.get(target.architecture, {}))


def check_files(target: TargetSpec, path: Path) -> None:
    """Raises ValueError where the files in `path` lack the module, as those of many converters do. Files that have not
    been fetched are not asked."""
    names = [target_name(name) for name in tensor_names(path)]
    begin = mtp_file_names(target.architecture, target.num_layers)[f"layers.{target.num_layers}."]
    if names and not mtp_names(names, target):
        raise ValueError(
            f"draft is 'mtp', but the files in {path} have no MTP layer (such as {begin}input_layernorm.weight); fetch "
            "a checkpoint that keeps it, or name a draft checkpoint, ngram or none instead"
        )
    check_count(names, target, path)
    *words, index, _ = begin.split(".")
    following = ".".join((*words, str(int(index) + target.mtp_modules), ""))
    if any(name.startswith(following) for name in names):
        logger.info(
            "the files in %s have more MTP heads than draft: the last of %d drafts all later tokens",
            *(path, target.mtp_modules),
        )


def check_count(names: Collection[str], target: TargetSpec, path: Path) -> None:
    """Raises ValueError where files with tensors `names`, but for a leading "model.", have fewer modules than their
    config.json says."""
    later = {name.split(".")[1] for name in mtp_names(names, target).values() if name.startswith("later.")}
    if names and len(later) + 1 < target.mtp_modules:
        raise ValueError(
            f"the files in {path} have {len(later) + 1} of the {target.mtp_modules} MTP modules that "
            f"{MTP_FORMS[target.architecture].count} of their config.json says; fetch a checkpoint that keeps all, or "
            "write the number of those there"
        )


def mtp_quantization(quantization: Quantization | None, spec: TargetSpec) -> Quantization | None:
    """Returns a target's quantisation for the module, whose layers its config calls as the files do."""
    if quantization is None:
        return None
    names = mtp_file_names(spec.architecture, spec.num_layers, spec.mtp_modules)
    return replace(quantization, file_names=names)


def load_mtp(target: Target) -> MTP:
    """Reads the module in the files of `target`. Raises ValueError that names every missing or unexpected tensor."""
    assert target.path is not None
    module = read_mtp(target.path, target.config, target.quantization, target.dtype, target.device, target.shared)
    if module.lm_head is not None:
        logger.info("the MTP head has its own output head: %d tokens", target.config.vocab_size)
    return module


def read_mtp(
    path: Path,
    spec: TargetSpec,
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device,
    shared: Tensors,
) -> MTP:
    """`load_mtp` of the target in `path`, without it: `quantization` says how its weights are stored, `shared` are its
    EMBEDDING and HEAD."""
    tensors = mtp_tensors({target_name(key): tensor for key, tensor in read_tensors(path).items()}, spec)
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(CACHE_SCALES)}
    quantization = mtp_quantization(quantization, spec)
    dequantize_head(HEAD.removesuffix(".weight"), quantization, tensors, dtype)
    drop_later_copies(tensors, shared, path)
    with torch.device("meta"):
        module = MTP(MTPConfig.of(spec, path))
        if drop_copy(tensors, EMBEDDING, shared):
            module.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        if drop_copy(tensors, HEAD, shared):
            module.lm_head = Head(spec.hidden_size, spec.vocab_size)
    quantize(module, quantization, tensors, device)
    return load_weights(module, adapt_values(tensors, spec), dtype, device, path)


def is_later_copy(name: str) -> bool:
    """Whether a module after the first has this embedding or head."""
    return name.startswith("later.") and name.endswith((EMBEDDING, HEAD))


def drop_later_copies(tensors: dict[str, Tensor], shared: Tensors, path: Path) -> None:
    """Removes the embeddings and heads of modules after the first, copies of the first's or the target's. Raises
    ValueError for others."""
    for name in list(filter(is_later_copy, tensors)):
        key = EMBEDDING if name.endswith(EMBEDDING) else HEAD
        if drop_copy(tensors, name, {name: tensors.get(key, shared[key])}):
            raise ValueError(
                f"{path}: {name} is not that of the first MTP module; modules with one of their own are not supported"
            )
