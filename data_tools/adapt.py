"""Goes on training a draft with logged answers, mixed with data that it was trained on.

    slipstream adapt --from-log chat.jsonl code.jsonl --old runs/data --draft runs/draft/best --output runs/adapted

A row's `category`, else the name of its file, is its category, of which every HELD_OUT-th row is held out.
Invariant: a draft that would be accepted more than LOSS shorter in an old category is not written. An interrupted run
leaves step-N in the output, from which the same command goes on, and which the adapted draft replaces.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.config import run
from slipstream.data_tools.dataset import Conversation, write_dataset
from slipstream.data_tools.prepare import Tally, describe
from slipstream.data_tools.rows import read_rows
from slipstream.data_tools.target_tokenizer import load_target_tokenizer
from slipstream.data_tools.tokenization import CategoryTokenizer, tokenize_rows
from slipstream.data_tools.verb_options import AdaptConfig
from slipstream.models.files.atomic import FolderLock, atomic_folder, remove_folder
from slipstream.models.files.checkpoint import (
    checkpoint_fingerprint,
    named_target,
    read_json,
    resolve,
    weights_fingerprint,
)
from slipstream.models.files.learning import TEXT_LEN
from slipstream.models.files.outputs import CHECKPOINT, STEP, FolderKind, check_output_folder, step_folders
from slipstream.models.files.prepared import read_report
from slipstream.models.files.scratch import ScratchFolder
from slipstream.train.batches import PackedRows
from slipstream.train.checkpoints import check_run_folder, provenance
from slipstream.train.continuation import LOSS, MOST_PASSES, PAST, Continuation, train_steps
from slipstream.train.mixture import Mixture
from slipstream.train.options import OptimOptions

INTERRUPTED = FolderKind("a run of adapt that was interrupted", (), STEP.below(r"step-\d+"))
WRITTEN = replace(CHECKPOINT, patterns=(*CHECKPOINT.patterns, *INTERRUPTED.patterns))
HELD_OUT = 8
MOST_HELD_OUT = 100  # rows of a category
OLD = "old data"
WORSE = 3  # exit status where an old category is accepted shorter


@dataclass(frozen=True, slots=True)
class Change:
    """Simulated accept lengths of a category's held-out answers."""

    num_documents: int
    before: float
    after: float


def adapt(config: AdaptConfig) -> None:
    output = Path(config.output)
    is_written = (output / "run.json").is_file()
    if is_written and not config.overwrite and read_json(output / "run.json").get("options") == options_of(config):
        print(f"{output}: written before, by the same options; --overwrite trains again")
        return
    inputs = {"from_log": config.from_log, "old": config.old, "draft": (config.draft,)}
    kind = WRITTEN if is_written else INTERRUPTED
    check_output_folder(config.output, kind, inputs, overwrite=config.overwrite or not is_written)
    check_run_folder(output)
    with FolderLock(output, replaced=True) as lock:
        train(config, kind, lock)


def train(config: AdaptConfig, kind: FolderKind, lock: FolderLock) -> None:
    """`kind`: what the output may hold."""
    output = Path(config.output)
    target = config.target or named_target(resolve(config.draft))
    mixture = load_data(replace(config, target=target))
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    optim = OptimOptions(epochs=config.epochs)
    continuation = Continuation(
        target,
        config.draft,
        device,
        optim,
        trust_remote_code=config.trust_remote_code,
        last_layers=None,
        lora_rank=config.lora_rank,
    )
    origin = provenance(mixture.data_hash)
    identity = {
        "epochs": config.epochs,
        "lora_rank": config.lora_rank,
        "draft": checkpoint_fingerprint(resolve(config.draft)),
        "target": weights_fingerprint(resolve(target)),
        "rows of from_log and old": mixture.data_hash,
    }
    checkpoints = continuation.resume(output, identity, origin, lock)
    data = continuation.options.data
    heldout = mixture.heldout_rows(data, max(len(mixture.folders[0].splits["heldout"]), MOST_HELD_OUT))
    old = name_categories(heldout)
    loop = continuation.loop_over(mixture.train_rows(data), heldout)
    before = continuation.lengths(loop, continuation.best)
    train_steps(loop, checkpoints)
    weights = continuation.new_weights()
    after = continuation.lengths(loop, weights)
    counts = heldout.category_counts()
    changes = {name: Change(counts[name], before[name], after[name]) for name in sorted(counts, key=old.__contains__)}
    print("\n".join(table(changes)))
    worse = [name for name in old & counts.keys() if after[name] < (1 - LOSS) * before[name]]
    if worse:
        print(f"{', '.join(worse)}: more than {LOSS:.0%} shorter; nothing is written. Lower --epochs, or add old data")
        for step in step_folders(output):
            if not STEP.foreign(step):
                remove_folder(step)
        raise SystemExit(WORSE)
    lengths = {name: [change.before, change.after] for name, change in changes.items()}
    with atomic_folder(output, kind.check) as new:
        continuation.write(weights, new, {**origin, "options": options_of(config), "accept_lengths": lengths})
    print(f"{config.output}: written")


def options_of(config: AdaptConfig) -> dict[str, Any]:
    """The options as they read back from run.json."""
    return dict(json.loads(json.dumps(asdict(replace(config, overwrite=False)))))


def load_data(config: AdaptConfig) -> Mixture:
    """The logs, and old data with its share. The logs' rows are not on disk any more, but where memory maps them."""
    with ScratchFolder("adapt") as folder:
        log = Path(folder) / "log"
        digest = prepare_logs(config, log)
        old_tokens = sum(num_tokens(Path(data)) for data in config.old)
        passes = min(MOST_PASSES, PAST / (1 - PAST) * num_tokens(log) / old_tokens)
        return Mixture.load({str(log): 1.0, **dict.fromkeys(config.old, passes)}, digest)


def prepare_logs(config: AdaptConfig, path: Path) -> str:
    """Writes the rows of the logs as a prepared dataset. Returns the tokenizer's hash."""
    options = config.prepare_options(max_length=TEXT_LEN)
    tokenizer = CategoryTokenizer(load_target_tokenizer(options), options)
    tally = Tally()
    parts: dict[bool, list[Conversation]] = {True: [], False: []}
    for is_heldout, conversation in divided(logged(tokenizer, tally)):
        parts[is_heldout].append(conversation)
    tally.check()
    if not parts[True]:
        raise ValueError("from_log has one row of each category, and the second is held out; log more answers")
    report = partial(describe, tokenizer, tally)
    write_dataset(parts[False], path, heldout=0.0, seed=0, describe=report, heldout_conversations=parts[True])
    return tokenizer.target.hash


def logged(tokenizer: CategoryTokenizer, tally: Tally) -> Iterator[Conversation]:
    for name in tokenizer.options.data:
        options = replace(tokenizer.options, data=(name,))
        for conversation in tally.kept(tokenize_rows(read_rows(options), tokenizer)):
            yield replace(conversation, category=conversation.category or Path(name).name.partition(".")[0])


def divided(conversations: Iterator[Conversation]) -> Iterator[tuple[bool, Conversation]]:
    """Says which are held out. Leaves out copies: a server may have answered a question often."""
    texts: set[bytes] = set()
    counts: dict[str | None, int] = {}
    for conversation in conversations:
        text = b"".join(ids.tobytes() for ids, _ in conversation.documents)
        if text in texts:
            continue
        texts.add(text)
        number = counts.get(conversation.category, 0)
        counts[conversation.category] = number + 1
        yield number % HELD_OUT == 1 and number < HELD_OUT * MOST_HELD_OUT, conversation


def num_tokens(data: Path) -> int:
    return int(read_report(data, "old")["tokens"])


def name_categories(heldout: PackedRows) -> set[str]:
    """Tells categories of old data, all but the first folder's, from others of their name. Returns those."""
    first = heldout.shares[1].first_document
    names = [*map(str, heldout.categories[:first])]
    old = [OLD if name is None else f"{OLD}, {name}" for name in heldout.categories[first:]]
    heldout.categories = names + old
    return {*old}


def table(changes: Mapping[str, Change]) -> Iterator[str]:
    width = max(len("category"), *map(len, changes))
    yield f"{'category':<{width}}  held out  before   after  change"
    for name, change in changes.items():
        gain = change.after / change.before - 1
        yield f"{name:<{width}}  {change.num_documents:>8}  {change.before:>6.3f}  {change.after:>6.3f}  {gain:>+6.1%}"


main = partial(run, adapt, AdaptConfig, "slipstream adapt")

if __name__ == "__main__":
    main()
