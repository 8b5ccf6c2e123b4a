"""Documents longer than a row, against a naive walk through each: what windows hold, and that nothing is lost."""

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

from slipstream.models.files.checkpoint import read_json
from slipstream.tests.train.runs import refusal
from slipstream.train.batches import Batch, PackedRows, possible_roots
from slipstream.train.eagle3 import main
from slipstream.train.windows import WindowLayout, measure

LENGTHS = (1, 2, 9, 10, 11, 17, 18, 19, 40, 64, 0, 100)


def long_documents(seed: int = 0) -> list[tuple[list[int], list[bool]]]:
    """Tokens that no other place has, so that a token tells where it comes from."""
    generator = np.random.default_rng(seed)
    bounds = np.cumsum((0, *LENGTHS))
    runs = [np.repeat(generator.random(40) < 0.6, generator.integers(1, 6, 40)) for _ in LENGTHS]  # answers and prompts
    return [
        (list(range(first, last)), run[: last - first].tolist())
        for first, last, run in zip(bounds, bounds[1:], runs, strict=False)
    ]


def dataset_of(documents: list[tuple[list[int], list[bool]]]) -> Dataset:
    return Dataset.from_dict({"input_ids": [ids for ids, _ in documents], "loss_mask": [mask for _, mask in documents]})


def naive_windows(ids: list[int], max_length: int) -> list[list[int]]:
    """A quarter of each later window, and the document's first token, repeat what came before."""
    windows = [ids[:max_length]]
    done = max_length
    context = max(1, max_length // 4)
    while done < len(ids):
        new = ids[done : done + max_length - 1 - context]
        windows.append(ids[:1] + ids[done - context : done] + new)
        done += len(new)
    return windows


def windows_of(batch: Batch) -> list[list[int]]:
    return [batch.tokens[batch.documents == number].tolist() for number in range(int(batch.documents.max()) + 1)]


@pytest.mark.parametrize("max_length", [3, 4, 8, 10, 18, 64])
def test_windows_lose_no_token_and_no_prediction(max_length):
    documents = long_documents()
    weights = [
        [(token + 2) * is_supervised for token, is_supervised in zip(*document, strict=True)] for document in documents
    ]
    dataset = dataset_of(documents).add_column("loss_weights", weights)
    rows = PackedRows(dataset, max_length, is_split=True)
    batch = rows.batch(list(range(len(rows.rows))))
    expected = Counter(tuple(window) for ids, _ in documents for window in naive_windows(ids, max_length))
    windows = Counter(map(tuple, windows_of(batch)))
    assert windows <= expected
    assert max(map(len, windows)) <= max_length
    followers = Counter(  # tokens that a round's first drafted token predicts
        ids[place] for ids, mask in documents for place in range(2, len(ids)) if mask[place - 1] and mask[place]
    )
    assert Counter(batch.tokens.flatten()[possible_roots(batch) + 1].tolist()) == followers
    supervised = Counter(batch.tokens[batch.supervised].tolist())
    assert sum(supervised.values()) == rows.num_supervised
    roots = {window[-1] for window in windows if followers[window[-1] + 1]}
    assert {token for token, count in supervised.items() if count > 1} <= roots, (
        "which begin a round in the next window"
    )
    assert max(supervised.values()) == 2
    assert batch.weights[batch.supervised].tolist() == [token + 2 for token in batch.tokens[batch.supervised].tolist()]
    assert rows.num_tokens == sum(len(window) for window in windows)
    assert rows.num_split_documents == sum(length > max_length for length in LENGTHS)


def test_what_is_cut_ends_at_the_row():
    documents = long_documents()
    rows = PackedRows(dataset_of(documents), 10, is_split=False)
    windows = {tuple(window) for window in windows_of(rows.batch(list(range(len(rows.rows)))))}
    assert windows <= {tuple(ids[:10]) for ids, _ in documents}
    assert rows.num_split_documents == 0


def test_two_tokens_have_no_room_for_a_window_with_context():
    windows, _ = measure(dataset_of(long_documents()), WindowLayout(2, is_split=True))
    assert windows.lengths.tolist() == [min(2, length) for length in LENGTHS]


def test_a_run_splits_long_documents_and_says_so(tmp_path, arguments, save_data, capsys):
    """A run that cut them is not continued with windows, nor the other way round; where none is long, it is."""
    generator = np.random.default_rng(1)
    documents = [
        (generator.integers(5, 120, size).tolist(), [False] * 3 + [True] * (size - 3)) for size in (150, 30, 90)
    ]
    path = save_data(dataset_of(documents), dataset_of(documents[1:]))
    changes = {
        "data__path": path,
        "data__long_documents": "null",
        "data__batch_size": 1,
        "optim__steps": "null",
        "optim__epochs": 1,
    }
    sentence = (
        "2 documents longer than data.max_length 40 are split into 8 windows, 160 supervised tokens beyond the first"
    )
    main([*arguments(tmp_path / "split", **changes), "--dry-run"])
    assert f"data      {sentence}" in capsys.readouterr().out
    main(arguments(tmp_path / "split", **changes))
    assert f"train: {sentence}" in capsys.readouterr().out
    tokens = read_json(next((tmp_path / "split").glob("step-*")) / "run.json")["tokens"]
    assert tokens == sum(sum(mask) for _, mask in documents) + 6  # each later window supervises its root again
    cut = changes | {"data__long_documents": "cut"}
    main(arguments(tmp_path / "cut", **cut))
    assert "train: 2 documents cut, 160 supervised tokens beyond data.max_length 40" in capsys.readouterr().out
    message = "pass the original data.long_documents to continue it"
    assert message in refusal(arguments(tmp_path / "split", **cut))
    assert message in refusal(arguments(tmp_path / "cut", **changes))
    short = {"data__path": save_data(dataset_of(documents[1:2]), dataset_of(documents[1:2]))}
    main(arguments(tmp_path / "short", **changes | short))
    main(arguments(tmp_path / "short", **cut | short))
