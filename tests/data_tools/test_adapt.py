"""Drafts that go on with logged answers: what is held out, what is kept of old text, and when nothing is written."""

import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.data_tools import adapt as adapt_module
from slipstream.data_tools.adapt import HELD_OUT, MOST_HELD_OUT, adapt, divided
from slipstream.data_tools.dataset import Conversation, write_dataset
from slipstream.data_tools.verb_options import AdaptConfig
from slipstream.models.drafts.adapters import read_adapter
from slipstream.models.files.checkpoint import read_json, tokenizer_hash
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.request import Request, SamplingParams
from slipstream.tests.serve.engine_runs import build_engine, run
from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.user_errors import user_error
from slipstream.train import continuation
from slipstream.train.continuation import Continuation
from slipstream.train.loop import Loop

DRAFT = ROOT / "tests" / "assets" / "eagle3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Logs of two servers, and old data."""
    folder = tmp_path_factory.mktemp("logs")
    engine = build_engine(TINY, DRAFT, device="cpu", max_running=30)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    prompts = {str(seed): [1, 300 + seed, 17, 25] for seed in range(30)}
    answers = run(engine, [Request(id=name, prompt=prompt, params=params) for name, prompt in prompts.items()])
    rows = [prompts[name] + list(answers[name].tokens) for name in prompts]
    lines = [
        json.dumps({"input_ids": row, "loss_mask": [0] * 4 + [1] * (len(row) - 4), "kind": "chat"}) for row in rows
    ]
    (folder / "math.jsonl").write_text("\n".join(lines[:12] + lines[:3]) + "\n")
    (folder / "code.jsonl").write_text("\n".join(lines[12:20]) + '\n{"input_ids": [1, 2')
    old = [Conversation([(np.array(row, np.int32), np.arange(len(row)) >= 4)]) for row in rows[20:]]
    digest = tokenizer_hash(load_tokenizer(TINY))
    write_dataset(old, folder / "old", heldout=0.2, seed=0, describe=lambda: {"tokenizer_hash": digest})
    return folder


def config(folder: Path, output: Path, **options: Any) -> AdaptConfig:
    logs = (str(folder / "math.jsonl"), str(folder / "code.jsonl"))
    options = {"draft": str(DRAFT), "skip_bad": True, "device": "cpu", **options}
    return AdaptConfig(from_log=logs, old=(str(folder / "old"),), target=str(TINY), output=str(output), **options)


def test_a_draft_goes_on_with_logged_answers(folder, tmp_path, monkeypatch, capsys):
    """The draft that is written is as the table says, and another run goes on from it."""
    monkeypatch.setattr(continuation, "RATE", 1.0)
    monkeypatch.setattr(adapt_module, "LOSS", 1.0)
    output = tmp_path / "adapted"
    adapt(config(folder, output, epochs=2))
    run_file = read_json(output / "run.json")
    assert run_file["learned_from"] == str(DRAFT)
    lengths = run_file["accept_lengths"]
    assert [*lengths] == ["math", "code", "old data"]
    assert any(after != before for before, after in lengths.values())
    report = capsys.readouterr().out
    rows = [line.split() for line in report.splitlines() if line.startswith(("math", "code", "old data"))]
    assert [row[-4] for row in rows] == ["2", "1", "2"]
    assert run_file["target_path"] == str(TINY)
    again = tmp_path / "again"
    adapt(config(folder, again, epochs=1, draft=str(output)))
    later = read_json(again / "run.json")
    assert later["learned_from"] == str(DRAFT)
    for name, (before, _) in later["accept_lengths"].items():
        assert before == pytest.approx(lengths[name][1], abs=0.05), "weights are rounded to 16 bits"


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(folder, tmp_path, monkeypatch, capsys):
    """SIGTERM ends it in its second step, and Ctrl-C once it is trained: what is written is the same, bit for bit.
    Other options are refused, and a written draft is left alone by the command that wrote it."""
    monkeypatch.setattr(adapt_module, "LOSS", 1.0)
    train_step = Loop.train_step
    lengths = Continuation.lengths
    adapt(config(folder, tmp_path / "whole", epochs=2))
    output = tmp_path / "adapted"

    def end_in_second(loop, interrupted):
        if loop.progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(loop, interrupted)

    def end_last(self, loop, weights):
        if loop.is_done:
            raise KeyboardInterrupt
        return lengths(self, loop, weights)

    monkeypatch.setattr(Loop, "train_step", end_in_second)
    with pytest.raises(SystemExit) as ended:
        adapt(config(folder, output, epochs=2))
    monkeypatch.setattr(Loop, "train_step", train_step)
    assert ended.value.code == 130
    assert [path.name for path in output.iterdir()] == ["step-3"]
    with user_error("epochs is 5, but the run in .*step-3 has 2; pass the saved value"):
        adapt(config(folder, output, epochs=5))
    monkeypatch.setattr(Continuation, "lengths", end_last)
    with pytest.raises(KeyboardInterrupt):
        adapt(config(folder, output, epochs=2))
    monkeypatch.setattr(Continuation, "lengths", lengths)
    adapt(config(folder, output, epochs=2))
    assert {path.name for path in output.iterdir()} == {"config.json", "model.safetensors", "run.json"}
    for name in ("config.json", "model.safetensors"):
        assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    monkeypatch.setattr(adapt_module, "train", None)
    capsys.readouterr()
    adapt(config(folder, output, epochs=2))
    assert "written before, by the same options" in capsys.readouterr().out
    with user_error("exists; name another folder or add --overwrite"):
        adapt(config(folder, output, epochs=5))
    assert not list(tmp_path.glob(".*"))


def test_an_adapter_goes_half_of_the_way(folder, tmp_path, monkeypatch):
    """It is accepted as the table says, merged into the draft that it names."""
    monkeypatch.setattr(continuation, "RATE", 1.0)
    monkeypatch.setattr(adapt_module, "LOSS", 1.0)
    output = tmp_path / "adapter"
    adapt(config(folder, output, epochs=2, lora_rank=4))
    adapter = read_adapter(output)
    assert adapter.base == str(DRAFT.resolve())
    lengths = read_json(output / "run.json")["accept_lengths"]
    assert any(after != before for before, after in lengths.values())
    adapt(config(folder, tmp_path / "again", epochs=1, draft=str(output)))
    for name, (before, _) in read_json(tmp_path / "again" / "run.json")["accept_lengths"].items():
        assert before == pytest.approx(lengths[name][1], abs=0.01)


def test_nothing_is_written_where_old_text_is_forgotten(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(adapt_module, "LOSS", -9.0)  # it would have to rise tenfold
    output = tmp_path / "adapted"
    with pytest.raises(SystemExit) as ended:
        adapt(config(folder, output, epochs=1))
    assert ended.value.code == adapt_module.WORSE
    assert not list(tmp_path.iterdir())
    assert "old data: more than" in capsys.readouterr().out


def test_a_log_of_one_row_is_refused(folder, tmp_path):
    log = tmp_path / "short.jsonl"
    log.write_text((folder / "math.jsonl").read_text().partition("\n")[0] + "\n")
    with user_error("from_log has one row of each category"):
        adapt(replace(config(folder, tmp_path / "adapted"), from_log=(str(log),)))


def test_every_eighth_row_of_a_category_is_held_out_and_copies_are_dropped():
    def conversation(category, number):
        return Conversation([(np.array([number], np.int32), np.array([True]))], category)

    sizes = {"a": 9, "b": 1, "c": HELD_OUT * (MOST_HELD_OUT + 5)}
    starts = {"a": 0, "b": 100, "c": 1000}
    rows = [conversation(name, starts[name] + number) for name, size in sizes.items() for number in range(size)]
    entries = [*divided(iter(rows + rows[:20]))]
    assert [entry for _, entry in entries] == rows
    heldout = Counter(entry.category for is_heldout, entry in entries if is_heldout)
    assert heldout == {"a": 1, "c": MOST_HELD_OUT}
