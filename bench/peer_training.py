"""Trains drafts with the trainer of speculators and with ours, on the same rows, and serves all of them alike.

    python bench/peer_training.py --config bench/peers/tiny.yaml --target assets/tiny-target --data runs/demo/dataset \
        --output runs/peer --peer-python peer/bin/python --jobs 2        # after make demo, on a CPU

PEER_PYTHON is the Python of an environment of its own: python3.11 -m venv peer && peer/bin/pip install
speculators==0.9.0. The YAML file has for each kind of draft the target states (`layers`), the depth at which it is
measured (`depth`) and the flags of each side (`ours`, `peer`). Both sides get as many tries (`our_tries`,
`peer_tries`). --ours="...", --peer="..." and --accept="..." add flags for all kinds; write the =.

The target's states are captured once for each set of layers, in the layout of speculators, whose trainer reads them,
about 2 (K + 1) H bytes a token; ours runs the target. Then `slipstream accept` asks every draft the held-out prompts
and the files of --questions, greedily; the best try of a side has the longest accept length on the held-out prompts, so
only the files of --questions are new to it. What is finished is kept: the same command goes on after a stop.

For a real model on GPUs, --jobs drafts at once, spread over them; `prepare` and `frequency-map` make DATA and MAP:

    python bench/peer_training.py --config bench/peers/smollm2-135m.yaml --target TARGET --data DATA \
        --output runs/peer --peer-python peer/bin/python --questions mt_bench.jsonl --concurrency 32 --jobs 6 \
        --ours="--draft.vocabulary MAP" --peer="--num-workers 1" --accept="--engine.kv_cache_tokens 65536"

The trainer of speculators compiles its network in every run, which needs a C compiler; with torch 2.11 its fused loss
does not compile (--peer="--loss-implementation eager"). Each of its workers (24 by default) starts a CUDA context, so
name few where several runs share a GPU; --num-workers 0 needs no shared memory (/dev/shm). Engines that share a GPU
need a fixed kv_cache_tokens.

Prints a Markdown table and appends one JSON line per try to OUTPUT/results.jsonl. A try that fails is named with the
end of its log, and the others go on. `seconds` is the whole training program, start and compilation included, without
the capture: compare them only of runs with --jobs 1.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy
from slipstream.runtime import free_cores

import json
import os
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from datasets import Dataset, load_from_disk

from slipstream import config as options
from slipstream.bench.lines import Lines, origin, table
from slipstream.bench.peer_runs import INSTALL, Peer, Run, call, module_command
from slipstream.config import check_required
from slipstream.data_tools.state_folders import trainer_flags
from slipstream.models.files.atomic import atomic_file
from slipstream.models.files.checkpoint import resolve
from slipstream.models.files.names import check_checkpoint, check_file, check_folder
from slipstream.models.files.outputs import check_working_folder
from slipstream.models.files.state_store import StateIndex
from slipstream.serve.measure.questions import rows_of
from slipstream.serve.options import check_at_least

HELDOUT = "heldout"
PROGRAMS = {"eagle3": "eagle3", "dflash": "dflash", "dspark": "dflash"}  # kind of draft: our training program
COLUMNS = (  # heading, key of a line, format
    ("draft", "drafter", "s"),
    ("trainer", "trainer", "s"),
    ("try", "flags", "s"),
    ("seconds", "seconds", ".0f"),
    ("at once", "jobs", "d"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """How both sides train one kind of draft."""

    layers: tuple[int, ...] = ()
    """Target states that the draft reads, as for capture-states. Default: by kind of draft."""
    depth: int = 3
    """Tokens drafted in every round while a draft is measured: the engine's choice would differ by draft."""
    ours: str = ""
    """Flags of our training program in every try, as one text."""
    our_tries: tuple[str, ...] = ("",)
    """Flags of each try."""
    peer: str = ""
    """Flags of `speculators train` in every try."""
    peer_tries: tuple[str, ...] = ("",)
    """Flags of each try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Drafts trained by speculators and by us on the same rows, served alike."""

    REQUIRED = {
        "target": "a folder or a hub id",
        "data": "a folder",
        "output": "a folder",
        "peer_python": f"a Python that has speculators ({INSTALL})",
    }

    target: str = ""
    """Target model: folder or hub id."""
    data: str = ""
    """Prepared dataset (slipstream prepare) with a held-out split."""
    output: str = ""
    """Folder for states, checkpoints and results.jsonl."""
    peer_python: str = ""
    """Python that has speculators."""
    drafts: dict[str, Tries] = field(default_factory=dict)
    """Tries by kind of draft: eagle3, dflash, dspark. Best given in a file, --config."""
    epochs: int = 1
    """Passes over the training rows, on both sides."""
    seed: int = 0
    """Seed of every training."""
    ours: str = ""
    """More flags of our training programs, for every kind of draft, as one text; these win over those of `drafts`, but
    for the tries'."""
    peer: str = ""
    """More flags of `speculators train`, likewise."""
    accept: str = ""
    """Flags of `slipstream accept`, such as --engine.kv_cache_tokens 65536 where several engines share a GPU."""
    heldout: int = 40
    """Held-out rows, which both trainers validate on and every draft is measured on."""
    questions: tuple[str, ...] = ()
    """Files of questions to measure on, too, as for slipstream accept."""
    max_tokens: int = 256
    """Longest answer while a draft is measured."""
    concurrency: int = 8
    """Requests at once while a draft is measured."""
    jobs: int = 1
    """Drafts to train or measure at once, spread over the GPUs."""

    def __post_init__(self) -> None:
        check_required(self)
        check_at_least(self, 1, "epochs", "heldout", "max_tokens", "concurrency", "jobs")
        if not self.drafts or not set(self.drafts) <= set(PROGRAMS):
            raise ValueError(f"drafts names {', '.join(self.drafts) or 'nothing'}; choose from {', '.join(PROGRAMS)}")
        for name, tries in self.drafts.items():
            sizes = (len(tries.our_tries), len(tries.peer_tries))
            if sizes[0] != sizes[1] or not sizes[0]:
                raise ValueError(
                    f"drafts.{name} has {sizes[0]} our_tries and {sizes[1]} peer_tries; give both sides as many"
                )
            if tries.depth < 1:
                raise ValueError(f"drafts.{name}.depth is {tries.depth}; give at least 1")

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        check_checkpoint("target", self.target)
        check_folder("data", self.data, self.REQUIRED["data"])
        for name in self.questions:
            check_file("questions", name, "a file of questions")


class Workers:
    """Runs programs, at most `jobs` at once, each on a GPU in turn and with its share of the cores."""

    def __init__(self, jobs: int) -> None:
        self._pool = ThreadPoolExecutor(jobs)
        self._slots = SimpleQueue[dict[str, str]]()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        threads = str(max(1, free_cores() // jobs))
        shared = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
        for slot in range(jobs):
            gpu = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
            self._slots.put(shared | gpu)

    def submit(self, run: Run, accept_flags: Sequence[str]) -> "Future[dict[str, dict[str, Any]]]":
        """Trains and measures a draft; its figures by category."""
        return self._pool.submit(self._finish, run, accept_flags)

    def _finish(self, run: Run, accept_flags: Sequence[str]) -> dict[str, dict[str, Any]]:
        slot = self._slots.get()
        try:
            run.train(slot)
            figures = run.measure(accept_flags, slot)
        finally:
            self._slots.put(slot)
        lengths = ", ".join(f"{name} {figures[name]['by_rounds']:.3f}" for name in sets_of(figures))
        print(f"{run.drafter}, {run.side}, {run.flags or 'defaults'}: {run.seconds:.0f} s, {lengths}", flush=True)
        return figures

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def main(argv: Sequence[str] | None = None) -> None:
    options.run(compare, PeerConfig, argv, "bench/peer_training.py")


def compare(config: PeerConfig) -> None:
    """Trains and measures what is missing, and prints the table. Raises ValueError for the tries that failed."""
    inputs = {"data": [config.data], "target": [config.target], "questions": config.questions}
    check_working_folder(config.output, inputs)
    peer = Peer.find(config.peer_python)
    questions = write_questions(config)
    runs: list[Run] = []
    figures: list[Future[dict[str, dict[str, Any]]]] = []
    workers = Workers(config.jobs)
    try:
        for name, tries in config.drafts.items():  # these need no captured states
            for words in tries.our_tries:
                runs.append(our_run(config, name, words))
                figures.append(workers.submit(runs[-1], accept_flags(config, name, questions)))
        if config.jobs == 1:
            for future in figures:
                future.exception()  # waits: the capture must not slow down what is timed
        complete: set[Path] = set()
        for name, tries in config.drafts.items():
            folder = states_folder(config, name)
            if folder not in complete:
                capture(config, name, folder)
                complete.add(folder)
            for words in tries.peer_tries:
                runs.append(peer_run(config, peer, name, words, folder))
                figures.append(workers.submit(runs[-1], accept_flags(config, name, questions)))
        failures = []
        for run, future in zip(runs, figures, strict=True):
            error = future.exception()  # waits
            if isinstance(error, ValueError):
                failures.append(f"{run.drafter}, {run.side}, {run.flags}: {error}")
            elif error is not None:
                raise error
    finally:
        workers.close()
        report(config, peer, results_of(runs, figures))  # of a run that was interrupted, too
    if failures:
        raise ValueError("\n".join((f"{len(failures)} of {len(runs)} tries failed; the others are kept", *failures)))


def results_of(runs: Iterable[Run], figures: Iterable["Future[Any]"]) -> list[tuple[Run, dict[str, dict[str, Any]]]]:
    """The runs that have figures, with them."""
    pairs = zip(runs, figures, strict=False)  # an interrupt may come between a run and its future
    ends = [(run, future) for run, future in pairs if future.done() and not future.cancelled()]
    return [(run, future.result()) for run, future in ends if future.exception() is None]


def write_questions(config: PeerConfig) -> list[Path]:
    """Writes the held-out prompts and the questions to files, each of which is one category of `accept`."""
    prompts = read_prompts(load_from_disk(config.data)[HELDOUT], config.heldout)
    sets: dict[str, list[Mapping[str, Any]]] = {HELDOUT: [{"prompt": prompt} for prompt in prompts]}
    for name in config.questions:
        path = Path(name)
        stem = path.name.split(".")[0]
        if stem in sets:
            raise ValueError(f"questions has two files called {stem}; rename one")
        sets[stem] = [row for _, row in rows_of(path)]
    folder = Path(config.output).resolve() / "questions"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, rows in sets.items():
        paths.append(folder / f"{stem}.jsonl")
        with atomic_file(paths[-1]) as temporary:
            lines = ({**row, "category": stem, "id": f"{stem}-{number}"} for number, row in enumerate(rows))
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def read_prompts(rows: Dataset, count: int) -> list[list[int]]:
    """The tokens before the first answer of each row."""
    prompts = []
    for row in rows.select(range(min(count, len(rows)))):
        mask = [False, *row["loss_mask"][1:]]  # nothing predicts the first token
        if True in mask:
            prompts.append(row["input_ids"][: mask.index(True)])
    if not prompts:
        raise ValueError("data has no held-out answers to measure on; prepare it with --heldout")
    return prompts


def accept_flags(config: PeerConfig, drafter: str, questions: Iterable[Path]) -> list[str]:
    """Flags of `slipstream accept` that are the same for all drafts of a kind."""
    depth = config.drafts[drafter].depth
    flags = ["--engine.width", str(depth + 1)]
    if drafter == "eagle3":
        flags += ["--drafter.depth", str(depth)]
    flags += ["--target", target_path(config), "--no-baseline", "--num-questions", "null"]
    flags += ["--max-tokens", str(config.max_tokens), "--concurrency", str(config.concurrency)]
    return [*flags, "--questions", *map(str, questions), *shlex.split(config.accept)]


def target_path(config: PeerConfig) -> str:
    return str(resolve(config.target).absolute())


def our_run(config: PeerConfig, drafter: str, flags: str) -> Run:
    """A try of ours; its flags come last and so win over those of all tries."""
    tries = config.drafts[drafter]
    words = [*shlex.split(tries.ours), *shlex.split(config.ours)]
    words += ["--target", target_path(config), "--data.path", str(Path(config.data).resolve())]
    words += ["--optim.epochs", str(config.epochs), "--evaluation.documents", str(config.heldout)]
    words += ["--seed", str(config.seed)]
    if tries.layers:
        words += ["--draft.aux_layers", str(list(tries.layers))]
    command = module_command(f"train.{PROGRAMS[drafter]}", [*words, *shlex.split(flags), "--output"])
    return Run("slipstream", drafter, flags, tuple(command), Path(config.output))


def peer_run(config: PeerConfig, peer: Peer, drafter: str, flags: str, states: Path) -> Run:
    """A try of speculators; its flags come last and so win."""
    words = ["--speculator-type", drafter, "--verifier-name-or-path", target_path(config)]
    words += [*trainer_flags(states, StateIndex.read(states)), "--epochs", str(config.epochs)]
    words += ["--seed", str(config.seed), "--no-resume-from-checkpoint"]
    words += ["--log-freq", "20"]  # it waits for the device where it logs
    words += [*shlex.split(config.drafts[drafter].peer), *shlex.split(config.peer), *shlex.split(flags)]
    command = peer.command([*words, "--save-path"])
    return Run("speculators", drafter, flags, tuple(command), Path(config.output))


def states_folder(config: PeerConfig, drafter: str) -> Path:
    """The folder for the states that `drafter` reads; kinds of draft with the same `layers` share it."""
    layers = [str(layer) for layer in config.drafts[drafter].layers]
    return Path(config.output).resolve() / "-".join(("states", *(layers or [PROGRAMS[drafter]])))


def capture(config: PeerConfig, drafter: str, states: Path) -> None:
    """Captures the states that `drafter` reads into `states`, unless it is complete; its log lies beside it."""
    layers = config.drafts[drafter].layers
    words = ["--data", config.data, "--target", target_path(config), "--output", str(states), "--yes"]
    words += ["--layout", "speculators", "--drafters", PROGRAMS[drafter], "--heldout-documents", str(config.heldout)]
    if layers:
        words += ["--layers", *map(str, layers)]
    began = time.perf_counter()
    call(module_command("data_tools.capture_states", words), states.with_suffix(".log"), os.environ, None)
    print(f"{states.name}: {time.perf_counter() - began:.0f} s", flush=True)


def report(config: PeerConfig, peer: Peer, results: Sequence[tuple[Run, Mapping[str, Mapping[str, Any]]]]) -> None:
    """Prints the tries, those of a kind of draft together, and appends them to results.jsonl."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = Path(config.output) / "results.jsonl"
    lines = Lines(path, origin("peer_training", device))
    names = {"slipstream": "slipstream", "speculators": f"speculators {peer.version}"}
    lengths = {run: figures[HELDOUT]["by_rounds"] for run, figures in results}
    for run, figures in sorted(results, key=lambda result: list(PROGRAMS).index(result[0].drafter)):
        rivals = [length for rival, length in lengths.items() if (rival.side, rival.drafter) == (run.side, run.drafter)]
        line = {"drafter": run.drafter, "trainer": names[run.side], "flags": run.flags or "defaults"}
        line |= {"seconds": run.seconds, "jobs": config.jobs, "is_best": lengths[run] == max(rivals)}
        sets = {category: figures[category]["by_rounds"] for category in sets_of(figures)}
        rates = {category: figures[category]["accept_rates"] for category in sets}
        settings = {"epochs": config.epochs, "seed": config.seed, "command": shlex.join(run.command)}
        lines.add(line | {"accept_length": sets, "accept_rates": rates} | settings)
    if lines.all:
        categories = list(lines.all[0]["accept_length"])
        columns = [*COLUMNS, *((f"accept length, {name}", name, ".3f") for name in categories)]
        columns += [("by position, held out", "rates", "s"), ("best", "best", "s")]
        print(table(columns, [cells(line) for line in lines.all]))
        print(f"appended to {path}")


def sets_of(figures: Mapping[str, Any]) -> list[str]:
    """Categories, the held-out prompts first, without the line for all."""
    return sorted(figures.keys() - {"all"}, key=lambda name: (name != HELDOUT, name))


def cells(line: Mapping[str, Any]) -> dict[str, Any]:
    rates = line["accept_rates"][HELDOUT]
    text = " ".join(f"{rate:.3f}".lstrip("0") for rate in rates)
    return {**line, **line["accept_length"], "rates": text, "best": "best" if line["is_best"] else ""}


if __name__ == "__main__":
    main()
