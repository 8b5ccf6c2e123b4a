"""Every input format, from every kind of file, and the sentences that malformed rows get."""

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from datasets import Dataset, DatasetDict
from hypothesis import given, settings, strategies

from slipstream.data_tools.conversations import to_example
from slipstream.data_tools.options import ConversationOptions
from slipstream.data_tools.rows import Row, RowError, read_rows
from slipstream.data_tools.verb_options import PrepareConfig
from slipstream.tests.data_tools.chats import chat, write_jsonl
from slipstream.tests.tables import each_case, table_of
from slipstream.tests.user_errors import user_error

TURNS = chat("Hello", "fine")
ROWS = [
    {"id": str(number), "split": "ab"[number % 2], "messages": chat("Hello", f"fine {number}")} for number in range(5)
]


def example(columns: dict[str, Any], **options: Any) -> Any:
    return to_example(Row("file, line 3", columns), columns, **options)


@each_case()
def test_conversation_formats_are_one(columns):
    result = example({"id": 7, **columns})
    assert (result.id, result.messages, result.tools, result.text, result.documents) == ("7", TURNS, None, None, None)


FORMS = table_of(__file__, "forms")


def form_of(kind: str, texts: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """The columns of a form, and its messages, with these texts."""
    conversation = chat(*texts)
    worse = [*conversation[:-1], {"role": "assistant", "content": "worse"}]
    parts = {
        "QUESTION": texts[0],
        "ANSWER": texts[1],
        "LAST": texts[-1],
        "PAIR": conversation[:2],
        "CONVERSATION": conversation,
        "WORSE": worse,
        "QUESTIONS": texts[::2],
        "USER TURNS": [{"role": "user", "content": text} for text in texts[::2]],
        "WITH INPUT": chat(f"{texts[0]}\n5, 8", texts[1]),
        "QUESTION TURN": conversation[:1],
        "BUT LAST": conversation[:-1],
        "LAST TURN": conversation[-1:],
        "WORSE TURN": worse[-1:],
    }
    form = FORMS[kind]
    return {name: parts.get(value, value) for name, value in form["columns"].items()}, parts[form["messages"]]


COLUMNS = ("messages", "conversations", "completion", "text", "tools", "weight", "input", "finish_reason", "rejected")


@pytest.mark.parametrize("kind", FORMS)
@settings(max_examples=30, deadline=None)
@given(data=strategies.data())
def test_each_form_gives_the_messages_written_by_hand(kind, data):
    """Whichever optional columns are missing or null."""
    length = data.draw(strategies.sampled_from([2, 4]))
    texts = data.draw(strategies.lists(strategies.text(min_size=1), min_size=length, max_size=length))
    columns, messages = form_of(kind, texts)
    if data.draw(strategies.booleans()):
        columns["system"] = "Be kind."
        messages = [{"role": "system", "content": "Be kind."}, *messages]
    nulls = data.draw(strategies.sets(strategies.sampled_from(COLUMNS)))
    columns |= dict.fromkeys(nulls - set(FORMS[kind].get("needed", ())))
    assert example(columns).messages == messages


def test_forms_that_agree_are_one():
    for columns in (
        {"messages": TURNS, "turns": ["Hello"]},
        {"messages": TURNS, "prompt": "Hello", "chosen": TURNS, "rejected": chat("Hello", "bad")},  # UltraFeedback's
        {"messages": TURNS, "prompt": "another"},  # a question alone says less than a conversation
        {"instruction": "Hello", "input": "", "output": "fine", "text": "rendered"},
        {"conversations": TURNS, "instruction": "Hello", "response": "fine"},
    ):
        assert example(columns).messages == TURNS
    assert example({"text": "Hello", "prompt": "Hel"}).text == "Hello"
    assert example({"prompt": "Hello", "question": "Hello"}).messages == TURNS[:1]


def test_other_formats():
    assert example({"text": "Hello"}).text == "Hello"
    tokens = example({"input_ids": [3, 4], "loss_mask": [0, True], "messages": TURNS})
    assert (tokens.documents, tokens.messages) == ([([3, 4], [0, 1])], None)
    token_rows = [{"input_ids": [3, 4], "loss_mask": [0, 1]}, {"input_ids": [5], "loss_mask": [1]}]
    assert example({"token_rows": token_rows, "messages": TURNS}).documents == [([3, 4], [0, 1]), ([5], [1])]
    assert example({"input_ids": None, "loss_mask": None, "messages": TURNS}).messages == TURNS
    plain = example({"prompt": "Hello", "completion": "fine"}, has_template=False)
    assert (plain.prompt, plain.text, plain.messages) == ("Hello", "fine", None)
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    for tools in ([tool], json.dumps([tool]), [tool["function"]], [{**tool, "function": {**tool["function"], "x": 1}}]):
        assert example({"messages": TURNS, "tools": tools}).tools == [tool]
    system = example({"system": "Be kind.", "conversations": TURNS}).messages
    assert system == [{"role": "system", "content": "Be kind."}, *TURNS]


ADD = {"name": "add", "arguments": '{"a": 1}'}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": ADD}]}


@each_case()
def test_forms_of_calls_are_one(message):
    assert example({"messages": [message]}).messages == [CALL]


def test_other_names_of_roles():
    role_names = {"Human": "user", "USER": "user", " Assistant": "assistant", "gpt": "assistant", "observation": "tool"}
    turns = [{"from": role, "value": "x"} for role in [*role_names, "developer", "Function", "System"]]
    roles = [message["role"] for message in example({"conversations": turns}).messages]
    assert roles == [*role_names.values(), "system", "tool", "system"]


def test_messages_may_be_json_text():
    for column in ("messages", "conversations"):
        assert example({column: json.dumps(TURNS), "system": "Be kind."}).messages[1:] == TURNS


def test_messages_and_rows_have_weights():
    turns = [{**turn, "weight": weight} for turn, weight in zip(TURNS * 2, (None, 0, 1, 2.5), strict=True)]
    result = example({"messages": turns, "weight": 0.5})
    assert (result.messages, result.weights, result.row_weight) == (TURNS * 2, {1: 0, 3: 2.5}, 0.5)
    for columns in ({"text": "x"}, {"instruction": "a", "output": "b"}, {"input_ids": [1], "loss_mask": [1]}):
        assert example(columns).row_weight == example({**columns, "weight": None}).row_weight == 1
        assert example({**columns, "weight": 3}).row_weight == 3
    weighted = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "loss_weights": [0, 0.5, 2]}
    assert example(weighted).documents == [([1, 2, 3], [0, 0.5, 2])]
    assert example({"token_rows": [weighted]}).documents == [([1, 2, 3], [0, 0.5, 2])]


MALFORMED = yaml.safe_load(Path(__file__).with_name("malformed_rows.yaml").read_text())["rows"]


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        *((row["columns"], row["fault"]) for row in MALFORMED),
        ({"text": "x", "weight": float("nan")}, "weight is nan; give a number from 0"),
        ({"messages": TURNS, "tools": [{"name": "\udc00"}]}, "tools holds \\udc00 at character 0, half of a surrogate"),
        ({"messages": TURNS, "tools": f"[{'1' * 5000}]"}, "4300 digits"),
        ({"messages": TURNS, "tools": "[" * 100_000}, "is nested too deep"),
        ({"text": "a\ud83d"}, "text holds \\ud83d at character 1"),
        ({"text": "a", "id": "\ud83d"}, "id holds \\ud83d"),
    ],
)
def test_malformed_rows_name_place_and_fault(columns, fault):
    with pytest.raises(RowError, match=r"^file, line 3: ") as caught:
        example(columns)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"a": }', "not valid JSON: Expecting value at column 7"),
        (b"[1]", "holds a list, not a JSON object"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not readable JSON: Exceeds the limit"),
        (b"[" * 100_000, "is nested too deep"),
    ],
)
def test_malformed_lines_name_place_and_fault(line, fault):
    with pytest.raises(RowError, match=rf"^file, line 3: {fault}"):
        Row("file, line 3", line).columns()


def save(folder: Path, kind: str) -> Path:
    """ROWS in a file or folder of the kind."""
    path = folder / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    if kind == "jsonl":
        path.write_bytes(b"\n" + lines)
    elif kind == "json":
        path.write_bytes(b"\n " + json.dumps(ROWS, indent=1).encode())
    elif kind == "bom.json":
        path.write_bytes(codecs.BOM_UTF8 + json.dumps(ROWS, indent=1).encode())
    elif kind == "lines.json":
        path.write_bytes(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif kind in ("arrow", "stream.arrow"):
        make = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
        with make(path, (table := pyarrow.Table.from_pylist(ROWS)).schema) as writer:
            writer.write_table(table, max_chunksize=2)
    elif kind == "saved":
        Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "splits":
        DatasetDict({"test": Dataset.from_list(ROWS), "train": Dataset.from_list(ROWS[:1])}).save_to_disk(path)
    elif kind == "folder":
        path.mkdir()
        write_jsonl(path / "a.jsonl", ROWS[:2])
        write_jsonl(path / "b.jsonl", ROWS[2:])
        (path / "README.md").write_text("no data")
        (path / ".c.tmp" / "new").mkdir(parents=True)  # what another program is writing
        write_jsonl(path / ".c.tmp" / "new" / "rows.jsonl", ROWS)
    return path


KINDS = "jsonl json bom.json lines.json jsonl.gz parquet arrow stream.arrow saved splits folder"


@pytest.mark.parametrize("kind", KINDS.split())
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    options = ConversationOptions(data=(str(save(tmp_path, kind)),), split="test")
    assert [row.columns() for row in read_rows(options)] == ROWS


def save_tools(folder: Path, kind: str, rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The value of `data` for rows in a file, a folder or on the hub."""
    path = folder / f"tools.{kind}"
    if kind == "jsonl":
        write_jsonl(path, rows)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "arrow":
        with pyarrow.ipc.new_file(path, (table := pyarrow.Table.from_pylist(rows)).schema) as writer:
            writer.write_table(table)
    elif kind == "saved":
        Dataset.from_list(rows).save_to_disk(path)
    else:
        dataset = Dataset.from_list(rows)
        monkeypatch.setattr(
            "slipstream.data_tools.rows.load_dataset",
            lambda *_, streaming, **__: dataset.to_iterable_dataset() if streaming else dataset,
        )
        return "owner/name"
    return str(path)


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "saved", "hub"])
def test_objects_of_a_column_do_not_lend_each_other_keys(tmp_path, kind, limit, monkeypatch):
    """Arrow gives all objects of a column the same keys; a template would show what one row lacks as null."""

    def row(name, properties):
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
        call = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": properties}}]}
        return {"messages": [chat("Hello", "fine")[0], call], "tools": [tool]}

    rows = [row("add", {"a": {"type": "number"}}), row("find", {"text": {"type": "string", "most": 3}})]
    options = ConversationOptions(data=(save_tools(tmp_path, kind, rows, monkeypatch),), limit=limit)
    assert [read.columns() for read in read_rows(options)] == rows


def test_several_sources_follow_each_other(tmp_path):
    options = ConversationOptions(data=(str(save(tmp_path, "parquet")), str(save(tmp_path, "jsonl"))))
    rows = list(read_rows(options))
    assert [row.columns() for row in rows] == ROWS + ROWS
    assert rows[4].place.endswith("rows.parquet, row 5")
    assert rows[5].place.endswith("rows.jsonl, line 2")  # line 1 is empty


def cut_gzip(path: Path) -> Path:
    path.write_bytes(gzip.compress(json.dumps(ROWS).encode())[:18])
    return path


def damaged_gzip(path: Path) -> Path:
    data = gzip.compress(b"".join(json.dumps({"text": f"{number**7}"}).encode() + b"\n" for number in range(3000)))
    path.write_bytes(data[: len(data) // 2])
    return path


def damaged_in_its_middle(path: Path) -> Path:
    """A table, or a dataset that `datasets` saved, which begins as it should."""
    file = next(path.glob("test/*.arrow")) if path.is_dir() else path
    data = bytearray(file.read_bytes())
    data[4 : len(data) // 2] = bytes(byte ^ 0xFF for byte in data[4 : len(data) // 2])
    file.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent.jsonl", "absent.jsonl does not exist; name a file"),
        (lambda folder: folder, "holds no file that ends in"),
        (lambda folder: write_jsonl(folder / "a.csv", []), "a.csv has no known ending"),
        (lambda folder: write_jsonl(folder / "a.parquet", [1]), "a.parquet is not a readable parquet file"),
        (lambda folder: write_jsonl(folder / "a.arrow", [1]), "a.arrow is not a readable arrow file"),
        (lambda folder: write_jsonl(folder / "a.json", [[1, 2], [3]]), "a.json is not valid JSON: Extra data: line 2"),
        (lambda folder: cut_gzip(folder / "a.json.gz"), "a.json.gz is not valid JSON: Compressed file ended"),
        (lambda folder: damaged_gzip(folder / "a.jsonl.gz"), r"a.jsonl.gz is damaged or cut short after line \d+"),
        (lambda folder: damaged_in_its_middle(save(folder, "parquet")), "rows.parquet is not a readable parquet file"),
        (lambda folder: damaged_in_its_middle(save(folder, "splits")), "is damaged .*; write the dataset again"),
        (lambda folder: save(folder, "splits"), "split is 'dev'; .* has test, train"),
        (lambda _: "", "data is empty"),
    ],
)
def test_unreadable_data_gets_one_sentence(tmp_path, make, message):
    with user_error(message):
        list(read_rows(ConversationOptions(data=(str(path),) if (path := make(tmp_path)) else (), split="dev")))


@each_case()
def test_bad_options_are_refused(options, message):
    with user_error(message):
        PrepareConfig(**options)
