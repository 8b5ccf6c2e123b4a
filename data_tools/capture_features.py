"""Runs the target once over a prepared dataset and keeps the states that drafts read, for training without it.

    slipstream capture-features --target Qwen/Qwen3-8B --data data/qwen3-8b --output features/qwen3-8b
    accelerate launch data_tools/capture_features.py ... --dtype fp8 --yes      (each process takes some shards)

Shows size and time first, and asks. A run that was stopped continues with the shards that are missing.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from tqdm import tqdm

from slipstream.data_tools.capture_index import build_index, check_output, load_splits
from slipstream.data_tools.capture_options import CaptureConfig
from slipstream.data_tools.command_line import run, show_table
from slipstream.data_tools.feature_shards import Capturer, read_documents
from slipstream.models.atomic import recover
from slipstream.models.checkpoint import resolve
from slipstream.models.feature_store import INDEX, FeatureIndex, FeatureStore, shard_path, write_shard
from slipstream.models.outputs import check_working_folder

TIMED_PASSES = 3


def main(argv: Sequence[str] | None = None) -> None:
    run(
        capture_features,
        CaptureConfig,
        argv,
        prog="slipstream capture-features",
        description="Run the target over a prepared dataset and keep its states for training.",
    )


def capture_features(config: CaptureConfig) -> None:
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    accelerator, output = Accelerator(cpu=on_cpu), Path(config.output)
    splits = load_splits(config)
    index = build_index(config, splits)
    check_output(output, index)
    if not any(shard.num_tokens for shard in index.shards):
        raise ValueError(
            f"data {config.data} has nothing to capture: no document has a supervised token behind its first within "
            f"max_length {config.max_length}; raise --max-length or prepare other data"
        )
    if config.verify:
        verify_all(FeatureStore(output))
        return
    pending = find_pending(config, index)
    if pending:
        check_working_folder(config.output, {"data": [config.data], "target": [config.target]})
    accelerator.wait_for_everyone()  # from here on shards appear
    if not pending:
        accelerator.print(f"{output} is complete: {len(index.shards)} shards")
        return
    if accelerator.is_main_process:
        check_room(output, index, pending)
    form = index.form
    path = resolve(config.target, config.revision, trust_remote_code=config.trust_remote_code)
    capturer = Capturer(path, form, accelerator.device, config.trust_remote_code)
    if accelerator.is_main_process:
        describe(config, index, pending)
        estimate_time(config, index, pending, capturer, splits, accelerator.num_processes)
        confirm(config)
        prepare_folder(output, index)
    accelerator.wait_for_everyone()
    own = pending[accelerator.process_index :: accelerator.num_processes]
    capture_shards(config, index, own, capturer, splits, show=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    accelerator.print(f"{output}: {len(pending)} shards written; train with --data.features {output}")


def find_pending(config: CaptureConfig, index: FeatureIndex) -> list[int]:
    if config.chosen_shards and config.chosen_shards[-1] >= len(index.shards):
        raise ValueError(f"shards is {config.shards}; there are shards 0 to {len(index.shards) - 1}")
    return config.chosen_shards or index.missing(Path(config.output))


def check_room(output: Path, index: FeatureIndex, pending: list[int]) -> None:
    needed = sum(index.num_bytes(number) for number in pending)
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(
            f"output {output} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; use --dtype fp8, fewer "
            "--train-documents, a smaller --max-length or another disk"
        )


def describe(config: CaptureConfig, index: FeatureIndex, pending: list[int]) -> None:
    form, shards = index.form, [index.shards[number] for number in pending]
    tokens, size = sum(shard.num_tokens for shard in shards), sum(map(index.num_bytes, pending))
    print(f"Features of {config.target} over {config.data}:")
    show_table(
        {
            "states": f"{list(form.layers)} of {form.hidden_size} in {form.dtype}",
            "documents": sum(shard.count for shard in shards),
            "tokens": tokens,
            "bytes per token": form.num_bytes(0, 1, 0),
            "bytes more per supervised token": form.num_bytes(0, 0, 1),
            "supervised tokens": sum(shard.num_supervised for shard in shards),
            "shards": f"{len(pending)} of {len(index.shards)}",
            "size": f"{size / 1e9:.2f} GB",
        }
    )


def estimate_time(
    config: CaptureConfig,
    index: FeatureIndex,
    pending: list[int],
    capturer: Capturer,
    splits: dict[str, Dataset],
    num_processes: int,
) -> None:
    span = next((index.shards[number] for number in pending if index.shards[number].num_tokens), None)
    if span is None:  # the shards that are missing hold documents that nothing reads
        return
    documents = read_documents(splits[span.split], span, config.max_length)
    rate = capturer.measure_rate(span, documents, config.batch_tokens, TIMED_PASSES) * num_processes
    tokens = sum(index.shards[number].num_tokens for number in pending)
    minutes = tokens / rate / 60
    show_table(
        {"time": f"{minutes:.1f} minutes at {rate:,.0f} tokens per second ({num_processes} processes, a few passes)"}
    )


def confirm(config: CaptureConfig) -> None:
    if config.yes:
        return
    if not sys.stdin.isatty():
        raise ValueError("nothing was written: there is no terminal to ask; add --yes")
    if input("Write them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ValueError("nothing was written")


def prepare_folder(output: Path, index: FeatureIndex) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for path in (output / INDEX, *(shard_path(output, number) for number in range(len(index.shards)))):
        recover(path)
    if not (output / INDEX).exists():
        index.write(output)


def capture_shards(
    config: CaptureConfig,
    index: FeatureIndex,
    numbers: list[int],
    capturer: Capturer,
    splits: dict[str, Dataset],
    show: bool,
) -> None:
    """One shard is written while the next is computed."""
    output, capture = Path(config.output), index.digest
    total = sum(index.shards[number].num_tokens for number in numbers)
    written: Future[None] | None = None
    with ThreadPoolExecutor(1) as writer, tqdm(total=total, unit="token", unit_scale=True, disable=not show) as bar:
        for number in numbers:
            span = index.shards[number]
            documents = read_documents(splits[span.split], span, config.max_length)
            shard = capturer.capture(span, documents, config.batch_tokens, bar.update)
            if written is not None:
                written.result()
            written = writer.submit(write_shard, output, number, shard, capture)
        if written is not None:
            written.result()


def verify_all(store: FeatureStore) -> None:
    """Raises ValueError that names every shard which is missing or damaged, and the command that rebuilds it."""
    faults = []
    for number, shard in enumerate(tqdm(store.index.shards, "verifying", unit="shard")):
        try:
            for slot in range(shard.count):
                store.read(number, slot)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    print(f"{store.folder}: all {len(store.index.shards)} shards are whole")


if __name__ == "__main__":
    main()
