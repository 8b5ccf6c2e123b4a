"""Where a run's numbers go: metrics.jsonl always, Weights & Biases and TensorBoard on request."""

import importlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from slipstream.train.options import TrackerOptions


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a step. Opened at step n it drops the lines after n, which a killed run may have left."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_lines(path) if line["step"] <= step]
        draft = path.with_suffix(".tmp")
        draft.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(draft, path)
        self.file = path.open("a")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line without its end is what a killed run was writing, and is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class TensorBoard:
    def __init__(self, folder: Path, step: int) -> None:
        module = import_tracker("torch.utils.tensorboard", "tensorboard")
        self.writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Resumes the run whose id lies in the output folder. Offline without an API key; `wandb sync` uploads later."""

    def __init__(self, folder: Path, options: TrackerOptions, config: Mapping[str, Any]) -> None:
        wandb = import_tracker("wandb", "wandb")
        id_path = folder / "wandb_id"
        if not id_path.exists():
            id_path.write_text(uuid.uuid4().hex)
        self.run = wandb.init(
            project=options.project,
            name=options.name or folder.name,
            id=id_path.read_text(),
            resume="allow",
            dir=str(folder),
            mode="online" if wandb.api.api_key else "offline",
            config=dict(config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


def import_tracker(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"tracker.{package} is on, but {package} is missing: pip install {package}") from error


def open_trackers(folder: Path, options: TrackerOptions, config: Mapping[str, Any], step: int) -> list[Tracker]:
    trackers: list[Tracker] = [JsonLines(folder / "metrics.jsonl", step)]
    if options.tensorboard:
        trackers.append(TensorBoard(folder, step))
    if options.wandb:
        trackers.append(WeightsAndBiases(folder, options, config))
    return trackers
