"""gpt-oss with a dense MLP in place of its experts: an architecture of the tests, for the oracle transformers and for
our decoder. Its attention has windows in every other layer, sinks, biases and YaRN without truncation."""

from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from slipstream.models.targets import config as targets
from slipstream.models.targets import families

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}


class DenseGptOssConfig(GptOssConfig):
    model_type = "dense_gpt_oss"
    mlp_bias: bool = False


class MLP(LlamaMLP):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None  # where experts return their scores, too


class DenseGptOssForCausalLM(GptOssForCausalLM):
    config_class = DenseGptOssConfig

    def __init__(self, config: DenseGptOssConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = MLP(config)
        self.post_init()
        for layer in self.model.layers:
            layer.self_attn.sinks.data.normal_()  # as large as scores


def dense_gpt_oss(**fields: Any) -> DenseGptOssConfig:
    """Made known to transformers, and to our decoder as a family that it serves."""
    AutoConfig.register(DenseGptOssConfig.model_type, DenseGptOssConfig, exist_ok=True)
    AutoModelForCausalLM.register(DenseGptOssConfig, DenseGptOssForCausalLM, exist_ok=True)
    targets.DENSE_ARCHITECTURES[DenseGptOssForCausalLM.__name__] = False
    families.FAMILIES[DenseGptOssForCausalLM.__name__] = families.gpt_oss
    return DenseGptOssConfig(**{"rope_parameters": YARN, "attn_implementation": "eager"} | fields)
