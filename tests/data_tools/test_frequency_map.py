"""`slipstream frequency-map` against collections.Counter."""

import json
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from datasets import load_from_disk
from matplotlib.figure import Figure

from slipstream.data_tools import frequency_map, prepare
from slipstream.data_tools.dataset import Conversation, write_dataset
from slipstream.models.drafts.token_map import TokenMap
from slipstream.tests.data_tools.chats import CHATML, chat, write_jsonl
from slipstream.tests.tables import each_case

ROWS = [{"messages": chat(f"What is {n}?", f"It is {n * n}. Hello there")} for n in range(300)]
END = 2
SPECIAL = list(range(8))


@pytest.fixture(scope="module")
def data(tmp_path_factory, target) -> Path:
    """A folder with conversations (rows.jsonl) and the dataset prepared from them (prepared)."""
    folder = tmp_path_factory.mktemp("data")
    rows = write_jsonl(folder / "rows.jsonl", ROWS)
    prepare.main(["--data", str(rows), "--target", str(target), "--output", str(folder / "prepared")])
    return folder


def counter(prepared: Path, *splits: str) -> Counter[int]:
    counts: Counter[int] = Counter()
    for split in splits:
        for row in load_from_disk(prepared)[split]:
            pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
            counts.update(token for token, supervised in pairs if supervised)
    return counts


def chosen(counts: Counter[int], size: int) -> list[int]:
    """END, then the most frequent: special tokens that answers do not have take no place."""
    tokens = sorted(set(range(512)) - {END}, key=lambda token: (-counts[token], token))
    return sorted([END, *tokens[: size - 1]])


def run(folder: Path, *arguments: object) -> TokenMap:
    frequency_map.main([*map(str, arguments), "-o", str(folder / "map.safetensors"), "--overwrite"])
    return TokenMap.read(folder / "map.safetensors")


def as_counter(token_map: TokenMap) -> Counter[int]:
    return Counter({token: count for token, count in enumerate(token_map.counts.tolist()) if count})


def test_counts_the_supervised_training_tokens(tmp_path, data, capsys):
    token_map = run(tmp_path, "--data", data / "prepared", "--size", 40)
    counts = counter(data / "prepared", "train")
    report = json.loads((data / "prepared" / "report.json").read_text())
    assert as_counter(token_map) == counts
    assert token_map.ids.tolist() == chosen(counts, 40)
    assert token_map.vocab_size == 512
    metadata = token_map.metadata
    assert (metadata["tokens_seen"], metadata["kept_ids"]) == (counts.total(), [END])
    assert (metadata["tokenizer_hash"], metadata["data_hash"]) == (report["tokenizer_hash"], report["data_hash"])
    covered = sum(counts[token] for token in chosen(counts, 40)) / counts.total()
    assert metadata["coverage"] == {"40": round(covered, 6), "512": 1.0}
    output = capsys.readouterr().out
    assert f"40 of 512 tokens (8% of the vocabulary) cover {covered:.2%} of {counts.total():,} answer tokens" in output
    assert f"        40  {covered:8.2%}  " + "#" * round(30 * covered) in output


def test_splits_shards_and_threads_add_up(tmp_path, data, monkeypatch):
    monkeypatch.setattr(frequency_map, "SHARD_ROWS", 7)
    token_map = run(tmp_path, "--data", data / "prepared", "--split", "heldout", "--num-proc", 3)
    assert as_counter(token_map) == counter(data / "prepared", "heldout")
    twice = run(tmp_path, "--data", data / "prepared", data / "prepared", "--num-proc", 2)
    assert len(twice.ids) == 128, "by default a quarter of the vocabulary"
    once = counter(data / "prepared", "train")
    assert as_counter(twice) == once + once


def test_conversations_count_as_their_prepared_dataset(tmp_path, data, target):
    raw = run(tmp_path, "--data", data / "rows.jsonl", "--target", target, "--size", 40)
    assert as_counter(raw) == counter(data / "prepared", "train", "heldout")


def test_served_answers_count_as_the_conversations_they_come_from(tmp_path, data, target):
    """One file of each kind of log: together they are the prepared dataset, end tokens included."""
    answers = [row["messages"][1]["content"] for row in ROWS]
    logs: list[dict[str, object]] = [{"id": str(n), "messages": row["messages"]} for n, row in enumerate(ROWS[:100])]
    logs += [{"choices": [{"message": {"content": text}, "finish_reason": "stop"}]} for text in answers[100:200]]
    logs += [{"text": text} for text in answers[200:]]
    served = write_jsonl(tmp_path / "served.jsonl", logs)
    token_map = run(tmp_path, "--from-responses", served, "--target", target, "--size", 40, "--num-proc", 2)
    assert as_counter(token_map) == counter(data / "prepared", "train", "heldout")


def test_the_plot_and_the_loss_at_given_rates(tmp_path, data, capsys):
    plot = tmp_path / "plots" / "map.png"
    rates = ["--accept-rates", "0.5", "0.25"]
    share = run(tmp_path, "--data", data / "prepared", "--size", 40, *rates, "--plot", plot).coverage
    length = 1 + 0.5 * share + 0.25 * share**2
    output = capsys.readouterr().out
    assert f"  {length:5.2f}  {length / 1.75:6.1%}  <- this map" in output
    assert "   1.75  100.0%" in output
    assert "at accept rates a_k of 0.5 0.25 with the whole vocabulary" in output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_same_data_give_the_same_bytes(tmp_path, data):
    token_map = run(tmp_path, "--data", data / "prepared")
    files = [tmp_path / f"{number}.safetensors" for number in range(12)]
    for file in files:
        token_map.write(file)
    assert len({file.read_bytes() for file in files}) == 1


def test_a_run_that_ends_while_it_draws_is_repeated(tmp_path, data, monkeypatch, exits):
    flags = [f"--data={data / 'prepared'}", *(f"--{name}={tmp_path / name}" for name in ("output", "plot", "fr-spec"))]
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", Mock(side_effect=KeyboardInterrupt))
        with exits("", 130):
            frequency_map.main(flags)
    frequency_map.main(flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fr-spec", "output", "plot"]


def test_merged_maps_add_their_counts_in_any_order(tmp_path, data):
    for split in ("train", "heldout"):
        run(tmp_path, "--data", data / "prepared", "--split", split).write(tmp_path / f"{split}.safetensors")
    parts = [tmp_path / "train.safetensors", tmp_path / "heldout.safetensors"]
    merged = run(tmp_path, "--merge", *parts, "--size", 40)
    counts = counter(data / "prepared", "train", "heldout")
    assert as_counter(merged) == counts
    assert merged.ids.tolist() == chosen(counts, 40)
    again = run(tmp_path, "--merge", *reversed(parts), "--size", 40)
    assert again.metadata == merged.metadata
    assert merged.metadata["data_hash"] != TokenMap.read(parts[0]).metadata["data_hash"]


def write_tokens(path: Path, ids: list[int]):
    """A prepared dataset with one training row of these supervised tokens."""
    row = (np.array(ids, np.int32), np.ones(len(ids), np.bool_))
    report = {"vocab_size": 512, "special_ids": SPECIAL, "end_ids": [END], "tokenizer_hash": "other"}
    write_dataset([Conversation([row])], path, heldout=0, seed=0, describe=lambda: report)


def error(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> str:
    with pytest.raises(SystemExit):
        run(folder, *arguments)
    assert not (folder / "map.safetensors").exists()
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_ids_outside_the_vocabulary_are_an_error(tmp_path, capsys):
    for wrong in (512, -1):
        write_tokens(tmp_path / f"data{wrong}", [10, wrong])
        message = error(capsys, tmp_path, "--data", tmp_path / f"data{wrong}")
        assert f"token id {wrong} is outside the vocabulary of 512 tokens" in message


def test_special_tokens_of_answers_are_kept(tmp_path):
    write_tokens(tmp_path / "data", [10, 10, 11, 11, 6])
    assert run(tmp_path, "--data", tmp_path / "data", "--size", 3).ids.tolist() == [END, 6, 10]


def test_other_tokenizers_are_refused(tmp_path, data, target, make_folder, capsys):
    write_tokens(tmp_path / "foreign", [10, 11])
    message = error(capsys, tmp_path, "--data", data / "prepared", tmp_path / "foreign")
    assert "different tokenizers" in message
    assert "with another tokenizer" in error(capsys, tmp_path, "--data", tmp_path / "foreign", "--target", target)
    # The same tokenizer in a model with more ids: the map follows the model.
    larger = run(tmp_path, "--data", data / "prepared", "--target", make_folder(CHATML, 640))
    assert larger.vocab_size == 640


@each_case()
def test_impossible_runs_get_one_sentence(tmp_path, data, capsys, arguments, message):
    words = [word.replace("PREPARED", str(data / "prepared")) for word in arguments]
    assert message in error(capsys, tmp_path, *words)


@pytest.mark.parametrize("option", ["--output", "--sglang-pt", "--fr-spec", "--plot"])
def test_only_files_of_the_same_kind_are_replaced(option, tmp_path, data, capsys, monkeypatch):
    path = tmp_path / "file"
    words = ["--data", str(data / "prepared"), "--size", "40"]
    words += [option, str(path)] if option == "--output" else [option, str(path), "--output", str(tmp_path / "map")]
    frequency_map.main(words)
    frequency_map.main([*words, "--overwrite"])
    content = path.read_bytes()
    assert not list(tmp_path.glob(".*"))

    def refused(*more):
        with pytest.raises(SystemExit):
            frequency_map.main([*words, *more])
        return capsys.readouterr().err

    monkeypatch.setattr(frequency_map, "count", None)  # all is refused before anything is counted
    output = [] if option == "--output" else ["--output", str(tmp_path / "another")]
    assert f"{path} exists; name another file or add --overwrite" in refused(*output)
    assert path.read_bytes() == content
    for foreign in (b"mine", b"\x89PNG mine", data.joinpath("prepared", "report.json").read_bytes()):
        path.write_bytes(foreign)
        assert f"{path} is not a" in refused("--overwrite")
        assert path.read_bytes() == foreign
    assert "which is read" in refused("--data", str(tmp_path), "--overwrite")
