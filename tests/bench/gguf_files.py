"""Writes checkpoints as GGUF files, as llama.cpp's converter does: names, order of rotated rows, metadata."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}


def write_gguf(checkpoint: Path, tokenizer: Path, path: Path, quantization: str) -> dict[str, Tensor]:
    """Writes a dense checkpoint with matrices of a quantization such as Q4_1, norms in fp32.

    Returns the weights that the file holds, unpacked, under the checkpoint's names.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    family = config["model_type"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    writer = GGUFWriter(path, family)
    add_sizes(writer, config)
    add_tokenizer(writer, tokenizer, config["vocab_size"])
    weights = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        kind = GGMLQuantizationType.F32 if weight.dim() == 1 else GGMLQuantizationType[quantization]
        data = gguf.quants.quantize(rotated(name, weight.float(), config).numpy(), kind)
        tensor_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(tensor_name, data, raw_dtype=kind)
        # Blocks lie within a row, so what quantisation loses does not depend on the rows' order.
        blocks = gguf.quants.quantize(weight.float().numpy(), kind)
        weights[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def rotated(name: str, weight: Tensor, config: dict[str, Any]) -> Tensor:
    """Puts the two halves of a head of a Llama's queries and keys row by row, as GGUF has them."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    projection = name.split(".")[-2]
    if config["model_type"] != "llama" or projection not in heads:
        return weight
    rows, columns = weight.shape
    return weight.view(heads[projection], 2, -1, columns).transpose(1, 2).reshape(rows, columns)


def add_sizes(writer: GGUFWriter, config: dict[str, Any]):
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: GGUFWriter, folder: Path, vocab_size: int):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    ids = {index: token for token, index in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids) | {index for index, token in ids.items() if token.startswith("<|")}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([ids[index] for index in range(vocab_size)])
    writer.add_token_types([TokenType.CONTROL if index in special else TokenType.NORMAL for index in range(vocab_size)])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
