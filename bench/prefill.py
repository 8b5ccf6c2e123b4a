"""Time to compute one long prompt, against its linear layers and FlashInfer's attention kernel alone in the same run.

    python bench/prefill.py --target CKPT --prompt-len 8192

`ms` is the engine's step from the prompt to its first token. `linears_ms` are all linear layers of the target at that
many rows, `attention_ms` FlashInfer's kernel on the same pages for all layers; both by CUDA events. Ends in one JSON
line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from slipstream.bench.gpu import kernel_table, milliseconds
from slipstream.bench.lines import Lines, origin
from slipstream.config import parse
from slipstream.models.layers import Linear
from slipstream.serve.engine import Engine
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request, SamplingParams

REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Options of this benchmark."""

    target: str
    """Target checkpoint."""
    prompt_len: int = 8192
    """Tokens of the prompt, computed in one pass."""
    attention: str = "auto"
    """Attention backends."""
    profile: bool = False
    """List the kernels of a pass by time."""
    output: str | None = None
    """File to append the JSON line to."""


def main() -> None:
    config = parse(PrefillConfig, prog="bench/prefill.py", description="Time of a long prompt.")
    length = config.prompt_len
    engine = Engine(
        EngineConfig(
            target=config.target,
            attention=config.attention,
            max_running=1,
            max_model_len=length + 16,
            kv_cache_tokens=2 * length,
            prefill_budget=length,
            cuda_graph=False,
            overlap=False,
        )
    )
    times = [prompt_ms(engine, length, seed) for seed in range(REPEATS + 1)][1:]  # the first one compiles
    if config.profile:
        print(kernel_table(lambda: prompt_ms(engine, length, 99), repeats=1))
    linears, attention = linears_ms(engine, length), attention_ms(engine, length)
    lines = Lines(config.output)
    lines.add(
        {
            **origin("prefill", "cuda"),
            "target": config.target,
            "draft": "none",
            "prompt_len": length,
            "ms": round(median(times), 2),
            "linears_ms": round(linears, 2),
            "attention_ms": round(attention, 2),
            "ratio": round(median(times) / (linears + attention), 3),
            "tok_s": round(1000 * length / median(times)),
        }
    )
    lines.print()


def prompt_ms(engine: Engine, length: int, seed: int) -> float:
    """Wall time of the step that computes a prompt never seen before."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(20, min(4000, engine.info.vocab_size), (length,), generator=generator).tolist()
    engine.add(Request(id=str(seed), prompt=prompt, params=SamplingParams(max_tokens=1, temperature=0.0)))
    torch.cuda.synchronize()
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def linears_ms(engine: Engine, rows: int) -> float:
    """All linear layers of the decoder, one behind another."""
    modules = [module for module in engine.target.layers.modules() if isinstance(module, Linear)]
    inputs = {module.in_features: random(rows, module.in_features, module) for module in modules}

    @torch.inference_mode()
    def run() -> None:
        for module in modules:
            F.linear(inputs[module.in_features], module.weight, module.bias)

    return milliseconds(run)


def random(rows: int, columns: int, module: nn.Linear) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=module.weight.dtype, device=module.weight.device)


def attention_ms(engine: Engine, rows: int) -> float:
    """FlashInfer's paged kernel, causal, planned once, for as many layers as the target has."""
    import flashinfer  # the bench alone needs it here

    spec, cache = engine.specs[0], engine.executor.runner.caches[0]  # (L, 2, slots, G, D)
    page_size = engine.config.page_size
    pages = cache.unflatten(2, (-1, page_size))
    num_heads = engine.target.config.num_heads
    q = torch.randn(rows, num_heads, spec.head_dim, dtype=cache.dtype, device=cache.device)
    workspace = torch.zeros(384 * 2**20, dtype=torch.uint8, device=cache.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")
    count = -(-rows // page_size)
    ends = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
    numbers = torch.randperm(pages.shape[2] - 1, device=cache.device)[:count].int() + 1
    last = torch.tensor([rows - (count - 1) * page_size], dtype=torch.int32)
    shape = (num_heads, spec.num_kv_heads, spec.head_dim, page_size)
    wrapper.plan(*ends, numbers, last, *shape, causal=True, q_data_type=cache.dtype, kv_data_type=cache.dtype)

    @torch.inference_mode()
    def run() -> None:
        for layer in range(spec.num_layers):
            wrapper.run(q, (pages[layer, 0], pages[layer, 1]))

    return milliseconds(run)


if __name__ == "__main__":
    main()
