"""Rows of files, folders, saved datasets and hub datasets, each with its place for error messages.

Invariant: rows come in the order of the arguments, then of file names, then of the file. `columns` parses a line, so
worker processes do the parsing and a malformed line spoils no other.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
import pyarrow.parquet
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset

from slipstream.data_tools.options import SUFFIXES, ConversationOptions, check_source
from slipstream.models.chat.quotes import json_type
from slipstream.models.files.prepared import load_saved

Columns = Mapping[str, Any]  # of a row, by name
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)  # of a .gz file


class RowError(ValueError):
    """A malformed row; the message names file, line and fault."""


@dataclass(frozen=True, slots=True)
class Row:
    place: str  # "file, line 3"
    content: bytes | Columns  # a line of JSON, or columns that were never text

    def columns(self) -> Columns:
        """The row's columns. Raises RowError when the line is not a JSON object."""
        if not isinstance(self.content, bytes):
            return self.content
        try:
            row = json.loads(self.content)
        except UnicodeDecodeError as error:
            raise RowError(f"{self.place}: not valid UTF-8 (byte {error.start})") from error
        except json.JSONDecodeError as error:
            raise RowError(f"{self.place}: not valid JSON: {error.msg} at column {error.colno}") from error
        except ValueError as error:  # a number of more digits than Python reads
            raise RowError(f"{self.place}: not readable JSON: {error}") from error
        except RecursionError as error:
            raise RowError(f"{self.place}: is nested too deep") from error
        if not isinstance(row, dict):
            raise RowError(f"{self.place}: holds {json_type(row)}, not a JSON object")
        return row


def read_rows(options: ConversationOptions) -> Iterator[Row]:
    """Every row of `options.data`. Raises ValueError if it is empty or names something missing or unreadable."""
    for source in _sources(options):
        yield from source


def check_data(options: ConversationOptions) -> None:
    """Raises ValueError if `options.data` is empty or names something missing, before anything is read or written."""
    _sources(options)


def _sources(options: ConversationOptions) -> list[Iterator[Row]]:
    """The rows of each name in `options.data`, not yet read."""
    if not options.data:
        raise ValueError("data is empty; name at least one file, folder or hub dataset")
    return [_source(name, options) for name in options.data]


def _source(name: str, options: ConversationOptions) -> Iterator[Row]:
    path = Path(name)
    if path.is_dir():
        return _read_folder(path, options.split)
    if path.is_file():
        return _read_file(path)
    check_source("data", name)
    return _read_hub(name, options)


def matches(columns: Columns, conditions: Mapping[str, str], place: str) -> bool:
    """Whether all column=value conditions hold, true and false in any case. Raises RowError for a missing column."""
    for column, value in conditions.items():
        if column not in columns:
            raise RowError(f"{place}: no column {column!r} as `where` asks; it has {', '.join(sorted(columns))}")
        text = str(columns[column])
        is_equal = text.lower() == value.lower() if isinstance(columns[column], bool) else text == value
        if not is_equal:
            return False
    return True


def _read_file(path: Path) -> Iterator[Row]:
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return _read_lines(path)
    if name.endswith(".json"):
        return _read_json(path)
    if name.endswith((".parquet", ".arrow")):
        return _read_table(path)
    raise ValueError(f"data: {path} has no known ending; give one of {', '.join(SUFFIXES)}")


def _read_folder(path: Path, split: str) -> Iterator[Row]:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        yield from _read_dataset(load_saved(path), str(path), split)
        return
    all_files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES))
    # Another program may be writing what is hidden, itself or its folder.
    files = [file for file in all_files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(f"data: folder {path} holds no file that ends in {', '.join(SUFFIXES)}")
    for file in files:
        yield from _read_file(file)


def _read_hub(name: str, options: ConversationOptions) -> Iterator[Row]:
    try:
        # A few rows of a large dataset come without its download.
        dataset = load_dataset(name, options.subset, split=options.split, streaming=options.limit is not None)
    except (ValueError, OSError) as error:  # datasets derives its own errors from these
        raise ValueError(f"data: {name} is neither a local path nor a readable hub dataset: {error}") from error
    yield from _read_dataset(dataset, name, options.split)


def _read_dataset(dataset: Dataset | DatasetDict | IterableDataset, name: str, split: str) -> Iterator[Row]:
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise ValueError(f"split is {split!r}; {name} has {', '.join(dataset)}")
        dataset = dataset[split]
    yield from _arrow_rows(name, dataset, first=0)


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read_lines(path: Path) -> Iterator[Row]:
    number = 0
    with _open(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Row(f"{path}, line {number}", line)
        except DAMAGE as error:
            raise ValueError(f"{path} is damaged or cut short after line {number}: {error}") from error


def _read_json(path: Path) -> Iterator[Row]:
    """A JSON array of objects, or lines of JSON."""
    try:
        with _open(path) as file:
            is_array = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        with _open(path) as file:
            items = json.load(file) if is_array else None
    except (ValueError, RecursionError, *DAMAGE) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if items is None:
        yield from _read_lines(path)
        return
    for number, item in enumerate(items, 1):
        yield Row(f"{path}, item {number}", item if isinstance(item, dict) else json.dumps(item).encode())


def _read_table(path: Path) -> Iterator[Row]:
    """Parquet, Arrow's file format, or its stream format as `datasets` writes it."""
    try:
        rows = (row for batch in _batches(path) for row in batch.to_pylist())
        yield from _arrow_rows(str(path), rows, first=1)
    except (pyarrow.ArrowException, OSError) as error:  # at its end or at a damaged part
        raise ValueError(f"{path} is not a readable {path.suffix[1:]} file: {error}") from error


def _arrow_rows(name: str, rows: Iterable[Columns], *, first: int) -> Iterator[Row]:
    """Rows that Arrow held, `first` being the number of the first."""
    for number, columns in enumerate(rows, first):
        yield Row(f"{name}, row {number}", without_nulls(columns))


def _batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1000)
    source = pyarrow.memory_map(str(path))
    if source.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(source)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    source.seek(0)
    return iter(pyarrow.ipc.open_stream(source))


def without_nulls(value: Any) -> Any:
    """Without null keys: Arrow gives every object of a column the keys of all others, as null. It cannot tell these
    from nulls that a row had; JSON text inside a column keeps its own."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and isinstance(next((inner for inner in value if inner is not None), None), dict | list):
        return [without_nulls(inner) for inner in value]
    return value
