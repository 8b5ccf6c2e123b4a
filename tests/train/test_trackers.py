"""Trackers: the records that they write, how a resumed run continues them, and training without their packages."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.train.options import TrackerOptions
from slipstream.train.samples import Sample
from slipstream.train.trackers import JsonLines, Trackers, import_tracker, is_metrics, read_lines

SAMPLE = Sample("what is <2 + 2>?", "it is 4.", ((0, 2), (6, 8)))


def test_json_lines_go_on_after_the_step_that_is_resumed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "metrics.tmp").write_text("mine")
    log = JsonLines(path, step=0)
    for step in range(1, 5):
        log.log(step, {"loss": 1 / step}, [SAMPLE] if step in (2, 4) else [])
    log.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    log = JsonLines(path, step=3)
    log.log(4, {"loss": 9.0})
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 2, "sample": {"prompt": "what is <2 + 2>?", "answer": "it is 4.", "spans": [[0, 2], [6, 8]]}},
        {"step": 3, "loss": 1 / 3},
        {"step": 4, "loss": 9.0},
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.tmp"]
    assert (tmp_path / "metrics.tmp").read_text() == "mine"


def test_a_full_disk_is_told_with_the_name_of_the_records(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl", step=0)
    log.file.close()
    with Path("/dev/full").open("a") as log.file:
        for write in (lambda: log.log(1, {}), log.close):
            with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/metrics.jsonl'"):
                write()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"step": 1, "loss": 2.0}\n{"step": 1, "sample": {}}\n', True),
        ('{"step": 1}\n{"step": 2, "lo', True),
        ('{"st', True),
        ("", True),
        ("a note", False),
        ('{"step": 1}\na note', False),
        ('{"epoch": 1}\n', False),
        ("5\n", False),
        ("[1]\n", False),
        ('{"step": 1, "loss": null}\n', False),
        ("\xff\n", False),
    ],
)
def test_the_records_of_a_run_are_told_from_other_files(content, expected, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(content)
    assert is_metrics(tmp_path / "metrics.jsonl") is expected


def test_tensorboard_has_the_content_of_metrics_jsonl(tmp_path):
    trackers = Trackers(tmp_path, TrackerOptions(tensorboard=True), {}, {}, step=0)
    trackers.log(1, {"loss": 2.0})
    trackers.log(2, {"loss": 1.5, "eval_accept_length": 1.25}, [SAMPLE, SAMPLE])
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    lines = read_lines(tmp_path / "metrics.jsonl")
    numbers = [line for line in lines if "sample" not in line]
    for name in ("loss", "eval_accept_length"):
        expected = [(line["step"], line[name]) for line in numbers if name in line]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected
    assert set(events.Tags()["scalars"]) == {"loss", "eval_accept_length"}
    assert len(lines) - len(numbers) == len(events.Tags()["tensors"]) == 2
    (event,) = events.Tensors("sample_1/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text == "what is &lt;2 + 2&gt;?<hr><mark>it</mark> is <mark>4.</mark>"
    assert event.step == 2


class FakeWandb:
    """The part of wandb that is used; it records every call."""

    api = SimpleNamespace(api_key="key")

    def __init__(self):
        self.options: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.artifacts: list[Any] = []
        self.summaries: dict[str, str] = {}
        self.is_finished = False
        self.id = ""
        self.plot = SimpleNamespace(bar=lambda table, x, y, title: ("bar", table, x, y, title))

    def init(self, **options: Any) -> "FakeWandb":
        self.options = options
        self.id = options["id"]
        return self

    def define_metric(self, name: str, summary: str):
        self.summaries[name] = summary

    def log(self, record: dict[str, Any], step: int):
        self.logged.append((step, record))

    def finish(self):
        self.is_finished = True

    def Table(self, columns: list[str], data: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
        return columns, data

    def Html(self, text: str) -> str:
        return text

    def Artifact(self, name: str, type: str, metadata: dict[str, Any]) -> SimpleNamespace:
        files = []
        return SimpleNamespace(name=name, type=type, metadata=metadata, files=files, add_file=files.append)

    def log_artifact(self, artifact: SimpleNamespace, aliases: list[str]):
        self.artifacts.append((artifact, aliases))


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_options_provenance_numbers_and_samples(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "drafts")
    options = TrackerOptions(wandb="metrics")
    run = {"git_revision": "abc", "system": {"cpus": 2}, "argv": ["train/eagle3.py"]}
    trackers = Trackers(tmp_path / "..", options, {"seed": 3, "optim": {"lr": 1e-4}}, run, step=0)
    values = {"loss": 1.0, "eval_accept_length": 1.5, "eval_accept_rate_0": 0.4, "eval_accept_rate_1": 0.1}
    trackers.log(7, values, [SAMPLE])
    trackers.log(8, {"loss": 0.5})
    trackers.close()
    assert wandb.options["config"] == {"seed": 3, "optim": {"lr": 1e-4}, "run": run}
    expected = {"project": "drafts", "name": "..", "mode": None, "resume": "allow"}
    assert expected.items() <= wandb.options.items()
    (_, first), (_, second) = wandb.logged
    assert values.items() <= first.items()
    _, table, *_ = first["accept_rate_by_position"]
    assert table == (["position", "accept rate"], [["0", 0.4], ["1", 0.1]])
    answer = "<mark>it</mark> is <mark>4.</mark>"
    assert first["samples"] == (
        ["step", "prompt", "answer", "share drafted"],
        [[7, SAMPLE.prompt, answer, SAMPLE.accepted_share]],
    )
    assert second == {"loss": 0.5}
    assert [step for step, _ in wandb.logged] == [7, 8]
    assert wandb.summaries == {"eval_accept_length": "max", "loss": "min"}
    assert wandb.is_finished


def test_a_run_that_goes_on_is_the_same_run_of_wandb(tmp_path, wandb):
    names = []
    for step in (0, 3):
        Trackers(tmp_path, TrackerOptions(wandb="metrics"), {}, {}, step).close()
        names.append(wandb.options["id"])
    assert names[0] == names[1] == (tmp_path / "wandb_id").read_text()


@pytest.mark.parametrize(("uploads", "expected"), [("metrics", []), ("best", ["best"]), ("all", ["best", "step-4"])])
def test_checkpoints_become_artifacts_by_option(uploads, expected, tmp_path, wandb):
    folders = [tmp_path / "best", tmp_path / "step-4"]
    for folder in folders:
        (folder / "state").mkdir(parents=True)
        (folder / "model.safetensors").touch()
    trackers = Trackers(tmp_path, TrackerOptions(wandb=uploads), {}, {}, step=0)
    trackers.checkpoints(folders, 4, {"accept_length": 1.5})
    assert [aliases for _, aliases in wandb.artifacts] == [["latest", name] for name in expected]
    for artifact, aliases in wandb.artifacts:
        assert artifact.files == [str(tmp_path / aliases[1] / "model.safetensors")], "what serves, not what resumes"
        assert artifact.metadata == {"step": 4, "accept_length": 1.5}
        assert artifact.name == f"draft-{wandb.id}"
    trackers.close()


@pytest.mark.parametrize(
    ("key", "variable", "mode"),
    [("key", None, None), ("", None, "offline"), ("key", "offline", None), ("", "disabled", None)],
)
def test_wandb_is_left_its_own_mode(key, variable, mode, tmp_path, wandb, monkeypatch):
    """Offline only where it would ask for a key."""
    monkeypatch.setattr(FakeWandb, "api", SimpleNamespace(api_key=key))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    Trackers(tmp_path, TrackerOptions(wandb="metrics"), {}, {}, step=0)
    assert wandb.options["mode"] == mode


FAILURES = ("init", "define_metric", "log", "Table", "Artifact", "log_artifact", "finish")


@pytest.mark.parametrize("name", FAILURES)
def test_whatever_wandb_raises_ends_no_run(name, tmp_path, wandb, monkeypatch, capsys):
    """At the start and when a run continues; it is said once, and metrics.jsonl goes on."""

    def fail(*_, **__):
        raise RuntimeError("no network")

    monkeypatch.setattr(wandb, name, fail, raising=True)
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").touch()
    for first in (0, 2):
        trackers = Trackers(tmp_path, TrackerOptions(wandb="all"), {}, {}, step=first)
        for step in (first + 1, first + 2):
            trackers.log(step, {"loss": 1.0, "eval_accept_rate_0": 0.5}, [SAMPLE])
            trackers.checkpoints([tmp_path / "best"], step, {})
        trackers.close()
        printed = capsys.readouterr().out
        assert printed.count("Weights & Biases is off from here on (RuntimeError: no network)") == 1
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4]


def test_wandb_goes_offline_where_the_service_does_not_answer(tmp_path, wandb, monkeypatch, capsys):
    init = wandb.init

    def refuse_online(**options):
        if options["mode"] is None:
            raise OSError("deadline exceeded")
        return init(**options)

    monkeypatch.setattr(wandb, "init", refuse_online)
    trackers = Trackers(tmp_path, TrackerOptions(wandb="metrics"), {}, {}, step=0)
    trackers.log(1, {"loss": 1.0})
    assert wandb.options["mode"] == "offline"
    assert wandb.logged == [(1, {"loss": 1.0})]
    assert "does not start (deadline exceeded); goes on offline" in capsys.readouterr().out


@pytest.mark.slow
def test_wandb_runs_offline_without_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    best = tmp_path / "best"
    best.mkdir()
    (best / "config.json").write_text("{}")
    options = TrackerOptions(wandb="best")
    trackers = Trackers(tmp_path, options, {"seed": 3}, {}, step=0)
    trackers.log(1, {"loss": 2.0, "eval_accept_rate_0": 0.5}, [SAMPLE])
    trackers.checkpoints([best], 1, {"accept_length": 1.0})
    trackers.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert (tmp_path / "wandb_id").read_text() in folder.name
    assert list(folder.glob("run-*.wandb"))


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(ValueError, match=r"tracker.wandb is on, but wandb is missing: pip install wandb"):
        import_tracker("no_such_module_of_wandb", "wandb")


@pytest.mark.slow
def test_training_imports_no_tracker_and_no_server():
    names = ("wandb", "tensorboard", "starlette", "uvicorn", "deepspeed")
    code = f"""
import sys
for name in {names}:
    sys.modules[name] = None  # an import now fails
import slipstream.train.eagle3
"""
    subprocess.run([sys.executable, "-c", code], check=True)
