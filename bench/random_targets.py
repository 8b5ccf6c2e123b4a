"""Targets of published sizes with random weights that are made on the device, and drafts for them.

On the disk are a config.json and the draft. Nothing is learnt about acceptance: simulate it (`simulate_accept_length`).
Tokens choose their experts almost independently; those of real text hit fewer.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slipstream.kernels.gemm.fp8 import E4M3
from slipstream.models.drafts.base import DraftNetwork, write_draft
from slipstream.models.drafts.dflash import DFlash, DFlashConfig, default_block_aux_layers
from slipstream.models.drafts.eagle3 import Eagle3, Eagle3Config
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.models.drafts.mtp import MTP, MTPConfig
from slipstream.models.files.weights import allocate
from slipstream.models.layers.formats.table import read_quantization
from slipstream.models.layers.quantized import quantize_by_config
from slipstream.models.targets.config import TargetSpec, default_aux_layers
from slipstream.models.targets.decoder import Target, load_config
from slipstream.serve.engine import build

SPREAD = 0.02  # standard deviation of the weights
EMBEDDING_SPREAD = 50.0  # so much that layers hardly change it: attention would make a prompt's tokens alike
DRAFT_VOCABULARY = 32_000
ROPE = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"truncate": False, "original_max_position_embeddings": 4096}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SHARED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 2}
SHARED |= {"dtype": "bfloat16", "rope_parameters": ROPE, "sliding_window": None, "use_sliding_window": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama31-8b": SHARED
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "vocab_size": 128_256}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072},
    "qwen3-8b": SHARED
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
    | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "vocab_size": 151_936}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960},
    "qwen3-30b-a3b": SHARED
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False}
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "vocab_size": 151_936}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40_960}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral-8x7b": SHARED
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "vocab_size": 32_000}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32_768}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss-20b": SHARED
    | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "swiglu_limit": 7.0}
    | {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "vocab_size": 201_088}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072}
    | {"num_local_experts": 32, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5, "sliding_window": 128}
    | {"layer_types": ["sliding_attention", "full_attention"] * 12, "rope_parameters": YARN}
    | {"quantization_config": {"quant_method": "mxfp4"}},
}
DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
DELTA |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "head_dim": 256, "vocab_size": 248_320}
DELTA |= {"rope_parameters": ROPE | {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}
DELTA |= {"max_position_embeddings": 262_144, "attention_bias": False, "mtp_num_hidden_layers": 1}
HYBRID = ["linear_attention"] * 3 + ["full_attention"]
GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
CONFIGS |= {
    "qwen35-4b": SHARED
    | DELTA
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "tie_word_embeddings": True}
    | {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "layer_types": HYBRID * 8}
    | {"num_attention_heads": 16, "num_key_value_heads": 4},
    "qwen36-27b": SHARED
    | DELTA
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "linear_num_value_heads": 48}
    | {"hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64, "layer_types": HYBRID * 16}
    | {"num_attention_heads": 24, "num_key_value_heads": 4},
    "qwen36-35b-a3b": SHARED
    | DELTA
    | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    | {"hidden_size": 2048, "layer_types": HYBRID * 10}
    | {"num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "gemma4-26b-a4b": SHARED
    | {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "tie_word_embeddings": True}
    | {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "vocab_size": 262_144}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024}
    | {"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
    | {"moe_intermediate_size": 704, "final_logit_softcapping": 30.0, "max_position_embeddings": 262_144}
    | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "rope_parameters": GEMMA4_ROPE}
    | {"hidden_activation": "gelu_pytorch_tanh"},
    "muse-30b": SHARED
    | {"architectures": ["MuseGlimmerForCausalLM"], "model_type": "muse_glimmer_text", "rms_norm_eps": 1e-5}
    | {"hidden_size": 6656, "intermediate_size": 19_968, "num_hidden_layers": 52, "vocab_size": 202_048}
    | {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 2048}
    | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 13, "attention_bias": False}
    | {"rope_parameters": ROPE | {"rope_theta": 5e5}, "max_position_embeddings": 131_072}
    | {"layer_rope_theta": [5e5, 5e5, 5e5, 0] * 13},
    "glm45-air-half": SHARED  # 23 of 46 layers, what one GPU holds in 16 bits
    | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True}
    | {"hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 23, "vocab_size": 151_552}
    | {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
    | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "max_position_embeddings": 131_072}
    | {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
    | {"routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False},
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "vocab_size": 512, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
CONFIGS["tiny"] = CONFIGS["qwen3-8b"] | TINY  # for a CPU
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
CONFIGS["llama31-8b-w4a16"] = CONFIGS["llama31-8b"] | {"quantization_config": INT4}
CONFIGS["llama31-8b-fp8"] = CONFIGS["llama31-8b"] | {"quantization_config": BLOCKS}
CONFIGS["qwen3-30b-a3b-fp8"] = CONFIGS["qwen3-30b-a3b"] | {"quantization_config": BLOCKS}
CONFIGS["muse-30b-fp8"] = CONFIGS["muse-30b"] | {"quantization_config": BLOCKS}

DSPARK: dict[str, Any] = {"sample_from_anchor": True, "markov_rank": 256, "confidence_head": True}
HEADS: dict[str, dict[str, Any]] = {  # of block drafts, with the published sizes: fields of their configs
    "none": {},
    "dflash2": {"conv_kernel_size": 2, "selector_rank": 256},
    "dspark": DSPARK,
    "dspark-gated": DSPARK | {"markov_head_type": "gated"},
    "lilicorr": {"lilicorr": LiLiCorrConfig()},
    "lilicorr-conv": {"lilicorr": LiLiCorrConfig(), "conv_kernel_size": 2},
}
BLOCK_DRAFTS = HEADS | {"dflash": {}, "dspark-map": DSPARK | {"draft_vocab_size": 32_768}}
del BLOCK_DRAFTS["none"]
MTP_HEADS = {"mtp": None, "mtp-map": 32_768}  # tokens that they propose; None: all
DRAFTS = ("eagle3", *MTP_HEADS, *BLOCK_DRAFTS)


class Pair(NamedTuple):
    target: str
    draft: str


@contextmanager
def random_pair(name: str, draft: str = "eagle3") -> Iterator[Pair]:
    """Folders of a target and a draft, one of DRAFTS, for engines built in this process within the context.

    Raises ValueError for an unknown name.
    """
    if draft not in DRAFTS:
        raise ValueError(f"draft is random:{draft}; choose of {', '.join(DRAFTS)}")
    if name not in CONFIGS:
        raise ValueError(f"shape is {name!r}; choose of {', '.join(CONFIGS)}")
    load = build.load_target
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(f"{folder}/{name}", f"{folder}/{draft}-draft")
        for path in map(Path, pair):
            path.mkdir()
        (Path(pair.target) / "config.json").write_text(json.dumps(CONFIGS[name]))
        save_draft(load_config(Path(pair.target)), pair, draft)
        build.load_target = make_target
        try:
            yield pair
        finally:
            build.load_target = load


def published_spec(name: str) -> TargetSpec:
    with _folder(name) as path:
        return load_config(path)


def published_target(name: str, dtype: torch.dtype, device: torch.device, quantization: str | None = None) -> Target:
    """A target of CONFIGS with random weights; `quantization` "fp8" quantises 16-bit weights on the fly."""
    with _folder(name) as path:
        return make_target(path, load_config(path), dtype, device, quantization=quantization)


@contextmanager
def _folder(name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[name]))
        yield Path(folder)


def save_draft(target: TargetSpec, pair: Pair, name: str) -> None:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        make = new_mtp if name in MTP_HEADS else new_eagle3 if name == "eagle3" else new_block
        draft = make(target, pair.target, name)
    for parameter in draft.parameters():
        fill(parameter.data)
    size = draft.config.draft_vocab_size
    if size is not None and size < target.vocab_size:
        draft.set_vocabulary(torch.arange(size))
    write_draft(draft, draft.state_dict(), Path(pair.draft), {})


def new_eagle3(target: TargetSpec, path: str, _name: str) -> DraftNetwork:
    size = min(DRAFT_VOCABULARY, target.vocab_size)
    fields = {"aux_layers": default_aux_layers(target.num_layers), "target": path}
    return Eagle3(Eagle3Config.from_target(target, draft_vocab_size=size, **fields)).bfloat16()


def new_mtp(target: TargetSpec, path: str, name: str) -> DraftNetwork:
    """A head as the target's family has it, or of the common form."""
    size = MTP_HEADS[name]
    fields = {} if size is None else {"draft_vocab_size": min(size, target.vocab_size)}
    return MTP(MTPConfig.from_target(target, target=path, **fields)).bfloat16()


def new_block(target: TargetSpec, path: str, name: str) -> DraftNetwork:
    """A block draft of five layers that reads five states."""
    sizes = {"num_layers": 5, "aux_layers": default_block_aux_layers(target.num_layers, 5), "mask_token_id": 0}
    sizes["block_size"] = 7 if "sample_from_anchor" in BLOCK_DRAFTS[name] else 8  # seven drafted tokens
    fields: dict[str, Any] = sizes | {"target": path} | BLOCK_DRAFTS[name]
    if (size := fields.get("draft_vocab_size")) is not None:
        fields["draft_vocab_size"] = min(size, target.vocab_size - 1)
    return DFlash(DFlashConfig.from_target(target, **fields)).bfloat16()


def make_target(
    path: Path,
    config: TargetSpec,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> Target:
    """In place of decoder.load_target."""
    formats = read_quantization(path, quantization)
    with torch.device("meta"):
        target = Target(config)
    quantize_by_config(target, formats)
    allocate(target, dtype, device)
    torch.manual_seed(0)
    for name, parameter in target.named_parameters():
        fill(parameter.data, vector=0.0 if name.endswith("bias") else 1.0)
    target.embed_tokens.weight.data.normal_(std=EMBEDDING_SPREAD)
    for name, buffer in target.named_buffers():
        fill_codes(name, buffer)
    target.quantization = formats
    target.path = path
    target.trust_remote_code = trust_remote_code
    return target.eval().requires_grad_(False)


def fill_codes(name: str, buffer: torch.Tensor) -> None:
    """Fills a tensor of quantised weights, codes of e4m3, 4-bit codes in words, or scales, so that weights spread by
    SPREAD, or less where codes are integers."""
    if buffer.dtype == E4M3:
        for part in buffer.view(torch.uint8).flatten().split(1 << 26):
            part.random_(0, 256)
            part[(part & 127) == 127] = 0  # no NaN
    elif name.endswith("words"):
        half = torch.iinfo(buffer.dtype).max + 1
        buffer.random_(-half, half)
    elif buffer.dtype == torch.int32:
        buffer.fill_(0x78787878)  # four times 2^-7
    else:
        values = torch.arange(256).to(torch.uint8).view(E4M3).float()
        buffer.fill_(SPREAD / values[values.isfinite()].square().mean().sqrt().item())


def fill(tensor: torch.Tensor, vector: float = 1.0) -> None:
    """Matrices at random, the elements of a vector, such as a norm's scales, with one number."""
    if tensor.dim() == 1:
        tensor.fill_(vector)
    else:
        tensor.normal_(std=SPREAD)
