"""The demo with a real model: what it refuses without a GPU, its prompts, its report, and all steps in miniature."""

import json
import os
import shutil
import subprocess

import pytest
import torch

from slipstream.bench import real_demo
from slipstream.bench.demo import ROOT
from slipstream.bench.real_demo import RealDemoConfig, identical_answers, main, prompts, write_report
from slipstream.serve.measure.questions import read_questions
from slipstream.tests.sources import TINY
from slipstream.tests.tables import each_case

NO_GPU = "TARGET=smollm2 needs an NVIDIA GPU"


def test_without_a_gpu_nothing_is_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SystemExit, match=rf"^demo: error: {NO_GPU}, and torch \S+ sees none; `make demo` .* without one$"
    ):
        main(["--output", str(tmp_path / "run"), "--gguf", str(tmp_path / "no-file")])
    assert not (tmp_path / "run").exists()


def test_make_installs_nothing_without_a_gpu(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    paths = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["make", "demo", "TARGET=smollm2", "PYTHON=false"]
    result = subprocess.run(command, cwd=tmp_path, env=outside | paths, capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stderr.startswith(NO_GPU)
    assert not result.stdout
    assert not (tmp_path / ".venv").exists()


@each_case()
def test_options_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        RealDemoConfig(**options)


def test_no_prompt_is_measured():
    """As many prompts as the options ask for, none of them a question of the comparison."""
    rows = list(prompts())
    defaults = RealDemoConfig()
    assert sum(row["split"] == "train" for row in rows) == defaults.train_questions
    assert sum(row["split"] == "heldout" for row in rows) >= defaults.heldout_questions
    measured = {question.first[0]["content"] for question in read_questions(real_demo.MEASURED)}
    assert len(measured) == 80 + 381
    assert measured.isdisjoint(row["messages"][0]["content"] for row in rows)


def journal_row(question: int, turn: int, concurrency: int, answer: str, *, drafted: bool) -> dict[str, object]:
    return {
        "question": question,
        "turn": turn,
        "concurrency": concurrency,
        "drafted": drafted,
        "answer": answer,
    }


def test_answers_are_compared_turn_by_turn():
    rows = [
        journal_row(1, 0, 1, "a", drafted=True),
        journal_row(1, 0, 1, "a", drafted=False),
        journal_row(1, 1, 1, "b", drafted=False),
        journal_row(1, 1, 1, "c", drafted=True),
        journal_row(1, 0, 16, "d", drafted=True),
        {"counters": {"rounds": 3}, "concurrency": 1},
    ]
    assert identical_answers(rows) == (1, 2)


@pytest.mark.parametrize(("answer", "verdict"), [("a", "draft: yes"), ("b", "draft: NO, 1 of 2 (on a GPU")])
def test_the_report(answer, verdict, tmp_path, capsys):
    rows = [journal_row(1, 0, level, "a", drafted=False) for level in (1, 16)]
    rows += [journal_row(1, 0, 1, "a", drafted=True), journal_row(1, 0, 16, answer, drafted=True)]
    figures = [{"category": "writing", "by_rounds": 2.5}]
    (tmp_path / "accept").mkdir()
    (tmp_path / "draft").mkdir()
    (tmp_path / "accept" / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "accept" / "accept.json").write_text(json.dumps({"options": {}, "figures": figures}))
    metrics = [{"step": 1, "eval_accept_length": 2.25}, {"step": 2, "loss": 1.0}]
    (tmp_path / "draft" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    write_report("eagle3", tmp_path, 9.04)
    printed = capsys.readouterr().out
    assert verdict in printed
    assert "simulated in training: 2.25" in printed
    assert json.loads((tmp_path / "report.json").read_text()) == {
        "drafter": "eagle3",
        "total_s": 9.0,
        "figures": figures,
        "simulated_accept_length": 2.25,
        "num_answers": 2,
        "num_identical": 2 if answer == "a" else 1,
    }


@pytest.mark.slow
def test_all_steps_in_miniature(tmp_path, monkeypatch):
    """On a CPU, with the bundled target as the GGUF file, a minute: categories, both levels, and a second run."""
    gguf_files = pytest.importorskip("slipstream.tests.bench.gguf_files", exc_type=ImportError)
    gguf_files.write_gguf(TINY, TINY, tmp_path / "tiny.gguf", "BF16")
    recipe = (ROOT / "configs" / "eagle3" / "smollm2.yaml").read_text()
    small = recipe.replace("batch_size: 8", "batch_size: 1").replace("max_length: 2048", "max_length: 512")
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "smollm2.yaml").write_text(small)
    monkeypatch.setattr(real_demo, "recipes", lambda _: {"eagle3": tmp_path / "eagle3" / "smollm2.yaml"})
    monkeypatch.setattr(real_demo, "check_gpu", lambda: None)
    for name, value in (("VOCABULARY", 1024), ("RUNNING", 16), ("CACHE_TOKENS", 16384)):
        monkeypatch.setattr(real_demo, name, value)
    output = tmp_path / "run"
    words = ["--gguf", str(tmp_path / "tiny.gguf"), "--output", str(output), "--train-questions", "30"]
    main([*words, "--heldout-questions", "6", "--max-tokens", "20", "--measured-questions", "1"])
    report = json.loads((output / "report.json").read_text())
    assert report["num_answers"] == report["num_identical"] == 2 * (8 * 2 + 1)
    categories = {figure["category"] for figure in report["figures"]}
    assert len(categories) == 8 + 2
    assert {"math", "gsm8k", "all"} <= categories
    assert {figure["setting"]["concurrency"] for figure in report["figures"]} == {1, 16}
    real_demo.open_output(str(output), {}, {})
    assert [path.name for path in output.iterdir()] == ["demo.json"]
