import torch
from torch import Tensor

from slipstream.models.targets.config import RopeConfig


class RotaryEmbedding:
    """Tables of cos and sin for every position (RoFormer; scaling types as transformers computes them), for the first R
    dims of a head: mostly all D.

    `context`: the most positions of a text, by default those of the tables. Longrope (arXiv 2402.13753) has one set of
    frequencies up to the context length before its extension and another beyond. A text that grows past it would need
    its cached keys again, so what may be served decides, not a text's length.

    `query_scales` (P,) fp32: factors of queries by position, where the model has them.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int, context: int | None = None) -> None:
        context = max_positions if context is None else context
        inverse_frequencies, scale = _inverse_frequencies(rope, rope.rotary_dim(head_dim), context)
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies)  # (P, R / 2)
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = angles.cos() * scale  # (P, R) fp32
        self.sin = angles.sin() * scale
        growth = rope.query_growth
        steps = None if growth is None else torch.floor(torch.arange(max_positions) / growth.period)
        self.query_scales = None if growth is None or steps is None else 1 + growth.beta * torch.log(1 + steps)

    def to(self, device: torch.device) -> "RotaryEmbedding":
        self.cos = self.cos.to(device)
        self.sin = self.sin.to(device)
        self.query_scales = None if self.query_scales is None else self.query_scales.to(device)
        return self


def _inverse_frequencies(rope: RopeConfig, rotary_dim: int, context: int) -> tuple[Tensor, float]:
    if not rope.rotates:
        return torch.zeros(rotary_dim // 2), 1.0
    if rope.rope_type == "default":
        return 1.0 / rope.theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim), 1.0
    if rope.rope_type == "proportional":
        count = int(rope.scaling["partial_rotary_factor"] * rotary_dim // 2)
        turning = 1.0 / rope.theta ** (torch.arange(0, 2 * count, 2).float() / rotary_dim)
        still = torch.zeros(rotary_dim // 2 - count)
        return torch.cat((turning, still)) / rope.scaling.get("factor", 1.0), 1.0
    from transformers import PretrainedConfig  # here: the import takes a second
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # They take a model config: one with a single head has the fields that they read.
    parameters = {"rope_theta": rope.theta, "rope_type": rope.rope_type, **rope.scaling}
    length = int(rope.scaling.get("original_max_position_embeddings", 2048) * rope.scaling.get("factor", 1))
    sizes = {"hidden_size": rotary_dim, "num_attention_heads": 1, "max_position_embeddings": length}
    config = PretrainedConfig.from_dict({**sizes, "rope_parameters": parameters})
    return ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"), seq_len=context)
