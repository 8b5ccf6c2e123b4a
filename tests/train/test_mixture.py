"""Several prepared datasets with weights: epochs against counts, runs that stop and go on, what is refused."""

import itertools
import json
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets

from slipstream.models.files.checkpoint import read_json
from slipstream.tests.train.conftest import random_dataset
from slipstream.tests.train.runs import assert_like_run, assert_same_run, records, refusal, run_interrupted
from slipstream.tests.user_errors import user_error
from slipstream.train import eagle3
from slipstream.train.batches import PackedRows, Share, row_order, training_batches
from slipstream.train.mixture import Mixture
from slipstream.train.options import DataOptions

WEIGHTS = {"once": 1.0, "often": 2.5, "half": 0.5, "rare": 0.01}
SIZES = {"once": 30, "often": 25, "half": 40, "rare": 12}
MAX_LENGTH = 40


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    parts = [random_dataset(size, seed=seed) for seed, size in enumerate(SIZES.values())]
    shares = [Share(name, SIZES[name], weight) for name, weight in WEIGHTS.items()]
    return PackedRows(concatenate_datasets(parts), MAX_LENGTH, shares)


@pytest.fixture(scope="module")
def folders(save_data) -> list[Path]:
    return [save_data(random_dataset(30, seed=5), random_dataset(4, seed=6), data_hash="a" * 64),
            save_data(random_dataset(20, seed=7), random_dataset(5, seed=8), data_hash="b" * 64)]  # fmt: skip


def test_an_epoch_has_each_folder_as_often_as_its_weight_says(rows):
    order = row_order(rows, seed=3, start=0)
    epochs = [Counter(itertools.islice(order, len(rows))) for _ in range(20)]
    for share in rows.shares:
        size = len(share.rows)
        expected = max(1, round(share.passes * size))
        for epoch in epochs:
            counts = [epoch[row] for row in share.rows]
            assert sum(counts) == expected
            assert max(counts) - min(counts) <= 1
        if expected % size:
            assert len({tuple(epoch[row] for row in share.rows) for epoch in epochs}) > 3, "chosen anew"
            means = np.mean([[epoch[row] for row in share.rows] for epoch in epochs], axis=0)
            assert means.std() < 0.3, "no row is preferred"
    assert len(rows) == sum(epochs[0].values())


def test_rows_hold_documents_of_one_folder(rows):
    bounds = np.cumsum([0, *SIZES.values()])
    for share, first, last in zip(rows.shares, bounds, bounds[1:], strict=False):
        documents = [document for row in share.rows for document in rows.rows[row]]
        assert sorted(documents) == sorted(set(documents))
        assert len(documents) == share.num_documents
        assert all(first <= document < last for document in documents)


def test_one_folder_is_ordered_as_ever():
    """Runs of one folder, which older versions began, go on at the same row."""
    rows = PackedRows(random_dataset(30, seed=1), MAX_LENGTH)
    size = len(rows.rows)
    expected = [np.random.default_rng((9, epoch)).permutation(size).tolist() for epoch in range(3)]
    assert list(itertools.islice(row_order(rows, 9, 0), 3 * size)) == sum(expected, [])


@pytest.mark.parametrize("start", [0, 1, 40, 75])
def test_the_order_goes_on_anywhere_on_any_number_of_processes(rows, start):
    order = list(itertools.islice(row_order(rows, 3, 0), 3 * len(rows)))
    assert list(itertools.islice(row_order(rows, 3, start), 60)) == order[start : start + 60]
    for processes in (1, 2, 3):
        shares = [training_batches(rows, 2, 3, start, start + 24, process, processes) for process in range(processes)]
        passes = range(24 // (2 * processes))
        batches = [next(shares[process])[0] for _ in passes for process in range(processes)]
        assert torch.cat([batch.numbers for batch in batches]).tolist() == list(range(start, start + 24))
        texts = [row[: row.count_nonzero()].tolist() for batch in batches for row in batch.tokens]
        expected = [rows.batch([row]).tokens[0] for row in order[start : start + 24]]
        assert texts == [row[: row.count_nonzero()].tolist() for row in expected]


def test_a_run_of_a_mixture_goes_on_exactly(tmp_path, arguments, folders, capsys):
    mixture = json.dumps({str(folders[0]): 1, str(folders[1]): 0.5})
    eagle3.main(arguments(tmp_path / "whole", data__path=mixture))
    printed = capsys.readouterr().out
    for line in (f"train: {folders[1]}: ", "weight 0.5: ", f"heldout: {folders[1]}: "):
        assert line in printed
    flags = arguments(tmp_path / "parts", data__path=mixture)
    run_interrupted(flags, signal.SIGTERM)
    eagle3.main(flags)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    run = read_json(tmp_path / "whole" / "best" / "run.json")
    hashes = {str(folders[0]): ("a" * 64, 1), str(folders[1]): ("b" * 64, 0.5)}
    assert {path: (data["data_hash"], data["weight"]) for path, data in run["data_folders"].items()} == hashes
    moved = shutil.copytree(folders[1], tmp_path / "moved")
    eagle3.main(arguments(tmp_path / "parts", data__path=json.dumps({str(folders[0]): 1, str(moved): 0.5})))
    other = json.dumps({str(folders[0]): 1, str(folders[1]): 0.75})
    assert "pass the original data.path to continue it" in refusal(arguments(tmp_path / "parts", data__path=other))


def test_a_plan_counts_each_folder(tmp_path, arguments, folders, capsys):
    mixture = json.dumps({str(folders[0]): 1, str(folders[1]): 2})
    flags = [flag for flag in arguments(tmp_path / "run", data__path=mixture) if not flag.startswith("--optim.steps")]
    eagle3.main([*flags, "--optim.epochs=1", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    plain = [PackedRows(random_dataset(size, seed), MAX_LENGTH) for size, seed in ((30, 5), (20, 7))]
    for folder, rows, weight in zip(folders, plain, (1, 2), strict=True):
        (line,) = [line for line in lines if f" {folder}: " in line]
        assert f"{rows.num_documents} documents, {rows.num_tokens:,} tokens, {rows.num_supervised:,} of them" in line
        assert f"in {len(rows.rows)} rows; weight {weight}: {weight * len(rows.rows)} rows an epoch" in line
    (total,) = [line for line in lines if line.startswith("tokens ")]
    tokens = [rows.num_tokens for rows in plain]
    assert f" {tokens[0] + 2 * tokens[1]:,} in all" in total


def test_held_out_documents_come_from_every_folder(save_data, folders):
    report = read_json(folders[0] / "report.json")
    mixture = Mixture.load({str(folder): 0.1 for folder in folders}, report["tokenizer_hash"])
    rows = mixture.heldout_rows(DataOptions(path="d", max_length=MAX_LENGTH), 3)
    assert len(rows.dataset) == 6
    assert len(rows) == len(rows.rows)
    other = save_data(random_dataset(4, seed=1), random_dataset(4, seed=2), tokenizer_hash="9" * 64)
    with user_error(f"data.path {other} was prepared with another tokenizer .hash 99999999"):
        Mixture.load({str(folders[0]): 1, str(other): 1}, report["tokenizer_hash"])
    empty = Dataset.from_dict({"input_ids": [], "loss_mask": []}, features=random_dataset(1, seed=0).features)
    trained_only = save_data(random_dataset(4, seed=1), empty)
    mixture = Mixture.load({str(trained_only): 1, str(folders[0]): 1}, report["tokenizer_hash"])
    rows = mixture.heldout_rows(DataOptions(path="d", max_length=MAX_LENGTH), 3)
    assert len(rows.dataset) == 3
    assert [share.num_documents for share in rows.shares] == [0, 3]
    assert len(rows) == len(rows.rows)
    with user_error(f"data.path {trained_only}: split heldout is empty; prepare with a larger"):
        Mixture.load({str(trained_only): 1}, report["tokenizer_hash"])
    nothing = Dataset.from_dict({"input_ids": [[1, 2, 3]], "loss_mask": [[False] * 3]})
    silent = save_data(nothing, nothing)
    with user_error(f"no document of 1 in {silent} has two supervised tokens"):
        Mixture.load({str(folders[0]): 1, str(silent): 1}, report["tokenizer_hash"]).train_rows(
            DataOptions(path="d", max_length=MAX_LENGTH)
        )


def test_weights_of_tokens_change_neither_counts_nor_the_scale_of_the_loss(tmp_path, arguments, save_data):
    """All weights doubled: the same run. Some of them: another one, however its steps are divided into passes."""
    parts = [random_dataset(30, seed=5), random_dataset(20, seed=7)]
    heldout = random_dataset(4, seed=6)

    def weighted(data, weight):
        return data.add_column("loss_weights", [[weight * value for value in mask] for mask in data["loss_mask"]])

    plain = [save_data(part, heldout) for part in parts]
    double = [save_data(weighted(part, 2.0), heldout) for part in parts]
    runs = {}
    for name, paths in {"plain": plain, "double": double, "mixed": [plain[0], double[1]]}.items():
        runs[name] = tmp_path / name
        eagle3.main(arguments(runs[name], data__path=json.dumps({str(path): 1 for path in paths})))
    assert_like_run(runs["double"], runs["plain"])
    mixed = json.dumps({str(plain[0]): 1, str(double[1]): 1})
    small = {"data__batch_size": 1, "optim__accumulation": 2}
    eagle3.main(arguments(tmp_path / "small", data__path=mixed, **small))
    assert_like_run(tmp_path / "small", runs["mixed"])
    tokens = [[record["tokens"] for record in records(run)] for run in runs.values()]
    assert tokens[0] == tokens[1] == tokens[2]
    losses = [[record["loss"] for record in records(run)] for run in runs.values()]
    assert losses[0] != pytest.approx(losses[2], rel=1e-4)


def test_documents_that_another_folder_holds_out_are_not_trained_on(save_data):
    options = DataOptions(path="", max_length=MAX_LENGTH)
    first = random_dataset(30, seed=5)
    second = random_dataset(20, seed=7)
    same_sum = Dataset.from_dict({"input_ids": [second[3]["input_ids"][::-1]], "loss_mask": [second[3]["loss_mask"]]})
    folders = [save_data(first, concatenate_datasets([second.select([2, 17]), same_sum])), save_data(second, first)]
    tokenizer_hash = read_json(folders[0] / "report.json")["tokenizer_hash"]
    with user_error(f"every document of {folders[0]} is held out in another folder"):
        Mixture.load({str(folder): 1 for folder in folders}, tokenizer_hash).train_rows(options)
    folders[1] = save_data(second, random_dataset(5, seed=9))
    rows = Mixture.load({str(folder): 1 for folder in folders}, tokenizer_hash).train_rows(options)
    alone = [Mixture.load({str(folder): 1}, tokenizer_hash).train_rows(options) for folder in folders]
    expected = {*alone[0].documents, *(30 + document for document in alone[1].documents)} - {32, 47}
    assert set(rows.documents) == expected
    assert [share.num_copies for share in rows.shares] == [0, 2]
    assert "18 documents (2 copies of held-out ones left out)" in rows.shares[1].sentence
    assert rows.num_dropped == alone[0].num_dropped + alone[1].num_dropped


def test_each_folder_may_have_captured_states(tmp_path, arguments, folders, data_path, capture_to):
    """In any order; without those of a folder the target computes its states."""
    mixture = json.dumps({str(folders[0]): 1, str(folders[1]): 2})
    captures = [str(capture_to("--layers", "0", "2", "4", data=folder)) for folder in folders]
    eagle3.main(arguments(tmp_path / "online", data__path=mixture))
    eagle3.main(arguments(tmp_path / "both", data__path=mixture, data__aux_states=json.dumps(captures[::-1])))
    assert_like_run(tmp_path / "both", tmp_path / "online")
    flags = arguments(tmp_path / "half", data__path=mixture, data__aux_states=captures[1])
    assert f"data.aux_states has no capture of {folders[0]}; name one" in refusal(flags)
    eagle3.main([*flags, "--data.aux_states_missing=online"])
    assert_like_run(tmp_path / "half", tmp_path / "online")
    other = str(capture_to("--layers", "0", "2", "4", data=data_path))
    flags = arguments(tmp_path / "other", data__path=mixture, data__aux_states=json.dumps([*captures, other]))
    assert f"data.aux_states {other} holds states of other data (data_hash 0123) than {folders[0]}, " in refusal(flags)
    more = str(capture_to("--layers", "0", "2", "3", "4", data=folders[1]))
    flags = arguments(tmp_path / "more", data__path=mixture, data__aux_states=json.dumps([captures[0], more]))
    assert f"data.aux_states {more} has another format than {captures[0]}; capture both with" in refusal(flags)
    few = str(capture_to("--layers", "0", "2", "4", data=folders[1], train_documents=3))
    flags = arguments(tmp_path / "few", data__path=mixture, data__aux_states=json.dumps([captures[0], few]))
    assert f" of train was not captured in data.aux_states {few}; capture more" in refusal(flags)
