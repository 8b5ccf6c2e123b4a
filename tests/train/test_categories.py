"""Accept lengths by category: of a batch, of a run on one process and on two, and on its page."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.models.files.checkpoint import read_json
from slipstream.tests.train.conftest import SaveData, documents, random_dataset
from slipstream.tests.train.runs import end_program, records, start_program
from slipstream.train import draft_setup, eagle3
from slipstream.train.batches import collate
from slipstream.train.mixture import Mixture
from slipstream.train.options import DataOptions
from slipstream.train.report import ReportConfig, write_report

METRIC = "accept_length_by_category/"


@torch.no_grad()
def test_a_category_counts_as_its_documents_alone(training):
    """Also one that a batch lacks, so that all processes hold the same names; documents without one are in none."""
    training.eval()
    training.categories = ["math", "qa/short", "absent"]
    rows = documents(seed=1) + documents(seed=2)
    names = ["math", "qa/short", None, "math", "qa/short", "math"]
    batch = replace(collate(rows, 64), categories=names)
    _, metrics = training(batch)
    flat = [document for row in rows for document in row]
    for category in training.categories:
        alone = [document for document, name in zip(flat, names, strict=True) if name == category]
        expected = training(collate([alone], 256))[1]["accept_length"].tolist() if alone else [0, 0]
        assert metrics[METRIC + category].tolist() == expected
    _, plain_metrics = training(collate(rows, 64))
    assert metrics.keys() == plain_metrics.keys()


def save_categories(save_data: SaveData) -> Path:
    heldout = random_dataset(9, seed=2).add_column("category", ["a b", "math", None, *["math", "a b", "once"] * 2])
    train = random_dataset(60, seed=1).add_column("category", [None] * 60)
    return save_data(train, heldout)


def test_a_run_logs_and_draws_them(tmp_path, arguments, save_data, monkeypatch, capsys):
    monkeypatch.setattr(draft_setup, "MAX_CATEGORIES", 2)
    eagle3.main(arguments(tmp_path, data__path=save_categories(save_data), optim__steps=1))
    printed = capsys.readouterr().out
    assert "heldout: documents by category: a b 3, math 3; accept lengths of the 2 largest are logged\n" in printed
    (line,) = records(tmp_path)
    assert {name.removeprefix(f"eval_{METRIC}") for name in line if METRIC in name} == {"a b", "math"}
    text = write_report(ReportConfig(run=str(tmp_path))).read_text()
    chart = next(part for part in text.split("<figure>") if "Accept length by category, held out<" in part)
    legend = re.search("<div class=legend>(.*?)</div>", chart)
    assert re.findall("</i>([^<]*)<", legend[1]) == ["a b", "math"]


def test_folders_with_and_without_categories_are_evaluated_together(save_data):
    paths = [save_data(random_dataset(30, seed=5), random_dataset(4, seed=6)), save_categories(save_data)]
    mixture = Mixture.load({str(path): 1.0 for path in paths}, read_hash(paths[0]))
    options = DataOptions(path="", max_length=40)
    rows = mixture.heldout_rows(options, 200)
    assert sorted(rows.category_counts().items()) == [("a b", 3), ("math", 3), ("once", 2)]
    batch = rows.batch(list(range(len(rows))))
    documents = [document for row in rows.rows for document in row]
    assert list(batch.categories) == [rows.dataset["category"][document] for document in documents]
    assert not Mixture.load({str(paths[0]): 1.0}, read_hash(paths[0])).heldout_rows(options, 200).category_counts()


def read_hash(path: Path) -> str:
    return str(read_json(path / "report.json")["tokenizer_hash"])


@pytest.mark.slow
def test_two_processes_find_what_one_does(tmp_path, arguments, save_data):
    """A category of one document is on one process alone."""
    data = save_categories(save_data)
    single, pair = (
        arguments(tmp_path / name, data__path=data, optim__steps=1, data__batch_size=2 // len(name))
        for name in ("1", "22")
    )
    eagle3.main(single)
    end_program(start_program(Path(eagle3.__file__), *pair, num_processes=2))
    assert records(tmp_path / "22") == [pytest.approx(line, rel=1e-3) for line in records(tmp_path / "1")]
