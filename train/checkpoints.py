"""The output folder of a run: step-N (servable, with the state to resume from) and best (servable).

Invariants: a folder under its final name is complete (models/files/atomic.py). A run killed at any moment continues
from its newest step-N as if it had never stopped, or starts over if there is none. Only what a run wrote is deleted or
replaced, and only after all checks have passed. One run at a time writes into the folder.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import Tensor, nn

from slipstream.config import complete, flatten
from slipstream.models.files.atomic import (
    FolderLock,
    InUseError,
    atomic_folder,
    check_staging,
    put_json,
    recover,
    remove_folder,
    staged_name,
)
from slipstream.models.files.checkpoint import disk_errors, read_json, reason
from slipstream.models.files.outputs import CHECKPOINT, STEP, step_folders
from slipstream.train.trackers import is_metrics

Options = Mapping[str, Any]  # flat, by dotted name
WriteDraft = Callable[[Mapping[str, Tensor], Path, Options], None]  # state_dict, folder, contents of run.json
# Options that may change when a run continues.
FREE_OPTIONS = (
    *("output", "dry_run", "target_sharding", "target_compile", "data.batch_size", "data.row_ranks"),
    "data.long_documents",
    "draft.interchange",  # the options that it chooses are compared
    *("optim.accumulation", "tracker.", "checkpoint.", "evaluation.every"),
    *("evaluation.patience", "draft.init_from_target"),
    *("states.endpoint", "states.engine", "states.devices", "states.prefetch", "states.timeout", "states.api_key_file"),
)
# Inputs that may have moved since, and the hash that identifies them.
BY_CONTENT = {"target": "target_fingerprint", "data.path": "data_hash", "draft.vocabulary": "vocabulary_hash"}
BY_CONTENT |= {"evaluation.costs": "costs_hash"}
LENGTHS = ("optim.epochs", "optim.steps")  # options that may grow when a run continues
# Remedies for hashes and lengths. For every other option: pass the saved value.
REMEDIES = {hash: f"pass the original {option}" for option, hash in BY_CONTENT.items()}
REMEDIES["split_documents"] = "pass the original data.long_documents"
REMEDIES |= dict.fromkeys(LENGTHS, "pass the saved value, or one above it,")
OWN_NAMES = re.compile(r"best|step-\d+|metrics\.jsonl|report\.html")  # names that a run or its report writes
DAMAGE = (SafetensorError, UnpicklingError)  # of a file of a state
SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED)


@dataclass(slots=True)
class Progress:
    step: int = 0  # optimizer steps done
    rows: int = 0  # packed rows trained on, all processes: the run's position in its data
    tokens: int = 0  # supervised tokens seen, all processes
    skipped_steps: int = 0  # of these, skipped because the gradient was not finite
    best_step: int = 0
    best_accept_length: float = 0.0  # at that step
    best_speed: float = 0.0  # expected, if that chooses the step
    evaluations_since_best: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the latest evaluation
    fitted: dict[str, list[float]] = field(default_factory=dict)  # fields of the draft's config, by that evaluation
    first_length: int = 0  # steps or epochs that the run was to have when it began: its warm-up is a share of these


def provenance(data_hash: str) -> dict[str, Any]:
    """Origin of a checkpoint, for its run.json: the command, the code, the machine of this process, the data."""
    versions = {name: version(name) for name in ("slipstream", "transformers", "accelerate")}
    versions |= {"python": sys.version.split()[0], "torch": str(torch.__version__)}  # with its build, such as +cu130
    return {
        "argv": sys.argv,
        "git_revision": git_revision(),
        "versions": versions,
        "system": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "cuda": torch.version.cuda,
            "processes": int(os.environ.get("WORLD_SIZE", "1")),
        },
        "data_hash": data_hash,
    }


def git_revision() -> str | None:
    """Revision of this code; None outside a repository, or where git is not installed."""
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return git.stdout.strip() or None


@dataclass(slots=True)
class Checkpoints:
    """Every method is called by all processes; the first one writes what is not sharded.

    `identity`: what must match for a run to continue: its options and the hashes of their files. `defaults` of options,
    for checkpoints from before there were these. `run`: the provenance for every run.json. `write_draft` writes a
    servable folder from a full state dict. `lock` of the output is held by the first process.
    """

    accelerator: Accelerator
    model: nn.Module
    output: Path
    keep: int
    identity: Options
    defaults: Options
    run: Options
    write_draft: WriteDraft
    lock: FolderLock | None
    newest: int = 0  # step of the newest checkpoint that this run loaded or wrote
    extension: dict[str, Any] = field(default_factory=dict)  # options of `optim` that this run changes: saved values

    def __post_init__(self) -> None:
        self.identity = _as_read(self.identity)
        self.defaults = _as_read(self.defaults)

    def resume(self) -> Progress:
        """Loads the newest checkpoint, if any, into the prepared model and optimizers. Raises ValueError if that run
        differs from this one."""
        folders = step_folders(self.output)
        progress = self.load(folders[-1]) if folders else Progress()
        self.newest = progress.step
        self.accelerator.wait_for_everyone()  # all have read
        if self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            clean(self.output)
        self.drop_old()  # left by a kill just after the newest one was written
        return progress

    def load(self, folder: Path) -> Progress:
        """Raises ValueError if it is a checkpoint of another run."""
        with damage_reported(folder):
            saved = read_json(folder / "state" / "progress.json")
            progress = Progress(**saved["progress"])
            identity = saved["identity"]
            form = saved["form"]
        self.check_identity(identity, folder)
        self.check_form(form, folder)
        with damage_reported(folder):
            # Training draws from no global generator: a process without a saved generator state misses nothing.
            self.accelerator.load_state(str(folder / "state"))
        self.accelerator.step = 0  # checkpoints lie between accumulation windows
        return progress

    def check_identity(self, saved: Options, folder: Path) -> None:
        """Raises ValueError if the run in `folder` has other options or inputs. An option that its version did not have
        counts as its default."""
        earlier = complete(saved, self.defaults)
        for name in sorted(self.identity.keys() | earlier.keys()):
            is_elsewhere = content_hash_of(name) in saved or (name in BY_CONTENT.values() and name not in saved)
            value = self.identity.get(name)
            saved_value = earlier.get(name)
            if value == saved_value or is_elsewhere or name.startswith(FREE_OPTIONS):
                continue
            if is_extension(name, earlier, self.identity):
                self.extension[name.removeprefix("optim.")] = saved_value
                continue
            if name not in self.identity.keys() | self.defaults.keys():
                raise ValueError(
                    f"the run in {folder} has {name} {saved_value!r}, an option that this version does not have; "
                    "continue it with the version that its run.json names, or name another output to start afresh"
                )
            raise ValueError(
                f"{name} is {value!r}, but the run in {folder} has {saved_value!r}; "
                f"{REMEDIES.get(name, 'pass the saved value')} to continue it, or another output to start afresh"
            )

    def check_form(self, saved: Options, folder: Path) -> None:
        """Raises ValueError if the state in `folder` was saved in shards that these processes cannot load."""
        form = state_form(self.accelerator)
        is_deepspeed = form["sharding"].startswith("DeepSpeed")  # which cannot reshard
        if form["sharding"] != saved["sharding"] or (is_deepspeed and form != saved):
            raise ValueError(
                f"{folder} was saved by {saved['num_processes']} processes under {saved['sharding']}, this launch has "
                f"{form['num_processes']} under {form['sharding']}; launch with the accelerate configuration and "
                "num_processes that the run began with (under DDP a run continues on any number)"
            )

    def save_best(self, progress: Progress) -> Path:
        """Returns the folder, as `save_step` does."""
        return self._save(self.output / "best", progress, with_state=False)

    def save_step(self, progress: Progress) -> Path:
        folder = self._save(self.output / f"step-{progress.step}", progress, with_state=True)
        self.newest = progress.step
        self.drop_old()
        return folder

    def drop_old(self) -> None:
        """Deletes all step checkpoints but the newest `keep` and those that hold a user's files, once every process has
        read or written them."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for old in step_folders(self.output)[: -self.keep]:
                if not STEP.foreign(old):
                    remove_folder(old)
        self.accelerator.wait_for_everyone()

    def check_alone(self) -> None:
        """Raises InUseError if another run has written here since, which a file system that grants a lock twice lets
        happen."""
        if self.lock is not None:
            self.lock.check()
        for folder in step_folders(self.output)[-1:]:
            if folder.name != f"step-{self.newest}":
                raise InUseError(
                    f"output {self.output} holds {folder.name} of another run, and the newest of this one is "
                    f"{self.newest}; this run ends, and the same command continues from {folder.name}"
                )

    def _save(self, path: Path, progress: Progress, *, with_state: bool) -> Path:
        tensors = self.accelerator.get_state_dict(self.model)
        with ExitStack() as stack:
            shared: list[Any] = [None]
            if self.accelerator.is_main_process:
                self.check_alone()
                kind = STEP if with_state else CHECKPOINT
                shared = [stack.enter_context(atomic_folder(path, kind.check))]
                values = asdict(progress)
                del values["fitted"]  # config.json has it
                del values["first_length"]
                del values["evaluations_since_best"]
                self.write_draft(tensors, shared[0], {**self.run, **values})
            folder = broadcast_object_list(shared)[0]
            if with_state:
                with disk_errors(folder):
                    self.accelerator.save_state(str(folder / "state"))
            if with_state and self.accelerator.is_main_process:
                form = state_form(self.accelerator)
                values = {"progress": asdict(progress), "identity": self.identity, "form": form}
                put_json(folder / "state" / "progress.json", values)
            self.accelerator.wait_for_everyone()
        self.accelerator.wait_for_everyone()
        return path


@contextmanager
def damage_reported(folder: Path) -> Iterator[None]:
    """Turns the errors of reading a damaged checkpoint, which its readers raise, into a ValueError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, EOFError, *DAMAGE) as error:
        raise ValueError(
            f"{folder} cannot be read ({reason(error)}); move it away, and the same command continues from the "
            "checkpoint before it, or starts over"
        ) from error


def _as_read(options: Options) -> dict[str, Any]:
    """Flat options as they read back from progress.json."""
    return dict(json.loads(json.dumps(flatten(options))))


def is_extension(name: str, saved: Options, options: Options) -> bool:
    """Whether a run may continue with this change to the option `name`: its length grows, or its learning rate, which
    was constant, decays in the end."""
    before = saved.get(name)
    after = options.get(name)
    if name in LENGTHS:
        return before is not None and after is not None and after > before
    return (name, before, after) == ("optim.schedule", "constant", "wsd")


def content_hash_of(name: str) -> str | None:
    """The hash in a run's identity that stands for the option `name`, or for the mapping of which it is a key."""
    return next((digest for option, digest in BY_CONTENT.items() if f"{name}.".startswith(f"{option}.")), None)


def state_form(accelerator: Accelerator) -> dict[str, Any]:
    """How the state is stored: whole (DDP, one process) or in shards."""
    sharding = "DDP or one process"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        sharding = f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    elif accelerator.distributed_type == DistributedType.FSDP:
        sharding = "FSDP"
    return {"sharding": sharding, "num_processes": accelerator.num_processes}


def check_run_folder(output: Path) -> None:
    """Raises ValueError if `output` holds something under a run's names that no run wrote."""
    for step in step_folders(output):
        missing = next((name for name in STEP.markers if not (step / name).is_file()), None)
        if missing is not None:
            raise ValueError(
                f"output {output} holds {step.name}, which is not a training checkpoint (it has no {missing}); "
                "move it away or name another output"
            )
    if (output / "best").exists():
        CHECKPOINT.check(output / "best")
    if not is_metrics(output / "metrics.jsonl"):
        raise ValueError(
            f"output {output} holds a metrics.jsonl that no training run wrote; move it away or name another output"
        )
    for path in interrupted(output):
        check_staging(path)


def clean(output: Path) -> None:
    """Deletes what a killed run or report was writing, and restores what it was about to replace."""
    for path in interrupted(output):
        recover(path)


def interrupted(output: Path) -> list[Path]:
    """Unfinished files and folders of a run or report that was killed or is still writing."""
    names = (staged_name(path.name) for path in output.iterdir()) if output.is_dir() else ()
    return [output / name for name in names if name is not None and OWN_NAMES.fullmatch(name)]
