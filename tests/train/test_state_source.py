"""Training from captured states: the same losses as from the target, and clear ends where that cannot be."""

import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from torch import Tensor

from slipstream.data_tools.verb_options import CaptureConfig
from slipstream.models.files.state_store import shard_path
from slipstream.tests.pairwise import gate_of
from slipstream.tests.random_targets import change_json
from slipstream.tests.train.conftest import MAX_LENGTH, random_dataset
from slipstream.tests.train.runs import assert_like_run, assert_same_run, refusal, run_interrupted
from slipstream.tests.user_errors import user_error
from slipstream.train import dflash, eagle, eagle3
from slipstream.train.batches import BATCHES_AHEAD, PackedRows
from slipstream.train.draft_setup import build
from slipstream.train.options import DataOptions, EvaluationOptions
from slipstream.train.state_source import (
    StateSource,
    open_states,
    read_ahead,
    read_states,
    target_states,
)
from slipstream.train.target_files import TargetFiles
from slipstream.train.trackers import read_metrics
from slipstream.train.training import DraftTraining

CPU = torch.device("cpu")
BLOCKS = dflash.DraftOptions(num_layers=2, block_size=5, mask_token_id=7, anchors=6, aux_layers=(2, 0, 3))
DRAFTERS: dict[str, tuple[Any, type[Any], Any]] = {  # program, its options, those of its draft
    "eagle": (eagle.EagleTraining, eagle.EagleOptions, eagle.DraftOptions(ttt_steps=2)),
    "eagle3": (eagle3.Eagle3Training, eagle3.Eagle3Options, eagle3.DraftOptions(aux_layers=(2, 0, 3), ttt_steps=3)),
    "eagle3 that reads the normed state": (
        eagle3.Eagle3Training,
        eagle3.Eagle3Options,
        eagle3.DraftOptions(aux_layers=(4, 0, 2), ttt_steps=2),
    ),
    "dflash": (dflash.DFlashTraining, dflash.DFlashOptions, BLOCKS),
    "dspark": (
        dflash.DFlashTraining,
        dflash.DFlashOptions,
        replace(BLOCKS, sample_from_anchor=True, markov_rank=4, confidence_head=True),
    ),
}


def start(
    name: str, target: Path, path: Path, aux_states: Path | None = None, max_length: int = MAX_LENGTH, **options: Any
) -> tuple[DraftTraining, dict[str, PackedRows]]:
    """Training and rows as the program makes them, always with the same weights. `options` of the data."""
    kind, options_class, draft = DRAFTERS[name]
    data = DataOptions(path=str(path), max_length=max_length, aux_states=aux_states and str(aux_states), **options)
    run = options_class(output="", target=str(target), data=data, draft=draft)
    accelerator = SimpleNamespace(device=CPU, print=print)
    files = TargetFiles.find(run, accelerator, kind.Network)
    splits = load_from_disk(data.path)
    rows = {split: PackedRows(splits[split], data.max_length) for split in ("train", "heldout")}
    states = open_states(data, {data.path: {**files.origin(), "data_hash": "0123"}})
    torch.manual_seed(3)
    training = build(kind, files)
    for parameter in training.draft.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    if states:
        read_states(states, data, training, rows, training.draft.config.aux_layers, CPU)
    return training, rows


def numbers(training: DraftTraining, rows: dict[str, PackedRows]) -> dict[str, Tensor]:
    """Losses and metrics of every batch of two rows, and the counts of evaluation."""
    values = {}
    for first in range(0, len(rows["train"]) - 1, 2):
        loss, metrics = training.loss(rows["train"].batch([first, first + 1], first))
        values |= {f"loss {first}": loss.detach()} | {f"{name} {first}": value for name, value in metrics.items()}
    for first in range(len(rows["heldout"])):
        metrics = training.evaluate(rows["heldout"].batch([first]))
        values |= {f"heldout {name} {first}": value for name, value in metrics.items()}
    return values


@pytest.fixture(scope="module")
def online(target_path, data_path) -> Callable[..., dict[str, Tensor]]:
    """Numbers of a drafter that reads the target itself."""
    return cache(lambda name, max_length: numbers(*start(name, target_path, data_path, max_length=max_length)))


@pytest.mark.parametrize(
    ("name", "capture", "max_length"),
    gate_of(
        [
            ("eagle", "all", 17),
            ("eagle3", "supervised", MAX_LENGTH),
            ("eagle3", "all", 17),
            ("eagle3 that reads the normed state", "all", MAX_LENGTH),
            ("dflash", "supervised", 17),
            ("dflash", "all", MAX_LENGTH),
            ("dspark", "supervised", 17),
        ],
        [("eagle", "all", 17), ("eagle3", "supervised", MAX_LENGTH), ("dflash", "all", MAX_LENGTH)],
    ),
)
def test_losses_are_those_of_the_target_itself(target_path, data_path, stores, online, name, capture, max_length):
    """Captured at one length and in one order of layers, read at others."""
    training, rows = start(name, target_path, data_path, stores[capture], max_length)
    assert all(parameter.is_meta for parameter in training.target.layers.parameters())
    values = numbers(training, rows)
    expected = online(name, max_length)
    assert values.keys() == expected.keys()
    assert sum("loss" in key for key in values) >= 5
    for key, value in values.items():
        torch.testing.assert_close(
            value, expected[key], rtol=2e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_documents_without_states_are_computed(target_path, data_path, capture_to, online, name):
    """Some were not captured, some are longer than their captured states, and some lost their shard."""
    folder = capture_to("--layers", "3", "2", "0", train_documents=45, heldout_documents=4, max_length=30)
    shard_path(folder, 1).unlink()
    training, rows = start(name, target_path, data_path, folder, aux_states_missing="online")
    batches = [rows["train"].batch([row]) for row in range(len(rows["train"]))]
    counts = [(len(batch.cached.rows), len(batch.cached.online_rows)) for batch in batches if batch.cached is not None]
    assert any(cached and computed for cached, computed in counts)
    values = numbers(training, rows)
    expected = online(name, MAX_LENGTH)
    for key, value in expected.items():
        torch.testing.assert_close(values[key], value, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_states_are_those_of_the_target_up_to_rounding(target_path, data_path, capture_to, dtype, tolerance):
    folder = capture_to("--layers", "3", "2", "0", dtype=dtype)
    plain, plain_rows = start("eagle3", target_path, data_path)
    training, rows = start("eagle3", target_path, data_path, folder)
    aux_states, final = target_states(training.target, rows["train"].batch([0, 1]), CPU)
    cached = rows["train"].batch([0, 1]).cached
    expected = target_states(plain.target, plain_rows["train"].batch([0, 1]), CPU)
    for states, reference, cached_rows in (
        (aux_states, expected[0], cached.rows),
        (final, expected[1], cached.final_rows),
    ):
        assert states.shape == reference.shape
        assert states.dtype == torch.float32
        error = (states - reference)[cached_rows].unflatten(-1, (-1, 32))
        size = reference[cached_rows].unflatten(-1, (-1, 32)).abs()
        assert (error.abs() <= tolerance * size + size.amax(-1, keepdim=True) * 2**-17).all()
        is_uncached = torch.ones(len(states), dtype=torch.bool).index_fill(0, cached_rows, False)
        assert not states[is_uncached].any()


def test_documents_without_states_stop_a_run(target_path, data_path, capture_to):
    short = capture_to("--layers", "3", "2", "0", max_length=20)
    _, rows = start("dflash", target_path, data_path, short)
    fault = "document .* of train was captured up to max_length 20 and is longer"
    with user_error(f"{fault}.*or set data.aux_states_missing to online"):
        read_all(rows["train"])


def read_all(rows: PackedRows):
    for row in range(len(rows)):
        rows.batch([row]).cached.to(CPU)


def test_a_batch_is_made_while_the_last_one_is_copied(target_path, data_path, stores, monkeypatch):
    _, rows = start("dflash", target_path, data_path, stores["all"])
    expected = [rows["train"].batch([row]).cached.to(CPU) for row in (0, 1)]
    copy = StateSource.copy
    may_copy = Event()

    def slow(*arguments):
        assert may_copy.wait(60)
        copy(*arguments)

    monkeypatch.setattr(StateSource, "copy", slow)
    batches = [rows["train"].batch([row]) for row in (0, 1)]
    may_copy.set()
    for batch, reference in zip(batches, expected, strict=True):
        states = batch.cached.to(CPU).states
        assert torch.equal(states["aux_states"], reference.states["aux_states"])


def test_damage_stops_a_run_even_where_states_may_be_computed(tmp_path, target_path, data_path, stores):
    shutil.copytree(stores["all"], tmp_path, dirs_exist_ok=True)
    content = bytearray(shard_path(tmp_path, 1).read_bytes())
    content[-(len(content) // 3)] ^= 1
    shard_path(tmp_path, 1).write_bytes(content)
    _, rows = start("dflash", target_path, data_path, tmp_path, aux_states_missing="online")
    with user_error(r"shard-00001.safetensors is damaged .*; rebuild it: .* --shards 1 --yes"):
        read_all(rows["train"])


def test_other_tokens_than_the_data_are_noticed(target_path, save_data, stores):
    """The data's hash is the same in this test."""
    data = save_data(random_dataset(60, seed=5), random_dataset(9, seed=6))
    _, rows = start("dflash", target_path, data, stores["all"], aux_states_missing="online")
    with user_error("holds other tokens than the data; rebuild it"):
        read_all(rows["train"])


def test_a_whole_run_is_the_same_and_continues_bit_for_bit(tmp_path, arguments, finished, stores):
    flags = {"data__aux_states": stores["all"]}
    eagle3.main(arguments(tmp_path / "cached", **flags))
    assert_like_run(tmp_path / "cached", finished)
    run_interrupted(arguments(tmp_path / "stopped", **flags), signal.SIGTERM)
    eagle3.main(arguments(tmp_path / "stopped", **flags))
    assert_same_run(tmp_path / "stopped", tmp_path / "cached")


WORDS = "--layers", "0", "2", "3", "4"


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_document_that_was_not_captured(tmp_path, arguments, capture_to, split):
    few = capture_to(*WORDS, **{f"{split}_documents": 4})
    message = refusal(arguments(tmp_path, data__aux_states=few))
    assert f"of {split} was not captured in data.aux_states {few}" in message
    assert "lower data.max_length or evaluation.documents, or set data.aux_states_missing to online" in message
    assert not (tmp_path / "metrics.jsonl").exists()


def test_fewer_documents_of_the_evaluation_may_be_captured(tmp_path, arguments, capture_to):
    few = capture_to(*WORDS, heldout_documents=4)
    eagle3.main(arguments(tmp_path, data__aux_states=few, evaluation__documents=4))
    assert "eval_accept_length" in read_metrics(tmp_path / "metrics.jsonl")[-1]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_missing_shard(tmp_path, arguments, stores, split):
    folder = shutil.copytree(stores["all"], tmp_path / "features")
    shards = json.loads((folder / "index.json").read_text())["shards"]
    number = max(number for number, shard in enumerate(shards) if shard["split"] == split)
    path = shard_path(folder, number)
    path.unlink()
    message = refusal(arguments(tmp_path / "run", data__aux_states=folder))
    assert f"{path} is missing; rebuild it: slipstream capture-states" in message
    assert f"--shards {number} --yes" in message
    assert not (tmp_path / "run").exists()
    eagle3.main(arguments(tmp_path / "run", data__aux_states=folder, data__aux_states_missing="online"))
    assert (tmp_path / "run" / "best").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_fingerprint": "d" * 64}, "target_fingerprint is dddddddddddd, the run's is"),
        ({"data_hash": "d" * 64}, "data_hash is dddddddddddd, the run's is 0123; train on the data"),
        ({"layers": "[1, 0, 4]"}, "hold [0, 2, 3, 4], the draft reads [1, 0, 4]"),
        (None, "is missing; rebuild it: slipstream capture-states"),
    ],
)
def test_aux_states_of_something_else_and_missing_shards_end_in_a_sentence(
    tmp_path, arguments, stores, changes, message
):
    folder = tmp_path / "features"
    layers = (changes or {}).get("layers", "[2, 0, 4]")
    shutil.copytree(stores["all"], folder)
    for path in () if changes is not None else folder.glob("shard-*"):
        path.unlink()
    change_json(folder / "index.json", **changes or {})
    assert message in refusal(arguments(tmp_path / "run", data__aux_states=folder, draft__aux_layers=layers))


class CountedRows:
    """Stands for PackedRows whose batches come from disk."""

    batches_ahead = BATCHES_AHEAD

    def __init__(self):
        self.add_states = lambda batch, _documents: batch
        self.made = 0

    def batches(self, count: int, fault: int = -1) -> Iterator[int]:
        for number in range(count):
            if number == fault:
                raise ValueError("no such shard")
            self.made += 1
            yield number


def test_batches_are_read_ahead_in_order_and_not_too_far():
    rows = CountedRows()
    threads = set(threading.enumerate())
    assert list(read_ahead(rows.batches(10), rows)) == list(range(10))
    rows = CountedRows()
    batches = read_ahead(rows.batches(100), rows)
    assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
    batches.close()
    assert 4 <= rows.made <= 4 + BATCHES_AHEAD
    assert set(threading.enumerate()) <= threads
    batches = read_ahead(rows.batches(5, fault=2), rows)
    assert [next(batches), next(batches)] == [0, 1]
    with user_error("no such shard"):
        next(batches)


def test_batches_that_need_no_disk_are_made_when_they_are_asked_for():
    rows = CountedRows()
    rows.add_states = None
    batches = read_ahead(rows.batches(9), rows)
    next(batches)
    assert rows.made == 1


def test_a_capture_holds_what_an_evaluation_reads():
    """By default, or a run would refuse the capture that was made for it."""
    assert CaptureConfig(data=["d"], target="t", output="o").heldout_documents == EvaluationOptions().documents
