"""The loop of every training program: accumulation, clipping, schedule, evaluation, trackers, checkpoints, resume.

A drafter's loss is a sum over supervised tokens, times their weights. It is divided by the sum of these over all
processes and the whole accumulation window, known before the first forward pass, so neither of them changes the
gradient.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object, parse_flag_from_env
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.integrations import unset_hf_deepspeed_config

from slipstream import runtime
from slipstream.config import option_defaults
from slipstream.models.files.atomic import FolderLock
from slipstream.models.files.checkpoint import Values
from slipstream.train.batches import Batch, PackedRows, evaluation_batches, training_batches
from slipstream.train.checkpoints import SHARDING, Checkpoints, Progress
from slipstream.train.interrupts import Interrupt, end_with_launcher, mute_lost_streams
from slipstream.train.optim import CLIP, Schedule, build_optimizers
from slipstream.train.options import RunOptions
from slipstream.train.state_source import read_ahead
from slipstream.train.trackers import Trackers
from slipstream.train.training import DraftTraining, Metrics, add, reduce

MAX_SKIPPED = 10  # consecutive non-finite steps that end a run


def start(options: RunOptions) -> Accelerator:
    """The accelerator of this process, as `accelerate launch` set it up. Raises ValueError for Muon on shards."""
    end_with_launcher()
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    has_bf16 = not on_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    bf16 = options.precision == "bf16" or (options.precision == "auto" and has_bf16)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if bf16 else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if options.optim.name == "muon" and accelerator.distributed_type in SHARDING:
        raise ValueError(
            f"optim.name is 'muon', which needs whole matrices, and {accelerator.distributed_type.value} shards them; "
            "use adamw, or the ddp configuration"
        )
    if on_cpu:
        # With several processes, each would count the others' cores as busy.
        cores = runtime.free_cores() if accelerator.num_processes == 1 else runtime.usable_cores()
        if torch.get_num_threads() < cores // accelerator.num_processes:
            accelerator.print(f"uses {torch.get_num_threads()} of {cores} cores; OMP_NUM_THREADS sets their number")
    accelerator.gradient_accumulation_steps = options.optim.accumulation
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # clips and accumulates by its own configuration
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": options.data.batch_size,
            "gradient_accumulation_steps": options.optim.accumulation,
            "gradient_clipping": CLIP,
        }
        if bf16:  # makes it skip a step whose gradient is not finite
            accelerator.state.deepspeed_plugin.deepspeed_config["bf16"]["check_grad_overflow"] = True
        unset_hf_deepspeed_config()  # else transformers shards the target under ZeRO-3 as well
    sharding = getattr(accelerator.state, "fsdp_plugin", None)
    if sharding is not None and sharding.fsdp_version == 2 and bf16:
        # Accelerate's default policy also returns the loss and reduces gradients in bf16.
        sharding.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    torch.manual_seed(options.seed)
    return accelerator


def dtype_of_weights(accelerator: Accelerator) -> torch.dtype | None:
    """Dtype that a draft's layers take: None (any) under autocast, else that of their weights, as when sharded."""
    if accelerator.mixed_precision == "no":
        return torch.float32
    return torch.bfloat16 if accelerator.distributed_type in SHARDING else None


def fit(
    accelerator: Accelerator,
    training: DraftTraining,
    train: PackedRows,
    heldout: PackedRows,
    options: RunOptions,
    identity: Values,
    run: Values,
    lock: FolderLock | None,
) -> Progress:
    """Trains to the last step, or until evaluations no longer improve; at SIGINT, SIGTERM, SIGHUP or its launcher's end
    saves after the step at hand and exits with status 130.

    `identity`: hashes of what the options name, compared when a run continues. `run`: provenance for every run.json.
    `lock` of the output: the first process's.
    """
    output = Path(options.output)
    optimizers = build_optimizers(training, options.optim)
    model, *optimizers = accelerator.prepare(training, *optimizers)
    identity = {**asdict(options), **identity}
    defaults = option_defaults(type(options))
    checkpoints = Checkpoints(
        accelerator, model, output, options.checkpoint.keep, identity, defaults, run, training.write, lock
    )
    progress = checkpoints.resume()
    if training.calibrator is not None and progress.fitted:
        training.calibrator.set(progress.fitted)
    first = replace(options.optim, **checkpoints.extension)  # options of the run that continues
    progress.first_length = progress.first_length or first.steps or first.epochs
    loop = Loop(accelerator, model, optimizers, options, train, heldout, progress, training)
    if checkpoints.extension:
        accelerator.print(loop.schedule.extension(progress, checkpoints.extension))
    is_main = accelerator.is_main_process
    stopped = False
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())  # before there is a file of metrics, which says that a run trains
        trackers = Trackers(output, options.tracker, identity, run, progress.step) if is_main else None
        if trackers is not None:
            stack.callback(trackers.close)
        bar = stack.enter_context(tqdm(total=loop.num_steps, initial=progress.step, unit="step", disable=not is_main))
        while not loop.is_done and not stopped:
            record, stopped = loop.train_step(interrupt.received)
            folders = []
            if loop.is_done or progress.step % options.evaluation.every == 0:
                record |= loop.evaluate()
                if progress.best_step == progress.step:
                    folders.append(checkpoints.save_best(progress))
            if trackers is not None:
                trackers.log(progress.step, record, [] if training.samples is None else training.samples.take())
            if loop.is_done or stopped or progress.step % options.checkpoint.every == 0:
                folders.append(checkpoints.save_step(progress))
            if trackers is not None:
                trackers.checkpoints(folders, progress.step, progress.metrics)
            show(bar, record, progress)
    mute_lost_streams()
    if not loop.is_done:
        accelerator.print(f"stopped; step {progress.step} of {loop.num_steps} is saved, the same command continues")
        raise SystemExit(130)
    if progress.step < loop.num_steps:
        accelerator.print(
            f"no new best in {progress.evaluations_since_best} evaluations (evaluation.patience "
            f"{options.evaluation.patience}): the run ends at step {progress.step} of {loop.num_steps}"
        )
    return progress


@dataclass
class Loop:
    """One optimizer step, one evaluation; `progress` is updated in place."""

    accelerator: Accelerator
    model: nn.Module
    optimizers: list[AcceleratedOptimizer]
    options: RunOptions
    train: PackedRows
    heldout: PackedRows
    progress: Progress
    training: DraftTraining  # what `model` wraps
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        num_processes = self.accelerator.num_processes
        schedule = Schedule.of(self.options, len(self.train), num_processes)
        tokens = schedule.rows_per_step * self.train.row_tokens
        rate = self.training.peak_lr(self.options.optim, tokens)
        self.schedule = replace(schedule, optim=replace(self.options.optim, lr=rate))
        self.num_steps = self.schedule.num_steps(self.progress)
        ranks = self.options.data.row_ranks
        index = self.accelerator.process_index
        batches = training_batches(
            self.train,
            self.options.data.batch_size,
            self.options.seed,
            self.progress.rows,
            self.schedule.last_row,
            index // ranks,
            num_processes // ranks,
        )
        if index % ranks:
            batches = ((replace(batch, is_shared=True), is_new) for batch, is_new in batches)
        self.batches = read_ahead(batches, self.train)

    @property
    def is_done(self) -> bool:
        """Whether the run is at its last step, or out of patience."""
        patience = self.options.evaluation.patience
        is_stuck = patience is not None and self.progress.evaluations_since_best >= patience
        return is_stuck or self.progress.step >= self.num_steps

    def train_step(self, interrupted: bool) -> tuple[dict[str, float], bool]:
        """Metrics of the step, without non-finite values, and whether any process was interrupted."""
        accelerator = self.accelerator
        progress = self.progress
        began = time.perf_counter()
        lr = self.schedule.lr(progress)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = lr
        window = [next(self.batches) for _ in range(self.options.optim.accumulation)]
        totals = self.backward(window)
        waited = sum(sum(batch.cached.waits) for batch, _ in window if batch.cached is not None)
        totals["interrupted"] = torch.tensor([float(interrupted), 1.0], device=accelerator.device)
        sums = reduce(accelerator, totals)
        stopped = sums.pop("interrupted")[0] > 0
        num_supervised = sums.pop("supervised")[0]
        record = {name: total / max(count, 1.0) for name, (total, count) in sums.items()}
        self.update(record)
        progress.rows += self.schedule.next_rows(progress)
        progress.step += 1
        progress.tokens += int(num_supervised)
        seconds = time.perf_counter() - began
        record |= {"lr": lr, "tokens": progress.tokens, "tokens_per_second": num_supervised / seconds}
        if self.train.add_states is not None:
            record["wait_share"] = waited / seconds  # of this process, for states
        record |= {"skipped_steps": progress.skipped_steps} if progress.skipped_steps else {}
        return {name: value for name, value in record.items() if math.isfinite(value)}, stopped

    def backward(self, window: Sequence[tuple[Batch, bool]]) -> Metrics:
        """Clipped gradients of the window's loss. The sums of its metrics, and `grad_norm` before clipping.

        Of the last window of an epoch some batches may be no new ones, and count nothing.
        """
        accelerator = self.accelerator
        totals = Metrics()
        total_weight = float(sum(batch.total_weight for batch, is_new in window if is_new))
        weight = torch.tensor(total_weight, device=accelerator.device)
        # Processes average their gradients and the accelerator divides by the window: both are undone here.
        scale = accelerator.num_processes * self.options.optim.accumulation / accelerator.reduce(weight, "sum")
        for batch, is_new in window:
            with accelerator.accumulate(self.model):
                loss, metrics = self.model(batch)
                accelerator.backward(loss * (scale * is_new))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
            sums = {
                "loss": torch.stack((loss.detach(), loss.new_tensor(batch.total_weight))),
                "supervised": loss.new_tensor([batch.num_supervised, 1]),
            }
            add(totals, metrics | sums, is_new=is_new)
        if norm is not None:  # old versions of DeepSpeed give none
            norm = torch.as_tensor(norm.full_tensor() if isinstance(norm, DTensor) else norm, device=accelerator.device)
            totals["grad_norm"] = torch.stack((norm, torch.ones_like(norm)))
        return totals

    def update(self, record: Mapping[str, float]) -> None:
        """Takes the optimizers' step, unless the loss or gradient in `record`, that of all processes, is not finite.

        DeepSpeed has taken its step, or skipped it, within `backward`.
        """
        norm = record.get("grad_norm", 0.0)
        is_finite = math.isfinite(record["loss"]) and math.isfinite(norm) and norm >= 0  # DeepSpeed's NaN may be -1
        was_skipped = any(optimizer.step_was_skipped for optimizer in self.optimizers)  # by DeepSpeed
        for optimizer in self.optimizers:
            if is_finite:
                optimizer.step()
            optimizer.zero_grad()
        if is_finite and not was_skipped:
            self.skipped_in_a_row = 0
        else:
            self.skip(f"loss {record['loss']:.4g}, gradient norm {norm:.4g}", was_skipped)

    def skip(self, numbers: str, was_skipped: bool) -> None:
        """Counts a skipped step. Raises ValueError after MAX_SKIPPED in a row, or if DeepSpeed has applied the step."""
        step = self.progress.step + 1
        lr = self.schedule.optim.lr
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED and not was_skipped:
            raise ValueError(
                f"step {step} is not finite ({numbers}), and this version of DeepSpeed has applied it; lower optim.lr "
                f"{lr:.4g}, or continue from the last checkpoint with a newer DeepSpeed"
            )
        self.progress.skipped_steps += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row == MAX_SKIPPED:
            raise ValueError(
                f"{MAX_SKIPPED} steps in a row, up to step {step}, were not finite ({numbers}) and not applied; lower "
                f"optim.lr {lr:.4g}, or look for broken data or target states"
            )
        if self.accelerator.is_main_process:
            tqdm.write(f"step {step} is not finite ({numbers}) and not applied")

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Metrics over the held-out rows, under `eval_` names; notes in the progress whether they are the best."""
        accelerator = self.accelerator
        totals = Metrics()
        self.model.eval()
        batches = evaluation_batches(
            self.heldout, self.options.data.batch_size, accelerator.process_index, accelerator.num_processes
        )
        for batch, is_new in read_ahead(batches, self.heldout):
            self.training.is_new = is_new
            add(totals, self.model(batch)[1], is_new=is_new)
        self.model.train()
        metrics = {name: total / max(count, 1.0) for name, (total, count) in reduce(accelerator, totals).items()}
        calibrator = self.training.calibrator
        if calibrator is not None:
            metrics |= calibrator.end(gather_object)
            self.progress.fitted = calibrator.fields()
        metrics |= self.training.expected_speed(metrics)
        self.progress.metrics = metrics
        self.note_best(metrics)
        return {f"eval_{name}": value for name, value in metrics.items()}

    def note_best(self, metrics: Mapping[str, float]) -> None:
        """Records a new best, or one more evaluation without."""
        progress = self.progress
        by_speed = self.options.evaluation.costs is not None
        speed = metrics["expected_speed"] if by_speed else 0.0
        length = metrics["accept_length"]
        if speed > progress.best_speed if by_speed else length > progress.best_accept_length:
            progress.best_step = progress.step
            progress.best_accept_length = length
            progress.best_speed = speed
            progress.evaluations_since_best = 0
        else:
            progress.evaluations_since_best += 1


def show(bar: tqdm, record: Mapping[str, float], progress: Progress) -> None:
    mute_lost_streams()
    figures = {"loss": f"{record['loss']:.3f}"} if "loss" in record else {}
    figures["tok/s"] = f"{record['tokens_per_second']:.0f}"
    if "accept_length" in progress.metrics:
        figures["accept"] = f"{progress.metrics['accept_length']:.2f}"
    bar.set_postfix(figures, refresh=False)
    bar.update()


def leave_processes() -> None:
    """For a program's end: one that ends within a process group may abort, as the group's threads still run."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
