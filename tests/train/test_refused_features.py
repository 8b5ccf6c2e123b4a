"""Captures that do not fit a run, or lack some of what it reads, end it before its first step."""

import json
import shutil
from pathlib import Path

import pytest

from slipstream.models.feature_store import shard_path
from slipstream.tests.train.conftest import CaptureTo
from slipstream.tests.train.runs import Arguments, refusal
from slipstream.train import eagle3
from slipstream.train.trackers import read_metrics

WORDS = "--layers", "0", "2", "3", "4"


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_document_that_was_not_captured(
    tmp_path: Path, arguments: Arguments, capture_to: CaptureTo, split: str
) -> None:
    few = capture_to(*WORDS, **{f"{split}_documents": 4})
    message = refusal(arguments(tmp_path, data__features=few))
    assert f"of {split} was not captured in data.features {few}" in message
    assert "lower data.max_length or evaluation.documents, or set data.features_missing to online" in message
    assert not (tmp_path / "metrics.jsonl").exists()


def test_fewer_documents_of_the_evaluation_may_be_captured(
    tmp_path: Path, arguments: Arguments, capture_to: CaptureTo
) -> None:
    few = capture_to(*WORDS, heldout_documents=4)
    eagle3.main(arguments(tmp_path, data__features=few, evaluation__documents=4))
    assert "eval_accept_length" in read_metrics(tmp_path / "metrics.jsonl")[-1]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_missing_shard(tmp_path: Path, arguments: Arguments, stores: dict[str, Path], split: str) -> None:
    folder = shutil.copytree(stores["all"], tmp_path / "features")
    shards = json.loads((folder / "index.json").read_text())["shards"]
    number = max(number for number, shard in enumerate(shards) if shard["split"] == split)
    path = shard_path(folder, number)
    path.unlink()
    message = refusal(arguments(tmp_path / "run", data__features=folder))
    assert f"{path} is missing; rebuild it: slipstream capture-features" in message
    assert f"--shards {number} --yes" in message
    assert not (tmp_path / "run").exists()
    eagle3.main(arguments(tmp_path / "run", data__features=folder, data__features_missing="online"))
    assert (tmp_path / "run" / "best").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_fingerprint": "d" * 64}, "target_fingerprint is dddddddddddd, the run's is"),
        ({"tokenizer_hash": "d" * 64}, "tokenizer_hash is dddddddddddd, the run's is"),
        ({"data_hash": "d" * 64}, "data_hash is dddddddddddd, the run's is 0123; train on the data"),
        ({"layers": "[1, 0, 4]"}, "hold the states [0, 2, 3, 4], the draft reads [1, 0, 4]"),
        (None, "is missing; rebuild it: slipstream capture-features"),
    ],
)
def test_features_of_something_else_and_missing_shards_end_in_a_sentence(
    tmp_path: Path, arguments: Arguments, stores: dict[str, Path], changes: dict[str, str] | None, message: str
) -> None:
    folder, layers = tmp_path / "features", (changes or {}).get("layers", "[2, 0, 4]")
    shutil.copytree(stores["all"], folder)
    for path in () if changes is not None else folder.glob("shard-*"):
        path.unlink()
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | (changes or {})))
    assert message in refusal(arguments(tmp_path / "run", data__features=folder, draft__feature_layers=layers))
