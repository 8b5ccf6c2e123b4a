"""Log a run's metrics and samples: to metrics.jsonl always, to Weights & Biases and TensorBoard on request.

All get the same metrics and samples. Weights & Biases also gets the options, the code's revision, versions and system
(`run` of its config) and, by option, checkpoints. Invariant: what a tracker besides metrics.jsonl raises ends no run;
it is said once, and that tracker is switched off.
"""

import importlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from slipstream.models.files.atomic import atomic_file, full_disk_errors
from slipstream.models.files.checkpoint import Values
from slipstream.train.options import TrackerOptions
from slipstream.train.samples import Sample

RECORD = '{"step": '  # start of every record
BY_POSITION = "eval_accept_rate_"


class JsonLines:
    """One JSON object a step. Opened at step n, it drops later records, left by a killed run."""

    def __init__(self, path: Path, step: int) -> None:
        lines = [line for line in read_lines(path) if line["step"] <= step]
        with atomic_file(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.path = path
        self.file = path.open("a")

    def log(self, step: int, values: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        with full_disk_errors(self.path):
            for record in ({"step": step, **values}, *(sample.record(step) for sample in samples)):
                self.file.write(json.dumps(record) + "\n")
            self.file.flush()

    def close(self) -> None:
        with full_disk_errors(self.path):  # what could not be written is tried again
            self.file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without an unfinished last line, which a killed run was writing. Raises
    ValueError that names a line which no run wrote."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    return [read_record(path, place, line) for place, line in enumerate(lines, 1) if line.endswith("\n")]


def read_record(path: Path, place: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    values = record if isinstance(record, dict) else {}
    numbers = [value for name, value in values.items() if name != "sample"]
    if type(values.get("step")) is not int or not all(isinstance(value, int | float) for value in numbers):
        raise ValueError(f"{path}, line {place}, is no record of a run: {line[:80].strip()}; remove the line")
    return values


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The same without sample answers: one record a step."""
    return [line for line in read_lines(path) if "sample" not in line]


def is_metrics(path: Path) -> bool:
    """Whether the file, if there is one, holds only a run's records; a kill may have cut off the last."""
    if not path.exists():
        return True
    try:
        last = path.read_text().rpartition("\n")[2]
        read_lines(path)
        return RECORD.startswith(last[: len(RECORD)])
    except ValueError:
        return False


class TensorBoard:
    def __init__(self, folder: Path, step: int) -> None:
        module = import_tracker("torch.utils.tensorboard", "tensorboard")
        self.writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        for number, sample in enumerate(samples):
            self.writer.add_text(f"sample_{number}", f"{escape(sample.prompt)}<hr>{sample.html()}", step)

    def checkpoint(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps none."""

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Continues the run whose id is stored in the output folder. Offline where there is neither a key nor WANDB_MODE,
    and where the service fails at the start; `wandb sync` uploads later."""

    def __init__(self, folder: Path, options: TrackerOptions, config: Values) -> None:
        self.wandb = import_tracker("wandb", "wandb")
        id_path = folder / "wandb_id"
        if not id_path.exists() or not id_path.read_text():  # a kill may have left it empty
            id_path.write_text(uuid.uuid4().hex)
        self.uploads = options.wandb
        settings = {  # W&B reads other variables by itself
            "project": os.environ.get("WANDB_PROJECT", "slipstream"),
            "name": os.environ.get("WANDB_NAME", folder.name),
            "job_type": "train",
            "id": id_path.read_text(),
            "resume": "allow",
            "dir": str(folder),
            "config": dict(config),
        }
        has_mode = "WANDB_MODE" in os.environ or self.wandb.api.api_key
        try:
            self.run = self.wandb.init(**settings, mode=None if has_mode else "offline")
        except Exception as error:  # of many types: the network, the service, its settings
            tqdm.write(f"Weights & Biases does not start ({error}); goes on offline, `wandb sync` uploads later")
            self.run = self.wandb.init(**settings, mode="offline")
        self.run.define_metric("eval_accept_length", summary="max")
        self.run.define_metric("loss", summary="min")

    def log(self, step: int, values: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Also logs a bar chart of the accept rate by drafted position and a table of samples."""
        record: dict[str, Any] = dict(values)
        rates = [(name.removeprefix(BY_POSITION), rate) for name, rate in values.items() if BY_POSITION in name]
        if rates:
            table = self.wandb.Table(columns=["position", "accept rate"], data=[list(rate) for rate in rates])
            title = "Accept rate by position: share of rounds"
            record["accept_rate_by_position"] = self.wandb.plot.bar(table, "position", "accept rate", title=title)
        if samples:
            rows = [[step, sample.prompt, self.wandb.Html(sample.html()), sample.accepted_share] for sample in samples]
            record["samples"] = self.wandb.Table(columns=["step", "prompt", "answer", "share drafted"], data=rows)
        self.run.log(record, step=step)

    def checkpoint(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Uploads a checkpoint's servable files as a new version of one artifact, with the folder's name as alias."""
        if self.uploads == "metrics" or (self.uploads == "best" and folder.name != "best"):
            return
        artifact = self.wandb.Artifact(f"draft-{self.run.id}", type="model", metadata={"step": step, **metrics})
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            artifact.add_file(str(file))
        self.run.log_artifact(artifact, aliases=["latest", folder.name])

    def close(self) -> None:
        self.run.finish()


def import_tracker(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"tracker.{package} is on, but {package} is missing: pip install {package}") from error


Tracker = TensorBoard | WeightsAndBiases


class Trackers:
    """All of a run's. `config`: options and identity; `run`: provenance of the code, the system and the data."""

    def __init__(self, folder: Path, options: TrackerOptions, config: Values, run: Values, step: int) -> None:
        self.lines = JsonLines(folder / "metrics.jsonl", step)
        self.services: dict[str, Tracker] = {}
        if options.tensorboard:
            import_tracker("torch.utils.tensorboard", "tensorboard")
            self._begin("TensorBoard", lambda: TensorBoard(folder, step))
        if options.wandb != "none":
            import_tracker("wandb", "wandb")
            self._begin("Weights & Biases", lambda: WeightsAndBiases(folder, options, {**config, "run": dict(run)}))

    def log(self, step: int, values: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        self.lines.log(step, values, samples)
        self._tell(lambda tracker: tracker.log(step, values, samples))

    def checkpoints(self, folders: Sequence[Path], step: int, metrics: Mapping[str, float]) -> None:
        """`folders` were written in this step; `metrics` of the latest evaluation."""

        def upload(tracker: Tracker) -> None:
            for folder in folders:
                tracker.checkpoint(folder, step, metrics)

        self._tell(upload)

    def close(self) -> None:
        self.lines.close()
        self._tell(lambda tracker: tracker.close())

    def _begin(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            self.services[name] = make()
        except Exception as error:  # as in _tell
            _say_off(name, error)

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        """Calls every tracker besides metrics.jsonl."""
        for name, tracker in list(self.services.items()):
            try:
                call(tracker)
            except Exception as error:  # of types that only the package knows; a service must not end a run
                del self.services[name]
                _say_off(name, error)


def _say_off(name: str, error: Exception) -> None:
    tqdm.write(f"{name} is off from here on ({type(error).__name__}: {error}); metrics.jsonl goes on")
