"""Step times that are kept from one start to the next."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.serve.engine import cost_files
from slipstream.serve.engine.cost_files import CostKey, cache_folder, load, save, text_hash

KEY = CostKey("H100", "2.11", "3.6", "0.1", text_hash("{}"), text_hash("none"), {"page_size": 16, "widths": (1, 4)})
TABLES = {"target": {"plain": [[1, 4.0]]}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(cost_files.FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "step_costs"


def test_what_was_saved_is_loaded(folder):
    assert load(KEY) is None
    save(KEY, TABLES)
    assert load(KEY) == TABLES
    assert [path.name for path in folder.iterdir()] == [KEY.name()]
    save(KEY, {"target": {}})
    assert load(KEY) == {"target": {}}


@pytest.mark.parametrize(
    "other",
    [{"gpu": "H200"}, {"torch": "2.12"}, {"model": text_hash("{ }")}, {"options": {"page_size": 1, "widths": (1, 4)}}],
)
def test_every_field_counts(other):
    save(KEY, TABLES)
    assert load(replace(KEY, **other)) is None


def test_names_do_not_depend_on_the_order_of_options():
    assert replace(KEY, options={"widths": (1, 4), "page_size": 16}).name() == KEY.name()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"format": 2, "tab',
        b"\xff\xfe",
        b"[]",
        b"3",
        b'{"format": 1, "tables": {}}',
        b'{"format": 2, "tables": 3}',
    ],
)
def test_a_damaged_file_is_named_and_replaced(content, folder, caplog):
    folder.mkdir(parents=True)
    (folder / KEY.name()).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load(KEY) is None
    assert str(folder / KEY.name()) in caplog.text
    save(KEY, TABLES)
    assert load(KEY) == TABLES


def test_a_folder_that_cannot_be_written_is_a_warning(folder, caplog):
    folder.parent.write_text("a file is in the way")
    with caplog.at_level(logging.WARNING):
        save(KEY, TABLES)
    assert "not kept" in caplog.text
    assert load(KEY) is None


def test_a_folder_in_the_place_of_the_file_is_a_warning(folder, caplog):
    (folder / KEY.name()).mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert load(KEY) is None
        save(KEY, TABLES)
    assert caplog.text.count(KEY.name()) >= 2


def test_the_cache_is_in_the_home_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.delenv(cost_files.FOLDER_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "slipstream" / "step_costs"
    save(KEY, TABLES)
    assert json.loads((cache_folder() / KEY.name()).read_text())["key"]["gpu"] == "H100", "people can read it"
