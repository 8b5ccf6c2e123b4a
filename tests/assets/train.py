"""Trains the drafts of this folder: healthy ones, in which the doctor must find nothing wrong.

    make demo                                     # answers of assets/tiny-target, in runs/demo
    python tests/assets/train.py                  # all drafts
    python tests/assets/train.py dspark-gated     # one of them

They are narrow inside, so that all of them take less than 6 MB: attention has few heads of 32 dims, MLPs have 48
neurons. Each is trained by its family's program with the seed and the options that DRAFTS names, from states of the
target that are captured once, in 2 to 9 minutes on a core of a busy machine. An interrupted run continues; delete
DEMO/small to train anew.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from slipstream.models.drafts.base import HEAD
from slipstream.models.files.weights import public_tensors
from slipstream.train import dflash, eagle, eagle3
from slipstream.train.draft_options import BaseDraftOptions
from slipstream.train.draft_setup import train
from slipstream.train.options import CheckpointOptions, DataOptions, EvaluationOptions, OptimOptions
from slipstream.train.target_files import TargetFiles
from slipstream.train.training import DraftTraining

ASSETS = Path(__file__).resolve().parent
ROOT = ASSETS.parent.parent
TARGET = "assets/tiny-target"  # from ROOT
HEAD_DIM = 32
STATES = (2, 3, 4, 5, 6)  # that some draft reads
MUON: dict[str, Any] = {"name": "muon", "schedule": "linear", "momentum": 0.85}
FILES = ("config.json", "model.safetensors")
LONGEST = 512  # tokens of a conversation, and of a packed row


@dataclass(frozen=True)
class Recipe:
    program: Any  # module of train/
    seed: int
    options: Mapping[str, Any]  # of the draft
    lr: float
    heads: tuple[int, int]  # of queries, of keys and values
    map_size: int | None = 512  # tokens of the draft's vocabulary; None: all of the target's
    epochs: int = 10  # passes over the demo's answers
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the draft's config that no option sets


def chain(**options: Any) -> dict[str, Any]:
    return {"intermediate_size": 48, "ttt_steps": 3, **options}


def from_states(**options: Any) -> dict[str, Any]:
    """Options of an EAGLE3 draft."""
    return chain(**{"ttt_steps": 5, **options})


def block(**options: Any) -> dict[str, Any]:
    small = {"num_layers": 1, "intermediate_size": 48, "aux_layers": (5,)}
    return {**small, "anchors": 96, "loss": "dpace", **options}


def dspark(**options: Any) -> dict[str, Any]:
    return block(**{"markov_rank": 8, "sample_from_anchor": True, **options})


FEW = (2, 1)
SOME = (4, 2)
MANY = (4, 4)  # heads: a block's slots know of the text only by attention
DRAFTS: dict[str, Recipe] = {
    "eagle": Recipe(eagle, 0, chain(ttt_steps=1), 1e-2, FEW, 1024, 2),
    "eagle-no-bias": Recipe(eagle, 1, chain(bias=False), 1e-2, FEW, 1024, 3),
    "eagle-whole-vocabulary": Recipe(eagle, 2, chain(), 1e-2, FEW, None, 3),
    "eagle3": Recipe(eagle3, 0, from_states(aux_layers=(3,), norms=()), 6e-3, FEW, 256, 4),
    "eagle3-flags": Recipe(eagle3, 1, from_states(aux_layers=(2, 5), ttt_steps=3), 6e-3, FEW, 384, 2),
    "eagle3-one-state": Recipe(
        eagle3, 2, from_states(aux_layers=(4,), norms=("norm_before_fc", "norm_output")), 6e-3, FEW, 256, 4
    ),
    "dflash": Recipe(dflash, 0, block(block_size=6), 1e-2, MANY),
    "dflash-window": Recipe(dflash, 1, block(block_size=5, sliding_window=24), 1e-2, SOME),
    "dflash-anchor": Recipe(dflash, 2, block(block_size=4, sample_from_anchor=True), 1e-2, SOME),
    "dspark": Recipe(dflash, 0, dspark(block_size=4, confidence_head=True), 1e-2, MANY),
    "dspark-gated": Recipe(dflash, 1, dspark(block_size=5), 1e-2, SOME, fields={"markov_head_type": "gated"}),
    "dspark-fill-in": Recipe(dflash, 2, dspark(block_size=5, sample_from_anchor=False), 1e-2, SOME),
}
RUN_OPTIONS = {eagle: eagle.EagleOptions, eagle3: eagle3.Eagle3Options, dflash: dflash.DFlashOptions}
EVALUATIONS = {dflash: dflash.BlockEvaluationOptions}
TRAININGS = {eagle: eagle.EagleTraining, eagle3: eagle3.Eagle3Training, dflash: dflash.DFlashTraining}


@dataclass(frozen=True)
class NarrowFiles(TargetFiles):
    """Makes drafts with other heads than the target's."""

    recipe: Recipe | None = None

    def new_draft(self, network: type[Any], options: BaseDraftOptions, **sizes: Any) -> Any:
        queries, keys = self.recipe.heads
        narrow_sizes = {"num_heads": queries, "num_kv_heads": keys, "head_dim": HEAD_DIM}
        return super().new_draft(network, options, **{**sizes, **narrow_sizes, **self.recipe.fields})


def narrow(kind: type[DraftTraining], recipe: Recipe) -> type[DraftTraining]:
    """Trains drafts that are narrow inside, and start with what they can take from the target: its final norm, and the
    rows of its head if they have one of their own."""

    class Narrow(kind):
        @classmethod
        def new_draft(cls, options, files):
            values = (getattr(files, field.name) for field in fields(TargetFiles))
            return super().new_draft(options, NarrowFiles(*values, recipe))

        def start(self, *, continues=False):
            tensors = public_tensors(self.draft)
            weights = self.target.initial_weights(1)
            if "norm.weight" in tensors:
                tensors["norm.weight"].data.copy_(weights["norm.weight"])
            if HEAD in tensors:
                tensors[HEAD].data.copy_(weights[HEAD][self.target_ids])
            if self.drafter == "dflash":  # passes the last state on
                size = self.draft.config.hidden_size
                tensors["fc.weight"].data.zero_()[:, -size:].copy_(torch.eye(size))
            return ""

    return Narrow


def capture(demo: Path) -> Path:
    """The target's states of all answers, so that it runs once for all drafts."""
    path = demo / "small" / "states"
    program = [sys.executable, str(ROOT / "data_tools" / "capture_states.py"), "--data", str(demo / "dataset")]
    arguments = ["--target", TARGET, "--output", str(path), "--layers", *map(str, STATES), "--yes"]
    subprocess.run([*program, *arguments, "--max-length", str(LONGEST), "--heldout-documents", "40"], check=True)
    return path


def token_map(demo: Path, size: int) -> Path:
    """The `size` most frequent tokens of the answers."""
    path = demo / "small" / f"tokens-{size}.safetensors"
    if not path.exists():
        program = [sys.executable, str(ROOT / "data_tools" / "frequency_map.py"), "--data", str(demo / "dataset")]
        subprocess.run([*program, "--target", TARGET, "--size", str(size), "--output", str(path)], check=True)
    return path


def make(name: str, demo: Path):
    recipe = DRAFTS[name]
    output = demo / "small" / name
    options = dict(recipe.options)
    if recipe.map_size is not None:
        options["vocabulary"] = str(token_map(demo, recipe.map_size))
    run_options = RUN_OPTIONS[recipe.program](
        target=TARGET,
        output=str(output),
        data=DataOptions(path=str(demo / "dataset"), max_length=LONGEST, batch_size=2, aux_states=str(capture(demo))),
        draft=recipe.program.DraftOptions(**options),
        optim=OptimOptions(lr=recipe.lr, epochs=recipe.epochs, **MUON),
        evaluation=EVALUATIONS.get(recipe.program, EvaluationOptions)(every=200, documents=40),
        checkpoint=CheckpointOptions(every=100),
        seed=recipe.seed,
    )
    train(run_options, narrow(TRAININGS[recipe.program], recipe))
    folder = ASSETS / name
    folder.mkdir(exist_ok=True)
    for file in FILES:
        shutil.copyfile(output / "best" / file, folder / file)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="folder of `make demo`, for its dataset")
    parser.add_argument("names", nargs="*", default=list(DRAFTS), help=f"default: all of {', '.join(DRAFTS)}")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(DRAFTS)):
        parser.error(f"no draft is called {', '.join(unknown)}; there are {', '.join(DRAFTS)}")
    os.chdir(ROOT)
    if len(arguments.names) == 1:
        make(arguments.names[0], arguments.demo)
        return
    for name in arguments.names:  # a process for each, since accelerate keeps the state of one run
        subprocess.run([sys.executable, __file__, "--demo", str(arguments.demo), name], check=True)


if __name__ == "__main__":
    main()
