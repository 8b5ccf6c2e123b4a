"""The trainer of `serve --learn`: goes on training a draft with what its server answers (serve/engine/learning.py).

python -m slipstream.train.learn FD JOB, which the engine's process starts. Texts with the target's states come in on a
socket and wait in memory (text_ring.py); nothing of them is written to disk, and all of it is gone when the process
ends. A round trains the draft by its family's objective on the texts that are there, old ones among them, and walks
held-out ones with the weights that serve and with new ones, which lie between the trained and the first. On a GPU of
its own a step takes as many rows as fit, up to RATE_TOKENS. Without new texts a round only follows one that has gained.
The trainer offers weights if recent texts are accepted longer by GAIN, past ones as long as ever but for LOSS, and no
client's shorter by CLIENT_LOSS. Then it waits: the engine lets them serve on trial. If they are taken back, or recent
texts are accepted shorter by GAIN, training goes on from those that serve.

While the engine has work, training keeps to a share of the time (pace.py). Of a GPU it takes all memory that it will
need before the engine sizes its cache.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor, nn

from slipstream.models.files.atomic import atomic_folder
from slipstream.models.files.learning import (
    TEXT_LEN,
    LearnJob,
    Line,
    Load,
    Offer,
    Outcome,
    Ready,
    ServedText,
    StateAnswer,
    StateQuestion,
    Verdict,
)
from slipstream.models.files.outputs import CHECKPOINT
from slipstream.models.files.prepared import load_saved
from slipstream.train.batches import PackedRows, Share
from slipstream.train.checkpoints import Progress
from slipstream.train.continuation import LOSS, MOST_PASSES, PAST, Continuation
from slipstream.train.loop import Loop
from slipstream.train.optim import RATE_TOKENS
from slipstream.train.options import OptimOptions
from slipstream.train.pace import Pace
from slipstream.train.state_source import StateSource
from slipstream.train.text_ring import MemoryStates, ServedTexts, Split, Splits, dataset_of, in_fp8

STEPS = 25  # of a round, at least
EVALUATION_SHARE = 0.05  # of the time of steps and evaluations
LEAST_TEXTS = 16  # of the train split, from which on it trains
LEAST_HELD_OUT = 4
CLIENT_LOSS = 0.05  # of a client's accept length
GAIN = 0.05  # of (accept length - 1) of recent texts, to offer weights; as great a loss drops them
DATA_TOKENS = 512  # of texts of `data` whose states the engine computes at once, or one longer text
DATA_SHARE = 0.2  # of the time, at most, that the engine computes such states while it has work
NICE = 10
WAIT_SECONDS = 0.5


class Channel:
    """The trainer's end of the socket: a thread puts texts into memory. `saving`: held while weights are being saved,
    which the engine's end does not break off."""

    def __init__(self, line: Line, texts: ServedTexts, folder: Path) -> None:
        self.texts = texts
        self.saving = threading.Lock()
        self._line = line
        self.verdicts: SimpleQueue[Outcome] = SimpleQueue()
        self._answers: SimpleQueue[Tensor] = SimpleQueue()
        self._folder = folder
        threading.Thread(target=self._listen, name="slipstream-learn", daemon=True).start()

    def states_of(self, texts: list[list[int]]) -> Tensor:
        """Returns states as a StateAnswer has them, which the engine computes."""
        self.send(StateQuestion(texts))
        return self._answers.get()

    def send(self, message: Ready | StateQuestion | Offer) -> None:
        with suppress(OSError):  # the engine is gone: so will this process be, at once
            self._line.send(message)

    def _listen(self) -> None:
        try:
            while True:
                message = self._line.receive()
                if isinstance(message, Verdict):
                    self.verdicts.put(message.outcome)
                elif isinstance(message, StateAnswer):
                    self._answers.put(message.states)
                else:
                    self.texts.add(message)
        except (EOFError, OSError):
            with self.saving:
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(0)  # the engine is gone, and with this process all texts


class Lengths(NamedTuple):
    """Simulated accept lengths of held-out texts, means over clients; 0 without texts. `clients`: of recent texts of
    those with LEAST_HELD_OUT."""

    recent: float
    past: float
    clients: Mapping[str, float]


class Trainer(Continuation):
    """Trains in rounds. `serving`: the weights that serve; `best`: those that have served and are accepted longest on
    past texts."""

    def __init__(self, job: LearnJob) -> None:
        optim = OptimOptions(steps=1000, schedule="constant")
        device = torch.device(job.device)
        super().__init__(job.target, job.draft, device, optim, trust_remote_code=job.trust_remote_code, last_layers=0)
        self.job = job
        self.serving = self.best
        length = self.options.data.max_length
        self.most_rows = num_rows(length) if device.type == "cuda" and job.share == 1 else 1  # of a step
        self.seconds = {"steps": 0.0, "evaluations": 0.0}
        self.heldout: Split | None = None
        self.measured: dict[int, Lengths] = {}  # of `serving` and `best` by id, with the held-out texts that are there
        self.pace = Pace(job.share, Load(job.folder).is_busy)
        self.training.register_forward_pre_hook(lambda *_: self.pace.begin())
        self.training.register_forward_hook(self._end_evaluation)

    def _end_evaluation(self, training: nn.Module, *_: object) -> None:
        if not training.training:
            self.rest()

    def train_step(self, loop: Loop) -> None:
        began = time.monotonic()
        loop.train_step(False)
        self.rest()
        self.seconds["steps"] += time.monotonic() - began

    def rest(self) -> None:
        if self.job.device != "cpu":
            torch.cuda.synchronize()  # sync
        self.pace.end()

    def round(self, loop: Loop) -> None:
        """Trains until evaluations have had at most their share of the time."""
        steps = 0
        while steps < STEPS or self.seconds["evaluations"] > EVALUATION_SHARE * sum(self.seconds.values()):
            self.train_step(loop)
            steps += 1

    def take_memory(self) -> None:
        """Takes what a step and an evaluation of the longest rows need, of fewer where they do not fit; torch keeps it.
        Changes nothing else."""
        while not self.fits():
            self.most_rows //= 2
        self.load(self.best)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            optimizer.state.clear()
        self.progress = Progress(first_length=self.progress.first_length)

    def fits(self) -> bool:
        """Whether a step of `most_rows` and an evaluation find memory, beside weights that serve and new ones. Raises
        torch.OutOfMemoryError where one row does not."""
        length = self.options.data.max_length
        states = torch.zeros(length - 1, len(self.job.layers), self.config.hidden_size)
        split = Split({"": [in_fp8(ServedText("", [0] * length, 1, states))] * self.most_rows}, {})
        copies = [self.weights()]
        self.model.train()
        try:
            loop = self.loop(Splits(split, split))
            loop.train_step(False)
            copies.append(self.new_weights())
            self.lengths(loop, copies[-1])
        except torch.OutOfMemoryError:
            if self.most_rows == 1:
                raise
            return False
        return True

    def loop(self, splits: Splits) -> Loop:
        if splits.heldout != self.heldout:
            self.heldout = splits.heldout
            self.measured.clear()
        train = self.rows(splits.train, shares_of(splits.train))
        return self.loop_over(train, self.rows(splits.heldout), min(self.most_rows, len(train)))

    def rows(self, split: Split, shares: Sequence[Share] = ()) -> PackedRows:
        """`shares` of an epoch; evaluations, which walk each row once, have none."""
        groups = groups_of(split)
        texts = [text for part in groups.values() for text in part]
        packed = PackedRows(dataset_of(texts), self.options.data.max_length, shares)
        packed.categories = [" ".join(group) for group, part in groups.items() for _ in part]
        store: Any = MemoryStates(texts, tuple(self.job.layers), self.config.num_layers)
        layers = self.training.draft.config.aux_layers
        pinned = self.job.device != "cpu"
        source = StateSource({0: store}, "served", layers, final_state=self.training.reads_final_state, pinned=pinned)
        packed.add_states = source.add
        return packed

    def measured_lengths(self, loop: Loop, weights: Mapping[str, Tensor]) -> Lengths:
        if id(weights) not in self.measured:
            self.measured[id(weights)] = self.accept_lengths(loop, weights)
        return self.measured[id(weights)]

    def accept_lengths(self, loop: Loop, weights: Mapping[str, Tensor]) -> Lengths:
        began = time.monotonic()
        lengths = self.lengths(loop, weights)
        self.seconds["evaluations"] += time.monotonic() - began
        counts = Counter(loop.heldout.categories)
        clients = {name for name in lengths if name.startswith("recent ") and counts[name] >= LEAST_HELD_OUT}
        return Lengths(
            recent=mean_of(lengths, "recent"),
            past=mean_of(lengths, "past"),
            clients={name: lengths[name] for name in clients},
        )


def num_rows(length: int) -> int:
    """Returns how many rows of so many tokens a step takes on a GPU of its own, if they fit."""
    return max(1, RATE_TOKENS // length)


def groups_of(split: Split) -> dict[tuple[str, str], list[ServedText]]:
    """Texts by part, recent or past, and client."""
    return {(name, client): texts for name, part in split._asdict().items() for client, texts in part.items()}


def shares_of(split: Split) -> list[Share]:
    """An epoch has as many tokens of each client, and PAST of them are past."""
    groups = groups_of(split)
    sizes = {group: sum(len(text.tokens) for text in texts) for group, texts in groups.items()}
    recent = sum(sizes[group] for group in sizes if group[0] == "recent")
    tokens = {"recent": recent, "past": recent * PAST / (1 - PAST)}  # of an epoch
    return [
        Share("", len(texts), min(MOST_PASSES, tokens[name] / len(getattr(split, name)) / sizes[name, client]))
        for (name, client), texts in groups.items()
    ]


def add_data(job: LearnJob, trainer: Trainer, channel: Channel) -> None:
    """Lets the past begin with texts that the draft was trained on, whose states the engine computes."""
    splits = load_saved(Path(job.data or ""))  # the server has read its report
    length = min(trainer.options.data.max_length, TEXT_LEN)
    pace = Pace(DATA_SHARE, Load(job.folder).is_busy)
    texts = channel.texts
    for name, memory in (("train", texts.train), ("heldout", texts.heldout)):
        rows = splits[name].shuffle(seed=trainer.options.seed, keep_in_memory=True)  # writes into no folder
        for documents in batches_of(first_answers(rows, length)):
            pace.begin()
            states = channel.states_of([tokens for tokens, _ in documents])
            pace.end()
            if not len(states):
                continue
            parts = states.split([len(tokens) for tokens, _ in documents])
            is_full = False
            for (tokens, start), part in zip(documents, parts, strict=True):
                is_full |= texts.add_past(memory, ServedText("learn.data", tokens, start, part[:-1]))
            if is_full:
                break


def first_answers(rows: Dataset, length: int) -> Iterator[tuple[list[int], int]]:
    """Yields documents up to the end of their first answer, and where it begins; not those where that is too short, or
    further than `length` tokens."""
    for row in rows:
        mask = [bool(value) for value in row["loss_mask"][:length]]
        start = mask.index(True) if True in mask else length
        end = start + sum(takewhile(bool, mask[start:]))
        if end >= start + 2:
            yield row["input_ids"][:end], start


def batches_of(documents: Iterable[tuple[list[int], int]]) -> Iterator[list[tuple[list[int], int]]]:
    """Joins documents in turn while they have at most DATA_TOKENS."""
    batch: list[tuple[list[int], int]] = []
    for document in documents:
        if batch and sum(len(tokens) for tokens, _ in (*batch, document)) > DATA_TOKENS:
            yield batch
            batch = []
        batch.append(document)
    if batch:
        yield batch


def mean_of(lengths: Mapping[str, float], part: str) -> float:
    values = [length for name, length in lengths.items() if name.partition(" ")[0] == part]
    return sum(values) / max(1, len(values))


def is_better(before: Lengths, after: Lengths, best: Lengths) -> bool:
    """Whether weights are worth a trial. `before`: of those that serve; `best`: of those with the longest past."""
    is_fair = all(
        after.clients[name] >= (1 - CLIENT_LOSS) * length
        for lengths in (before, best)
        for name, length in lengths.clients.items()
    )
    return is_fair and after.recent - before.recent > least_gain(before) and after.past >= (1 - LOSS) * best.past


def least_gain(before: Lengths) -> float:
    """Returns the gain in recent texts' accept length from which on weights are offered."""
    return GAIN * max(before.recent - 1, GAIN)


def learn(job: LearnJob, trainer: Trainer, channel: Channel) -> None:
    """Learns until the engine is gone."""
    if job.data is not None:
        add_data(job, trainer, channel)
    last_splits: Splits | None = None
    length = last_length = 0.0  # of recent texts, with the weights of the last two rounds over the same texts
    began = time.monotonic()
    while True:
        splits = channel.texts.now()
        has_few = splits.train.num_recent < LEAST_TEXTS or splits.heldout.num_recent < LEAST_HELD_OUT
        if has_few or (splits == last_splits and length <= last_length):
            time.sleep(WAIT_SECONDS)
            continue
        if splits != last_splits:
            last_splits = splits
            loop = trainer.loop(splits)
            length = 0.0
        trainer.round(loop)
        weights = trainer.new_weights()
        after = trainer.accept_lengths(loop, weights)
        before, best = (trainer.measured_lengths(loop, x) for x in (trainer.serving, trainer.best))
        last_length = length
        length = after.recent
        if before.recent - after.recent > least_gain(before):
            trainer.load(trainer.serving)
        if not is_better(before, after, best):
            continue
        folder = Path(tempfile.mkdtemp(prefix="step-", dir=job.folder))  # one that died may have left its own there
        trainer.write(weights, folder, {"metrics": {"recent": after.recent, "past": after.past}})
        seconds = trainer.seconds | {"all": time.monotonic() - began}
        channel.send(Offer(str(folder), before.recent, after.recent, seconds))
        if channel.verdicts.get() == "passed":
            with channel.saving, atomic_folder(Path(job.output), CHECKPOINT.check) as new:
                shutil.copytree(folder, new, dirs_exist_ok=True)
            trainer.serving = weights
            trainer.best = weights if after.past > best.past else trainer.best
            trainer.measured.clear()
        else:
            trainer.load(trainer.serving)
        shutil.rmtree(folder)


def main() -> None:
    number, text = sys.argv[1:]
    job = LearnJob(**json.loads(text))
    os.nice(NICE)
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # accelerate's, too
    trainer = Trainer(job)
    if device.type == "cuda":
        trainer.take_memory()
    texts = ServedTexts(job.memory, trainer.options.data.max_length)
    channel = Channel(Line(socket.socket(fileno=int(number))), texts, Path(job.folder))
    channel.send(Ready())
    learn(job, trainer, channel)


if __name__ == "__main__":
    main()
