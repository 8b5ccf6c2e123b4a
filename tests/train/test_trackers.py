"""What trackers write, what a resumed run does to them, and that training needs none of their packages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.train.options import TrackerOptions
from slipstream.train.trackers import JsonLines, import_tracker, open_trackers, read_lines


def test_json_lines_go_on_after_the_step_that_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path, step=0)
    for step in range(1, 5):
        log.log(step, {"loss": 1 / step})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    log = JsonLines(path, step=3)
    log.log(4, {"loss": 9.0})
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 1 / 3},
        {"step": 4, "loss": 9.0},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    trackers = open_trackers(tmp_path, TrackerOptions(tensorboard=True), {}, step=0)
    for tracker in trackers:
        tracker.log(1, {"loss": 2.0})
        tracker.log(2, {"loss": 1.5, "eval_accept_length": 1.25})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.5)]
    assert [event.value for event in events.Scalars("eval_accept_length")] == [1.25]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_wandb_runs_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = open_trackers(tmp_path, TrackerOptions(wandb=True, name="a run"), {"seed": 3}, step=0)
    for tracker in trackers:
        tracker.log(1, {"loss": 2.0})
        tracker.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert (tmp_path / "wandb_id").read_text() in folder.name
    assert list(folder.glob("run-*.wandb"))


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ValueError, match=r"tracker.wandb is on, but wandb is missing: pip install wandb"):
        import_tracker("no_such_module_of_wandb", "wandb")


def test_training_imports_no_tracker_and_no_server() -> None:
    names = ("wandb", "tensorboard", "fastapi", "uvicorn", "deepspeed")
    code = f"""
import sys
for name in {names}:
    sys.modules[name] = None  # an import now fails
import slipstream.train.eagle3
"""
    subprocess.run([sys.executable, "-c", code], check=True)
