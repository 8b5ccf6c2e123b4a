"""Tiny random targets of a TargetSpec, for layers that no family has yet, and their answers without pages or drafts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.kernels.kv.fp8 import decode, encode
from slipstream.kernels.kv.rope import rotate_halves
from slipstream.kernels.norm import norm_heads
from slipstream.kernels.sampling.sample import Sampling, noise_key, sample
from slipstream.models.files.weights import public_tensors
from slipstream.models.layers.attention import Attention, AttentionLayer, Mask
from slipstream.models.layers.recurrence import Record, RecurrentMixer, State, zero_state
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import DecoderShape, LayerSpec, RopeConfig, TargetSpec
from slipstream.models.targets.decoder import Target, load_target
from slipstream.serve.drafters.registry import plan_draft
from slipstream.serve.engine import engine_plan
from slipstream.serve.engine.engine_plan import DeviceFacts, EnginePlan, plan_engine
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request
from slipstream.tests import random_drafts
from slipstream.tests.random_targets import SHAPE, roughen

NOMINAL = DecoderShape(
    vocab_size=120,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    rope=RopeConfig(),
)


def spec_of(layers: Sequence[LayerSpec]) -> TargetSpec:
    return TargetSpec(**NOMINAL.shape(), architecture="Qwen3ForCausalLM", layers=tuple(layers))


def save_spec(spec: TargetSpec, folder: Path, seed: int = 0, **tensors: Tensor):
    """Weights five times the usual spread, so that no two logits are close, and `tensors` beside them. config.json is
    that of a Llama: what is read of it beside the spec is the same."""
    torch.manual_seed(seed)
    target = Target(spec)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    roughen(target)
    folder.mkdir(parents=True)
    save_file(
        {name: x.contiguous() for name, x in (public_tensors(target) | tensors).items()}, folder / "model.safetensors"
    )
    values = {
        **SHAPE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": NOMINAL.rms_norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(values))


def save_spec_draft(kind: str, spec: TargetSpec, target: Path, folder: Path):
    """A random draft, "eagle3" or "dflash"; the former begins as the target's last layer."""
    save = {"eagle3": random_drafts.save_random_draft, "dflash": random_drafts.save_random_dflash}[kind]
    with patch.object(random_drafts, "load_config", lambda _: spec):
        save(target, folder)


def plan_spec(
    spec: TargetSpec, target: Path, draft: str = "none", *, like_gpu: bool = False, **options: Any
) -> EnginePlan:
    """`like_gpu`: two steps in flight and captured passes, as tests play them."""
    sizes = {"max_running": 8, "kv_cache_tokens": 2048, "grammar_drafts": False, "device": "cpu"}
    config = EngineConfig(**sizes | options | {"target": str(target), "draft": draft})
    facts = DeviceFacts.of(torch.device(config.device))
    plan = plan_draft(config.source, config.drafter, spec)
    if not like_gpu:
        return plan_engine(config, target, spec, plan, facts, torch.float32)
    config = replace(config, attention="prefill=sdpa,verify=triton,draft=triton")
    with patch.object(engine_plan, "pick_modes", lambda *_: (True, True)):
        return plan_engine(config, target, spec, plan, facts, torch.float32)


class NaiveAttention(Attention):
    """Every row of one text sees the rows before it and itself, as far as its layer's window reaches. `scales`: numbers
    are rounded as a cache of codes with scales (2, G) of each layer rounds them. It keeps the states after each token
    of the text, by the ids of layers with recurrent state, and goes on from them where the text has grown."""

    def __init__(self, scales: Sequence[Tensor] | None = None):
        self.scales = scales
        self.states: dict[int, list[State]] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        self.layers: dict[int, RecurrentMixer] = {}

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer):
        raise AssertionError("a target's rows all ask")

    def recur(self, records: Record, layer: RecurrentMixer) -> Tensor:
        """Token by token, from an empty state."""
        self.layers[layer.id] = layer
        states = self.states.setdefault(layer.id, [])
        outputs = self.outputs.setdefault(layer.id, [])
        for index in range(len(states), len(next(iter(records.values())))):
            record = {name: values[index : index + 1] for name, values in records.items()}
            state = states[-1] if states else zero_state(layer.spec.state_shapes, 1, torch.device("cpu"))
            states.append(layer.step(state, record))
            outputs.append(layer.read(state, states[-1], record))
        return torch.cat(outputs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        spec = layer.spec
        length = len(q)
        q, k, v = norm_heads(q, k, v, layer.norms)
        rope = RotaryEmbedding(spec.rope, spec.head_dim, length)
        q = rotate_halves(q, rope.cos[:, None], rope.sin[:, None])
        k = rotate_halves(k, rope.cos[:, None], rope.sin[:, None])
        if self.scales is not None:
            k, v = (
                decode(encode(x, scale[:, None]), scale[:, None], x.dtype)
                for x, scale in zip((k, v), self.scales[layer.id], strict=True)
            )
        group = spec.num_heads // spec.num_kv_heads
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        is_seen = (distance >= 0) & (distance < (spec.window or length))
        scores = torch.einsum("iqd,jqd->qij", q, k) * spec.score_scale
        return torch.einsum("qij,jqd->iqd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), v)


@dataclass(frozen=True, slots=True)
class Reference:
    """A target that computes each text by itself, token by token."""

    target: Target
    attention: Callable[[], Attention] = NaiveAttention

    @classmethod
    def load(cls, spec: TargetSpec, folder: Path, attention: Callable[[], Attention] = NaiveAttention) -> "Reference":
        return cls(load_target(folder, spec, torch.float32, torch.device("cpu")), attention)

    @torch.inference_mode()
    def answer(self, request: Request) -> list[int]:
        """Greedy, or sampled by temperature alone."""
        params = request.params
        keys = torch.tensor([noise_key(request.seed, request.choice)])
        sampling = Sampling(keys, torch.tensor([params.temperature]), None)
        tokens = list(request.prompt)
        attention = self.attention()
        while len(tokens) < len(request.prompt) + params.max_tokens and (
            len(tokens) == len(request.prompt) or tokens[-1] != 2
        ):
            hidden, _ = self.target(torch.tensor(tokens), attention)
            logits = self.target.logits(hidden[-1:])
            tokens.append(int(sample(logits, torch.tensor([len(tokens)]), sampling)))
        return tokens[len(request.prompt) :]

    def answers(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """By request id."""
        return {request.id: self.answer(request) for request in requests}
