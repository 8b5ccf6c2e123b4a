"""Trains as train/eagle3.py does and notes which documents it was trained on; alone or as one of several processes:

    torchrun --nproc_per_node 2 tests/train/recorded_run.py JOB.json

JOB.json: `flags` of the program, `stop_in`: the step in which the last process is interrupted, or null.
"""

import json
import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import torch

from slipstream.train import eagle3, loop
from slipstream.train.batches import training_batches
from slipstream.train.loop import Loop

RANK = int(os.environ.get("RANK", "0"))
NUM_PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def train(flags: list[str], stop_in: int | None) -> list[list[int]]:
    """Tokens of each document that this process was given as new. The run saves after the step that follows."""
    documents = []
    train_step = Loop.train_step

    def noted(rows, *share):
        for batch, is_new in training_batches(rows, *share):
            numbers = range(int(batch.documents.max()) + 1 if is_new else 0)
            documents.extend(batch.tokens[batch.documents == number].tolist() for number in numbers)
            yield batch, is_new

    def interrupted(run, received):
        if run.progress.step + 1 == stop_in and RANK == NUM_PROCESSES - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(run, received)

    with patch.object(loop, "training_batches", noted), patch.object(Loop, "train_step", interrupted):
        try:
            eagle3.main(flags)
        except SystemExit as stop:
            if stop.code != 130:
                raise
    return documents


def main(path: Path):
    torch.set_num_threads(1)
    path.with_suffix(f".{RANK}.json").write_text(json.dumps(train(**json.loads(path.read_text()))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
