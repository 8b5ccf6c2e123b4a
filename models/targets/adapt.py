"""Files of some families -> tensors as our layers read them: what differs there in order, names and factors alone.

Letters: E experts, I their intermediate size, H hidden, D head dim, R rotated dims of a head.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.models.layers.formats.base import Tensors
from slipstream.models.layers.formats.table import FORMATS
from slipstream.models.targets.config import AttentionSpec, DeltaNetSpec, LayerSpec, TargetSpec
from slipstream.models.targets.families import DELTA_NETS, INTERLEAVED, MTP_FORMS, TABLES

NORM = "norm.weight"  # the final one
SCALES = {name for format in FORMATS for name in format.scale_tensors}
ACROSS_OUTPUTS = {name for format in FORMATS for name in format.across_outputs}
NAMES: dict[str, dict[str, str]] = TABLES["tensor_names"]  # of architectures
# Families that are not in MTP_FORMS, in whose files modules that predict more tokens are layers after the last.
LATER_LAYERS = frozenset({"Dots1ForCausalLM", "MiniMaxM2ForCausalLM", "SolarOpenForCausalLM"})
FUSED_EXPERTS = re.compile(r"\.experts\.down_proj(?=_scale_inv$|$)")
OUTPUTS = (".o_proj", ".down_proj")
OUTPUT_NORMS = (".post_attention_layernorm", ".post_feedforward_layernorm")
UNREAD = ("k_proj.", "v_proj.", "k_norm.")  # in files of Gemma 4, of layers that read keys and values of another
Value = TypeVar("Value")
OF_INPUTS = ("g_idx", "weight_g_idx", "input_scale")  # tensors of the inputs, which all rows share
WORD = 8  # rows in a word of 4-bit zeros or, in AWQ's files, codes
BLOCK = 128  # rows that share a scale of FP8 weights in blocks


def adapt_names(tensors: dict[str, Tensor], config: TargetSpec) -> dict[str, Tensor]:
    """Returns a target's tensors by their names in `Target`, with the axes in the order of its layers: views."""
    tensors = without_later_layers(named(tensors, config), config)
    unread = tuple(
        f"layers.{index}.self_attn.{name}"
        for index, layer in enumerate(config.layers)
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_source is not None
        for name in UNREAD
    )
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(unread)} | ones_of(config)


def mtp_names(keys: Iterable[str], config: TargetSpec) -> dict[str, str]:
    """Maps names of the tensors of the module that predicts a token more, in files but without a leading "model.", to
    those in `MTP` (models/drafts/mtp.py)."""
    if config.architecture not in MTP_FORMS:
        return {}
    begins: dict[str, str] = {}
    for index in range(config.mtp_modules):
        begins |= mtp_beginnings(config.architecture, config.num_layers, index)
    names = {}
    for key in keys:
        begin = next((begin for begin in begins if key.startswith(begin)), "")
        if begin and begins[begin]:
            names[key] = begins[begin] + key.removeprefix(begin)
    return names


def mtp_tensors(tensors: Tensors, config: TargetSpec) -> dict[str, Tensor]:
    """Returns the module's tensors of all that files have, by names as `mtp_names` has them; with the target's final
    norm, where the module has none."""
    names = mtp_names(tensors, config)
    form = MTP_FORMS.get(config.architecture)
    parts = {name: tensors[key] for key, name in names.items()}
    if form is not None and not form.has_norm and NORM in tensors:
        prefixes = [
            "",
            *(prefix for prefix in map(mtp_prefix, range(1, config.mtp_modules)) if f"{prefix}enorm.weight" in parts),
        ]
        parts |= {prefix + NORM: tensors[NORM] for prefix in prefixes}
    return named(parts, config)


def mtp_prefix(index: int) -> str:
    """Returns how names of module `index` begin here."""
    return f"later.{index - 1}." if index else ""


def mtp_beginnings(architecture: str, num_layers: int, index: int) -> dict[str, str]:
    """Returns how names of the tensors of module `index` begin in files of `architecture` -> here; empty: left out."""
    fill = partial(str.format, last=num_layers + index, index=index)
    names = MTP_FORMS[architecture].names.items()
    return {fill(file_name): mtp_prefix(index) + fill(name) if name else "" for file_name, name in names}


def mtp_file_tensors(
    tensors: Tensors, architecture: str, num_layers: int, layer: LayerSpec, num_modules: int = 1
) -> dict[str, Tensor]:
    """Returns the modules' tensors as files of `architecture` have them: the inverse of `mtp_tensors`. `layer` is a
    module's; files of its family may call a tensor differently, too. As they are where there is no such family."""
    form = MTP_FORMS.get(architecture)
    if form is None:
        return dict(tensors)
    begins = mtp_file_names(architecture, num_layers, num_modules)
    parts = {name: file_name for file_name, name in reversed(NAMES.get(architecture, {}).items())}
    stored = gates_joined(tensors, layer) if architecture in DELTA_NETS else dict(tensors)
    if architecture in INTERLEAVED:
        stored = {key: in_pairs(key, tensor, layer.attention) for key, tensor in stored.items()}
    longest_first = sorted(begins, key=len, reverse=True)
    files = {}
    copies = set() if form.has_norm else {mtp_prefix(index) + NORM for index in range(1, num_modules)}
    for key, tensor in renamed(stored, parts).items():
        if key in copies:
            continue
        begin = next((begin for begin in longest_first if key.startswith(begin)), "")
        name = begins[begin] + key.removeprefix(begin) if begin else key
        files[f"model.{name}" if begin and not name.startswith("mtp.") else name] = tensor
    return files


def mtp_file_names(architecture: str, num_layers: int, num_modules: int = 1) -> dict[str, str]:
    """Returns how names of the modules' tensors begin -> how they do in files of `architecture`, but without a leading
    "model."."""
    begins: dict[str, str] = {}
    for index in range(num_modules):
        for file_name, name in mtp_beginnings(architecture, num_layers, index).items():
            if name:
                begins.setdefault(name, file_name)
    return begins if MTP_FORMS[architecture].has_norm else begins | {NORM: NORM}


def gates_joined(tensors: Tensors, layer: LayerSpec) -> dict[str, Tensor]:
    """Tensors with those of attention's gate between the queries', head by head: the inverse of what
    `delta_net_tensors` does to layers with attention."""
    parts = dict(tensors)
    for key in [key for key in tensors if ".self_attn.gate_proj." in key]:
        queries = key.replace(".gate_proj.", ".q_proj.")
        heads = [part.unflatten(0, (layer.attention.num_heads, -1)) for part in (parts[queries], parts.pop(key))]
        parts[queries] = torch.cat(heads, dim=1).flatten(0, 1)
    return parts


def named(tensors: Tensors, config: TargetSpec) -> dict[str, Tensor]:
    """Returns tensors of layers by our names, with the axes in our order."""
    tensors = {scale_name(key, tensor): tensor for key, tensor in tensors.items()}
    if config.architecture == "Qwen3MoeForCausalLM":
        tensors = {key: oriented(key, tensor, config.hidden_size) for key, tensor in tensors.items()}
    if config.architecture in DELTA_NETS:
        tensors = delta_net_tensors(tensors, config)
    names = NAMES.get(config.architecture)
    is_plain = config.architecture == "HyperCLOVAXForCausalLM" and config.layers[0].norms == "pre"
    if names is not None and not is_plain:
        tensors = renamed(tensors, names)
        for key in (key for key in tensors if key.endswith(".gate.correction")):  # (1, E) in files of ERNIE
            tensors[key] = tensors[key].flatten()
    return tensors


def adapt_values(tensors: dict[str, Tensor], config: TargetSpec) -> dict[str, Tensor]:
    """Returns a target's tensors, or a rank's part of them, as its layers read them. Raises ValueError for a format of
    weights whose rows cannot be reordered."""
    if config.architecture in INTERLEAVED:
        tensors = {key: in_halves(key, tensor, config) for key, tensor in tensors.items()}
    for key in (key for key in tensors if key.endswith("router.norm.weight")):  # Gemma 4
        tensors[key] = tensors[key].float() * config.hidden_size**-0.5
    if config.residual_scale != 1:
        ends = OUTPUTS if config.layers[0].norms == "pre" else OUTPUT_NORMS
        tensors = {key: scaled(key, tensors, config.residual_scale, ends) for key in tensors}
    if config.logit_divisor != 1 and NORM in tensors:
        tensors[NORM] = (tensors[NORM].float() / config.logit_divisor).to(tensors[NORM].dtype)
    return tensors


def delta_net_tensors(tensors: Tensors, config: TargetSpec) -> dict[str, Tensor]:
    """Tensors of Qwen3-Next's and Qwen3.5's projections in parts: of queries and of the gate of attention, which stand
    together head by head, and of Qwen3-Next's delta nets, whose heads have queries, keys, values and gates together.

    Raises ValueError for a format of weights whose rows cannot be taken apart."""
    mixers = [layer.mixer for layer in (*config.layers, *([] if config.mtp is None else [config.mtp]))]
    parts: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        path, _, name = key.rpartition(".")
        layer, _, projection = path.rpartition(".")
        index = layer.split(".")[1] if layer.startswith("layers.") else ""
        mixer = mixers[int(index)] if index.isdigit() and int(index) < len(mixers) else None
        if projection == "q_proj" and isinstance(mixer, AttentionSpec):
            q, gate = heads_apart(key, tensor, mixer.num_heads, [mixer.head_dim] * 2)
            parts |= {key: q, f"{layer}.gate_proj.{name}": gate}
        elif projection == "in_proj_qkvz" and isinstance(mixer, DeltaNetSpec):
            values = mixer.group * mixer.value_dim
            q, k, v, z = heads_apart(key, tensor, mixer.num_key_heads, [mixer.key_dim] * 2 + [values] * 2)
            parts |= {f"{layer}.in_proj_qkv.{name}": joined(key, (q, k, v)), f"{layer}.in_proj_z.{name}": z}
        elif projection == "in_proj_ba" and isinstance(mixer, DeltaNetSpec):
            b, a = heads_apart(key, tensor, mixer.num_key_heads, [mixer.group] * 2)
            parts |= {f"{layer}.in_proj_b.{name}": b, f"{layer}.in_proj_a.{name}": a}
        else:
            parts[key] = tensor
    return parts


def heads_apart(key: str, tensor: Tensor, heads: int, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of a projection's tensor, of whose rows each head has `sizes` together. Raises ValueError where they
    cannot be told apart, as in blocks or words that two parts share."""
    name = key.rpartition(".")[2]
    if name in OF_INPUTS or (name in SCALES and tensor.numel() == 1):
        return [tensor] * len(sizes)
    if name == "weight_shape":
        return [tensor.new_tensor([heads * size, int(tensor[1])]) for size in sizes]
    axis = 1 if name in ACROSS_OUTPUTS else 0
    num_entries = tensor.shape[axis] if tensor.dim() > axis else 0
    units = (1, *([BLOCK] if name in SCALES else []), *([] if tensor.is_floating_point() else [WORD]))
    fitting = (unit for unit in units if num_entries * unit == heads * sum(sizes))
    unit = next((unit for unit in fitting if not any(size % unit for size in sizes)), None)
    if unit is None:
        raise ValueError(
            f"{key} is {list(tensor.shape)}: its rows are taken apart by heads when they are loaded, which this format "
            "of weights does not allow; use a checkpoint in 16 bits or FP8"
        )
    parts = tensor.unflatten(axis, (heads, -1)).split([size // unit for size in sizes], dim=axis + 1)
    return [part.flatten(axis, axis + 1) for part in parts]


def joined(key: str, parts: Sequence[Tensor]) -> Tensor:
    """Parts of a projection's tensor, as `heads_apart` gives them, one after the other."""
    name = key.rpartition(".")[2]
    if parts[0] is parts[1]:
        return parts[0]
    if name == "weight_shape":
        return parts[0].new_tensor([sum(int(part[0]) for part in parts), int(parts[0][1])])
    return torch.cat(list(parts), dim=1 if name in ACROSS_OUTPUTS else 0)


def without_later_layers(tensors: dict[str, Tensor], config: TargetSpec) -> dict[str, Tensor]:
    """Leaves out the layers after the last one, where they are modules that predict more tokens."""
    form = MTP_FORMS.get(config.architecture)
    if not (config.architecture in LATER_LAYERS if form is None else form.has_later_layers):
        return tensors
    layers = tuple(f"layers.{index}." for index in range(config.num_layers))
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("layers.") or key.startswith(layers)}


def ones_of(config: TargetSpec) -> dict[str, Tensor]:
    """Weights of norms that have none in files."""
    names = {"embedding_norm.weight": config.hidden_size} if config.embedding_norm else {}
    for index, layer in enumerate(config.layers):
        if isinstance(layer.mixer, AttentionSpec):
            norms = ("" if layer.mixer.norm_weights else "qk") + ("v" if layer.mixer.value_norm else "")
            names |= {f"layers.{index}.self_attn.{name}_norm.weight": layer.mixer.head_dim for name in norms}
    return {name: torch.ones(size) for name, size in names.items()}


def oriented(key: str, tensor: Tensor, hidden_size: int) -> Tensor:
    """Fused experts as (E, 2 I, H) and (E, H, I), which the files of Qwen3-VL-MoE have as (E, H, 2 I) and (E, I, H);
    told apart by their shapes, as in transformers."""
    axis = {"gate_up_proj": 2, "down_proj": 1}.get(key.rpartition(".")[2])
    is_turned = axis is not None and ".experts." in key and tensor.dim() == 3 and tensor.shape[axis] != hidden_size
    return tensor.transpose(1, 2) if is_turned else tensor


def scale_name(key: str, tensor: Tensor) -> str:
    """The name of a scale of FP8 weights or inputs per tensor, as most files have it; transformers (Ministral 3) gives
    the former that of scales of blocks."""
    path, _, name = key.rpartition(".")
    if name == "weight_scale_inv" and tensor.dim() == 0:
        return f"{path}.weight_scale"
    return f"{path}.input_scale" if name == "activation_scale" else key


def renamed(tensors: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, Value]:
    """Tensors with parts of their names, between dots, replaced; all at once, as parts may change places."""
    if not names:
        return dict(tensors)
    longest_first = sorted(names, key=len, reverse=True)
    part = re.compile(rf"(?<![^.])({'|'.join(map(re.escape, longest_first))})(?![^.])")
    return {part.sub(lambda match: names[match[0]], key): tensor for key, tensor in tensors.items()}


def in_halves(key: str, tensor: Tensor, config: TargetSpec) -> Tensor:
    """A tensor of a projection to queries or keys, with the rows of each head in the order of a rotation that pairs
    dims i and i + R / 2; others as they are."""
    path, _, name = key.rpartition(".")
    if not path.endswith((".q_proj", ".k_proj")):
        return tensor
    layer = config.attention[0]
    head_dim = layer.head_dim
    heads = layer.num_heads if path.endswith("q_proj") else layer.num_kv_heads
    rows = heads * head_dim
    is_across = name in ACROSS_OUTPUTS
    if not is_across and (tensor.numel() == 1 or name == "weight_shape"):
        return tensor
    if (
        not is_across and name in SCALES and BLOCK % head_dim == 0 and tensor.shape[0] == -(-rows // BLOCK)
    ):  # heads lie within blocks
        return tensor
    if is_across or tensor.shape[0] != rows:
        raise ValueError(
            f"{key} is {list(tensor.shape)}: rows of {config.architecture} are reordered when they are loaded, which "
            "this format of weights does not allow; use a checkpoint in 16 bits, FP8 or symmetric 4 bits of "
            "compressed-tensors"
        )
    return tensor.unflatten(0, (heads, head_dim))[:, half_order(layer)].flatten(0, 1)


def in_pairs(key: str, tensor: Tensor, layer: AttentionSpec) -> Tensor:
    """The inverse of `in_halves`, of a layer in 16 bits."""
    if not key.rpartition(".")[0].endswith((".q_proj", ".k_proj")):
        return tensor
    return tensor.unflatten(0, (-1, layer.head_dim))[:, half_order(layer).argsort()].flatten(0, 1)


def half_order(layer: AttentionSpec) -> Tensor:
    """Rows (D,) of a head whose rotation pairs dims 2 i and 2 i + 1, in the order of one that pairs i and i + R / 2."""
    dims = torch.arange(layer.head_dim)
    rotated = layer.rope.rotary_dim(layer.head_dim)
    return torch.cat((dims[:rotated:2], dims[1:rotated:2], dims[rotated:]))


def scaled(key: str, tensors: Tensors, factor: float, layers: tuple[str, ...]) -> Tensor:
    """A tensor of `layers`, whose outputs are added to the residual, times `factor`: the bias, and the scales of the
    weight, or the weight itself where it has none. Others as they are."""
    path, _, name = FUSED_EXPERTS.sub(".experts.down_proj.weight", key).rpartition(".")
    tensor = tensors[key]
    if not path.endswith(layers):
        return tensor
    has_scales = f"{path}_scale_inv" in tensors or any(f"{path}.{scale}" in tensors for scale in SCALES)
    if name == "bias" or name in SCALES or (name == "weight" and not has_scales):
        return (tensor.float() * factor).to(tensor.dtype)
    return tensor
