"""Runs the target once over a prepared dataset and keeps the states that drafts read, for training without it.

    slipstream capture-states --target Qwen/Qwen3-8B --data data/qwen3-8b --output features/qwen3-8b
    slipstream capture-states ... --layout speculators                        (for the trainer of that library)
    accelerate launch data_tools/capture_states.py ... --dtype fp8 --yes      (each process takes some shards)

Shows size and time first and asks before it writes. A run that was stopped continues with the missing shards.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from tqdm import tqdm

from slipstream.config import run
from slipstream.data_tools.answer_states import AnswersCapturer
from slipstream.data_tools.dataset import WEIGHTS
from slipstream.data_tools.engine_capture import EngineCapturer
from slipstream.data_tools.options import ConversationOptions, show_table
from slipstream.data_tools.state_folders import ShardFolder, SpeculatorsFolder, StateFolder, states_of_speculators
from slipstream.data_tools.state_shards import Capturer, Document, measure, plan_shards, read_documents
from slipstream.data_tools.target_tokenizer import load_target_tokenizer
from slipstream.data_tools.verb_options import CaptureConfig
from slipstream.models.drafts.dflash import default_block_aux_layers
from slipstream.models.files.atomic import FolderLock
from slipstream.models.files.checkpoint import resolve, weights_fingerprint
from slipstream.models.files.loss_masks import Cut
from slipstream.models.files.outputs import check_working_folder
from slipstream.models.files.prepared import load_saved, read_report
from slipstream.models.files.state_store import INDEX, ShardRange, StateFormat, StateIndex
from slipstream.models.files.text import read_key
from slipstream.models.states.address import Address
from slipstream.models.states.client import StateClient
from slipstream.models.targets.config import check_aux_layers, default_aux_layers
from slipstream.models.targets.pretrained import read_config

LAYOUTS: dict[str, type[StateFolder]] = {"slipstream": ShardFolder, "speculators": SpeculatorsFolder}
BLOCK_DRAFT_LAYERS = 5  # default of draft.num_layers, which decides the states that a DFLASH draft reads


@dataclass(frozen=True, slots=True)
class Job:
    """One capture: its options, data, index and the shards to write."""

    config: CaptureConfig
    splits: dict[str, Dataset]
    index: StateIndex
    folder: StateFolder
    cuts: dict[str, Cut]  # by split
    pending: list[int]  # numbers of the shards to write

    @property
    def num_tokens(self) -> int:
        return sum(self.index.shards[number].num_tokens for number in self.pending)

    @property
    def num_bytes(self) -> int:
        return sum(map(self.index.num_bytes, self.pending))

    def documents(self, span: ShardRange) -> list[Document]:
        return read_documents(self.splits[span.split], span, self.config.max_length, self.index.whole_documents)


def capture_states(config: CaptureConfig) -> None:
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=on_cpu)
    output = Path(config.output)
    splits = load_splits(config)
    path = resolve(config.target, config.revision, trust_remote_code=config.trust_remote_code)
    index, cuts = build_index(config, path, splits)
    folder = LAYOUTS[config.layout](output, index, splits)
    check_output(folder, output, index)
    if not any(shard.num_supervised if index.whole_documents else shard.num_tokens for shard in index.shards):
        raise ValueError(
            f"data {config.data} has nothing to capture: no document has a supervised token after its first within "
            f"max_length {config.max_length}; raise --max-length or prepare other data"
        )
    if config.verify:
        verify_all(folder, output, index)
        return
    if not set(config.shards) <= set(range(len(index.shards))):
        raise ValueError(f"shards is {list(config.shards)}; there are shards 0 to {len(index.shards) - 1}")
    job = Job(config, splits, index, folder, cuts, sorted(set(config.shards)) or folder.missing())
    if job.pending:
        check_working_folder(config.output, {"data": [config.data], "target": [config.target]})
    accelerator.wait_for_everyone()  # shards appear from here on
    is_main = accelerator.is_main_process
    if not job.pending:
        if is_main:
            folder.prepare()  # cleans up after a writer that was killed right after its last shard
        accelerator.print(f"{output} is complete: {len(index.shards)} shards; {folder.use()}")
        return
    if is_main:
        check_room(output, job.num_bytes, index.layout)
    capturer = open_capturer(config, path, index, accelerator.device)
    with ExitStack() as stack:
        if is_main:
            describe(job)
            estimate_time(job, capturer, accelerator.num_processes)
            confirm(config)
            folder.prepare()
            stack.enter_context(FolderLock(output))
            check_output(folder, output, index)  # again: another capture may have begun meanwhile
        accelerator.wait_for_everyone()
        capture_shards(job, job.pending[accelerator.process_index :: accelerator.num_processes], capturer, show=is_main)
        accelerator.wait_for_everyone()
    missing = f"{capturer.num_missing} documents were computed anew, " if capturer.num_missing else ""
    accelerator.print(f"{output}: {len(job.pending)} shards written, {missing}{folder.use()}")


def open_capturer(config: CaptureConfig, path: Path, index: StateIndex, device: torch.device) -> Capturer:
    """The target on `device`, the engines that have it, or the states of its answers. Raises ValueError where these are
    another one's."""
    if config.answers is not None:
        return AnswersCapturer(Path(config.answers), index, path, device, config.batch_tokens, config.trust_remote_code)
    if not config.endpoint:
        return Capturer(path, index.form, device, config.batch_tokens, config.trust_remote_code)
    addresses = [Address.parse("endpoint", text) for text in config.endpoint]
    client = StateClient("endpoint", addresses, read_key(config.api_key_file), config.timeout)
    client.check_target(index.target_fingerprint)
    return EngineCapturer(client, index.form, config.batch_tokens)


def load_splits(config: CaptureConfig) -> dict[str, Dataset]:
    read_report(Path(config.data), "data")
    dataset = load_saved(Path(config.data))
    if config.layout == "speculators" and WEIGHTS in dataset["train"].column_names:
        raise ValueError(
            f"data {config.data} has weights of tokens ({WEIGHTS}), for which layout speculators has no place; prepare "
            "it from rows and messages whose `weight` is 0 or 1"
        )
    limits = {"train": config.train_documents, "heldout": config.heldout_documents}
    return {
        name: dataset[name].select(range(len(dataset[name]) if limit is None else min(limit, len(dataset[name]))))
        for name, limit in limits.items()
    }


def build_index(config: CaptureConfig, path: Path, splits: dict[str, Dataset]) -> tuple[StateIndex, dict[str, Cut]]:
    """Plans a capture of the target at `path`: documents, states, shards; also says what max_length cuts of each split.
    Raises ValueError for data prepared with another tokenizer than the target's."""
    options = ConversationOptions(target=str(path), trust_remote_code=config.trust_remote_code)
    tokenizer_hash = load_target_tokenizer(options).hash
    report = read_report(Path(config.data), "data", tokenizer_hash)
    form = choose_format(config, path)
    size = int(config.shard_gb * 1e9)
    shards = list[ShardRange]()
    cuts = dict[str, Cut]()
    for name, split in splits.items():
        needs, cuts[name] = measure(split, config.max_length, config.layout == "speculators")
        shards += plan_shards(name, needs, form, size)
    index = StateIndex(
        target_fingerprint=weights_fingerprint(path),
        tokenizer_hash=tokenizer_hash,
        data_hash=report["data_hash"],
        max_length=config.max_length,
        form=form,
        shards=tuple(shards),
        command=config.command(),
        layout=config.layout,
    )
    return index, cuts


def choose_format(config: CaptureConfig, path: Path) -> StateFormat:
    """The states that the options name, of the target at `path`."""
    text = read_config(path, config.trust_remote_code).get_text_config()
    num_layers = text.num_hidden_layers
    defaults = {
        "eagle": lambda: (num_layers,),
        "mtp": lambda: (num_layers,),
        "eagle3": lambda: default_aux_layers(num_layers),
        "dflash": lambda: default_block_aux_layers(num_layers, BLOCK_DRAFT_LAYERS),
    }
    layers = config.layers or tuple(sorted({layer for name in config.drafters for layer in defaults[name]()}))
    check_aux_layers(layers, num_layers, "layers")
    last_hidden = (config.last_hidden or "eagle3" in config.drafters) and num_layers not in layers
    if config.layout == "speculators":
        layers = states_of_speculators(layers, num_layers)
        last_hidden = False
    return StateFormat(
        layers=layers,
        num_layers=num_layers,
        hidden_size=text.hidden_size,
        dtype=config.dtype,
        last_hidden=last_hidden,
    )


def check_output(folder: StateFolder, output: Path, index: StateIndex) -> None:
    """Raises ValueError if `output` holds another capture, or files of others."""
    if not (output / INDEX).exists():
        folder.check_new()
        return
    old = StateIndex.read(output).to_json()
    new = index.to_json()
    different = [name for name in new | old if name != "command" and old.get(name) != new.get(name)]
    if different:
        raise ValueError(
            f"output {output} holds states with another {', '.join(different)}; give the options they were captured "
            f"with ({old['command']}), or name another folder"
        )


def check_room(output: Path, needed: int, layout: str) -> None:
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(
            f"output {output} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; use "
            f"{'' if layout == 'speculators' else '--dtype fp8, '}fewer --train-documents, a smaller --max-length or "
            "another disk"
        )


def describe(job: Job) -> None:
    form = job.index.form
    shards = [job.index.shards[number] for number in job.pending]
    print(f"Aux hidden states of {job.config.target} over {job.config.data}:")
    show_table(
        {
            "states": f"{list(form.layers)} of {form.hidden_size} in {form.dtype}",
            "documents": sum(shard.count for shard in shards),
            "tokens": job.num_tokens,
            "bytes per token": form.num_bytes(0, 1, 0),
            "bytes more per supervised token": form.num_bytes(0, 0, 1),
            "supervised tokens": sum(shard.num_supervised for shard in shards),
            "shards": f"{len(job.pending)} of {len(job.index.shards)}",
            "size": f"{job.num_bytes / 1e9:.2f} GB",
        }
    )
    if "dflash" in job.config.drafters and not job.config.layers:
        print(
            f"the states are those of DFLASH drafts of {BLOCK_DRAFT_LAYERS} layers, the default of draft.num_layers; "
            "for drafts of another depth, or with draft.aux_layers, name them in --layers"
        )
    for name, cut in job.cuts.items():
        if cut.num_documents:
            print(f"{name}: {cut.sentence('max_length')}")


def estimate_time(job: Job, capturer: Capturer, num_processes: int) -> None:
    shards = job.index.shards
    span = next((shards[number] for number in job.pending if shards[number].num_tokens), None)
    if span is None:  # training reads nothing of the missing shards' documents
        return
    rate = capturer.measure_rate(span, job.documents(span)) * num_processes
    minutes = job.num_tokens / rate / 60
    show_table(
        {"time": f"{minutes:.1f} minutes at {rate:,.0f} tokens per second ({num_processes} processes, a few passes)"}
    )


def confirm(config: CaptureConfig) -> None:
    if config.yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError("nothing was written: no terminal to ask for confirmation; add --yes")
    if input("Write them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ValueError("nothing was written")


def capture_shards(job: Job, numbers: list[int], capturer: Capturer, show: bool) -> None:
    """Writes one shard while the next is computed."""
    total = sum(job.index.shards[number].num_tokens for number in numbers)
    with ThreadPoolExecutor(1) as writer, tqdm(total=total, unit="token", unit_scale=True, disable=not show) as bar:
        write = writer.submit(lambda: None)  # none before the first
        for number in numbers:
            span = job.index.shards[number]
            shard = capturer.capture(span, job.documents(span), bar.update)
            write.result()
            write = writer.submit(job.folder.write, number, shard)
        write.result()


def verify_all(folder: StateFolder, output: Path, index: StateIndex) -> None:
    """Raises ValueError naming every missing or damaged shard and the command that rebuilds it."""
    StateIndex.read(output)  # the folder must hold a capture
    faults = []
    for number in tqdm(range(len(index.shards)), "verifying", unit="shard"):
        try:
            folder.verify(number)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    print(f"{output}: all {len(index.shards)} shards are whole")


main = partial(run, capture_states, CaptureConfig, "slipstream capture-states")

if __name__ == "__main__":
    main()
