"""Trains drafts with the trainer of speculators, on our rows and states, and serves them and ours the same way.

    python bench/peer_training.py --target assets/tiny-target --data runs/demo/dataset --output runs/peer \
        --peer-python peer/bin/python --lr 6e-3 --draft runs/demo/draft/best --flags="--draft-vocab-size 1024"
    python bench/peer_training.py ... --drafter dflash --flags="--num-layers 4 --block-size 8 --max-anchors 96"

PEER_PYTHON is the Python of an environment of its own: python3.11 -m venv peer && peer/bin/pip install
speculators==0.9.0. Captures the target's states in its layout, trains once per seed, and asks an engine here for greedy
answers to the held-out prompts, each at most as long as the held-out answer. So is every checkpoint of --draft. Drafts
propose as many tokens as they do by default. A trained draft is kept: the same command goes on after a stop.

Prints a Markdown table and appends one JSON line per draft to OUTPUT/results.jsonl. `seconds` is its whole trainer
without the capture; `tokens` are supervised tokens seen, epochs times those of the training rows; `equal` counts
answers equal to those without a draft.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, load_from_disk

from slipstream.bench.lines import Lines, origin, table
from slipstream.config import check_required, run
from slipstream.data_tools.capture_states import CaptureConfig, capture_states
from slipstream.data_tools.options import check_at_least
from slipstream.data_tools.state_folders import trainer_flags
from slipstream.models.files.atomic import atomic_file
from slipstream.models.files.checkpoint import read_json, resolve
from slipstream.models.files.outputs import check_working_folder
from slipstream.models.files.state_store import StateIndex
from slipstream.serve.llm import LLM, Generation
from slipstream.serve.request import RequestStats, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
INSTALL = "python3.11 -m venv peer && peer/bin/pip install speculators==0.9.0, then --peer-python peer/bin/python"
ASK = """import json, torch, importlib.metadata as metadata
print(json.dumps([metadata.version("speculators"), torch.accelerator.is_available()]))"""
CPU_FLAGS = ("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--num-workers", "0")
TRAINED = "trained.json"  # written last into a run's folder
COLUMNS = (  # heading, key of a line, format
    ("draft", "draft", "s"),
    ("trainer", "trainer", "s"),
    ("lr", "lr", "g"),
    ("seed", "seed", "d"),
    ("tokens seen", "tokens", ",d"),
    ("seconds", "seconds", ".0f"),
    ("accept length", "accept_length", ".3f"),
    ("accept rate by position", "rates", "s"),
    ("answers equal", "equal", "s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Drafts trained by speculators and by us, served alike."""

    REQUIRED = {"target": "a folder or a hub id", "data": "a folder", "output": "a folder"}

    target: str = ""
    """Target model: folder or hub id."""
    data: str = ""
    """Prepared dataset (slipstream prepare) with a held-out split."""
    output: str = ""
    """Folder for states, checkpoints and results.jsonl."""
    peer_python: str = ""
    """Python that has speculators. Without it only the checkpoints of `draft` are measured."""
    drafter: Literal["eagle3", "dflash"] = "eagle3"
    """Kind of draft that speculators trains."""
    draft: tuple[str, ...] = ()
    """Checkpoints to measure, too: folders, hub ids or names of drafters."""
    layers: tuple[int, ...] = ()
    """Target states that the draft reads, as for capture-states. Default: by `drafter`."""
    lr: float | None = None
    """Learning rate of both its optimizers. Default: its own."""
    epochs: int = 2
    """Passes over the training rows."""
    row_tokens: int = 1024
    """Tokens in a step."""
    seeds: tuple[int, ...] = (0,)
    """One draft per seed."""
    flags: str = ""
    """More flags of `speculators train`, as one text; these win."""
    train_documents: int | None = None
    """Train on the first rows only."""
    questions: int = 40
    """Held-out rows, which its trainer validates on and the drafts are measured on."""
    concurrency: int = 8
    """Requests at once while a draft is measured."""

    def __post_init__(self) -> None:
        check_required(self)
        check_at_least(self, 1, "epochs", "row_tokens", "questions", "concurrency", "train_documents")
        if not self.peer_python and not self.draft:
            raise ValueError(
                f"nothing to measure: name checkpoints by --draft, or a Python with speculators ({INSTALL})"
            )


@dataclass(frozen=True, slots=True)
class Peer:
    """The package in its environment."""

    python: str
    version: str
    on_accelerator: bool

    @classmethod
    def find(cls, python: str) -> "Peer":
        """Raises ValueError unless `python` runs and has speculators."""
        program = shutil.which(python)
        if program is None:
            raise ValueError(f"peer_python {python} is not a program; {INSTALL}")
        path = str(Path(program).absolute())  # its links not followed: they lead out of the environment
        answer = subprocess.run([path, "-c", ASK], capture_output=True, text=True, env=environment())
        if answer.returncode:
            last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"peer_python {python} has no speculators ({last}); {INSTALL}")
        return cls(path, *json.loads(answer.stdout))

    def command(self, flags: Sequence[str]) -> list[str]:
        if self.on_accelerator:
            return [self.python, "-m", "speculators", "train", *flags]
        return [self.python, "-P", str(ROOT / "bench" / "speculators_on_cpu.py"), *CPU_FLAGS, *flags]


def environment() -> dict[str, str]:
    """Ours without the path to our packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def main(argv: Sequence[str] | None = None) -> None:
    run(measure_all, PeerConfig, argv, "bench/peer_training.py")


def measure_all(config: PeerConfig) -> None:
    inputs = {"data": [config.data], "target": [config.target], "draft": config.draft}
    check_working_folder(config.output, inputs)
    prompts, lengths = read_prompts(load_from_disk(config.data)["heldout"], config.questions)
    drafts = list(train_drafts(config)) if config.peer_python else []
    drafts += [ours(name) for name in config.draft]
    Path(config.output).mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = Path(config.output) / "results.jsonl"
    lines = Lines(results, origin("peer_training", device))
    plain = answer(config, "none", prompts, lengths)
    for described in drafts:
        answers = answer(config, described["draft"], prompts, lengths)
        equal = sum(drafted.tokens == expected.tokens for drafted, expected in zip(answers, plain, strict=True))
        lines.add(described | acceptance(answers) | {"questions": len(answers), "equal": f"{equal} of {len(answers)}"})
    print(table(COLUMNS, [line | {"rates": rates_text(line["accept_rates"])} for line in lines.all]))
    print(f"appended to {results}")


def rates_text(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.3f}".lstrip("0") for rate in rates)


def read_prompts(rows: Dataset, count: int) -> tuple[list[list[int]], list[int]]:
    """The tokens before the first answer of each row, and the length of that answer."""
    prompts = []
    lengths = []
    for row in rows.select(range(min(count, len(rows)))):
        mask = [False, *row["loss_mask"][1:]]  # nothing predicts the first token
        if True in mask:
            first = mask.index(True)
            prompts.append(row["input_ids"][:first])
            lengths.append([*mask, False].index(False, first) - first)
    if not prompts:
        raise ValueError("data has no held-out answers to measure on; prepare it with --heldout")
    return prompts, lengths


def train_drafts(config: PeerConfig) -> Iterator[dict[str, Any]]:
    """Trains what is missing. Yields one line per seed, without its measurement."""
    peer = Peer.find(config.peer_python)
    states = Path(config.output) / f"states-{config.drafter}"
    capture_states(
        CaptureConfig(
            data=config.data,
            target=config.target,
            output=str(states),
            layout="speculators",
            drafters=(config.drafter,),
            layers=config.layers,
            train_documents=config.train_documents,
            heldout_documents=config.questions,
            yes=True,
        )
    )
    index = StateIndex.read(states)
    tokens = sum(shard.num_supervised for shard in index.shards if shard.split == "train")
    for seed in config.seeds:
        flags = [*recipe(config), "--seed", str(seed)]
        folder, seconds = train(config, peer, [*trainer_flags(states, index), *flags])
        yield {
            "draft": str(folder / "checkpoint_best"),
            "trainer": f"speculators {peer.version}",
            "drafter": config.drafter,
            "flags": shlex.join(flags),
            "lr": config.lr,
            "seed": seed,
            "tokens": tokens * config.epochs,
            "seconds": seconds,
        }


def recipe(config: PeerConfig) -> list[str]:
    """Flags of its trainer that say what is trained and how; those of `flags` come last and so win."""
    flags = ["--speculator-type", config.drafter, "--epochs", str(config.epochs)]
    flags += ["--total-seq-len", str(config.row_tokens)]
    if config.lr is not None:
        flags += ["--lr", str(config.lr)]
    return [*flags, *shlex.split(config.flags)]


def train(config: PeerConfig, peer: Peer, flags: Sequence[str]) -> tuple[Path, float]:
    """The folder of its checkpoints and the seconds that they took; a run that was stopped begins again."""
    target = str(resolve(config.target).absolute())
    name = hashlib.sha256(shlex.join([peer.version, target, *flags]).encode()).hexdigest()[:8]
    folder = (Path(config.output) / f"{config.drafter}-{name}").resolve()
    if not (folder / TRAINED).exists():
        folder.mkdir(parents=True, exist_ok=True)
        places = ["--verifier-name-or-path", target, "--save-path", str(folder), "--no-resume-from-checkpoint"]
        command = peer.command([*places, "--log-freq", "20", *flags])  # it waits for the device where it logs
        print("$ " + shlex.join(command), flush=True)
        began = time.perf_counter()
        ended = subprocess.run(command, cwd=folder, env=environment())
        if ended.returncode or not (folder / "checkpoint_best").exists():
            raise ValueError(f"speculators train failed with status {ended.returncode}; its last lines are above")
        with atomic_file(folder / TRAINED) as temporary:
            temporary.write_text(json.dumps({"seconds": round(time.perf_counter() - began, 1)}) + "\n")
    return folder, read_json(folder / TRAINED)["seconds"]


def ours(name: str) -> dict[str, Any]:
    """A line for a checkpoint of `draft`, with what its run.json tells of its training."""
    run = read_json(Path(name) / "run.json") if (Path(name) / "run.json").exists() else {}
    revision = run.get("git_revision") or "unknown"  # None: trained outside a git checkout
    return {
        "draft": name,
        "trainer": f"slipstream {revision[:7]}" if run else "unknown",
        "drafter": None,
        "flags": shlex.join(run.get("argv", [])),
        "lr": None,
        "seed": None,
        "tokens": run.get("tokens"),
        "seconds": None,
    }


def answer(config: PeerConfig, draft: str, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[Generation]:
    params = [SamplingParams(max_tokens=length, temperature=0.0) for length in lengths]
    try:
        llm = LLM(config.target, draft, max_running=config.concurrency)
    except ValueError as error:
        raise ValueError(f"{draft} is not served: {error}") from error
    with llm:
        answers = llm.generate(prompts, params, progress=True)
    del llm  # free the memory before the next engine measures it
    gc.collect()
    torch.cuda.empty_cache()
    return answers


def acceptance(answers: Sequence[Generation]) -> dict[str, Any]:
    """Sums over answers, as the server counts them."""
    total = RequestStats()
    for generation in answers:
        total.add(generation.stats)
    rounds = max(1, total.rounds)
    return {
        "accept_length": round((total.completion_tokens - total.prefills) / rounds, 4),
        "accept_rates": [round(count / rounds, 4) for count in total.accepted_by_position],
        "rounds": total.rounds,
    }


if __name__ == "__main__":
    main()
