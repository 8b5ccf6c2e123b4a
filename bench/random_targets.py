"""Targets of published sizes with random weights that are made on the device, and EAGLE3 drafts for them.

On the disk are a config.json and the draft. Nothing is learnt about acceptance: simulate it (`simulate_accept_length`).
The experts of random weights are hit independently, real text hits fewer.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slipstream.models.drafts.base import write_draft
from slipstream.models.drafts.eagle3 import Eagle3, Eagle3Config
from slipstream.models.targets.config import TargetSpec, default_aux_layers
from slipstream.models.targets.decoder import Target, load_config
from slipstream.serve.engine import build

SPREAD = 0.02  # standard deviation of the weights
DRAFT_VOCABULARY = 32_000
ROPE = {"rope_type": "default", "rope_theta": 1e6}
SHARED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 2}
SHARED |= {"dtype": "bfloat16", "rope_parameters": ROPE, "sliding_window": None, "use_sliding_window": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama31-8b": SHARED
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "vocab_size": 128_256}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072},
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
}


class Pair(NamedTuple):
    target: str
    draft: str


@contextmanager
def random_pair(name: str) -> Iterator[Pair]:
    """Folders of a target and a draft for engines built in this process within the context.

    Raises ValueError for an unknown name.
    """
    if name not in CONFIGS:
        raise ValueError(f"shape is {name!r}; choose of {', '.join(CONFIGS)}")
    load = build.load_target
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(f"{folder}/{name}", f"{folder}/draft")
        for path in map(Path, pair):
            path.mkdir()
        (Path(pair.target) / "config.json").write_text(json.dumps(CONFIGS[name]))
        save_draft(load_config(Path(pair.target)), pair)
        build.load_target = make_target
        try:
            yield pair
        finally:
            build.load_target = load


def save_draft(target: TargetSpec, pair: Pair) -> None:
    size = min(DRAFT_VOCABULARY, target.vocab_size)
    fields = {"aux_layers": default_aux_layers(target.num_layers), "target": pair.target}
    draft = Eagle3(Eagle3Config.from_target(target, draft_vocab_size=size, **fields)).bfloat16()
    for parameter in draft.parameters():
        fill(parameter.data)
    if size < target.vocab_size:
        draft.set_vocabulary(torch.arange(size))
    write_draft(draft, draft.state_dict(), Path(pair.draft), {})


def make_target(
    path: Path,
    config: TargetSpec,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> Target:
    """In place of decoder.load_target."""
    if quantization is not None:
        raise ValueError(f"quantization is {quantization!r}; random weights have 16 bits")
    with torch.device("meta"):
        target = Target(config).to(dtype)
    target.to_empty(device=device)
    torch.manual_seed(0)
    for parameter in target.parameters():
        fill(parameter.data)
    target.path, target.trust_remote_code = path, trust_remote_code
    return target.eval().requires_grad_(False)


def fill(tensor: torch.Tensor) -> None:
    """Norms scale by one."""
    if tensor.dim() == 1:
        tensor.fill_(1.0)
    else:
        tensor.normal_(std=SPREAD)
