"""Measures a training step at a real model's shape with random weights: tokens/s, memory, share of peak.

    python bench/training.py --shape qwen3-8b --sequence 4096 --anchors 512 --profile
    python bench/training.py --shape qwen3-8b --sequence 2048 --rows 8 --block 8 --heads dflash2
    python bench/training.py --shape tiny                       # a few seconds on a CPU
    accelerate launch --config_file configs/accelerate/zero2.yaml --num_processes 2 bench/training.py --shape qwen3-8b

The step is the training loop's: frozen target, draft, loss, backward, clipping, AdamW. `share_of_peak` sets the
arithmetic that the step needs (bench/training_flops.py) against a plain bf16 matrix product of the same run. --profile
lists the kernels. With several processes each has its own rows and
the first prints: tokens/s of all processes, other figures of one. Prints tables, then one JSON line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from slipstream.bench.gpu import print_kernels, profile_kernels
from slipstream.bench.lines import Lines, origin
from slipstream.bench.random_targets import CONFIGS, DRAFT_VOCABULARY, HEADS, published_spec, published_target
from slipstream.bench.training_flops import step_flops
from slipstream.config import parse
from slipstream.models.drafts.dflash import DFlash, DFlashConfig, default_block_aux_layers
from slipstream.models.drafts.eagle3 import Eagle3, Eagle3Config
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import TargetSpec, default_aux_layers
from slipstream.models.targets.frozen import DecoderTarget
from slipstream.train import dflash, eagle3
from slipstream.train.batches import Batch, collate
from slipstream.train.loop import start
from slipstream.train.optim import CLIP, build_optimizers
from slipstream.train.options import DataOptions, OptimOptions, RunOptions
from slipstream.train.row_ranks import RowGroup
from slipstream.train.training import DraftTraining

WARM_UP = 3  # steps
OPTIM = OptimOptions(name="adamw")  # as in the figures of docs/performance.md; FSDP takes no other
PEAK_SIZE = {"cuda": 8192, "cpu": 512}  # of the square matrices of the plain product
Part = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Options of this benchmark."""

    shape: str = "qwen3-8b"
    """Sizes of target and draft: one of bench/random_targets.py."""
    quantization: Literal["fp8"] | None = None
    """Quantise the target's 16-bit weights on the fly."""
    drafter: Literal["dflash", "eagle3"] = "dflash"
    """Which training program."""
    sequence: int = 4096
    """Tokens in a packed row."""
    rows: int = 1
    """Packed rows in a step."""
    document: int = 1024
    """Tokens in a document; the first quarter is the prompt."""
    layers: int = 5
    """Layers of a block draft."""
    block: int = 16
    """Tokens of a block."""
    heads: str = "none"
    """Heads of a block draft, with the losses that follow from them: none, dflash2, dspark, dspark-gated, lilicorr or
    lilicorr-conv."""
    anchors: int = 512
    """Blocks per row."""
    loss: Literal["decay", "dpace"] = "decay"
    """Weights of a block's slots."""
    ttt_steps: int = 7
    """Steps of EAGLE3's training-time test."""
    reduced: bool = False
    """Give a block draft EAGLE3's reduced vocabulary."""
    compile: bool = False
    """Compile the draft."""
    given_states: bool = False
    """Leave the target's pass out of the steps, as if an engine gave its states."""
    row_ranks: int = 1
    """Processes that share rows."""
    steps: int = 10
    """Steps measured, after three that warm up."""
    profile: bool = False
    """List the kernels of a step."""
    output: str | None = None
    """File to append the JSON line to."""

    def __post_init__(self) -> None:
        if self.shape not in CONFIGS:
            raise ValueError(f"shape is {self.shape!r}; choose of {', '.join(CONFIGS)}")
        if self.heads not in HEADS:
            raise ValueError(f"heads is {self.heads!r}; choose of {', '.join(HEADS)}")
        if self.heads != "none" and self.drafter != "dflash":
            raise ValueError(f"heads is {self.heads!r}; drafter {self.drafter} has no such heads: give drafter dflash")

    @property
    def draft_vocab_size(self) -> int:
        return min(DRAFT_VOCABULARY, CONFIGS[self.shape]["vocab_size"] // 4)


def main(argv: list[str] | None = None) -> None:
    config = parse(StepConfig, argv, prog="bench/training.py", description="A training step at a model's shape.")
    accelerator = start(RunOptions(output="", data=DataOptions(path=""), optim=OPTIM))
    device = accelerator.device
    peak = plain_product(device)
    accelerator.print(f"a plain product does {peak / 1e12:.2f} TFLOP/s")
    training = build(config, device)
    training.row_group = RowGroup.of(config.row_ranks, accelerator.process_index, accelerator.num_processes)
    batch = make_batch(config)
    flops = step_flops(training, batch)
    if config.given_states:
        flops = {name: count for name, count in flops.items() if not name.startswith("target")}
    flops = {name: count // config.row_ranks for name, count in flops.items()}
    parts = make_parts(training, accelerator, batch)
    if config.given_states:
        parts.pop("target")()
        training.target.layers.to("meta")
    line = describe(config, accelerator) | measure(config, parts, batch, flops, peak, device)
    for name in ("tokens_per_second", "supervised_per_second"):
        line[name] *= accelerator.num_processes // config.row_ranks
    kernels = profile_kernels(lambda: run(parts), device.type == "cuda", repeats=3) if config.profile else {}
    if not accelerator.is_main_process:
        return
    print_table(line, flops)
    if config.profile:
        print_kernels(kernels)
    lines = Lines(config.output)
    lines.add(line)
    lines.print()


def plain_product(device: torch.device) -> float:
    """Operations per second of a bf16 matrix product, fp32 on the CPU: the median of ten times twenty."""
    size = PEAK_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(10):
        began = clock(device)
        for _ in range(20):
            left @ right
        times.append(clock(device) - began)
    return 20 * 2 * size**3 / median(times)


def clock(device: torch.device) -> float:
    """Seconds, read after the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def build(config: StepConfig, device: torch.device) -> DraftTraining:
    """Target and draft with random weights, made on the device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        draft = make_draft(config, published_spec(config.shape))
        target = published_target(config.shape, dtype, device, config.quantization)
        frozen = DecoderTarget(target, draft.config.aux_layers)
        length = config.sequence + max(config.block, config.ttt_steps)
        rope = RotaryEmbedding(draft.config.rope, draft.config.head_dim, length).to(device)
    if config.compile:
        draft.compile()
    if isinstance(draft, Eagle3):
        options = eagle3.DraftOptions(ttt_steps=config.ttt_steps)
        return eagle3.Eagle3Training(draft, frozen, rope, options, depth=config.ttt_steps)
    block_options = dflash.DraftOptions(anchors=config.anchors, loss=config.loss)
    return dflash.DFlashTraining(draft, frozen, rope, block_options, depth=config.block - 1, seed=0)


def make_draft(config: StepConfig, model: TargetSpec) -> Eagle3 | DFlash:
    size = config.draft_vocab_size
    if config.drafter == "eagle3":
        layers = default_aux_layers(model.num_layers)
        return Eagle3(Eagle3Config.from_target(model, draft_vocab_size=size, aux_layers=layers))
    layers = default_block_aux_layers(model.num_layers, config.layers)
    sizes = {"num_layers": config.layers, "block_size": config.block, "aux_layers": layers, "mask_token_id": 3}
    sizes |= head_fields(config.heads, model.hidden_size)
    return DFlash(DFlashConfig.from_target(model, draft_vocab_size=size if config.reduced else None, **sizes))


def head_fields(name: str, hidden_size: int) -> dict[str, Any]:
    """Fields of a block draft's config for HEADS[name], no wider than the draft."""
    fields = dict(HEADS[name])
    for rank in ("selector_rank", "markov_rank"):
        if rank in fields:
            fields[rank] = min(fields[rank], hidden_size)
    if (scorer := fields.get("lilicorr")) is not None:
        width = min(scorer.hidden_size, hidden_size)
        fields["lilicorr"] = replace(scorer, hidden_size=width, factor_dim=min(scorer.factor_dim, hidden_size))
    return fields


def make_batch(config: StepConfig) -> Batch:
    """Full rows of documents; the draft vocabulary is the lowest ids, so tokens are drawn from those."""
    generator = torch.Generator().manual_seed(0)
    prompt = config.document // 4
    rows = []
    for _ in range(config.rows):
        tokens = torch.randint(4, config.draft_vocab_size, (config.sequence,), generator=generator)
        pieces = [piece.tolist() for piece in tokens.split(config.document)]
        rows.append([(piece, [i >= prompt for i in range(len(piece))]) for piece in pieces])
    return collate(rows, config.sequence)


def make_parts(training: DraftTraining, accelerator: Accelerator, batch: Batch) -> dict[str, Part]:
    """The parts of a step in order."""
    target = training.target
    model, *optimizers = accelerator.prepare(training.train(), *build_optimizers(training, OPTIM))
    scale = 1 / batch.num_supervised
    losses = list[Tensor]()
    tokens = batch.tokens.to(accelerator.device)
    positions = batch.positions.to(accelerator.device)
    read = target.aux_states

    def draft_and_loss() -> None:
        target.aux_states = lambda *_: states[-1]  # type: ignore[method-assign]
        losses.append(model(batch)[0] * scale)
        target.aux_states = read  # type: ignore[method-assign]

    def update() -> None:
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def run_target() -> None:
        states.clear()
        states.append(read(tokens, positions))

    states: list[tuple[Tensor, Tensor]] = []
    return {
        "target": run_target,
        "draft and loss": draft_and_loss,
        "backward": lambda: accelerator.backward(losses.pop()),
        "update": update,
    }


def describe(config: StepConfig, accelerator: Accelerator) -> dict[str, Any]:
    return {
        **origin("training", accelerator.device.type),
        "processes": accelerator.num_processes,
        "distributed": accelerator.distributed_type.value,
        **{name: value for name, value in asdict(config).items() if name not in ("profile", "output")},
    }


def measure(
    config: StepConfig, parts: dict[str, Part], batch: Batch, flops: dict[str, int], peak: float, device: torch.device
) -> dict[str, Any]:
    """Medians over steps. The parts are timed in separate steps, because each waits for the device."""
    began = clock(device)
    run(parts)
    first = clock(device) - began
    for _ in range(WARM_UP - 1):
        run(parts)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = []
    by_part = {name: list[float]() for name in parts}
    for _ in range(config.steps):
        began = clock(device)
        run(parts)
        steps.append(clock(device) - began)
    for _ in range(config.steps):
        for name, part in parts.items():
            began = clock(device)
            part()
            by_part[name].append(clock(device) - began)
    seconds = median(steps)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    needed = sum(flops.values())
    return {
        "first_step_s": round(first, 1),
        "step_ms": round(1000 * seconds, 2),
        "parts_ms": {name: round(1000 * median(times), 2) for name, times in by_part.items()},
        "tokens_per_second": round(batch.tokens.numel() / seconds),
        "supervised_per_second": round(batch.num_supervised / seconds),
        "peak_memory_gb": None if memory is None else round(memory, 1),
        "tflop": round(needed / 1e12, 4),
        "tflops": round(needed / seconds / 1e12, 3),
        "plain_product_tflops": round(peak / 1e12, 2),
        "share_of_peak": round(needed / seconds / peak, 3),
    }


def run(parts: dict[str, Part]) -> None:
    for part in parts.values():
        part()


def print_table(line: dict[str, Any], flops: dict[str, int]) -> None:
    total = sum(flops.values())
    print("arithmetic: " + ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in flops.items()))
    print("time: " + ", ".join(f"{name} {value:.1f} ms" for name, value in line["parts_ms"].items()))
    print(
        f"step {line['step_ms']:.1f} ms, {line['tokens_per_second']} tokens/s, {line['tflops']:.2f} TFLOP/s "
        f"({100 * line['share_of_peak']:.0f} % of a plain product), peak memory {line['peak_memory_gb']} GiB; "
        f"the first step, with all compilation, took {line['first_step_s']} s"
    )


if __name__ == "__main__":
    main()
