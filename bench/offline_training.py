"""Training from captured states at a real model's shape: how long the device waits for the reader.

    python bench/offline_training.py --shape llama31-8b --drafter eagle3 --sequence 2048 --rows 8 --folder /data/tmp
    python bench/offline_training.py --shape tiny --sequence 256 --document 64 --anchors 8       # seconds on a CPU

Writes a capture of random states into a new folder under --folder (which it removes at the end), and trains on it by
the training loop's own reader: the first epoch reads from the disk and compares checksums, the second finds the pages
in the host's memory. A step waits for the device at its end, as the loop does, so the time that it waits for its batch
is the device's. Beside it the same step with one batch again and again. The first batches of an epoch are trained on
and not counted: the reader's queue fills with them, and memory for the copies to the device is taken.

A reader that is waited for is slower than the step, and two rates say why. `read_gb_per_second` is the reader's own in
an epoch without steps (and without checksums, which the epoch before has compared). `disk_gb_per_second` is that of the
same files read from end to end by a few threads in large pieces, both without any page in memory: where the first is
close to the second, the disk is the limit. Prints a line per epoch and per dtype and ends in JSON lines.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from tqdm import tqdm

from slipstream.bench.gpu import revision
from slipstream.bench.lines import Lines
from slipstream.bench.training import clock, median
from slipstream.bench.training_case import StepConfig, build, make_batch
from slipstream.config import parse
from slipstream.models.feature_store import (
    FeatureFormat,
    FeatureIndex,
    FeatureStore,
    ShardRange,
    encode,
    new_shard,
    write_shard,
)
from slipstream.train.batches import Batch, PackedRows
from slipstream.train.feature_source import BATCHES_AHEAD, read_ahead, read_features
from slipstream.train.loop import start
from slipstream.train.optim import build_optimizers
from slipstream.train.options import DataOptions, OptimOptions, RunOptions
from slipstream.train.training import DraftTraining

StoredDtype = Literal["bf16", "fp8", "fp32"]
WARM_UP = 3  # steps on a batch that is there
UNCOUNTED = BATCHES_AHEAD + 2  # batches of an epoch until the queue is full, one is trained on and one is let go
DISK_THREADS = 4  # one alone leaves a disk idle between its requests
DISK_PIECE = 8 * 2**20  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig(StepConfig):
    """Options of this benchmark; steps are those counted in an epoch."""

    folder: str | None = None
    """Disk to capture to. Default: that of temporary files."""
    dtypes: list[StoredDtype] = field(default_factory=lambda: ["bf16", "fp8"])
    """How states are kept."""

    def __post_init__(self) -> None:
        StepConfig.__post_init__(self)
        if self.sequence % self.document:
            raise ValueError(f"sequence is {self.sequence}; it must be a multiple of document, {self.document}")


def main(argv: list[str] | None = None) -> None:
    config = parse(OfflineConfig, argv, prog="bench/offline_training.py", description="Training from captured states.")
    accelerator = start(RunOptions(output="", data=DataOptions(path="")))
    training = build(config, accelerator.device)
    step = make_step(training, accelerator)
    tokens, mask = (part.tolist() * num_shards(config) for part in documents(config))
    rows = PackedRows(Dataset.from_dict({"input_ids": tokens, "loss_mask": mask}), config.sequence)
    lines = Lines(config.output, describe(config, accelerator))
    for dtype in config.dtypes:
        with TemporaryDirectory(dir=config.folder) as folder:
            store = capture(config, training, dtype, Path(folder))
            layers, rate = training.target.feature_layers, disk_rate(Path(folder))
            read_features(store, DataOptions(path=""), training, {"train": rows}, layers, accelerator.device)
            for found in measure(config, step, rows, store):
                lines.add({"dtype": dtype, **found, "disk_gb_per_second": round(rate, 3)})
                print(
                    f"{dtype} from the {found['from']}: step {found['step_ms']} ms, {found['alone_ms']} with its batch "
                    f"there; {100 * found['share_waited']:.2f} % waited for batches of {found['batch_gb']} GB, read at "
                    f"{found['read_gb_per_second']:.2f} GB/s, {found['read_gb_per_second'] / rate:.0%} of the disk's",
                    flush=True,
                )
    lines.print()


def make_step(training: DraftTraining, accelerator: Accelerator) -> Callable[[Batch], float]:
    """One step; returns its seconds until the device is done."""
    optim = OptimOptions()
    model, *optimizers = accelerator.prepare(training.train(), *build_optimizers(training, optim))

    def step(batch: Batch) -> float:
        began = clock(accelerator.device)
        accelerator.backward(model(batch)[0] * (1 / batch.num_supervised))
        accelerator.clip_grad_norm_(model.parameters(), optim.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return clock(accelerator.device) - began

    return step


def describe(config: OfflineConfig, accelerator: Accelerator) -> dict[str, Any]:
    named = ("shape", "drafter", "sequence", "rows", "document", "steps")
    return {
        "bench": "offline_training",
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "CPU",
        "date": date.today().isoformat(),
        "revision": revision(),
        **{name: getattr(config, name) for name in named},
    }


def capture(config: OfflineConfig, training: DraftTraining, dtype: StoredDtype, folder: Path) -> FeatureStore:
    """A shard for each batch of an epoch and one more, of documents as long as make_batch's."""
    tokens, mask = documents(config)
    form = FeatureFormat(
        layers=training.target.feature_layers,
        num_layers=config.sizes.num_layers,
        hidden_size=config.sizes.hidden_size,
        dtype=dtype,
        last_hidden=training.reads_final_state,
    )
    count, span = len(tokens), (len(tokens), tokens.numel(), int(mask.sum()))
    shards = tuple(ShardRange("train", number * count, *span) for number in range(num_shards(config)))
    names = dict.fromkeys(("target_fingerprint", "tokenizer_hash", "data_hash", "command"), "bench/offline_training.py")
    index = FeatureIndex(**names, max_length=config.sequence, form=form, shards=shards)
    index.write(folder)
    lengths = torch.full((count,), config.document)
    for number, shard_range in enumerate(tqdm(shards, "capture", disable=None)):
        shard = new_shard(shard_range, lengths, mask.flatten(), form, pinned=False)
        shard.tensors["tokens"].copy_(tokens.flatten())
        for name in ("features", "last_hidden"):
            if name in shard.tensors:
                fill(shard.tensors, name, dtype)
        write_shard(folder, number, shard, index.digest)
    forget_all(folder)
    return FeatureStore(folder)


def num_shards(config: OfflineConfig) -> int:
    return UNCOUNTED + config.steps + 1


def documents(config: OfflineConfig) -> tuple[Tensor, Tensor]:
    """Tokens and loss mask (documents, tokens) of a step."""
    tokens = make_batch(config).tokens.view(-1, config.document)
    return tokens, (torch.arange(config.document) >= config.document // 4).expand_as(tokens)


def fill(tensors: dict[str, Tensor], name: str, dtype: StoredDtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values, scales = encode(torch.randn(tensors[name].shape, dtype=torch.bfloat16, device=device), dtype)
    tensors[name].copy_(values)
    if scales is not None:
        tensors[f"{name}_scales"].copy_(scales)


def forget(path: Path) -> None:
    """Writes a file to the disk and lets its pages in memory go."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def forget_all(folder: Path) -> None:
    for path in folder.iterdir():
        forget(path)


def disk_rate(folder: Path) -> float:
    """GB/s of the shards read from end to end; leaves no page of them in memory."""
    paths = sorted(folder.glob("shard-*"))
    began = time.perf_counter()
    with ThreadPoolExecutor(DISK_THREADS) as threads:
        size = sum(threads.map(read_through, paths))
    seconds = time.perf_counter() - began
    forget_all(folder)
    return size / 1e9 / seconds


def read_through(path: Path) -> int:
    """Returns its bytes."""
    size, piece = 0, bytearray(DISK_PIECE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            size += count
    return size


def measure(
    config: OfflineConfig, step: Callable[[Batch], float], rows: PackedRows, store: FeatureStore
) -> Iterator[dict[str, Any]]:
    """`step` returns its seconds."""
    size, last = store.index.num_bytes(0), (UNCOUNTED + config.steps) * config.rows
    there = rows.batch(list(range(last, last + config.rows)))
    alone = median([step(there) for _ in range(WARM_UP + config.steps)][WARM_UP:])
    for source in ("disk", "memory"):
        waits, steps = list[float](), list[float]()
        for batch in follow(read_ahead(epoch(config, rows), rows), waits):
            steps.append(step(batch))
        waits, steps = waits[UNCOUNTED:], steps[UNCOUNTED:]
        if source == "disk":
            store.close()
            forget_all(store.folder)
        began = time.perf_counter()
        num_read = sum(1 for _ in follow(read_ahead(epoch(config, rows), rows), []))
        rate = size * num_read / 1e9 / (time.perf_counter() - began)
        total = sum(waits) + sum(steps)
        yield {
            "from": source,
            "batch_gb": round(size / 1e9, 3),
            "step_ms": round(1000 * total / len(steps), 1),
            "alone_ms": round(1000 * alone, 1),
            "wait_ms": round(1000 * sum(waits) / len(steps), 2),
            "share_waited": round(sum(waits) / total, 4),
            "read_gb_per_second": round(rate, 3),
            "tokens_per_second": round(config.rows * config.sequence * len(steps) / total),
        }


def epoch(config: OfflineConfig, rows: PackedRows) -> Iterator[Batch]:
    """As training does, each batch takes rows from anywhere."""
    number = UNCOUNTED + config.steps
    order = torch.randperm(number * config.rows, generator=torch.Generator().manual_seed(0))
    for chosen in order.view(number, config.rows).tolist():
        yield rows.batch(chosen)


def follow(batches: Iterator[Batch], waits: list[float]) -> Iterator[Batch]:
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        assert batch.cached is not None
        batch.cached.wait()
        waits.append(time.perf_counter() - began)
        yield batch


if __name__ == "__main__":
    main()
