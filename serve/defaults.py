"""What the engine takes where its options leave the choice to the checkpoint or the machine."""

from pathlib import Path

import torch

from slipstream.models.checkpoint import read_json
from slipstream.models.config import ModelConfig


def pick_max_model_len(asked: int | None, model: ModelConfig) -> int:
    """The context length: at most the target's positions, and its sliding window, which is not implemented."""
    limit = min(model.max_position_embeddings, model.sliding_window or model.max_position_embeddings)
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len is {asked}; this target allows at most {limit}")
    return asked or limit


def pick_widths(asked: int | None, offered: tuple[int, ...]) -> tuple[int, ...]:
    if asked is None:
        return offered
    if asked not in offered:
        raise ValueError(f"width is {asked}; this drafter offers {', '.join(map(str, offered))}")
    return (asked,)


def pick_device(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' and torch finds none; choose cpu, or install a CUDA build of torch")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(name: str, path: Path, device: torch.device) -> torch.dtype:
    if name == "auto" and device.type == "cpu":
        return torch.float32
    if name == "auto":
        config = read_json(path / "config.json")
        name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return getattr(torch, name)
