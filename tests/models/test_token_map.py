"""Token maps: their ids and the order of these; our file and those of other programs."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.models.drafts.token_map import (
    TokenMap,
    check_tokenizer,
    coverage_curve,
    read_token_map,
    reported_sizes,
)
from slipstream.tests.pairwise import grouped
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

SPECIAL = [0, 1, 63]


def build(counts: list[int], size: int, kept_ids: list[int]) -> TokenMap:
    metadata = {"tokenizer_hash": "t", "data_hash": "d"}
    return TokenMap.build(torch.tensor(counts, dtype=torch.int64), size, kept_ids, metadata)


def by_frequency(counts: list[int], size: int, kept_ids: list[int]) -> list[int]:
    ranked = sorted((token for token in range(len(counts)) if token not in kept_ids), key=lambda t: (-counts[t], t))
    return sorted(kept_ids) + ranked[: size - len(kept_ids)]


def expected_ids(counts: list[int], size: int, kept_ids: list[int]) -> list[int]:
    return sorted(by_frequency(counts, size, kept_ids))


@grouped()
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [3, 16, 64])
def test_holds_the_most_frequent_tokens_and_the_kept_ones(seed, size):
    counts = [random.Random(seed * 100 + token).randrange(4) for token in range(64)]  # many ties and zeros
    token_map = build(counts, size, SPECIAL)
    ids = expected_ids(counts, size, SPECIAL)
    assert token_map.ids.tolist() == ids
    assert [draft + int(offset) for draft, offset in enumerate(token_map.d2t)] == ids
    assert [token for token in range(64) if token_map.t2d[token]] == ids
    assert token_map.ids_by_frequency().tolist() == by_frequency(counts, size, SPECIAL)
    assert token_map.coverage == sum(counts[token] for token in ids) / sum(counts)


def test_coverage_curve_is_that_of_the_maps_of_each_size():
    counts = [random.Random(token).randrange(50) for token in range(3000)]
    curve = build(counts, 700, SPECIAL).metadata["coverage"]
    assert list(curve) == ["700", "1024", "2048", "3000"]
    for size, share in curve.items():
        assert share == pytest.approx(build(counts, int(size), SPECIAL).coverage, abs=1e-6)
    shares = coverage_curve(torch.tensor(counts[:64]), SPECIAL)
    assert (len(shares), shares[0]) == (65, 0.0)
    for size in range(len(SPECIAL), 65):
        assert shares[size] == pytest.approx(build(counts[:64], size, SPECIAL).coverage)
    assert reported_sizes(4096, 1024) == [1024, 2048, 4096]


def test_a_head_in_frequency_order_can_be_cut_at_any_size():
    """Rows of the longest layout, cut, are those of every shorter one, and as a set the map built at that size."""
    counts = [random.Random(token).randrange(6) for token in range(200)]
    token_map = build(counts, 50, SPECIAL)
    longest = token_map.ids_by_frequency(200).tolist()
    assert longest == by_frequency(counts, 200, SPECIAL)
    for size in range(3, 201):
        ids = token_map.ids_by_frequency(size)
        assert ids.dtype == torch.int64
        assert ids.tolist() == longest[:size]
        assert sorted(ids.tolist()) == build(counts, size, SPECIAL).ids.tolist()


def test_ids_that_the_counts_would_not_choose_come_before_all_others():
    token_map = TokenMap(torch.tensor([0, 3, 4]), torch.tensor([5, 9, 7, 1, 2]), {"kept_ids": [3], "tokens_seen": 24})
    assert token_map.ids_by_frequency().tolist() == [3, 0, 4]
    assert token_map.ids_by_frequency(5).tolist() == [3, 0, 4, 1, 2]


def test_a_cut_keeps_the_stop_ids_and_names_those_that_are_missing():
    token_map = build([9, 8, 7, 6, 5, 4, 0, 0], 6, [0])
    assert token_map.ids_by_frequency(3, stop_ids=[5]).tolist() == [0, 5, 1]
    with user_error(r"lacks the stop tokens 6, 7, so a draft could not end an answer; add them"):
        token_map.ids_by_frequency(stop_ids=[7, 0, 6])
    with user_error(r"^the token map lacks the stop token 7, "):
        token_map.ids_by_frequency(stop_ids=[7])
    for size in (0, 1, 9):
        with user_error(f"size is {size}; this map can be cut to 2 .* up to 8"):
            token_map.ids_by_frequency(size, stop_ids=[5])


def test_another_tokenizer_is_refused_with_what_to_do():
    token_map = build([1, 2], 1, [])
    check_tokenizer(token_map, "t")
    with user_error(r"^draft.vocabulary m was counted with another tokenizer \(t; the target's"):
        check_tokenizer(token_map, "other", "draft.vocabulary m")
    with user_error("make a map for this target with slipstream frequency-map"):
        check_tokenizer(token_map, "other")
    check_tokenizer(TokenMap(token_map.ids, token_map.counts, {}), "any")  # a file that does not say


def test_file_round_trip(tmp_path):
    token_map = build([3, 0, 5, 5, 1], 3, [1])
    token_map.write(tmp_path / "map.safetensors")
    assert (tmp_path / "map.safetensors").stat().st_mode & 0o777 == 0o644
    again = TokenMap.read(tmp_path / "map.safetensors")
    assert again.ids.tolist() == [1, 2, 3]
    assert again.counts.tolist() == [3, 0, 5, 5, 1]
    assert again.metadata == {
        "tokenizer_hash": "t",
        "data_hash": "d",
        "kept_ids": [1],
        "tokens_seen": 14,
        "coverage": {"3": round(10 / 14, 6), "5": 1.0},
    }
    tensors = load_file(tmp_path / "map.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "d2t": torch.int64,
        "t2d": torch.bool,
        "counts": torch.int64,
    }


def test_fr_spec_lists_keep_the_faults_of_their_first_script_out(tmp_path):
    """The first script listed the end token twice, one entry too many, and left ties in any order."""
    counts = Counter({5: 9, 2: 9, 7: 9, 1: 4})
    listed = [counts[token] for token in range(10)]
    build(listed, 3, [0]).write_fr_spec(tmp_path / "ids.pt")
    assert torch.load(tmp_path / "ids.pt", weights_only=True) == [0, 2, 5]


@each_case()
def test_impossible_sizes_are_refused(size, kept_ids, message):
    with user_error(message):
        build([1, 1, 1, 1, 1], size, kept_ids)


def test_nothing_counted_is_refused():
    with user_error("no supervised token"):
        build([0, 0, 0], 1, [])


def test_damaged_and_contradicting_files_are_refused(tmp_path):
    path = tmp_path / "map.safetensors"
    build([3, 0, 5, 5, 1], 3, [1]).write(path)
    tensors = load_file(path)
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    with user_error("damaged"):
        TokenMap.read(path)
    save_file({"d2t": tensors["d2t"]}, path)
    with user_error("lacks counts, t2d"):
        TokenMap.read(path)
    save_file({**tensors, "t2d": ~tensors["t2d"]}, path, {"token_map": "{}"})
    with user_error("name different tokens"):
        TokenMap.read(path)
    save_file({**tensors, "d2t": tensors["d2t"] + 9}, path, {"token_map": "{}"})
    with user_error("ids 10 to 12 leave the vocabulary of 5"):
        TokenMap.read(path)


VOCAB_SIZE = 10
LISTED = [7, 2, 9, 0]  # most frequent first


def saved(folder: Path, content: object, name: str = "map.pt") -> Path:
    torch.save(content, folder / name)
    return folder / name


@pytest.mark.parametrize(
    "content", [LISTED, torch.tensor(LISTED), torch.tensor(LISTED, dtype=torch.int32)], ids=["list", "int64", "int32"]
)
def test_a_list_in_order_of_frequency_can_be_cut(tmp_path, content):
    token_map = read_token_map(saved(tmp_path, content), VOCAB_SIZE)
    assert token_map.ids.tolist() == sorted(LISTED)
    assert token_map.vocab_size == VOCAB_SIZE
    assert [token_map.ids_by_frequency(size).tolist() for size in (1, 3, None)] == [LISTED[:1], LISTED[:3], LISTED]
    assert token_map.ids_by_frequency(3, stop_ids=[0]).tolist() == [0, 7, 2]
    with user_error("size is 5; this map can be cut to 1 .* up to 4"):
        token_map.ids_by_frequency(5)
    with user_error("lacks the stop token 3,"):
        token_map.ids_by_frequency(stop_ids=[3])
    check_tokenizer(token_map, "any")


def test_ascending_ids_have_no_order_to_cut_by(tmp_path):
    ids = torch.tensor(sorted(LISTED))
    t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    t2d[ids] = True
    offsets = {"d2t": ids - torch.arange(4), "t2d": t2d}
    save_file({**offsets, "lm_head.weight": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    save_file({"d2t": offsets["d2t"]}, tmp_path / "d2t.safetensors")
    paths = [saved(tmp_path, ids, "ids.pt"), saved(tmp_path, offsets, "mapping.pt")]
    for path in [*paths, tmp_path / "model.safetensors", tmp_path / "d2t.safetensors"]:
        token_map = read_token_map(path, VOCAB_SIZE)
        assert token_map.ids.tolist() == token_map.ids_by_frequency().tolist() == sorted(LISTED)
        with user_error("holds its 4 ids without an order of frequency; leave the size out"):
            token_map.ids_by_frequency(3)


def test_every_file_that_we_write_is_public_and_read_again(tmp_path):
    counts = torch.tensor([3, 0, 5, 6, 1])
    token_map = TokenMap.build(counts, 3, [1], {"tokenizer_hash": "t"})
    token_map.write(tmp_path / "map.safetensors")
    token_map.write_fr_spec(tmp_path / "fr_spec.pt")
    token_map.write_sglang(tmp_path / "sglang.pt")
    raw = torch.load(tmp_path / "sglang.pt", weights_only=True)
    assert (raw.dtype, raw.shape, raw.tolist()) == (torch.int64, (3,), [1, 2, 3])
    assert torch.load(tmp_path / "fr_spec.pt", weights_only=True) == [1, 3, 2]
    again = read_token_map(tmp_path / "map.safetensors", 5)
    assert again.metadata == token_map.metadata
    assert again.ids_by_frequency(5).tolist() == [1, 3, 2, 0, 4]
    assert read_token_map(tmp_path / "fr_spec.pt", 5).ids_by_frequency(2).tolist() == [1, 3]
    assert read_token_map(tmp_path / "sglang.pt", 5).ids.tolist() == [1, 2, 3]
    with user_error("was counted over 5 tokens, the target has 6; make a map"):
        read_token_map(tmp_path / "map.safetensors", 6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([3, 1, 4, 1, 5, 1], r"token id 1 appears at entries 1 and 3, .* \(2 duplicates\); drop the later ones"),
        ([3, 10, 4], "entry 1 is token id 10, outside the target's vocabulary of 10"),
        (torch.tensor([3, -1]), "entry 1 is token id -1, outside"),
        ([], "is not a token map"),
        ([1, True], "is not a token map"),
        ([1.0, 2.0], "is not a token map"),
        (torch.ones(2), "is not a token map"),
        (torch.ones(2, 2, dtype=torch.int64), "is not a token map"),
        ({"t2d": torch.ones(VOCAB_SIZE)}, "is not a token map"),
        ({"d2t": torch.tensor([0, 1]), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}, "name different tokens"),
        ({"d2t": torch.tensor([0, 1]), "t2d": torch.ones(3, dtype=torch.bool)}, "was counted over 3 tokens"),
        ({"d2t": torch.tensor([0, 1]), "t2d": [True]}, "t2d is not a 1-D tensor"),
        ({"d2t": torch.tensor([0, -1])}, "token id 0 appears at entries 0 and 1"),
    ],
)
def test_faults_are_named(tmp_path, content, message):
    with user_error(message):
        read_token_map(saved(tmp_path, content), VOCAB_SIZE)


class Evil:
    """Unpickled freely it would leave a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_nothing_but_data_is_unpickled(tmp_path):
    path = saved(tmp_path, Evil(tmp_path / "ran"))
    with user_error("holds more than token ids"):
        read_token_map(path, VOCAB_SIZE)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["absent.pt", "absent.safetensors", "text.pt", "text.safetensors"])
def test_unreadable_files_are_named(tmp_path, name):
    if name.startswith("text"):
        (tmp_path / name).write_text("no tensors")
    with user_error(f"{name} is missing, damaged or"):
        read_token_map(tmp_path / name, VOCAB_SIZE)
