"""Trains block drafts of several kinds alike and measures what each is worth, in accepted tokens.

    python bench/block_drafts.py --target assets/tiny-target --data runs/data --output runs/blocks \
        --methods dflash dflash2 dspark --lrs 3e-3 6e-3 --seeds 0 1 2 --jobs 4 --flags="--optim.epochs 3"

Every method is a set of flags of train/dflash.py (`METHODS`; eagle3: of train/eagle3.py). With the first seed it is
trained with every learning rate, with the others at the rate whose simulated accept length is best on the held-out rows
that choose checkpoints, `jobs` at a time on one device. The best checkpoint of each seed is then served: greedy and at
temperature 1, on these rows and on others, which decided nothing; `--tree` serves trees of so many nodes, too.

    python bench/block_drafts.py ... --methods dflash2 dspark --losses default ce l1 kl tv lk_lambda dpace \
        --baseline dflash2

trains every method with each of several losses (`LOSSES`), as methods of their own, called METHOD-LOSS.

Prints Markdown tables, the last one with each method's accept length over that of the baseline, with the 95 % interval
over seeds and questions (bench/accept_intervals.py). Appends one JSON line per draft served to OUTPUT/results.jsonl,
with tokens and rounds of every question. What is trained or measured is kept: the same command goes on after a stop.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import hashlib
import json
import multiprocessing
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk

from slipstream.bench.accept_intervals import Counts, accept_ratio
from slipstream.bench.lines import Lines, origin, table
from slipstream.bench.peer_training import acceptance, read_prompts
from slipstream.config import check_required, run
from slipstream.data_tools.options import check_at_least
from slipstream.models.files.atomic import atomic_file
from slipstream.models.files.checkpoint import read_json
from slipstream.models.files.outputs import check_working_folder
from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
BLOCK = "--draft.num_layers 3 --draft.block_size 8 --draft.anchors 96"
ANCHOR_FIRST = "--draft.num_layers 3 --draft.block_size 7 --draft.anchors 96 --draft.sample_from_anchor true"
SELECTOR = "--draft.selector_rank 64"
MARKOV = "--draft.markov_rank 64"
SCORER = "--draft.lilicorr '{candidate_topk: 8, hidden_size: 256, factor_dim: 256}'"
CONV = "--draft.conv true"
CONFIDENCE = "--draft.confidence_head true"
METHODS = {
    "dflash": BLOCK,
    "dflash-first": ANCHOR_FIRST,
    "conv": f"{BLOCK} {CONV}",
    "selector": f"{BLOCK} {SELECTOR}",
    "dflash2": f"{BLOCK} {CONV} {SELECTOR}",
    "dflash2-first": f"{ANCHOR_FIRST} {CONV} {SELECTOR}",
    "markov": f"{BLOCK} {MARKOV}",
    "dspark": f"{ANCHOR_FIRST} {MARKOV} {CONFIDENCE}",
    "dspark-gated": f"{ANCHOR_FIRST} {MARKOV} --draft.markov_head_type gated {CONFIDENCE}",
    "dspark-conv": f"{ANCHOR_FIRST} {MARKOV} {CONV} {CONFIDENCE}",
    "lilicorr": f"{BLOCK} {SCORER}",
    "lilicorr-conv": f"{BLOCK} {SCORER} {CONV}",
    "eagle3": "--draft.ttt_steps 7 --evaluation.depth 7",
}
LOSSES: dict[str, dict[str, float]] = {  # of the vocabulary; heads have theirs beside it (`with_loss`)
    "default": {},
    "ce": {"ce": 1},
    "l1": {"ce": 0.1, "l1": 0.9},
    "kl": {"kl": 1},
    "tv": {"tv": 1},
    "lk_lambda": {"lk_lambda": 1},
    "dpace": {},
}
HEAD_LOSSES: dict[str, dict[str, float]] = {  # flags of a head -> what trains it, whatever the vocabulary's loss
    SELECTOR: {"selector_ce": 0.1, "selector_tv": 0.9},
    SCORER: {"scorer_ce": 0.25, "scorer_regret": 0.25},
    CONFIDENCE: {"confidence": 1},
}
RATES = (("method", "method", "s"), ("lr", "lr", "g"), ("simulated", "simulated", ".3f"))  # heading, key, format
COLUMNS = (
    ("method", "method", "s"),
    ("lr", "lr", "g"),
    ("seed", "seed", "d"),
    ("tokens seen", "tokens", ",d"),
    ("simulated", "simulated", ".3f"),
    *((f"T = {t}, {group}", f"accept_{group}_{t}", ".3f") for t, group in product((0, 1), ("choosing", "others"))),
)
TREE = ("T = 0, others, tree", "accept_tree_others_0", ".3f")
COMPARED = {  # heading -> the end of a line's keys with tokens and rounds of each question
    "T = 0, others": "others_0",
    "T = 1, others": "others_1",
    "T = 0, others, tree": "tree_others_0",
}
NODES = 8  # of a chain: the root and seven drafted tokens, of every method
Groups = dict[str, tuple[list[list[int]], list[int]]]  # prompts and lengths of answers, by the name of the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraftsConfig:
    """Block drafts trained alike, served alike."""

    REQUIRED = {"target": "a folder or a hub id", "data": "a folder", "output": "a folder"}

    target: str = ""
    """Target model: folder or hub id."""
    data: str = ""
    """Prepared dataset (slipstream prepare) with a held-out split."""
    output: str = ""
    """Folder for checkpoints and results.jsonl."""
    methods: tuple[str, ...] = ("dflash", "dflash2", "dspark")
    """Names of METHODS, in bench/block_drafts.py."""
    losses: tuple[str, ...] = ("default",)
    """Names of LOSSES there: each method is trained with each that differs from its own. default: what follows from its
    heads."""
    baseline: str = "dflash"
    """Method that the others are compared with, if it is among them; with one of LOSSES its name is METHOD-LOSS."""
    lrs: tuple[float, ...] = (3e-3,)
    """Learning rates to choose from, for each method."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of each method; the first one's trainings choose the learning rate."""
    vocabulary: str | None = None
    """Token map of the drafts. Default: all tokens."""
    flags: str = ""
    """More flags of every training, as one text; these win."""
    jobs: int = 1
    """Trainings, then engines, at once."""
    choosing: int = 64
    """Held-out rows that choose checkpoints: the first ones."""
    others: int = 200
    """Held-out rows after these."""
    concurrency: int = 8
    """Requests at once while a draft is measured."""
    tree: int = 0
    """Serve trees of so many nodes, too. 0: chains only."""

    def __post_init__(self) -> None:
        check_required(self)
        check_at_least(self, 1, "jobs", "choosing", "others", "concurrency")
        check_at_least(self, 0, "tree")
        unknown = sorted(set(self.methods) - METHODS.keys())
        if unknown:
            raise ValueError(f"methods has {', '.join(unknown)}; known are {', '.join(METHODS)}")
        unknown = sorted(set(self.losses) - LOSSES.keys())
        if unknown:
            raise ValueError(f"losses has {', '.join(unknown)}; known are {', '.join(LOSSES)}")
        if not self.variants:
            raise ValueError(
                f"losses is {', '.join(self.losses)}, which {', '.join(self.methods)} lack or have anyway; add default"
            )

    @property
    def variants(self) -> dict[str, str]:
        """Flags of every method with every loss, by name."""
        found = {
            name if loss == "default" else f"{name}-{loss}": with_loss(METHODS[name], loss)
            for name, loss in product(self.methods, self.losses)
            if name != "eagle3" or loss == "default"
        }
        return {name: flags for name, flags in found.items() if flags is not None}


def with_loss(flags: str, loss: str) -> str | None:
    """A block draft's flags with one of LOSSES; None: it is what follows from the heads anyway.

    A selector's losses are those of its recipe, so that what differs is the vocabulary's; with `ce` nothing reads the
    target, the selector's loss neither.
    """
    if loss == "default":
        return flags
    if loss == "dpace":
        return f"{flags} --draft.loss dpace"
    if (loss == "l1" and MARKOV in flags) or (loss == "ce" and not any(head in flags for head in (MARKOV, SELECTOR))):
        return None
    weights = dict(LOSSES[loss])
    for head, own in HEAD_LOSSES.items():
        weights |= own if head in flags else {}
    if loss == "ce" and SELECTOR in flags:
        weights |= {"selector_ce": 1, "selector_tv": 0}
    return " ".join((flags, *(f"--draft.losses.{name} {weight:g}" for name, weight in weights.items() if weight)))


@dataclass(frozen=True, slots=True)
class Training:
    method: str
    lr: float
    seed: int
    words: list[str]  # the command without its output
    folder: Path

    @classmethod
    def of(cls, config: BlockDraftsConfig, method: str, lr: float, seed: int) -> "Training":
        program = "eagle3" if method == "eagle3" else "dflash"
        words = [sys.executable, str(ROOT / "train" / f"{program}.py"), "--target", config.target]
        words += ["--data.path", config.data, "--evaluation.documents", str(config.choosing)]
        words += ["--optim.name", "muon", "--optim.lr", str(lr), "--seed", str(seed)]
        words += [] if config.vocabulary is None else ["--draft.vocabulary", config.vocabulary]
        words += shlex.split(config.variants[method]) + shlex.split(config.flags)
        name = hashlib.sha256(shlex.join(words).encode()).hexdigest()[:8]
        return cls(method, lr, seed, words, Path(config.output) / f"{method}-{name}")

    def run(self) -> "Training":
        """Trains, or goes on, unless it is done. Raises ValueError if the program fails."""
        done = self.folder / "trained"
        if not done.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "log").open("a") as log:
                command = [*self.words, "--output", str(self.folder / "run")]
                ended = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            if ended.returncode:
                raise ValueError(f"{shlex.join(command)} failed with status {ended.returncode}; see {log.name}")
            done.touch()
        return self

    @property
    def draft(self) -> Path:
        return self.folder / "run" / "best"

    @property
    def simulated(self) -> float:
        """Accept length on the held-out rows that choose checkpoints, computed while training."""
        return float(read_json(self.draft / "run.json")["metrics"]["accept_length"])


def main(argv: Sequence[str] | None = None) -> None:
    run(compare, BlockDraftsConfig, argv, "bench/block_drafts.py")


def compare(config: BlockDraftsConfig) -> None:
    check_working_folder(config.output, {"data": [config.data], "target": [config.target]})
    groups = read_groups(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    Path(config.output).mkdir(parents=True, exist_ok=True)
    results = Path(config.output) / "results.jsonl"
    first, *other_seeds = config.seeds
    tried = train(config, [Training.of(config, *one, first) for one in product(config.variants, config.lrs)])
    rates = [{"method": one.method, "lr": one.lr, "simulated": one.simulated} for one in tried]
    print(table(RATES, rates), flush=True)
    chosen = [
        max((one for one in tried if one.method == name), key=lambda one: one.simulated) for name in config.variants
    ]
    more = [Training.of(config, one.method, one.lr, seed) for one, seed in product(chosen, other_seeds)]
    lines = Lines(results, origin("block_drafts", device))
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(config.jobs, mp_context=context) as pool:
        served = [pool.submit(measured, config, one, groups) for one in (*chosen, *train(config, more))]
        for one in served:
            lines.add(one.result())
    print(table(COLUMNS, lines.all))
    if config.tree:
        print(table((*COLUMNS[:3], TREE), [line for line in lines.all if TREE[1] in line]))
    if len(config.variants) > 1 and config.baseline in config.variants:
        print(table(*ratios(lines.all, config.baseline)))
    print(f"appended to {results}")


def ratios(lines: Sequence[dict[str, Any]], baseline: str) -> tuple[list[tuple[str, str, str]], list[dict[str, Any]]]:
    """Columns and rows of a table: every other method's accept length over the baseline's, with its 95 % interval."""
    columns = [
        ("method", "method", "s"),
        *((f"{heading}: of {baseline}", key, "s") for heading, key in COMPARED.items()),
    ]
    columns = [one for one in columns if one[1] == "method" or any(f"rounds_{one[1]}" in line for line in lines)]
    methods = [name for name in dict.fromkeys(line["method"] for line in lines) if name != baseline]
    keys = [key for _, key, _ in columns[1:]]
    return columns, [{"method": name} | {key: ratio(lines, name, baseline, key) for key in keys} for name in methods]


def ratio(lines: Sequence[dict[str, Any]], method: str, baseline: str, key: str) -> str | None:
    own, others = (counts_of(lines, name, key) for name in (method, baseline))
    return None if own is None or others is None else str(accept_ratio(own, others))


def counts_of(lines: Sequence[dict[str, Any]], method: str, key: str) -> Counts | None:
    """Of all seeds of a method; None where a line was measured without them."""
    own = [line for line in lines if line["method"] == method]
    if not own or not all(f"rounds_{key}" in line for line in own):
        return None
    return Counts.of(*([line[f"{name}_{key}"] for line in own] for name in ("tokens", "rounds")))


def train(config: BlockDraftsConfig, trainings: Sequence[Training]) -> list[Training]:
    with ThreadPoolExecutor(config.jobs) as pool:
        done = []
        for training in pool.map(Training.run, trainings):
            print(f"{training.method}, lr {training.lr:g}, seed {training.seed}: {training.draft}", flush=True)
            done.append(training)
    return done


def read_groups(config: BlockDraftsConfig) -> Groups:
    """Raises ValueError where there are too few held-out rows."""
    rows = load_from_disk(config.data)["heldout"]
    count = config.choosing + config.others
    if len(rows) < count:
        raise ValueError(f"data has {len(rows)} held-out rows; choosing and others are {count} together: lower them")
    others = rows.select(range(config.choosing, count))
    return {"choosing": read_prompts(rows, config.choosing), "others": read_prompts(others, config.others)}


def measured(config: BlockDraftsConfig, training: Training, groups: Groups) -> dict[str, Any]:
    """The line of a draft; measured once."""
    path = training.folder / "measured.json"
    if not path.exists():
        found = dict(serve(config, training, groups))
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(found) + "\n")
    made = read_json(training.draft / "run.json")
    line = {"method": training.method, "lr": training.lr, "seed": training.seed, "draft": str(training.draft)}
    line |= {"flags": shlex.join(training.words[2:]), "tokens": made["tokens"], "step": made["step"]}
    return line | {"simulated": training.simulated, "heldout": made["metrics"]} | read_json(path)


def serve(config: BlockDraftsConfig, training: Training, groups: Groups) -> Iterator[tuple[str, Any]]:
    """Figures of the draft in an engine, by name."""
    is_block = training.method != "eagle3"
    with engine(config, training, groups, NODES, {} if is_block else {"depth": NODES - 1}) as llm:
        for temperature, group in product((0, 1), groups):
            found = accepted(llm, groups[group], temperature)
            yield f"accept_{group}_{temperature}", found["accept_length"]
            yield f"rates_{group}_{temperature}", found["accept_rates"]
            yield f"tokens_{group}_{temperature}", found["tokens"]
            yield f"rounds_{group}_{temperature}", found["rounds"]
    if config.tree and is_block:
        with engine(config, training, groups, config.tree, {"topk": 4, "nodes": config.tree}) as llm:
            found = accepted(llm, groups["others"], 0)
            yield "accept_tree_others_0", found["accept_length"]
            yield "tokens_tree_others_0", found["tokens"]
            yield "rounds_tree_others_0", found["rounds"]


def engine(config: BlockDraftsConfig, training: Training, groups: Groups, width: int, drafter: dict[str, Any]) -> LLM:
    """With room for `concurrency` requests and no more, since others share the device."""
    longest = max(len(prompt) + length for group in groups.values() for prompt, length in zip(*group, strict=True))
    room = -(-longest // 64) * 64 + 64
    options = {"max_running": config.concurrency, "max_model_len": room, "kv_cache_tokens": config.concurrency * room}
    try:
        return LLM(config.target, str(training.draft), drafter=drafter, width=width, **options)
    except ValueError as error:
        raise ValueError(f"{training.draft} is not served: {error}") from error


def accepted(llm: LLM, rows: tuple[list[list[int]], list[int]], temperature: int) -> dict[str, Any]:
    """Sums over the answers, and `tokens` and `rounds` of each."""
    prompts, lengths = rows
    params = [
        SamplingParams(max_tokens=length, temperature=float(temperature), seed=number)
        for number, length in enumerate(lengths)
    ]
    answers = llm.generate(prompts, params, progress=True)
    stats = [answer.stats for answer in answers]
    tokens = [one.completion_tokens - one.prefills for one in stats]
    return acceptance(answers) | {"tokens": tokens, "rounds": [one.rounds for one in stats]}


if __name__ == "__main__":
    main()
