"""Packing and order against dict and loop models; data that cannot be trained on is refused."""

import itertools
import shutil

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.tests.train.conftest import random_dataset
from slipstream.tests.user_errors import user_error
from slipstream.train.batches import (
    Batch,
    PackedRows,
    collate,
    evaluation_batches,
    load_prepared,
    pack,
    training_batches,
)
from slipstream.train.windows import WindowLayout, measure


def naive_pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Longest first, each to the row where it leaves the least room, the most recent one among equals."""
    rows = []
    rooms = []
    stamp = []
    for tick, item in enumerate(sorted(range(len(lengths)), key=lambda item: -lengths[item])):
        fitting = [row for row, room in enumerate(rooms) if room >= lengths[item]]
        if fitting:
            row = min(fitting, key=lambda row: (rooms[row], -stamp[row]))
        else:
            row = len(rows)
            rows = [*rows, []]
            rooms = [*rooms, capacity]
            stamp = [*stamp, 0]
        rows[row].append(item)
        rooms[row] -= lengths[item]
        stamp[row] = tick
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_packing_is_best_fit_decreasing(seed):
    lengths = np.random.default_rng(seed).integers(1, 21, 100)
    assert pack(lengths, 20) == naive_pack(lengths.tolist(), 20)


def test_measure_counts_what_can_be_learnt():
    documents = [
        ([1] * 6, [False, False, True, True, False, True]),  # 3 supervised, two of them adjacent
        ([1] * 6, [False, True, False, True, False, True]),  # never two in a row
        ([1] * 12, [False] * 7 + [True] * 5),  # one of them within 8 tokens
        ([1] * 12, [False] * 5 + [True] * 7),  # three of them within 8 tokens
        ([1] * 3, [True, True, True]),  # the first token is nobody's prediction
        ([], []),
    ]
    dataset = Dataset.from_dict({"input_ids": [d[0] for d in documents], "loss_mask": [d[1] for d in documents]})
    windows, cut = measure(dataset, WindowLayout(8, is_split=False))
    assert (cut.num_documents, cut.num_supervised) == (2, 8)
    assert windows.documents.tolist() == list(range(6))
    assert windows.lengths.tolist() == [6, 6, 8, 8, 3, 0]
    assert windows.num_supervised.tolist() == [3, 0, 0, 3, 2, 0]
    rows = PackedRows(dataset, 8)
    assert sorted(itertools.chain(*rows.rows)) == [0, 3, 4]
    assert (rows.num_dropped, rows.num_supervised) == (3, 8)


def test_collate_lays_documents_out_with_padding():
    batch = collate([[([1, 2, 3], [False, True, True]), ([4, 5], [True, True])], [([6, 7, 8, 9], [False] * 4)]], 3)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, -1, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]]
    assert batch.supervised.tolist() == [[False, True, True, False, True], [False] * 5]
    assert (batch.num_supervised, batch.weights, batch.total_weight) == (3, None, 3)
    batch = collate([[([1, 2, 3], [9.0, 0.5, 2.0]), ([4, 5], [True, True])], [([6], [0.0])]], 3)
    assert batch.weights.tolist() == [[0, 0.5, 2, 0, 1], [0, 0, 0, 0, 0]]
    assert batch.supervised.tolist() == [[False, True, True, False, True], [False] * 5]
    assert (batch.num_supervised, batch.total_weight) == (3, 3.5)


def documents_of(batch: Batch) -> list[tuple[int, ...]]:
    numbers = range(int(batch.documents.max()) + 1)
    return sorted(tuple(batch.tokens[batch.documents == number].tolist()) for number in numbers)


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    return PackedRows(random_dataset(60, seed=4), 40)


def take(
    rows: PackedRows,
    count: int,
    *,
    start: int = 0,
    end: int | None = None,
    size: int = 2,
    process: int = 0,
    num: int = 1,
) -> list[tuple[Batch, bool]]:
    return list(itertools.islice(training_batches(rows, size, 7, start, end, process, num), count))


def all_documents(rows: PackedRows) -> list[tuple[int, ...]]:
    return sorted(tuple(rows.dataset[document]["input_ids"][:40]) for row in rows.rows for document in row)


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("stops", [(5,), (1, 6, 17)])
def test_numbers_of_processes_may_follow_each_other(rows, num, stops):
    """Two epochs in parts, each ending as a run that stops or ends does; every row of them comes twice."""
    documents = []
    bounds = [0, *stops, 2 * len(rows)]
    for part, (start, end) in enumerate(itertools.pairwise(bounds)):
        processes = num + part
        passes = -(-(end - start) // (2 * processes)) + 1
        for process in range(processes):
            batches = take(rows, passes, start=start, end=end, process=process, num=processes)
            assert not batches[-1][1], "nothing is left for the pass after the last"
            documents += [document for batch, is_new in batches if is_new for document in documents_of(batch)]
    assert sorted(documents) == sorted(2 * all_documents(rows))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_filler_repeats_a_row_of_its_step(rows, num):
    """In steps of two passes, the last one with one row: a row that is not finite may not end another row's step."""
    steps_by_process = [take(rows, 4, end=4 * num + 1, process=process, num=num) for process in range(num)]
    for step in (0, 1):
        batches = [pair for batches in steps_by_process for pair in batches[2 * step : 2 * step + 2]]
        new = {number for batch, is_new in batches if is_new for number in batch.numbers.tolist()}
        documents = {document for batch, is_new in batches if is_new for document in documents_of(batch)}
        fillers = [batch for batch, is_new in batches if not is_new]
        assert len(fillers) == step * (2 * num - 1)
        for batch in fillers:
            assert new.issuperset(batch.numbers.tolist())
            assert documents.issuperset(documents_of(batch))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_evaluation_sees_every_row_once_in_equally_many_batches(rows, num):
    batches_by_process = [list(evaluation_batches(rows, 2, process, num)) for process in range(num)]
    assert len({len(batches) for batches in batches_by_process}) == 1
    documents = [
        d for batches in batches_by_process for batch, is_new in batches if is_new for d in documents_of(batch)
    ]
    assert sorted(documents) == all_documents(rows)


def test_prepared_data_must_be_whole_and_of_this_tokenizer(save_data, target_path, tmp_path):
    expected = tokenizer_hash(AutoTokenizer.from_pretrained(target_path))
    some = random_dataset(4, seed=0)
    nothing = Dataset.from_dict({"input_ids": [], "loss_mask": []})
    data = save_data(some, some)
    assert len(load_prepared(data, expected)[0]["train"]) == 4
    shutil.rmtree(data / "heldout")
    with user_error(f"{data} is damaged .*heldout"):
        load_prepared(data, expected)
    with user_error("another tokenizer .hash 99999999"):
        load_prepared(save_data(some, some, tokenizer_hash="9" * 64), expected)
    with user_error("split train is empty"):
        load_prepared(save_data(nothing, some), expected)
    (tmp_path / "report.json").write_text("{}")  # as `make demo` writes beside its dataset
    for path, missing in ((target_path, "report.json"), (tmp_path, "dataset_dict.json")):
        with user_error(f"data.path {path} holds no {missing}"):
            load_prepared(path, expected)
