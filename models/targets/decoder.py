"""The serving target: a decoder with fused projections and experts, of any family in config.py."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slipstream.kernels.collectives.ranks import Ranks
from slipstream.kernels.compile_ahead import zero_filled
from slipstream.kernels.sampling.softcap import softcap
from slipstream.models.drafts.base import EMBEDDING, HEAD, ROWS
from slipstream.models.files.checkpoint import read_json, read_tensors
from slipstream.models.files.quantization import has_fp8_cache
from slipstream.models.files.ranks import check_units, rank_heads, rank_tensors, sliceable
from slipstream.models.files.weights import load_weights
from slipstream.models.layers.attention import Attention, Mask
from slipstream.models.layers.decoder_layer import MixingLayer, PerLayerInputs, decoder_layer
from slipstream.models.layers.formats.base import Quantization, Tensors
from slipstream.models.layers.formats.table import read_quantization
from slipstream.models.layers.linear import Embedding, Head
from slipstream.models.layers.norm import Delta, RMSNorm
from slipstream.models.layers.quantized import CACHE_SCALES, dequantize_head, join_gates, quantize
from slipstream.models.targets import families
from slipstream.models.targets.adapt import adapt_names, adapt_values, mtp_names
from slipstream.models.targets.cache_scales import read_cache_scales
from slipstream.models.targets.config import RecurrentSpec, TargetSpec, check_supported, is_complete, rope_fields
from slipstream.models.targets.pretrained import end_of_text_ids, find_tokenizer, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OTHER_PARTS = ("visual.", "mtp.", "mtp_")  # the tower of Qwen2.5-VL, modules that predict more tokens
MIXTRAL_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class Target(nn.Module):
    """Attributes: `config`, of a rank's part the whole target's; `path`, its folder; `quantization`, how weights are
    stored; `cache_scales`, those of an FP8 KV cache that its files have, by layer with attention; `ranks`, which share
    it, if it is a part; `has_mtp`, whether its files predict a token more; `embed_tokens` and `lm_head`, which drafters
    share."""

    path: Path | None = None
    quantization: Quantization | None = None
    cache_scales: tuple[Tensor | None, ...] = ()
    trust_remote_code = False
    has_mtp = False
    ranks: Ranks | None = None

    def __init__(self, config: TargetSpec) -> None:
        super().__init__()
        self.config = config
        self._is_short = False
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.per_layer_inputs = None
        if config.per_layer is not None:
            self.per_layer_inputs = PerLayerInputs(config.per_layer, len(config.layers), size, eps)
        kinds = [isinstance(spec.mixer, RecurrentSpec) for spec in config.layers]
        self.layers = nn.ModuleList(
            decoder_layer(spec, kinds[:index].count(kinds[index]), size, eps)
            for index, spec in enumerate(config.layers)
        )
        self.embedding_norm = RMSNorm(size, eps) if config.embedding_norm else None
        self.norm = RMSNorm(size, eps, config.norm_offset)
        self.lm_head = Head(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of embeddings and hidden states."""
        return next(self.embed_tokens.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.embed_tokens.parameters()).device

    @cached_property
    def kinds(self) -> list[int]:
        """The first two layers, and the first one of each other kind."""
        specs = self.config.layers
        return [index for index, spec in enumerate(specs) if index < 2 or spec not in specs[:index]]

    @property
    def shared(self) -> dict[str, Tensor]:
        """Embedding and head (V, H), by the names of their copies in drafts' files."""
        return {EMBEDDING: self.embed_tokens.table, HEAD: self.lm_head.table}

    def join(self, ranks: Ranks) -> None:
        """Lets the target, a rank's part, compute with the other ranks' parts."""
        self.ranks = self.embed_tokens.ranks = self.lm_head.ranks = ranks
        for layer in self.layers:
            assert isinstance(layer, MixingLayer)
            layer.join(ranks)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The one in `path`, if there is one. Read when first asked for, which takes seconds."""
        assert self.path is not None
        return find_tokenizer(self.path, self.trust_remote_code)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        assert self.path is not None
        return end_of_text_ids(self.path, self.trust_remote_code)

    @contextmanager
    def short_run(self) -> Iterator[None]:
        """Runs one layer of each of the `kinds`, which launch the kernels of all, in passes whose results nobody reads.
        The outputs of the other layers are zero, so that indices made of them are valid. Not to be nested."""
        self._is_short = True
        try:
            with zero_filled():
                yield
        finally:
            self._is_short = False

    def forward(
        self, tokens: Tensor, attention: Attention, aux_layers: Sequence[int] = (), mask: Mask = "causal"
    ) -> tuple[Tensor, Tensor | None]:
        """tokens (T,) -> hidden (T, H) after the final norm, and the states of `aux_layers` as (T, K * H).

        State i below num_layers is the output of layer i; num_layers itself is the hidden state after the final norm.
        """
        num_layers = len(self.layers)
        residual = self.embed(tokens)
        delta = None
        inputs = None if self.per_layer_inputs is None else self.per_layer_inputs(tokens, residual)
        aux_states, states = self._allocate_aux_states(residual, aux_layers)
        for index in self.kinds if self._is_short else range(num_layers):
            part = () if inputs is None else (inputs[:, index],)
            residual, delta = self.layers[index](residual, delta, attention, mask, states.get(index - 1), *part)
        hidden = self._norm(residual, delta, states.get(num_layers - 1))
        if num_layers in states:
            states[num_layers].copy_(hidden)
        return hidden, aux_states

    def _norm(self, residual: Tensor, delta: Delta | None, out: Tensor | None) -> Tensor:
        """The final norm of residual + delta, which goes to `out`."""
        if delta is not None:
            return self.norm.add(residual, delta, out)[0]
        if out is not None:
            out.copy_(residual)
        return self.norm(residual)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens (T,) -> (T, H), what the first layer reads."""
        embeds = self.embed_tokens(tokens)
        if self.embedding_norm is not None:
            return self.embedding_norm(embeds)
        scale = self.config.embedding_scale
        return embeds if scale is None else embeds * self.round(scale)

    def round(self, value: float) -> float:
        """`value` as the embeddings' dtype has it: Gemma's scale is multiplied so."""
        return torch.tensor(value, dtype=self.dtype, device="cpu").item()

    def _allocate_aux_states(
        self, embeds: Tensor, aux_layers: Sequence[int]
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """(T, K * H) and its part (T, H) for each state: layers write into them, which avoids a concatenation."""
        if not aux_layers:
            return None, {}
        aux_states = embeds.new_empty(len(embeds), len(aux_layers) * self.config.hidden_size)
        parts = aux_states.split(self.config.hidden_size, dim=1)
        return aux_states, dict(zip(aux_layers, parts, strict=True))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (T, H) -> (T, V), capped where the target caps them."""
        logits = self.lm_head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)


def load_config(path: Path, trust_remote_code: bool = False) -> TargetSpec:
    """Raises ValueError where `path` has no config.json, one with code that is not trusted, or another architecture."""
    file = path / "config.json"
    adapter = path / "adapter_config.json"
    if adapter.exists() and not file.exists():
        raise ValueError(f"{path} {families.adapter_refusal(read_json(adapter))}")
    values = read_json(file)
    if "auto_map" in values:  # do not ask for trust in code that runs nothing here
        check_supported(values)
    for part in (values, values.get("text_config")):
        if isinstance(part, Mapping):
            rope_fields(part)  # refuses two that differ, of which transformers tells no more than one
            families.check_types(part)
    if not is_complete(values) and not families.refusal(values):
        values = read_config(path, trust_remote_code).to_dict()
    return TargetSpec.from_json(values)


def decoder_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Returns tensors by their names in `Target`; of a multimodal checkpoint only the text part's, which
    `language_model` or `model.language_model` precedes, or that is all but OTHER_PARTS."""
    prefix = "language_model."
    head = HEAD.removesuffix("weight")
    is_multimodal = any(key.removeprefix("model.").startswith(prefix) for key in tensors)
    renamed = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("model.")
        if name.startswith((prefix, head)) if is_multimodal else not name.startswith(OTHER_PARTS):
            renamed[target_name(name.removeprefix(prefix))] = tensor
    return renamed


def target_name(key: str) -> str:
    """A file's name of a tensor -> ours, which are those of Qwen's files."""
    key = key.removeprefix("model.").replace("mlp.router.", "mlp.gate.")  # gpt-oss
    if ".block_sparse_moe." not in key:  # Mixtral
        return key
    key = key.replace(".block_sparse_moe.", ".mlp.")
    for mixtral, ours in MIXTRAL_PROJECTIONS.items():
        key = key.replace(f".{mixtral}.", f".{ours}.")
    return key


def leave_out_layers(target: Target, tensors: Tensors, count: int) -> dict[str, Tensor]:
    """Empties the first `count` layers and what they alone read; returns the tensors of the rest."""
    for index in range(count):
        target.layers[index] = nn.Module()
    target.per_layer_inputs = None
    prefixes = ("per_layer_inputs.", *(f"layers.{index}." for index in range(count)))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def drop_tied_head(tensors: dict[str, Tensor], path: Path) -> None:
    """Removes the head of a target whose config ties it to the embedding. Raises ValueError for one that differs."""
    names = [key for key in tensors if key.startswith(HEAD.removesuffix("weight"))]
    if names and not (names == [HEAD] and EMBEDDING in tensors and are_equal(tensors[HEAD], tensors[EMBEDDING])):
        raise ValueError(
            f"{path}: tie_word_embeddings is true in config.json, or left out where that means true, but the files "
            f"hold a head of their own ({names[0]}) that is not the embedding; set tie_word_embeddings to false at the "
            f"top level of config.json to use it, or delete {names[0]} from the files"
        )
    for name in names:
        del tensors[name]


def are_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same numbers, whatever their dtypes; reads them in pieces."""
    if left.shape != right.shape:
        return False
    starts = range(0, len(left), ROWS)
    return all(
        torch.equal(left[start : start + ROWS].double(), right[start : start + ROWS].double()) for start in starts
    )


def load_target(
    path: Path,
    config: TargetSpec,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    rank: int = 0,
    world: int = 1,
    last_layers: int | None = None,
    whole_experts: bool = False,
) -> Target:
    """Reads a transformers checkpoint folder, strictly. `quantization`: "fp8" to quantise 16-bit weights on the fly.

    With `world` ranks of tensor parallelism only the part of `rank`, `config.shard`; `config` is the whole target's.
    `last_layers`: how many are read, from the end; the others stay empty, and the target does not run.
    """
    spec = config.shard(rank, world, whole_experts=whole_experts)
    formats = read_quantization(path, quantization)
    if config.wrapper:
        logger.info("%s: the text part runs, as %s; it reads no images", config.wrapper, config.architecture)
    with torch.device("meta"):
        target = Target(config)
    file_tensors = read_tensors(path)
    has_mtp = bool(mtp_names(map(target_name, file_tensors), config))
    tensors = adapt_names(decoder_tensors(file_tensors), config)
    del file_tensors  # released as they are loaded
    if last_layers is not None:
        tensors = leave_out_layers(target, tensors, len(target.layers) - last_layers)
    scales = {key: tensors.pop(key) for key in list(tensors) if key.endswith(CACHE_SCALES)}
    head = HEAD.removesuffix(".weight")
    if config.tie_word_embeddings:
        drop_tied_head(tensors, path)
    dequantize_head(head, formats, tensors, dtype)
    quantize(target, formats, tensors, device)
    if world > 1:
        with torch.device("meta"):
            local = Target(spec)
        join_gates(local, formats, tensors)
        check_units(target, local, world)
        tensors = sliceable(target, tensors)
        quantize(local, formats, tensors, device)
        tensors = rank_tensors(target, local, tensors, rank, world, path)
        target = local
        target.config = config
    tensors = adapt_values(tensors, spec)
    if scales and has_fp8_cache(path):
        cache_scales = read_cache_scales(scales, config.layers, path)
        target.cache_scales = tuple(
            rank_heads(scale, layer.num_kv_heads, rank, world)
            for scale, layer in zip(cache_scales, spec.attention, strict=True)
        )
    target.quantization = formats
    target.has_mtp = has_mtp
    target.path = path
    target.trust_remote_code = trust_remote_code
    return load_weights(target, tensors, dtype, device, path)
