"""The rules by which SGLang 0.5.23 and vLLM 0.33 load a draft, stated again from the sources of their loaders: which
fields of config.json they read, which tensors the network that they build has, and what they leave as it was.

`check` raises AssertionError for a checkpoint that the server refuses, or runs as another network than was trained.

The loaders, in SGLang's `python/sglang/srt/` and vLLM's `vllm/model_executor/`:
  EAGLE3       models/llama_eagle3.py; models/llama_eagle3.py, models/qwen3_eagle3.py
  EAGLE        models/llama_eagle.py; models/llama_eagle.py
  blocks       models/dflash.py, dspark.py, lilicorr.py; models/qwen3_dflash.py, qwen3_dflash2.py, qwen3_dspark.py,
               lilicorr.py
  layer ids    model_executor/model_runner_components/spec_aux_hidden_state.py; vllm/v1/worker/gpu/spec_decode/eagle/
               eagle3_utils.py
  nested       -; vllm/transformers_utils/configs/speculators/algos.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Values = dict[str, Any]

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


def check(server: str, folder: Path, num_target_layers: int):
    values = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
    (architecture,) = values["architectures"]
    if "speculators_model_type" in values:
        assert server == "vllm", "SGLang reads no nested config"
        values = flattened(values)
        (architecture,) = values["architectures"]
    loaders = LOADERS[server]
    assert architecture in loaders, f"{server} has no {architecture}"
    loaders[architecture](values, shapes, num_target_layers)


def check_states(server: str, layers: list[int], depth: int):
    """`layers` are outputs. Servers collect states while layers run, so in their order; SGLang at a layer's start."""
    assert layers == sorted(set(layers))
    assert layers[-1] < depth - (server == "sglang")


def check_tensors(shapes: Shapes, expected: Shapes, ignored: tuple[str, ...] = ()):
    present = {name: shape for name, shape in shapes.items() if name not in ignored}
    assert present == expected


def decoder_layer(values: Values, name: str, width: int, norms: tuple[str, ...], *, qk_norm: bool) -> Shapes:
    """`width` of what q, k and v read."""
    hidden = values["hidden_size"]
    inner = values["intermediate_size"]
    heads = values["num_attention_heads"] * values["head_dim"]
    groups = values["num_key_value_heads"] * values["head_dim"]
    shapes = {
        "self_attn.q_proj.weight": (heads, width),
        "self_attn.k_proj.weight": (groups, width),
        "self_attn.v_proj.weight": (groups, width),
        "self_attn.o_proj.weight": (hidden, heads),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        **{f"{norm}.weight": (hidden,) for norm in norms},
    }
    if qk_norm:
        shapes |= {f"self_attn.{part}_norm.weight": (values["head_dim"],) for part in "qk"}
    return {f"{name}.{key}": shape for key, shape in shapes.items()}


def eagle3_shapes(values: Values, count: int, upper_norm: str, *, qk_norm: bool) -> Shapes:
    """`count` states; `upper_norm` is what the server calls the first norm of further layers."""
    hidden = values["hidden_size"]
    wide = values["target_hidden_size"] * count
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes = {
        "fc.weight": (hidden, wide),
        "norm.weight": (hidden,),
        "lm_head.weight": (values["draft_vocab_size"], hidden),
        **decoder_layer(values, "layers.0", 2 * hidden, norms, qk_norm=qk_norm),
    }
    for index in range(1, values["num_hidden_layers"]):
        upper = (upper_norm, "post_attention_layernorm")
        shapes |= decoder_layer(values, f"layers.{index}", hidden, upper, qk_norm=qk_norm)
    if values.get("norm_before_fc"):
        shapes["input_norm.weight"] = (wide,)
    if values.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (values["target_hidden_size"],) for index in range(count)}
    return shapes


def sglang_eagle3(values: Values, shapes: Shapes, depth: int):
    layers = (values.get("eagle_config") or {}).get(AUX_LAYERS) or [1, depth // 2 - 1, depth - 4]
    check_states("sglang", layers, depth)
    assert len(layers) > 1 or values["target_hidden_size"] != values["hidden_size"], "fc is left out"
    assert not values.get("norm_before_residual"), "not read"
    assert not values.get("attention_bias"), "not read"
    public = {name.replace("midlayer.", "layers.0."): shape for name, shape in shapes.items()}
    check_tensors(public, eagle3_shapes(values, len(layers), "hidden_norm", qk_norm=False), ("d2t", "t2d"))


def vllm_eagle3(values: Values, shapes: Shapes, depth: int, *, qk_norm: bool = False):
    inputs = values.get(AUX_LAYERS) or [2, depth // 2, depth - 3]
    check_states("vllm", [layer - 1 for layer in inputs], depth)
    nested = (values.get("eagle_config") or {}).get(AUX_LAYERS)
    count = len(inputs) if qk_norm and not nested else len(nested or "abc")  # by Llama's loader from there alone
    public = {name.replace("midlayer.", "layers.0."): shape for name, shape in shapes.items()}
    expected = eagle3_shapes(values, count, "input_layernorm", qk_norm=qk_norm)
    check_tensors(public, expected, ("d2t", "t2d", "embed_tokens.weight"))


def vllm_qwen3_eagle3(values: Values, shapes: Shapes, depth: int):
    assert values["model_type"] == "qwen3"
    vllm_eagle3(values, shapes, depth, qk_norm=True)


def sglang_eagle(values: Values, shapes: Shapes, _depth: int):
    hidden = values["hidden_size"]
    assert not values.get("bias"), "adds biases to attention"
    assert not values.get("attention_bias"), "likewise"
    layer = decoder_layer(values, "layers.0", hidden, ("post_attention_layernorm",), qk_norm=False)
    check_tensors(shapes, {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,), **layer})


def block_shapes(values: Values, fields: Values) -> Shapes:
    hidden = values["hidden_size"]
    shapes = {
        "fc.weight": (hidden, hidden * len(fields["target_layer_ids"])),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    taps = fields.get("conv_kernel_size", 0)
    for index in range(values["num_hidden_layers"]):
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= decoder_layer(values, f"layers.{index}", hidden, norms, qk_norm=True)
        for part in ("attention_conv", "mlp_conv") if taps else ():
            groups = hidden // fields["conv_group_size"]
            shapes[f"layers.{index}.{part}.base_kernel"] = (2, taps, hidden)
            shapes[f"layers.{index}.{part}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return shapes


def check_block(server: str, values: Values, shapes: Shapes, depth: int, heads: Shapes):
    fields = values["dflash_config"]
    check_states(server, fields["target_layer_ids"], depth)
    windowed = [kind == "sliding_attention" for kind in values["layer_types"]]
    assert not any(windowed) or values["sliding_window"] > 0
    if values.get("is_causal") is not None:  # else: layers with a window are causal, others are not
        assert bool(values["is_causal"]) != bool(values["sliding_window_non_causal"])
    assert 0 <= fields["mask_token_id"] < values["vocab_size"]
    check_tensors(shapes, block_shapes(values, fields) | heads)


def check_plain(values: Values):
    assert not values.get("sample_from_anchor"), "not read for these architectures"
    assert not values.get("draft_vocab_size"), "the head is the target's"


def plain_block(server: str) -> Callable[[Values, Shapes, int], None]:
    def load(values, shapes, depth):
        heads = {}
        if server == "vllm" and values.get("draft_vocab_size"):
            size = (values["draft_vocab_size"], values["hidden_size"])
            heads = {"lm_head.weight": size, "d2t": size[:1], "t2d": (values["vocab_size"],)}
            assert "layer_types" not in values or "sliding_attention" not in values["layer_types"]
            assert not values.get("sample_from_anchor")
        else:
            check_plain(values)
        embedding = {"embed_tokens.weight"} & shapes.keys() if server == "vllm" else set()
        rest = {name: shape for name, shape in shapes.items() if name not in embedding}
        assert values["dflash_config"].get("causal") in (None, False), "of all layers"
        check_block(server, values, rest, depth, heads)

    return load


def selector_block(server: str) -> Callable[[Values, Shapes, int], None]:
    def load(values, shapes, depth):
        check_plain(values)
        fields = values["dflash_config"]
        assert server == "sglang" or fields["conv_kernel_size"] > 0
        rank = fields["selector_rank"]
        heads = {f"candidate_selector.{end}_codebook": (values["vocab_size"], rank) for end in ENDS}
        heads["candidate_selector.hidden_projection.weight"] = (rank, values["hidden_size"])
        check_block(server, values, shapes, depth, heads)

    return load


ENDS = ("predecessor", "successor")


def lilicorr_block(server: str) -> Callable[[Values, Shapes, int], None]:
    def load(values, shapes, depth):
        check_plain(values)
        assert values["dflash_config"]["lilicorr_candidate_topk"] in (1, 2, 4, 8, 16)
        heads = {name: shape for name, shape in shapes.items() if name.startswith("lilicorr.")}
        assert heads  # their names: tests/peer_drafts.py
        check_block(server, values, shapes, depth, heads)

    return load


def markov_block(server: str) -> Callable[[Values, Shapes, int], None]:
    def load(values, shapes, depth):
        """Both read the fields of heads at the top level alone, and take a missing sample_from_anchor as true."""
        rank = values["markov_rank"]
        hidden = values["hidden_size"]
        size = values.get("draft_vocab_size") or values["vocab_size"]
        assert rank > 0
        heads = {
            "markov_head.markov_w1.weight": (values["vocab_size"], rank),
            "markov_head.markov_w2.weight": (size, rank),
        }
        is_gated = values["markov_head_type"] == "gated"
        if is_gated:
            assert server == "sglang"
            heads |= {
                "markov_head.gate_proj.weight": (rank, hidden + rank),
                "markov_head.gate_proj.bias": (rank,),
            }
        if values["enable_confidence_head"]:
            width = hidden + (rank if values["confidence_head_with_markov"] else 0)
            heads |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        if size < values["vocab_size"]:
            assert server == "vllm"
            heads |= {"lm_head.weight": (size, hidden), "d2t": (size,), "t2d": (values["vocab_size"],)}
        rest = {name: shape for name, shape in shapes.items() if name != "embed_tokens.weight"}
        if size == values["vocab_size"]:
            rest.pop("lm_head.weight", None)
        check_block(server, values, rest, depth, heads)

    return load


def flattened(values: Values) -> Values:
    """The nested config of speculators as vLLM reads it."""
    kind = values["speculators_model_type"]
    flat = {**values["transformer_layer_config"], "draft_vocab_size": values["draft_vocab_size"]}
    flat |= {"target_hidden_size": values["target_hidden_size"]}
    if kind == "eagle3":
        names = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", AUX_LAYERS)
        return {**flat, "architectures": [names[flat["model_type"]]], **{flag: values.get(flag) for flag in flags}}
    outputs = [layer - 1 for layer in values["aux_hidden_state_layer_ids"]]
    fields = {"mask_token_id": values["mask_token_id"], "target_layer_ids": outputs}
    flat |= {"sample_from_anchor": values["sample_from_anchor"], "dflash_config": fields}
    if flat["draft_vocab_size"] == flat["vocab_size"]:
        del flat["draft_vocab_size"]
    if kind == "dspark":
        names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
        return {**flat, "architectures": ["Qwen3DSparkModel"], **{name: values[name] for name in names}}
    fields["causal"] = not values["sliding_window_non_causal"]
    return {**flat, "architectures": ["DFlashDraftModel"]}


LOADERS: dict[str, dict[str, Callable[[Values, Shapes, int], None]]] = {
    "sglang": {
        "LlamaForCausalLMEagle3": sglang_eagle3,
        "LlamaForCausalLMEagle": sglang_eagle,
        "DFlashDraftModel": plain_block("sglang"),
        "DFlash2DraftModel": selector_block("sglang"),
        "LiLiCorrDraftModel": lilicorr_block("sglang"),
        "DSparkDraftModel": markov_block("sglang"),
    },
    "vllm": {
        "LlamaForCausalLMEagle3": vllm_eagle3,
        "Eagle3LlamaForCausalLM": vllm_eagle3,
        "Eagle3Qwen3ForCausalLM": vllm_qwen3_eagle3,
        "DFlashDraftModel": plain_block("vllm"),
        "DFlash2DraftModel": selector_block("vllm"),
        "LiLiCorrDraftModel": lilicorr_block("vllm"),
        "DSparkDraftModel": markov_block("vllm"),
        "Qwen3DSparkModel": markov_block("vllm"),
    },
}
