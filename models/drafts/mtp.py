"""MTP heads (multi-token prediction, DeepSeek-V3, arXiv 2412.19437): a module in a target's files that drafts.

Row t reads the embedding of token t + 1 and the target's state at t after its final norm, each normed. A layer of the
target's kind and a final norm make of them the state that the head turns into logits of token t + 2, and that the next
step of a chain reads in the place of the target's.

Names of tensors here; families.MTP says what files call them (N: the target's number of layers):

enorm.weight, hnorm.weight             norms of embedding and state
eh_proj.weight                         (H, 2 * H): reads [embedding ; state]
layers.N.*                             the layer
norm.weight                            the final norm
embed_tokens.weight, lm_head.weight    mostly copies of the target's, which are left out
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from slipstream.models.drafts.base import EMBEDDING, HEAD, DraftModule, drop_copy
from slipstream.models.files.checkpoint import read_tensors, tensor_names
from slipstream.models.files.weights import load_weights
from slipstream.models.layers.attention import Attention, Mask
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.linear import Embedding, Head, Linear
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.layers.quantized import CACHE_SCALES, dequantize_head, quantize
from slipstream.models.targets.adapt import adapt_values, mtp_names, mtp_tensors
from slipstream.models.targets.config import DecoderShape, LayerSpec, TargetSpec
from slipstream.models.targets.decoder import Target, target_name
from slipstream.models.targets.families import MTP as FORMS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(DecoderShape):
    """As wide as the target."""

    layer_spec: LayerSpec
    norm_offset: bool
    target_num_layers: int
    zero_first: bool
    """Row 0 reads zeros in place of an embedding."""

    @classmethod
    def of(cls, target: TargetSpec, path: Path) -> Self:
        """Returns the config of the module in the target's files, which lie in `path`. Raises ValueError where they
        have none."""
        if target.architecture not in FORMS:
            raise ValueError(
                f"draft is 'mtp', but no MTP head of {target.architecture}, the architecture of {path}, is served; "
                f"those of {', '.join(FORMS)} are. Name a draft checkpoint, ngram or none instead"
            )
        if target.mtp is None:
            raise ValueError(
                f"draft is 'mtp', but the config.json of {path} has no MTP layers "
                f"({FORMS[target.architecture].count}); name a draft checkpoint, ngram or none instead"
            )
        return cls(
            **target.shape(),
            layer_spec=target.mtp,
            norm_offset=target.norm_offset,
            target_num_layers=target.num_layers,
            zero_first=FORMS[target.architecture].zero_first,
        )

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The state after the final norm alone (models/targets/config.py)."""
        return (self.target_num_layers,)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (self.layer_spec,)


class MTP(DraftModule):
    """Any leading dims."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        eps = config.rms_norm_eps
        assert config.layer_spec.norms == "pre", "the layers of families.MTP"
        self.enorm = RMSNorm(size, eps, config.norm_offset)
        self.hnorm = RMSNorm(size, eps, config.norm_offset)
        self.eh_proj = Linear(2 * size, size)
        # Called as in files, whose config may say by names how layers are quantised.
        self.layers = nn.ModuleDict({str(config.target_num_layers): DecoderLayer(config.layer_spec, 0, size, eps)})
        self.norm = RMSNorm(size, eps, config.norm_offset)
        self.lm_head: Head | None = None  # the target's

    @property
    def layer(self) -> DecoderLayer:
        (layer,) = self.layers.values()
        assert isinstance(layer, DecoderLayer)
        return layer

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Target states (..., H) as `forward` reads them: unchanged."""
        return aux_states

    def write_context(self, embeds: Tensor, hidden: Tensor, attention: Attention) -> None:
        """Stores keys and values of rows (..., H) without computing their output."""
        normed, _ = self.layer.norm_input(self.join(embeds, hidden), None, None)
        self.layer.mixer.write(normed, attention)

    def forward(self, embeds: Tensor, hidden: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        """embeds and hidden (..., H) -> the state (..., H) that the head and the next step read."""
        residual, delta = self.layer(self.join(embeds, hidden), None, attention, mask)
        return self.norm.add(residual, delta)[0]

    def head_input(self, hidden: Tensor) -> Tensor:
        """States (..., H) as the head reads them: unchanged."""
        return hidden

    def join(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(self.enorm.pair(embeds, self.hnorm, hidden))


def check_files(config: MTPConfig, target: TargetSpec, path: Path) -> None:
    """Raises ValueError where the files in `path` lack the module, as those of many converters do. Files that have not
    been fetched are not asked."""
    names = tensor_names(path)
    if names and not mtp_names(map(target_name, names), target):
        example = next(iter(FORMS[target.architecture].names)).format(last=config.target_num_layers)
        raise ValueError(
            f"draft is 'mtp', but the files in {path} have no MTP layer (such as {example}weight); fetch a checkpoint "
            "that keeps it, or name a draft checkpoint, ngram or none instead"
        )


def load_mtp(target: Target) -> MTP:
    """Reads the module in the files of `target`. Raises ValueError that names every missing or unexpected tensor."""
    assert target.path is not None
    path = target.path
    spec = target.config
    tensors = mtp_tensors({target_name(key): tensor for key, tensor in read_tensors(path).items()}, spec)
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(CACHE_SCALES)}
    dequantize_head(HEAD.removesuffix(".weight"), target.quantization, tensors, target.dtype)
    with torch.device("meta"):
        module = MTP(MTPConfig.of(spec, path))
        if drop_copy(tensors, EMBEDDING, target.shared):
            module.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        if drop_copy(tensors, HEAD, target.shared):
            module.lm_head = Head(spec.hidden_size, spec.vocab_size)
            logger.info("the MTP head has its own output head: %d tokens", spec.vocab_size)
    quantize(module, target.quantization, tensors, target.device)
    return load_weights(module, adapt_values(tensors, spec), target.dtype, target.device, path)
