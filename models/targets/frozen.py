"""The target in training, frozen: read by the decoder that serves it (decoder.py), so that a family or a format of
weights is written once; families that it lacks, and sharded targets, by transformers with hooks on the captured layers.

Layer ids are those of config.py: 0..n-1 is the output of that layer, n the hidden state after the final norm.
"""

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions
from transformers.utils.quantization_config import Mxfp4Config

from slipstream.kernels.sampling.softcap import softcap
from slipstream.models.drafts.base import HEAD
from slipstream.models.files.checkpoint import Values, read_json, read_tensors
from slipstream.models.files.weights import public_tensors
from slipstream.models.layers.formats.base import QuantizedLinear
from slipstream.models.targets import families
from slipstream.models.targets.config import ARCHITECTURES, AttentionSpec, check_aux_layers
from slipstream.models.targets.decoder import Target, decoder_tensors, drop_tied_head, load_config, load_target
from slipstream.models.targets.packed_attention import PackedAttention
from slipstream.models.targets.sharded import share_out

LOGIT_FIELDS = re.compile("logit|head_multiplier|output_multiplier|dim_model_base")  # of configs that change logits
ATTENTION_PARTS = ("g_proj", "gate_proj", "query_layernorm")  # gates, norms after the rotation: drafts have none
VOCABULARY_CHUNK = 16384  # head rows per product: bounds full logits to (N, 16384)


class FrozenTarget(ABC):
    """Not an nn.Module, so that a training module may hold one without training, moving or saving it."""

    def __init__(
        self,
        model: nn.Module,
        layers: nn.ModuleList,
        aux_layers: tuple[int, ...],
        *,
        head: Tensor,
        head_bias: Tensor | None = None,
        logit_softcap: float | None,
    ) -> None:
        """head (V, Ht), head_bias (V,). logit_softcap: c, where the target's logits x become c * tanh(x / c). A draft
        learns those, and has raw ones itself."""
        self.model = model.eval().requires_grad_(False)
        self.layers = layers
        self.head = head
        self.head_bias = head_bias
        self.logit_softcap = logit_softcap
        self.aux_layers = aux_layers
        check_aux_layers(tuple(dict.fromkeys(aux_layers)), len(layers))  # a state may be wanted twice
        self.read_as: torch.dtype | None = None  # dtype of a draft's inputs; None: the model's

    @abstractmethod
    def aux_states(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Captured states (B, S, K * Ht) and the state after the final norm (B, S, Ht) of packed rows (B, S).

        `positions` restart at 0 at each document, and tokens attend within their document only. Padding has position 0:
        each padding token is its own document.
        """

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """(...) int64 -> rows of the embedding (..., Ht), not scaled, in the dtype that a draft reads."""

    @abstractmethod
    def initial_weights(self, num_layers: int) -> dict[str, Tensor]:
        """Head, final norm and the last `num_layers` layers, numbered from 0, by their names in files, dequantised; no
        layers where the target's have other norms or activations than a draft's, no norm where it is no RMS norm with
        weights. All processes call it where the layers are sharded."""

    def compile_layers(self) -> None:
        """Lets torch compile the layers, where they do not consist of fused kernels already."""

    def as_read(self, states: Tensor) -> Tensor:
        """Casts states to the dtype that a draft reads."""
        return states if self.read_as is None else states.to(self.read_as)

    @torch.no_grad()
    def logits(self, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The head's logits (N, Vd) of `ids` at `states` (N, Ht), and the best token (N,) of the whole vocabulary.

        Logits have the dtype of states and head, in bf16 half the bytes of fp32. `ids` (Vd,) ascending, on the host.
        Ties go to the lowest id. Holds at most one chunk of full logits.
        """
        head = self.head
        head_bias = self.head_bias
        cap = self.logit_softcap
        device_ids = ids.to(states.device, non_blocking=True)  # once: each copy may wait for the device
        logits = states.new_empty(len(states), len(ids))
        best = states.new_full((len(states),), -torch.inf)
        tokens = states.new_zeros(len(states), dtype=torch.int64)
        for start in range(0, len(head), VOCABULARY_CHUNK):
            end = start + VOCABULARY_CHUNK
            bias = None if head_bias is None else head_bias[start:end]
            with no_autocast(states.device):
                chunk = F.linear(states, head[start:end], bias)
            chunk = chunk if cap is None else softcap(chunk, cap)
            values, indices = chunk.max(dim=-1)
            better = values > best
            best = torch.where(better, values, best)
            tokens = torch.where(better, indices + start, tokens)
            first, last = torch.searchsorted(ids, torch.tensor([start, end])).tolist()
            logits[:, first:last] = chunk[:, device_ids[first:last] - start]
        return logits, tokens


class DecoderTarget(FrozenTarget):
    """The decoder that serves the target."""

    model: Target

    def __init__(self, model: Target, aux_layers: tuple[int, ...]) -> None:
        cap = model.config.logit_softcap
        super().__init__(model, model.layers, aux_layers, head=model.shared[HEAD], logit_softcap=cap)
        self.attention = PackedAttention()

    @torch.no_grad()
    def aux_states(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.attention.plan(positions)
        layers = tuple(dict.fromkeys(self.aux_layers))
        with no_autocast(tokens.device):  # the checkpoint's dtype, as in serving
            final, states = self.model(tokens.flatten(), self.attention, layers)
        assert states is not None
        if layers != self.aux_layers:
            parts = dict(zip(layers, states.split(final.shape[-1], dim=-1), strict=True))
            states = torch.cat([parts[layer] for layer in self.aux_layers], dim=-1)
        return states.view(*tokens.shape, -1), final.view(*tokens.shape, -1)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        return self.as_read(self.model.embed_tokens(tokens))

    def initial_weights(self, num_layers: int) -> dict[str, Tensor]:
        first = len(self.layers) - num_layers
        specs = self.model.config.layers[first:]
        are_alike = all(
            spec.norms == "pre"
            and spec.mlp.activation == "silu"
            and isinstance(spec.mixer, AttentionSpec)
            and spec.mixer.gate is None
            and not spec.mixer.norm_last
            for spec in specs
        )
        layers = enumerate(list(self.layers)[first:] if are_alike else [])
        weights = {
            f"layers.{i}.{name}": x
            for i, layer in layers
            for name, x in (public_tensors(layer) | dequantized_tensors(layer)).items()
        }
        return weights | {"norm.weight": self.model.get_parameter("norm.weight"), HEAD: self.head}


def dequantized_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Weights and biases of a layer's quantised projections, by their names in files of 16 bits."""
    weights = {}
    for path, linear in layer.named_modules():
        if isinstance(linear, QuantizedLinear):
            parent = path.rpartition(".")[0]
            weight = linear.dequantized()
            for part in linear.parts or [None]:
                name = path if part is None else f"{parent}.{part}"
                weights[f"{name}.weight"] = weight[linear.rows_of(part)]
                if linear.bias is not None:
                    weights[f"{name}.bias"] = linear.bias[linear.rows_of(part)]
    return weights


class StatesAlone(MoEModelOutputWithPastAndCrossAttentions):
    """The output of a decoder that gives states; what else a model may look for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class TransformersTarget(FrozenTarget):
    """A causal LM of transformers, in whatever precision it is. A factor of its logits (Muse-Glimmer) is one of the
    state after the final norm here, as in serving."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...]) -> None:
        output = output_head(model)
        config = model.config.get_text_config()
        self.logit_factor: float = getattr(config, "output_multiplier", 1.0)
        super().__init__(
            model,
            decoder_layers(model),
            aux_layers,
            head=output.weight,
            head_bias=output.bias,
            logit_softcap=getattr(config, "final_logit_softcapping", None),
        )
        self.decoder = decoder_of(model)
        if not self.head.is_meta:
            self._check_head()
        self._states: dict[int, Tensor] = {}
        for layer in set(aux_layers) - {len(self.layers)}:
            self.layers[layer].register_forward_hook(self._capture(layer))

    @torch.no_grad()
    def _check_head(self) -> None:
        """Raises ValueError for a model that changes the head's logits: drafts are trained, and served, without that.
        Compares what it makes of a few states with what `logits` makes of them; its layers do not run."""
        head = self.head
        states = torch.randn(3, head.shape[1], generator=torch.Generator().manual_seed(0)).to(head.device, head.dtype)
        forward = self.decoder.forward
        self.decoder.forward = lambda *_inputs, **_options: StatesAlone(last_hidden_state=states[None])
        try:
            expected = self.model(input_ids=torch.zeros(1, 3, dtype=torch.int64, device=head.device)).logits[0]
        finally:
            self.decoder.forward = forward
        logits, _ = self.logits(self.logit_factor * states, torch.arange(len(head)))
        if not is_close(logits, expected[:, : len(head)]):
            names = (name for name in self.model.config.get_text_config().to_dict() if LOGIT_FIELDS.search(name))
            raise ValueError(
                f"{type(self.model).__name__} changes its head's logits, perhaps by {', '.join(names) or 'its code'}, "
                "which training does not know; choose another target"
            )

    def _capture(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._states[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def aux_states(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        masks = self.masks(positions)
        with no_autocast(tokens.device):  # the checkpoint's dtype, as in serving
            output = self.decoder(input_ids=tokens, position_ids=positions, attention_mask=masks, use_cache=False)
        final = self._states[len(self.layers)] = self.logit_factor * output.last_hidden_state
        aux_states = torch.cat([self._states[layer] for layer in self.aux_layers], dim=-1)
        self._states.clear()
        return aux_states, final

    def masks(self, positions: Tensor) -> Any:
        """Attention masks, by kind of layer if there are several. Made here by transformers' function, as some models
        (gpt-oss) do not derive documents from `position_ids`."""
        shape_only = torch.empty(*positions.shape, 0, dtype=self.model.dtype, device=positions.device)
        return create_masks_for_generate(
            config=self.decoder.config,
            inputs_embeds=shape_only,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )

    def compile_layers(self) -> None:
        """Compiles each kind of layer at the first call of `aux_states`, and once more if sizes change."""
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward)  # hooks stay outside

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        return self.as_read(F.embedding(tokens, self.model.get_input_embeddings().get_parameter("weight")))

    def initial_weights(self, num_layers: int) -> dict[str, Tensor]:
        norm = self._norm_weight()
        last = [layer.state_dict() for layer in list(self.layers)[len(self.layers) - num_layers :]]
        is_sandwich = any("post_feedforward_layernorm.weight" in layer for layer in last)
        has_more = any(f"self_attn.{name}.weight" in layer for layer in last for name in ATTENTION_PARTS)
        is_silu = getattr(self.model.config.get_text_config(), "hidden_act", "silu") in ("silu", "swish")
        is_interleaved = type(self.model).__name__ in families.INTERLEAVED  # drafts rotate in halves
        has_norm = norm is not None and norm is self.decoder.norm.weight
        are_alike = is_silu and has_norm and not (is_sandwich or is_interleaved or has_more)
        layers = enumerate(last if are_alike else [])
        weights = {f"layers.{i}.{name}": x for i, layer in layers for name, x in layer.items()}
        return weights | ({} if norm is None else {"norm.weight": norm}) | {HEAD: self.head}

    @torch.no_grad()
    def _norm_weight(self) -> Tensor | None:
        """Weight (Ht,) of a draft's RMS norm that equals the final norm, if there is one."""
        try:
            weight = self.decoder.get_parameter("norm.weight")
        except AttributeError:
            return None
        if weight.is_meta:
            return weight
        row = torch.randn(len(weight), generator=torch.Generator().manual_seed(0)) + 1  # has a mean; eps is lost in it
        row = (100 * row).to(weight.device, weight.dtype)
        normed = self.decoder.norm(row[None])[0].float()
        scaled = row.float() * row.float().square().mean().rsqrt()
        if is_close(weight.float() * scaled, normed):
            return weight if self.logit_factor == 1 else self.logit_factor * weight
        if is_close((1 + weight.float()) * scaled, normed):
            return self.logit_factor * (1 + weight.float())
        return None


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The layer that makes logits of states. Raises ValueError for a model that has none, or one of another kind."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        kind = "no output embeddings" if head is None else f"output embeddings of class {type(head).__name__}"
        raise ValueError(f"{type(model).__name__} has {kind}; training needs an nn.Linear: choose another target")
    return head


def decoder_of(model: PreTrainedModel) -> Any:
    """The module that makes states of tokens. Raises ValueError for a model that does not name it, such as Llama 4."""
    decoder = model.get_decoder()
    if decoder is model:
        name = type(model).__name__
        raise ValueError(f"{name} names no decoder apart from its head (get_decoder); choose another target")
    return decoder


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of any transformers causal LM, whatever the list is called."""
    count = model.config.get_text_config().num_hidden_layers
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__} has no list of {count} decoder layers; aux hidden states cannot be captured"
    )


def no_autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)


def is_close(tensor: Tensor, expected: Tensor) -> bool:
    """Whether they are equal up to the rounding of 16 bits."""
    difference = (tensor.float() - expected.float()).abs().max()
    return bool(difference <= 0.02 * expected.float().abs().max())


def load_frozen_target(
    path: Path,
    aux_layers: tuple[int, ...],
    device: torch.device,
    trust_remote_code: bool = False,
    last_layers: int | None = None,
    mesh: DeviceMesh | None = None,
) -> FrozenTarget:
    """Loads a checkpoint folder in its own dtype, on the CPU in fp32 (as it is served there): as it is served, or by
    transformers where it is not, or is sharded.

    `last_layers`: how many layers are read, for `initial_weights` alone, and stay on the host. `mesh`: processes among
    which the layers are sharded (sharded.py); the first one reads the files.
    """
    if mesh is not None:
        model = empty_model(path, trust_remote_code)
        if ties_head(model.config) and any(path.glob("*.safetensors")):
            drop_tied_head(decoder_tensors(read_tensors(path)), path)  # else the processes would differ
        source = read_model(path, device, trust_remote_code) if mesh.get_local_rank() == 0 else None
        share_out(model, decoder_layers(model), source, mesh, device)
        return TransformersTarget(model, aux_layers)
    if is_served(read_json(path / "config.json")):
        return load_decoder_target(path, aux_layers, device, trust_remote_code, last_layers)
    model = read_model(path, device, trust_remote_code)
    for module in (model.get_input_embeddings(), output_head(model)) if last_layers is not None else (model,):
        nn.Module.to(module, device)
    return TransformersTarget(model, aux_layers)


def ties_head(config: PretrainedConfig) -> bool:
    """Whether a model's head is its embedding: the top level says, of multimodal ones, too."""
    return bool(getattr(config, "tie_word_embeddings", False))


def is_served(values: Values) -> bool:
    """Whether the decoder runs targets with such a config.json."""
    is_known = families.architecture_of(values) in ARCHITECTURES
    return is_known and not families.refusal(values)


def load_decoder_target(
    path: Path, aux_layers: tuple[int, ...], device: torch.device, trust_remote_code: bool, last_layers: int | None
) -> DecoderTarget:
    config = load_config(path, trust_remote_code)
    values = read_json(path / "config.json")
    name = "float32" if device.type == "cpu" else values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, name)
    place = device if last_layers is None else torch.device("cpu")
    model = load_target(path, config, dtype, place, trust_remote_code, last_layers=last_layers)
    for module in (model.embed_tokens, model.lm_head) if last_layers is not None else ():
        nn.Module.to(module, device)
    return DecoderTarget(model, aux_layers)


def empty_target(path: Path, aux_layers: tuple[int, ...], trust_remote_code: bool = False) -> TransformersTarget:
    """The target with parameters on the meta device, in the dtypes of its files: takes no memory."""
    return TransformersTarget(empty_model(path, trust_remote_code), aux_layers)


def read_model(path: Path, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    """On the host, in the dtype that `device` runs; MXFP4 (gpt-oss) is dequantized to the dtype of other weights."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    quantization = getattr(config, "quantization_config", None) or {}
    is_mxfp4 = quantization.get("quant_method") == "mxfp4"  # its kernels need a GPU and come from the hub
    return auto_class(config).from_pretrained(
        path,
        dtype=torch.float32 if device.type == "cpu" else "auto",
        trust_remote_code=trust_remote_code,
        quantization_config=Mxfp4Config(dequantize=True) if is_mxfp4 else None,
    )


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Returns transformers' class that builds a model: some that read images are no causal LMs to it."""
    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if reads_images and not is_causal else AutoModelForCausalLM


def empty_model(path: Path, trust_remote_code: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        dtype = config.dtype or torch.float32
        model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()  # moving parameters to the meta device untied them
    if ties_head(model.config):  # a caller's init_empty_weights unties them once more
        output_head(model)._parameters["weight"] = model.get_input_embeddings().get_parameter("weight")
    return model
