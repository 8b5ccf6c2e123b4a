"""Start of a run of any training program: checks its files, loads target and data, builds the draft, trains it."""

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate import Accelerator, init_empty_weights
from torch import Tensor, nn

from slipstream.models.drafts.interchange import check_options, draft_values
from slipstream.models.files.atomic import FolderLock
from slipstream.models.files.checkpoint import target_path
from slipstream.models.files.outputs import check_working_folder
from slipstream.train.batches import PackedRows
from slipstream.train.checkpoints import SHARDING, check_run_folder, provenance
from slipstream.train.draft_options import DraftRunOptions
from slipstream.train.engine_states import Engines
from slipstream.train.loop import dtype_of_weights, fit, start
from slipstream.train.mixture import Mixture
from slipstream.train.optim import Schedule
from slipstream.train.plan import plan, scarcity_lines, size_of
from slipstream.train.row_ranks import RowGroup
from slipstream.train.samples import SampleAnswers
from slipstream.train.speed import StepTimes
from slipstream.train.state_source import open_states, read_states
from slipstream.train.target_files import TargetFiles
from slipstream.train.training import DraftTraining
from slipstream.train.warm_start import inherit, warm_start

MAX_CATEGORIES = 32  # accept lengths in the log of an evaluation


def train(options: DraftRunOptions, kind: type[DraftTraining]) -> None:
    if not options.dry_run:
        check_output(options)
    accelerator = start(options)
    with ExitStack() as stack:
        lock = None
        if accelerator.is_main_process and not options.dry_run:
            lock = stack.enter_context(FolderLock(Path(options.output)))
            check_run_folder(Path(options.output))  # again: what a run that has just ended left
        target = TargetFiles.find(options, accelerator, kind.Network)
        row_group = RowGroup.of(options.data.row_ranks, accelerator.process_index, accelerator.num_processes)
        mixture = Mixture.load(options.data.folders, target.tokenizer_hash)
        train_rows = mixture.train_rows(options.data)
        heldout_rows = mixture.heldout_rows(options.data, options.evaluation.documents)
        Schedule.of(options, len(train_rows), accelerator.num_processes)  # fails early where there are too few rows
        if options.dry_run:
            show_plan(target, kind, train_rows)
            return
        model = {"target": options.target, "revision": options.revision, "trust_remote_code": options.trust_remote_code}
        engines = stack.enter_context(Engines.open(options.states, accelerator, model))
        train_draft(target, kind, train_rows, heldout_rows, mixture, engines, row_group, lock)


def show_plan(files: TargetFiles, kind: type[DraftTraining], train_rows: PackedRows) -> None:
    """Prints what a run needs, without reading weights."""
    options = files.options
    accelerator = files.accelerator
    with init_empty_weights():
        training = build(kind, files)
    on_gpu = accelerator.device.type != "cpu"  # else the run is planned for a machine that has one
    bf16 = accelerator.mixed_precision == "bf16" if on_gpu else options.precision != "fp32"
    size = files.size(training.target.head.dtype)
    accelerator.print(plan(training, train_rows, options, accelerator.num_processes, bf16, size))


def train_draft(
    files: TargetFiles,
    kind: type[DraftTraining],
    train_rows: PackedRows,
    heldout_rows: PackedRows,
    mixture: Mixture,
    engines: Engines | None,
    row_group: RowGroup | None,
    lock: FolderLock | None,
) -> None:
    options = files.options
    accelerator = files.accelerator
    identities = {folder.path: {**files.origin(), "data_hash": folder.data_hash} for folder in mixture.folders}
    stores = open_states(options.data, identities)
    training = build(kind, files)
    draft = training.draft
    training.row_group = row_group
    training.step_times = StepTimes.read(options.evaluation, training.depth)
    training.target.read_as = dtype_of_weights(accelerator)
    rows = {"train": train_rows, "heldout": heldout_rows}
    if engines is not None:
        engines.connect(training, rows, draft.config.aux_layers, files.origin()["target_fingerprint"])
    if stores:
        read_states(stores, options.data, training, rows, draft.config.aux_layers, accelerator.device)
    describe(accelerator, train_rows, heldout_rows, draft)
    counts = heldout_rows.category_counts()
    training.categories = [name for name, _ in counts.most_common(MAX_CATEGORIES)]
    if counts:
        rest = f"; accept lengths of the {MAX_CATEGORIES} largest are logged" if len(counts) > MAX_CATEGORIES else ""
        names = ", ".join(f"{name} {counts[name]}" for name in training.categories)
        accelerator.print(f"heldout: documents by category: {names}{rest}")
    for line in scarcity_lines(training, train_rows, options, accelerator.num_processes):
        accelerator.print(line)
    if accelerator.is_main_process:
        training.samples = SampleAnswers(files.tokenizer)
    costs = options.evaluation.costs
    identity = {
        "target_fingerprint": draft.config.target_fingerprint,
        "data_hash": mixture.data_hash,
        # None also for runs of versions that cut, so that they continue where no document is long.
        "split_documents": (train_rows.num_split_documents + heldout_rows.num_split_documents) or None,
        "vocabulary_hash": vocabulary_hash(draft.target_ids),
        "costs_hash": None if costs is None else hashlib.sha256(Path(costs).read_bytes()).hexdigest(),
    }
    run = {**provenance(mixture.data_hash), "data_folders": mixture.provenance(), **target_path(options.target)}
    run["max_length"] = options.data.max_length
    progress = fit(accelerator, training, train_rows, heldout_rows, options, identity, run, lock)
    figure = f"accept length {progress.best_accept_length:.3f}"
    if costs is not None:
        figure = f"expected speed {progress.best_speed:,.1f} tokens/s, {figure}"
    accelerator.print(f"best {figure} at step {progress.best_step}: {options.output}/best")


def build(kind: type[DraftTraining], files: TargetFiles) -> DraftTraining:
    """The draft, started as the options say, and its target."""
    options = files.options
    draft_options = options.draft if files.start is None else inherit(options.draft, files.start.config)
    rank = options.draft.lora_rank
    if rank and files.accelerator.distributed_type in SHARDING:
        raise ValueError(f"draft.lora_rank is {rank}, and adapters are not sharded; use the ddp configuration")
    draft: Any = files.start if rank else kind.new_draft(draft_options, files)
    check_options(options.draft.interchange, options.DRAFTER, draft_values(draft.config))
    is_copied = kind.copies_layers and files.start is None
    target = files.freeze(draft.config.aux_layers, len(draft.layers) if is_copied else 0)
    training = kind.of(draft, target, options, files.accelerator.device)
    if rank:
        training.adapt(rank, options.init_from)
        return training
    difference = training.start(continues=files.start is not None)
    if difference and options.newest_step is None:
        files.accelerator.print(difference)
    if files.start is not None and options.newest_step is None and not options.dry_run:
        for line in warm_start(draft, files.start).lines(options.init_from):
            files.accelerator.print(line)
    return training


def check_output(options: DraftRunOptions) -> None:
    """Raises ValueError, before anything is read or written, for an output that this run may not write to."""
    data = options.data
    inputs: dict[str, tuple[str | None, ...]] = {
        "target": (options.target,),
        "data.path": tuple(data.folders),
        "data.aux_states": data.captures,
        "init_from": (options.init_from,),
    }
    check_working_folder(options.output, inputs)
    check_run_folder(Path(options.output))


def vocabulary_hash(target_ids: Tensor | None) -> str | None:
    """sha256 of the target ids that a draft can propose; notices a replaced draft.vocabulary file."""
    return None if target_ids is None else hashlib.sha256(target_ids.cpu().numpy().tobytes()).hexdigest()


def describe(accelerator: Accelerator, train_rows: PackedRows, heldout_rows: PackedRows, draft: nn.Module) -> None:
    config: Any = draft.config
    accelerator.print(
        f"draft: {size_of(draft) / 1e6:.1f}M parameters, vocabulary {config.draft_vocab_size or config.vocab_size} of "
        f"{config.vocab_size}, target states {list(config.aux_layers)}"
    )
    for name, rows in (("train", train_rows), ("heldout", heldout_rows)):
        accelerator.print(
            f"{name}: {rows.num_supervised} supervised tokens in {len(rows.rows)} rows of {rows.max_length}, "
            f"{rows.num_dropped} documents left out: no two supervised tokens in a row"
        )
        if rows.long_sentence:
            accelerator.print(f"{name}: {rows.long_sentence}")
        if train_rows.is_mixed:
            for share in rows.shares:
                times = f"; weight {share.passes:g}: {share.epoch_rows:,} rows an epoch" if name == "train" else ""
                accelerator.print(f"{name}: {share.sentence}{times}")
