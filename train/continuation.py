"""A draft whose training goes on, on new text and old: by its family's objective, at a low rate, and what it becomes
lies between its first weights and the trained ones, so that it forgets little. `serve --learn` (learn.py) and
`slipstream adapt` (data_tools/adapt.py) train so.
"""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from slipstream.models.drafts.source import drafter_of
from slipstream.models.files.atomic import FolderLock
from slipstream.models.files.checkpoint import Values, read_json, resolve, target_path
from slipstream.models.files.learning import TEXT_LEN
from slipstream.models.layers.formats.base import Tensors
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.frozen import load_frozen_target
from slipstream.train.batches import PackedRows
from slipstream.train.checkpoints import Checkpoints, Options, Progress
from slipstream.train.interrupts import Interrupt
from slipstream.train.loop import Loop, dtype_of_weights
from slipstream.train.low_rank import FIRST
from slipstream.train.optim import build_optimizers
from slipstream.train.options import DataOptions, EvaluationOptions, OptimOptions
from slipstream.train.training import DraftTraining
from slipstream.train.warm_start import read_start

LOSS = 0.02  # of the accept length of past texts, up to which new weights are worth having; few texts say it to 1 %
RATE = 0.3  # of the learning rate of a run from scratch
WAY = 0.5  # from the first weights to the trained ones, which new weights have gone (Wortsman et al., 2109.01903)
PAST = 0.5  # share of past texts in an epoch, if there are enough of them
MOST_PASSES = 8  # through a past text in an epoch


class Continuation:
    """`best`: the weights from which new ones start; at first the draft's."""

    def __init__(
        self,
        target: str,
        draft: str,
        device: torch.device,
        optim: OptimOptions,
        *,
        trust_remote_code: bool,
        last_layers: int | None,
        lora_rank: int = 0,
    ) -> None:
        """`last_layers`: of the target, as load_frozen_target wants them; 0 where rows bring its states. `lora_rank`:
        of an adapter, which is trained in place of all weights."""
        path = resolve(target)
        self.config = load_config(path, trust_remote_code)
        folder = resolve(draft)
        self.lineage = {"learned_from": origin_of(folder, draft), **target_path(target)}
        drafter = drafter_of(read_json(folder / "config.json"), draft)
        module = importlib.import_module(f"slipstream.train.{drafter}")
        kind: type[DraftTraining] = module.program.keywords["kind"]
        options_class = module.main.args[1]
        network: Any = read_start("draft", str(folder), kind.Network, drafter, self.config)
        length = min(TEXT_LEN, network.config.max_position_embeddings)
        options = options_class(
            target=target,
            output="",
            data=DataOptions(path="served", max_length=length, long_documents="cut"),
            optim=optim,
            evaluation=EvaluationOptions(),
        )
        on_cpu = device.type == "cpu"
        self.accelerator = Accelerator(cpu=on_cpu, mixed_precision="no" if on_cpu else "bf16")
        frozen = load_frozen_target(path, network.config.aux_layers, device, trust_remote_code, last_layers)
        training = kind.of(network.to(device).requires_grad_(True), frozen, options, device)
        training.target.read_as = dtype_of_weights(self.accelerator)
        self.training = training
        weights = self.weights()
        training.start(continues=True)  # says what is trained
        self.load(weights)
        if lora_rank:
            training.adapt(lora_rank, draft)
        self.options = options
        optimizers = build_optimizers(training, optim)
        self.model, *self.optimizers = self.accelerator.prepare(training, *optimizers)
        self.progress = Progress(first_length=optim.steps or optim.epochs)
        self.best = self.weights()

    def resume(self, output: Path, identity: Options, run: Options, lock: FolderLock) -> Checkpoints:
        """Goes on from the newest checkpoint in `output`, if there is one; `best` stays. Returns those to come."""
        write = self.training.write
        checkpoints = Checkpoints(self.accelerator, self.model, output, 1, identity, {}, run, write, lock)
        length = self.progress.first_length
        self.progress = checkpoints.resume()
        self.progress.first_length = self.progress.first_length or length
        return checkpoints

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.training.state_dict().items()}

    def load(self, weights: Tensors) -> None:
        self.training.load_state_dict(weights)

    def exchange(self, weights: Tensors) -> dict[str, Tensor]:
        """Takes these in place of the weights there, which it returns. Copies nothing."""
        parameters = self.training.state_dict(keep_vars=True)
        before = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = weights[name]
        return before

    def new_weights(self) -> dict[str, Tensor]:
        """Weights to offer."""
        return {
            name: tensor.clone()
            if FIRST in name or not tensor.is_floating_point()
            else self.best[name].lerp(tensor, WAY)
            for name, tensor in self.training.state_dict().items()
        }

    def loop_over(self, train: PackedRows, heldout: PackedRows, size: int = 1) -> Loop:
        """Returns the loop over some rows, `size` in a pass; optimizers and progress go on."""
        options = self.options
        rate = RATE * self.training.peak_lr(options.optim, size * options.data.max_length)
        return Loop(
            self.accelerator,
            self.model,
            self.optimizers,
            replace(options, data=replace(options.data, batch_size=size), optim=replace(options.optim, lr=rate)),
            train,
            heldout,
            self.progress,
            self.training,
        )

    def lengths(self, loop: Loop, weights: Tensors) -> dict[str, float]:
        """Simulated accept lengths of held-out texts with these weights, by category; the trained weights stay."""
        self.training.categories = sorted({*map(str, loop.heldout.categories)})
        trained = self.exchange(weights)
        try:
            metrics = loop.evaluate()
        finally:
            self.exchange(trained)
        names = {name: f"eval_accept_length_by_category/{name}" for name in self.training.categories}
        return {name: metrics[key] for name, key in names.items() if key in metrics}

    def write(self, weights: Tensors, folder: Path, run: Values) -> None:
        """Writes a servable checkpoint, whose run.json says from which draft it goes on, into an existing folder."""
        self.training.write(weights, folder, {**self.lineage, "step": self.progress.step, **run})


def train_steps(loop: Loop, checkpoints: Checkpoints) -> None:
    """Trains to the last step; at SIGINT, SIGTERM or SIGHUP saves after the step at hand and exits with status 130."""
    progress = loop.progress
    stopped = False
    with Interrupt() as interrupt, tqdm(total=loop.num_steps, initial=progress.step, unit="step") as bar:
        while not loop.is_done and not stopped:
            _, stopped = loop.train_step(interrupt.received)
            if loop.is_done or stopped or progress.step % loop.options.checkpoint.every == 0:
                checkpoints.save_step(progress)
            bar.update()
    if not loop.is_done:
        print(f"stopped; step {progress.step} of {loop.num_steps} is saved, the same command continues")
        raise SystemExit(130)


def origin_of(folder: Path, name: str) -> str:
    """The draft that learning began with: the draft `name`, unless it has been learnt itself."""
    run = folder / "run.json"
    return read_json(run).get("learned_from", name) if run.is_file() else name
