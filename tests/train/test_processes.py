"""Runs on one process and on two, in small batches and in large ones, one after the other: the same run."""

import json
import math
from pathlib import Path

import pytest
from datasets import load_from_disk

from slipstream.models.files.checkpoint import read_json
from slipstream.tests.sources import ROOT
from slipstream.tests.tables import each_case
from slipstream.tests.train import recorded_run
from slipstream.tests.train.runs import assert_like_run, end_program, records, refusal, start_program
from slipstream.train import checkpoints, dflash
from slipstream.train.batches import PackedRows, evaluation_batches
from slipstream.train.eagle3 import main

ONE_EPOCH = {"optim__steps": "null", "optim__epochs": 1}


def test_accumulation_equals_a_bigger_batch(tmp_path, arguments):
    """The last step takes 3 of 31 rows: one batch, or a window with an empty place."""
    main(arguments(tmp_path / "batch", **ONE_EPOCH, data__batch_size=4))
    main(arguments(tmp_path / "window", **ONE_EPOCH, data__batch_size=1, optim__accumulation=4))
    assert_like_run(tmp_path / "window", tmp_path / "batch", last_step=8)


def train_recorded(folder: Path, num_processes: int, flags: list[str], stop_in: int | None) -> list[tuple[int, ...]]:
    """Documents on which a run with this number of processes was trained."""
    if num_processes == 1:
        return [tuple(document) for document in recorded_run.train(flags, stop_in)]
    job = folder / "job.json"
    job.write_text(json.dumps({"flags": flags, "stop_in": stop_in}))
    end_program(start_program(Path(recorded_run.__file__), str(job), num_processes=num_processes))
    documents_by_rank = [json.loads((folder / f"job.{rank}.json").read_text()) for rank in range(num_processes)]
    return [tuple(document) for documents in documents_by_rank for document in documents]


@pytest.mark.parametrize(
    ("begin", "go_on", "num_steps"),
    [
        pytest.param((1, 4), (2, 2), 8, id="one-then-two-steps-stay", marks=pytest.mark.slow),
        pytest.param((2, 2), (1, 2), 4 + 8, id="two-then-one-steps-halve", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, arguments, data_path, begin, go_on, num_steps):
    """(processes, batch size), stopped after step 4. Two processes share the last rows, 3 of 31, unequally."""
    first, second = (arguments(tmp_path, **ONE_EPOCH, data__batch_size=size) for _, size in (begin, go_on))
    documents = train_recorded(tmp_path, begin[0], first, stop_in=3)
    assert not (tmp_path / f"step-{num_steps}").exists()
    documents += train_recorded(tmp_path, go_on[0], second, stop_in=None)
    data = load_from_disk(str(data_path))["train"]
    rows = PackedRows(data, 40)
    assert len(rows) == 31
    assert sorted(documents) == sorted(tuple(data[document]["input_ids"][:40]) for row in rows.rows for document in row)
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    assert lines[-1]["tokens"] == rows.num_supervised
    assert all(math.isfinite(line["loss"]) for line in lines)
    rates = [line["lr"] for line in lines]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.15 * rates[0]  # a seventh: the decay is linear
    if begin[0] * begin[1] == go_on[0] * go_on[1]:
        main(arguments(tmp_path / "one", **ONE_EPOCH, data__batch_size=4))
        assert_like_run(tmp_path, tmp_path / "one", last_step=num_steps)


@pytest.mark.slow
def test_two_processes_run_out_of_patience_together(tmp_path, arguments):
    """Their weights hardly change, and no evaluation is better than the first."""
    flags = arguments(tmp_path, optim__lr=1e-15, evaluation__every=1, evaluation__patience=2, data__batch_size=1)
    end_program(start_program(ROOT / "train" / "eagle3.py", *flags, num_processes=2))
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "step-3").is_dir()


@pytest.mark.slow
def test_two_processes_calibrate_a_confidence_head_as_one_does(tmp_path, run_flags, data_path):
    """Where the held-out rows do not divide, the process that repeats the first one adds nothing."""
    heldout = PackedRows(load_from_disk(str(data_path))["heldout"], 40)
    shares = [[is_new for _, is_new in evaluation_batches(heldout, 2, process, 2)] for process in range(2)]
    assert shares == [[True, True], [True, False]]
    sizes = {"draft__num_layers": 1, "draft__block_size": 5, "draft__anchors": 6, "draft__mask_token_id": 7}
    heads = {"draft__markov_rank": 4, "draft__confidence_head": "true", "draft__sample_from_anchor": "true"}
    options = sizes | heads | {"optim__steps": 1, "evaluation__every": 1}
    single, pair = (run_flags(tmp_path / name, **options, data__batch_size=4 // len(name)) for name in ("1", "22"))
    dflash.main(single)
    end_program(start_program(Path(dflash.__file__), *pair, num_processes=2))
    configs = [read_json(tmp_path / name / "best" / "config.json")["dflash_config"] for name in ("1", "22")]
    for name in ("confidence_temperatures", "confidence_biases"):
        assert configs[1][name] == pytest.approx(configs[0][name], abs=1e-4)
    assert records(tmp_path / "22") == [pytest.approx(line, rel=1e-3) for line in records(tmp_path / "1")]


@each_case()
def test_a_state_that_does_not_fit_these_processes_is_refused(tmp_path, arguments, monkeypatch, saved, launch):
    forms = [dict(zip(("sharding", "num_processes"), form, strict=True)) for form in (saved, launch)]
    main(arguments(tmp_path, optim__steps=1))
    path = tmp_path / "step-1" / "state" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"form": forms[0]}))
    monkeypatch.setattr(checkpoints, "state_form", lambda _: forms[1])
    message = refusal(arguments(tmp_path, optim__steps=1))
    assert (
        f"step-1 was saved by {saved[1]} processes under {saved[0]}, this launch has {launch[1]} under {launch[0]}"
        in message
    )
