"""`--dry_run`: estimates what a run needs from shapes and the lengths of the data (docs/training.md).

No weights of target or draft are loaded. Letters: P trainable parameters, M tokens in a pass of one process, N asking
rows among them (ttt.py), b bytes of a number in the draft's pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.models.files.state_store import StateFormat
from slipstream.models.targets.frozen import VOCABULARY_CHUNK
from slipstream.models.targets.sizes import TargetSize
from slipstream.train.batches import PackedRows
from slipstream.train.checkpoints import Progress
from slipstream.train.optim import Schedule, build_optimizers
from slipstream.train.training import DraftTraining

GPU_COUNTS = (1, 2, 4, 8)
# Supervised tokens that a draft should see for each trainable parameter, epochs counted (docs/training.md, "How many
# tokens"): what the recipes' budgets come to, which follow the published drafts.
TOKENS_PER_PARAMETER = 1.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process."""

    target: int  # whole on every GPU
    activations: int
    parameters: int  # P, a number
    moments: int  # numbers that the optimizer keeps
    bf16: bool
    shared_layers: int = 0  # the target's layers, if they are sharded
    gathered: int = 0  # two of them, gathered: the one that runs and the next

    def per_gpu(self, sharding: str, num_gpus: int) -> int:
        """sharding: ddp, zero2, or zero3 (FSDP alike)."""
        weights = gradients = 4 * self.parameters
        moments = 4 * self.moments
        copies = 2 * self.parameters if self.bf16 else 0
        if sharding == "ddp":
            buckets = gradients if num_gpus > 1 else 0
            draft = weights + copies + gradients + moments + buckets
        elif sharding == "zero2":
            passing = 2 * copies if self.bf16 else weights + gradients
            draft = passing + (weights + gradients + moments) // num_gpus
        else:
            draft = copies + (weights + gradients + moments) // num_gpus
        layers = self.shared_layers // num_gpus + (self.gathered if num_gpus > 1 else 0)
        return self.target + layers + self.activations + draft


def plan(
    training: DraftTraining, train: PackedRows, options: Any, num_processes: int, bf16: bool, size: TargetSize | None
) -> str:
    """A page of text. Parameters of `training`, of its target and of its draft lie on the meta device. `size`: of the
    target in our decoder; None: transformers runs it."""
    draft = training.draft
    target = training.target.model
    assert isinstance(target, PreTrainedModel), "an empty target is transformers'"
    config = draft.config
    is_stored = options.data.aux_states is not None and options.data.aux_states_missing == "error"
    is_run = not (is_stored or options.states.is_used)
    layers = [bytes_of(layer) for layer in training.target.layers] if options.target_sharding != "none" else [0]
    memory = Memory(
        target=target_bytes(target, size, is_run) - sum(layers),
        activations=target_activations(training, train, options, is_decoder=size is not None)
        + draft_activations(draft, train, options, bf16, target.dtype.itemsize),
        parameters=size_of(draft),
        moments=moments_of(training, options),
        bf16=bf16,
        shared_layers=sum(layers),
        gathered=2 * max(layers),
    )
    dtype = str(target.dtype).removeprefix("torch.")
    if size is not None and size.quantization is not None:
        dtype = f"{size.quantization.name}, others {dtype}"
    lines = [
        f"draft     {size_of(draft) / 1e6:,.1f}M parameters, vocabulary "
        f"{config.draft_vocab_size or config.vocab_size:,}, target states {list(config.aux_layers)}",
        f"target    {size_of(target) / 1e6:,.1f}M parameters in {dtype}, frozen",
        *memory_lines(memory),
        *share_lines(train),
        *aux_lines(training, train),
        *step_lines(training, train, options, num_processes),
        *scarcity_lines(training, train, options, num_processes),
    ]
    return "\n".join(lines)


def memory_lines(memory: Memory) -> Iterator[str]:
    precision = "bf16 autocast" if memory.bf16 else "fp32"
    yield f"memory    GB per GPU, {precision}, estimated, before fragmentation and the libraries' own 2 to 3 GB"
    shared = f" and {_gb(memory.shared_layers)} sharded, {_gb(memory.gathered)} gathered at a time"
    yield (
        f"            target {_gb(memory.target)}{shared if memory.shared_layers else ''}, "
        f"activations {_gb(memory.activations)}"
    )
    yield f"            {'GPUs':<12}" + "".join(f"{count:>9}" for count in GPU_COUNTS)
    for sharding, name in (("ddp", "single, ddp"), ("zero2", "zero2"), ("zero3", "zero3, fsdp")):
        sizes = "".join(f"{_gb(memory.per_gpu(sharding, count)):>9}" for count in GPU_COUNTS)
        yield f"            {name:<12}{sizes}"


def share_lines(train: PackedRows) -> Iterator[str]:
    """A line for each folder, if there are several or its weight is not 1, and one about long documents, if any."""
    if train.long_sentence:
        yield f"data      {train.long_sentence}"
    if train.is_mixed:
        for share in train.shares:
            yield f"data      {share.sentence}; weight {share.passes:g}: {share.epoch_rows:,} rows an epoch"


def aux_lines(training: DraftTraining, train: PackedRows) -> Iterator[str]:
    """Disk space of slipstream capture-states for the train split; an upper bound: it leaves out some tokens."""
    num_layers = len(training.target.layers)
    layers = tuple(training.draft.config.aux_layers)
    for dtype in ("bf16", "fp8"):
        form = StateFormat(
            layers=layers,
            num_layers=num_layers,
            hidden_size=training.target.head.shape[1],
            dtype=dtype,
            last_hidden=training.reads_final_state and num_layers not in layers,
        )
        size = form.num_bytes(train.num_documents, train.num_tokens, train.num_supervised)
        yield f"aux hidden states  at most {_gb(size)} GB on disk in {dtype}, if captured offline"


def step_lines(training: DraftTraining, train: PackedRows, options: Any, num_processes: int) -> Iterator[str]:
    schedule = Schedule.of(options, len(train), num_processes)
    steps = schedule.num_steps(Progress())
    rows = schedule.rows_per_step
    yield (
        f"steps     {steps:,} of {rows} rows on {num_processes} process{'es' * (num_processes > 1)}, "
        f"{rows * train.row_tokens:,.0f} tokens each; {len(train) / rows:,.1f} steps are an epoch"
    )
    share = train.supervised_share
    total = planned_rows(schedule) * train.row_tokens
    yield f"tokens    {total:,.0f} in all, {share * total:,.0f} of them supervised ({share:.0%})"
    rate = training.peak_lr(options.optim, rows * train.row_tokens)
    yield f"rate      {rate:.3g} at most, {options.optim.name}"


def planned_rows(schedule: Schedule) -> int:
    """Rows of the whole run, those of each epoch counted."""
    return schedule.last_row or schedule.num_steps(Progress()) * schedule.rows_per_step


def scarcity_lines(training: DraftTraining, train: PackedRows, options: Any, num_processes: int) -> Iterator[str]:
    """A warning where the run sees few tokens for the draft's size. One that starts from another draft needs fewer."""
    schedule = Schedule.of(options, len(train), num_processes)
    tokens = planned_rows(schedule) * train.row_tokens * train.supervised_share
    size = sum(parameter.numel() for parameter in training.parameters() if parameter.requires_grad)
    if options.init_from is None and tokens < TOKENS_PER_PARAMETER * size:
        yield (
            f"warning   few tokens: {tokens:,.0f} supervised ones for {size:,} trainable parameters, "
            f"{tokens / size:.2g} each; a draft is likely to need {TOKENS_PER_PARAMETER:g}: prepare more data, raise "
            "optim.epochs, or make the draft smaller"
        )


def size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def moments_of(training: DraftTraining, options: Any) -> int:
    """AdamW keeps two numbers for each parameter, Muon one."""
    return sum(
        parameter.numel() * (1 if isinstance(optimizer, torch.optim.Muon) else 2)
        for optimizer in build_optimizers(training, options.optim)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def bytes_of(*modules: nn.Module) -> int:
    shared = {id(x): x for module in modules for x in module.parameters()}  # tied ones once
    return sum(x.numel() * x.element_size() for x in shared.values())


def target_bytes(target: PreTrainedModel, size: TargetSize | None, is_run: bool) -> int:
    """Bytes of the target, or of what training reads of it where its states come from disk."""
    if not is_run:
        return bytes_of(*heads_of(target))
    return bytes_of(target) if size is None else size.resident


def heads_of(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """The parts of a target that a GPU holds when its states come from disk."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def target_activations(training: DraftTraining, train: PackedRows, options: Any, is_decoder: bool) -> int:
    """States that are kept and one layer's, M * t * ((K + 9) * Ht + 3 * It), in the target's dtype of t bytes.

    Each token of a mixture of experts runs through E of them: It is theirs together, and another 2 * E * Ht. Attention
    of transformers' own (gpt-oss) keeps its scores, in four steps: 4 * Q numbers per pair of tokens of a row."""
    model: Any = training.target.model
    config = model.config.get_text_config()
    tokens = options.data.batch_size * train.row_tokens
    states = len(training.target.aux_layers) + 9
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * width
    experts = getattr(config, "num_experts_per_tok", None) or 0
    if experts:
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
        inner += getattr(config, "shared_expert_intermediate_size", None) or 0
    numbers = tokens * ((states + 2 * experts) * width + 3 * inner)
    if config._attn_implementation == "eager" and not is_decoder:
        numbers += 4 * config.num_attention_heads * tokens * train.row_tokens
    return int(model.dtype.itemsize * numbers)


def draft_activations(draft: Any, train: PackedRows, options: Any, bf16: bool, target_size: int) -> int:
    """Bytes that the draft's pass keeps for the gradient. S steps or one, L layers, R rows of each: N, or the slots.

    Per row and layer b * (2 * X + 3 * (Q + 2 * G) * D + 4 * H + 3 * I), X the width that attention reads; for EAGLE3
    also the draft's logits and the target's, of `target_size` bytes. A GPU keeps no weights of attention
    (blocks.py).
    """
    config = draft.config
    size = 2 if bf16 else 4
    tokens = options.data.batch_size * train.row_tokens
    share = train.supervised_share
    is_block = hasattr(config, "block_size")
    is_eagle3 = getattr(draft, "lm_head", None) is not None
    layers = getattr(config, "num_layers", 1)
    rows = tokens * share
    steps = getattr(options.draft, "ttt_steps", 1)
    running = tokens if is_eagle3 and layers > 1 else rows  # upper layers read the states of all rows
    if is_block:
        running = options.data.batch_size * options.draft.anchors * config.block_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    read = (2 if is_eagle3 else 1) * config.hidden_size
    numbers = running * steps * layers * (2 * read + 3 * heads + 4 * config.hidden_size + 3 * config.intermediate_size)
    numbers += tokens * config.hidden_size * (len(config.aux_layers) + 1)
    logits = 0.0
    if is_eagle3:
        logits = rows * (config.draft_vocab_size * (target_size + steps * size) + VOCABULARY_CHUNK * target_size)
    return int(numbers * size + logits)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f}"
