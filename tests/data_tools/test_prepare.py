"""`slipstream prepare` from file to dataset."""

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from datasets import Features, List, Value, load_from_disk
from transformers import AutoTokenizer

from slipstream.data_tools import tokenization
from slipstream.data_tools.prepare import main
from slipstream.tests.data_tools.chats import CHATML, LLAMA, SPECIAL, THINKING, chat, join, write_jsonl
from slipstream.tests.tables import each_case

ROWS = [{"id": str(n), "split": "ab"[n % 2], "messages": chat(f"What is {n}?", f"It is {n}.")} for n in range(20)]


def expected(target: Path, number: int) -> tuple[list[int], list[bool]]:
    pieces = [
        ("<|im_start|>user\n", False),
        (f"What is {number}?<|im_end|>\n<|im_start|>assistant\n", False),
        (f"It is {number}.<|im_end|>", True),
    ]
    return join(AutoTokenizer.from_pretrained(target), pieces)


def prepare(folder: Path, target: Path, rows: list[Any], *options: str) -> tuple[Any, dict[str, Any]]:
    """The dataset and the report of one run."""
    data = write_jsonl(folder / "rows.jsonl", rows)
    main(["--data", str(data), "--target", str(target), "--output", str(folder / "out"), "--overwrite", *options])
    return load_from_disk(folder / "out"), json.loads((folder / "out" / "report.json").read_text())


def as_set(dataset: Any, *splits: str) -> set[tuple[tuple[int, ...], tuple[bool, ...]]]:
    return {(tuple(row["input_ids"]), tuple(row["loss_mask"])) for split in splits for row in dataset[split]}


def test_dataset_and_report(tmp_path, target, capsys):
    dataset, report = prepare(tmp_path, target, ROWS, "--heldout", "0.2")
    rows = [expected(target, number) for number in range(20)]
    assert as_set(dataset, "train", "heldout") == {(tuple(ids), tuple(mask)) for ids, mask in rows}
    assert not as_set(dataset, "train") & as_set(dataset, "heldout")
    assert report["split_rows"] == {"train": 16, "heldout": 4}
    assert (report["rows_in"], report["rows_kept"], report["rows_dropped"]) == (20, 20, {})
    assert report["tokens"] == sum(len(ids) for ids, _ in rows)
    assert report["supervised_tokens"] == sum(sum(mask) for _, mask in rows)
    assert report["vocab_size"] == 512
    assert (report["special_ids"], report["end_ids"]) == (list(range(len(SPECIAL))), [2])
    assert dataset["train"].features == Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("bool"))})
    assert (
        "<|im_start|>user\nWhat is 0?<|im_end|>\n<|im_start|>assistant\n⟦It is 0.<|im_end|>⟧" in capsys.readouterr().out
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


def test_seed_decides_the_order(tmp_path, target):
    def order(*options):
        dataset, report = prepare(tmp_path, target, ROWS, *options)
        return list(dataset["train"]["input_ids"]), report["data_hash"], dataset["train"]._fingerprint

    assert order("--seed", "1") == order("--seed", "1")
    assert order("--seed", "1")[0] != order("--seed", "2")[0]
    assert order("--seed", "1")[1] != order("--seed", "2")[1]
    assert order("--heldout", "0")[1] != order("--heldout", "0.5")[1]


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_workers_change_nothing(kind, tmp_path, target, monkeypatch):
    """Nor does Ctrl-C reach them: it would print the traceback of each."""
    monkeypatch.setattr(tokenization, "CHUNK_ROWS", 5)
    masks = []

    def threads(number, **_):
        return ThreadPoolExecutor(
            number, initializer=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        )

    if kind == "threads":
        monkeypatch.setattr(tokenization, "ProcessPoolExecutor", threads)
    rows = [{"messages": chat(f"What is {n}?", f"It is {n}.")} for n in range(100)]
    rows[70] = {"messages": chat("no answer")}
    serial, parallel = (prepare(tmp_path, target, rows, "--num-proc", number) for number in "12")
    assert list(serial[0]["train"]["input_ids"]) == list(parallel[0]["train"]["input_ids"])
    assert {**serial[1], "options": None} == {**parallel[1], "options": None}
    assert serial[1]["rows_kept"] == 99
    assert all(signal.SIGINT in mask for mask in masks)
    assert bool(masks) == (kind == "threads")


def test_a_killed_worker_ends_in_a_sentence(tmp_path, target, monkeypatch, exits):
    monkeypatch.setattr(
        tokenization, "ProcessPoolExecutor", lambda number, **_: ThreadPoolExecutor(number, initializer=lambda: 1 // 0)
    )
    with exits("one of 2 processes that tokenise was killed, perhaps for want of memory; lower num_proc"):
        prepare(tmp_path, target, ROWS, "--num-proc=2")


def test_a_held_out_file_is_that_split_in_its_order(tmp_path, target):
    """Copies of its rows are not trained on."""
    other = write_jsonl(tmp_path / "other.jsonl", ROWS[12:])
    dataset, report = prepare(tmp_path, target, ROWS[:15], "--heldout-data", str(other))
    assert list(dataset["heldout"]["input_ids"]) == [expected(target, number)[0] for number in range(12, 20)]
    assert as_set(dataset, "train") == {tuple(map(tuple, expected(target, number))) for number in range(12)}
    assert (report["rows_in"], report["copies_of_heldout"]) == (23, 3)
    assert report["split_rows"] == {"train": 12, "heldout": 8}


def test_copies_of_held_out_rows_are_not_trained_on(tmp_path, target, capsys, exits):
    dataset, report = prepare(tmp_path, target, ROWS * 3, "--heldout", "0.2")
    held_out = as_set(dataset, "heldout")
    assert not held_out & as_set(dataset, "train")
    assert len(dataset["train"]) == 60 - 3 * len(held_out) == report["split_rows"]["train"]
    assert report["copies_of_heldout"] == 3 * len(held_out) - 12
    assert "left out of training" in capsys.readouterr().out
    with exits("every training row is also in the held-out split"):
        prepare(tmp_path, target, ROWS[:1] * 9, "--heldout", "0.2")


def test_where_and_limit(tmp_path, target):
    dataset, report = prepare(tmp_path, target, ROWS, "--where", "split=b", "--limit", "4", "--heldout", "0")
    assert as_set(dataset, "train") == {tuple(map(tuple, expected(target, number))) for number in (1, 3, 5, 7)}
    assert (report["rows_in"], report["rows_filtered"], len(dataset["heldout"])) == (4, 4, 0)
    rows = [{**row, "label": number % 5 == 0} for number, row in enumerate(ROWS)]
    for word in ("label=true", "label=True"):
        assert prepare(tmp_path, target, rows, "--where", word)[1]["rows_kept"] == 4


def test_long_rows_are_cut_and_rows_with_too_little_left_dropped(tmp_path, target):
    ids, mask = expected(target, 1)
    length = mask.index(True) + 2
    longer = {"messages": chat("What is 1? " * 9, "It is 1.")}
    options = ["--max-length", str(length), "--min-supervised", "2", "--heldout", "0"]
    dataset, report = prepare(tmp_path, target, [ROWS[1], longer], *options)
    assert as_set(dataset, "train") == {(tuple(ids[:length]), tuple(mask[:length]))}
    assert (report["rows_truncated"], report["rows_dropped"]) == (1, {"too_few_supervised_tokens": 1})
    assert "0 of" in report["dropped_examples"]["too_few_supervised_tokens"][0]


def test_every_format_meets_in_one_dataset(tmp_path, target):
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = [
        {"conversations": [{"from": "human", "value": "What is 1?"}, {"from": "gpt", "value": "It is 1."}]},
        {"prompt": "What is 2?", "completion": "It is 2."},
        {"instruction": "What is 3?", "input": "", "output": "It is 3."},
        {"prompt": "What is 4?", "chosen": "It is 4.", "rejected": "It is 5."},
        {"text": "Hello there"},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "messages": chat("not", "used")},
    ]
    dataset, _ = prepare(tmp_path, target, rows, "--heldout", "0")
    text = tokenizer("Hello there")["input_ids"]
    assert as_set(dataset, "train") == {
        *(tuple(map(tuple, expected(target, number))) for number in (1, 2, 3, 4)),
        (tuple(text), (True,) * len(text)),
        ((5, 6, 7), (False, True, True)),
    }


def test_target_without_template_takes_plain_completions(tmp_path, make_folder):
    target = make_folder(None)
    dataset, report = prepare(tmp_path, target, [{"prompt": "What?\n", "completion": "It is."}], "--heldout", "0")
    pieces = [("What?\n", False), ("It is.<|im_end|>", True)]
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids, mask = join(tokenizer, pieces)
    assert as_set(dataset, "train") == {(tuple(ids), tuple(mask))}
    assert report["vocab_size"] == len(tokenizer), "no model config: the tokenizer's"


def test_cut_answers_have_no_supervised_end(tmp_path, target, make_folder):
    ids, mask = expected(target, 1)
    ids = ids[:-1]
    mask = mask[:-1]
    columns = {"prompt": "What is 1?", "completion": "It is 1."}
    for row in (ROWS[1], columns):
        dataset, _ = prepare(tmp_path, target, [{**row, "finish_reason": "length"}], "--heldout", "0")
        assert as_set(dataset, "train") == {(tuple(ids), tuple(mask))}
        dataset, _ = prepare(tmp_path, target, [{**row, "finish_reason": "stop"}], "--heldout", "0")
        assert as_set(dataset, "train") == {tuple(map(tuple, expected(target, 1)))}
    plain = make_folder(None)
    dataset, _ = prepare(tmp_path, plain, [{**columns, "finish_reason": "length"}], "--heldout", "0")
    assert AutoTokenizer.from_pretrained(plain).decode(dataset["train"][0]["input_ids"]) == "What is 1?It is 1."


def test_dropped_rows_are_counted_by_reason(tmp_path, make_folder):
    rows = [ROWS[0], {"messages": chat("a", "")}, {"messages": chat("What?")}, {"messages": chat("a", "b")[1:]}]
    _, report = prepare(tmp_path, make_folder(THINKING), rows, "--heldout", "0")
    assert report["rows_dropped"] == {"empty_answer": 1, "no_assistant_turn": 1, "starts_with_assistant": 1}
    assert "rows.jsonl, line 2" in report["dropped_examples"]["empty_answer"][0]


def test_rows_keep_their_category(tmp_path, target, capsys):
    """MT-bench's, or that of a named column; read back, and none where no row has any."""
    names = ["writing", "math", None, "math"]
    rows = [
        {"question_id": 81 + n, **ROWS[n], "topic": n % 2, "tags": ["a"]} | ({"category": name} if name else {})
        for n, name in enumerate(names)
    ]
    heldout = write_jsonl(tmp_path / "heldout.jsonl", rows)
    dataset, report = prepare(tmp_path, target, ROWS[5:9], "--heldout-data", str(heldout))
    assert dataset["heldout"].features["category"] == Value("string")
    assert dataset["heldout"]["category"][:] == names
    assert dataset["train"]["category"][:] == [None] * 4
    assert report["heldout_categories"] == {"math": 2, "writing": 1}
    assert "held-out categories  math 2, writing 1" in capsys.readouterr().out
    copy = tmp_path / "copy"
    main(["--data", str(tmp_path / "out"), "--split=heldout", "--target", str(target), f"--output={copy}"])
    again = load_from_disk(copy)
    assert sorted(map(str, [*again["train"]["category"], *again["heldout"]["category"]])) == sorted(map(str, names))
    dataset, _ = prepare(tmp_path, target, rows, "--category-column=topic", "--heldout=0")
    assert sorted(dataset["train"]["category"]) == ["0", "0", "1", "1"]
    dataset, report = prepare(tmp_path, target, [{**row, "category": ["a"]} for row in rows], "--heldout=0.5")
    assert dataset["train"].column_names == ["input_ids", "loss_mask"]
    assert report["heldout_categories"] == {}


def test_tokens_have_the_weights_of_their_message_and_row(tmp_path, target):
    """A column holds them, in rows that need it alone, and is read back. Messages of weight 0 are not supervised."""
    turns = [turn for number in (1, 2, 6) for turn in ROWS[number]["messages"]]
    turns[1] = {**turns[1], "weight": 4}
    turns[5] = {**turns[5], "weight": 0}
    rows = [{"messages": turns, "weight": 0.5}, {**ROWS[3], "weight": 3.0}, ROWS[4], {**ROWS[5], "weight": 0}]
    dataset, report = prepare(tmp_path, target, rows, "--heldout", "0")
    assert dataset["train"].features["loss_weights"] == List(Value("float32"))
    assert (report["rows_dropped"], report["weighted_rows"]) == ({"too_few_supervised_tokens": 1}, 2)
    tokenizer = AutoTokenizer.from_pretrained(target)
    answers: dict[str, set[float]] = {}
    for row in dataset["train"]:
        weights = row["loss_weights"] or list(map(float, row["loss_mask"]))
        assert [weight > 0 for weight in weights] == row["loss_mask"]
        for weight in sorted(set(weights) - {0.0}):
            text = tokenizer.decode(
                [token for token, other in zip(row["input_ids"], weights, strict=True) if other == weight]
            )
            answers.setdefault(text, set()).add(weight)
    end = "<|im_end|>"
    assert answers == {
        f"It is 1.{end}": {2.0},
        f"It is 2.{end}": {0.5},
        f"It is 3.{end}": {3.0},
        f"It is 4.{end}": {1.0},
    }
    assert [row["loss_weights"] is None for row in dataset["train"]].count(True) == 1
    copy = tmp_path / "copy"
    main(["--data", str(tmp_path / "out"), "--target", str(target), "--output", str(copy), "--heldout", "0"])
    again = load_from_disk(copy)["train"]
    assert sorted(map(str, again)) == sorted(map(str, dataset["train"]))
    _, plain = prepare(tmp_path, target, [{"messages": turns[2:4]}, ROWS[3], ROWS[4]], "--heldout", "0")
    assert plain["data_hash"] != report["data_hash"]


def test_documents_of_a_conversation_stay_in_one_split(tmp_path, make_folder):
    rows = [{"messages": chat(f"Hello {n}", "<think>hm</think>fine", "What?", f"is {n}")} for n in range(20)]
    target = make_folder(THINKING)
    dataset, report = prepare(tmp_path, target, rows, "--heldout", "0.3")
    assert (report["rows_in"], report["rows_kept"], report["split_rows"]) == (20, 20, {"train": 28, "heldout": 12})
    tokenizer = AutoTokenizer.from_pretrained(target)
    for split in ("train", "heldout"):
        texts = [tokenizer.decode(row["input_ids"]) for row in dataset[split]]
        questions = [text.split("Hello ")[1].split("<|im_end|>")[0] for text in texts]
        assert questions[::2] == questions[1::2]
    first = dataset["heldout"][0]
    second = dataset["heldout"][1]
    supervised = [
        tokenizer.decode([token for token, counts in zip(row["input_ids"], row["loss_mask"], strict=True) if counts])
        for row in (first, second)
    ]
    assert supervised[0] == "<think>hm</think>fine<|im_end|>"
    assert supervised[1].startswith("is ")


def test_samples_of_a_prompt_stay_in_one_split(tmp_path, target):
    """Also where the first sample was dropped. Ids that only look like those of samples mean nothing."""
    rows: list[dict[str, Any]] = []
    for number in range(20):
        for sample in range(number % 4 == 0, 3):
            name = f"row{number}" + (f"#{sample}" if sample else "")
            origin = {"sample_of": f"row{number}"} if sample else {}
            rows.append({"id": name, **origin, "messages": chat(f"What is {number}?", f"Answer {sample}.")})
    dataset, report = prepare(tmp_path, target, rows, "--heldout", "0.3")
    assert report["rows_kept"] == len(rows) == 55
    tokenizer = AutoTokenizer.from_pretrained(target)
    questions = {
        split: {tokenizer.decode(row["input_ids"]).split("What is ")[1].split("?")[0] for row in dataset[split]}
        for split in ("train", "heldout")
    }
    assert (len(questions["train"]), len(questions["heldout"])) == (14, 6)
    assert questions["train"].isdisjoint(questions["heldout"])
    foreign = [{**row, "id": f"gsm8k#{index}", "sample_of": None} for index, row in enumerate(rows)]
    assert prepare(tmp_path, target, foreign, "--heldout", "0.2")[1]["split_rows"] == {"train": 44, "heldout": 11}


def test_the_date_in_a_template_is_frozen_and_said(tmp_path, make_folder):
    target = make_folder(LLAMA, end="<|eot|>")
    dataset, report = prepare(tmp_path, target, ROWS[:1], "--heldout", "0", "--date", "2023-03-05")
    text = AutoTokenizer.from_pretrained(target).decode(dataset["train"][0]["input_ids"])
    assert "Today: 05 Mar 2023" in text
    assert report["frozen_date"] == "2023-03-05"


def test_chat_template_file_and_variables(tmp_path, make_folder):
    (tmp_path / "mine.jinja").write_text("{{ greeting }}" + CHATML)
    options = ["--chat-template", str(tmp_path / "mine.jinja"), "--template.greeting", "<s>", "--heldout", "0"]
    target = make_folder(None)
    dataset, _ = prepare(tmp_path, target, ROWS[3:4], *options)
    ids, mask = expected(target, 3)
    assert as_set(dataset, "train") == {((0, *ids), (False, *mask))}


def test_bad_rows_stop_or_are_counted(tmp_path, target, capsys):
    foreign = {"input_ids": [5], "loss_mask": [1], "tokenizer_hash": "other"}
    bad = [{"messages": []}, {"input_ids": [512], "loss_mask": [1]}, foreign, {"messages": chat("hi \ud83d", "fine")}]
    bad.append({**ROWS[4], "category": "\ud83d"})
    data = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:3], *bad])
    with data.open("a") as file:
        file.write('{"messages": [')  # cut short
    arguments = ["--data", str(data), "--target", str(target), "--output", str(tmp_path / "out"), "--heldout", "0"]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"slipstream prepare: error: {data}, line 4: messages must be a list of at least one")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    main([*arguments, "--skip-bad"])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["rows_in"], report["rows_kept"], report["rows_dropped"]) == (9, 3, {"malformed": 6})
    assert "512 is not a token id of the target's vocabulary of 512" in report["dropped_examples"]["malformed"][1]
    assert "line 6: its input_ids come from another tokenizer" in report["dropped_examples"]["malformed"][2]


@each_case()
def test_impossible_runs_get_one_sentence(tmp_path, target, capsys, monkeypatch, rows, options, message):
    monkeypatch.chdir(write_jsonl(tmp_path / "other.jsonl", ROWS[1:2]).parent)
    with pytest.raises(SystemExit) as caught:
        prepare(tmp_path, target, ROWS[:rows] if isinstance(rows, int) else rows, *options)
    assert caught.value.code == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("slipstream prepare: error: ")
    assert re.search(message, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.jsonl", "rows.jsonl"]


def test_an_existing_output_is_kept(tmp_path, target, exits):
    prepare(tmp_path, target, ROWS)
    out = tmp_path / "out"
    rows = str(tmp_path / "rows.jsonl")
    for output, option, message in (
        (out, "--no-overwrite", "exists; name another folder or add --overwrite"),
        (tmp_path / "out" / "train", "--overwrite", "train is not a prepared dataset"),
        (tmp_path, f"--data={rows}", f"output {tmp_path} holds data {rows}, which is read"),
        (tmp_path, f"--heldout-data={rows}", f"output {tmp_path} holds heldout_data"),
    ):
        with exits(message):
            main(["--data", "nobody/unread", "--target", "nobody/absent", "--output", str(output), option])
    assert load_from_disk(out)["train"]


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, make_folder, exits):
    target = make_folder(CHATML, 300)
    highest = len(AutoTokenizer.from_pretrained(target)) - 1
    with exits(f"token id {highest}, its config.json a vocab_size of 300"):
        prepare(tmp_path, target, ROWS)
