"""Token maps against a sort written out in plain Python, and their files."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.models.token_map import TokenMap, check_stop_ids, check_tokenizer, reported_sizes

SPECIAL = [0, 1, 63]


def build(counts: list[int], size: int, kept: list[int]) -> TokenMap:
    metadata = {"tokenizer_hash": "t", "data_hash": "d"}
    return TokenMap.build(torch.tensor(counts, dtype=torch.int64), size, kept, metadata)


def by_frequency(counts: list[int], size: int, kept: list[int]) -> list[int]:
    others = sorted((token for token in range(len(counts)) if token not in kept), key=lambda t: (-counts[t], t))
    return sorted(kept) + others[: size - len(kept)]


def expected_ids(counts: list[int], size: int, kept: list[int]) -> list[int]:
    return sorted(by_frequency(counts, size, kept))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [3, 16, 64])
def test_holds_the_most_frequent_tokens_and_the_kept_ones(seed: int, size: int) -> None:
    counts = [random.Random(seed * 100 + token).randrange(4) for token in range(64)]  # many ties and zeros
    token_map = build(counts, size, SPECIAL)
    ids = expected_ids(counts, size, SPECIAL)
    assert token_map.ids.tolist() == ids
    assert [draft + int(offset) for draft, offset in enumerate(token_map.d2t)] == ids
    assert [token for token in range(64) if token_map.t2d[token]] == ids
    assert token_map.ids_by_frequency().tolist() == by_frequency(counts, size, SPECIAL)
    assert token_map.coverage == sum(counts[token] for token in ids) / sum(counts)


def test_coverage_curve_is_that_of_the_maps_of_each_size() -> None:
    counts = [random.Random(token).randrange(50) for token in range(3000)]
    curve = build(counts, 700, SPECIAL).metadata["coverage"]
    assert list(curve) == ["700", "1024", "2048", "3000"]
    for size, share in curve.items():
        assert share == pytest.approx(build(counts, int(size), SPECIAL).coverage, abs=1e-6)
    assert reported_sizes(4096, 1024) == [1024, 2048, 4096]


def test_a_head_in_frequency_order_can_be_cut_at_any_size() -> None:
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


def test_ids_that_the_counts_would_not_choose_come_before_all_others() -> None:
    chosen = TokenMap(torch.tensor([0, 3, 4]), torch.tensor([5, 9, 7, 1, 2]), {"kept_ids": [3], "tokens_seen": 24})
    assert chosen.ids_by_frequency().tolist() == [3, 0, 4]
    assert chosen.ids_by_frequency(5).tolist() == [3, 0, 4, 1, 2]


def test_a_cut_keeps_the_stop_ids_and_names_those_that_are_missing() -> None:
    token_map = build([9, 8, 7, 6, 5, 4, 0, 0], 6, [0])
    assert token_map.ids_by_frequency(3, stop_ids=[5]).tolist() == [0, 5, 1]
    with pytest.raises(ValueError, match=r"lacks the stop tokens 6, 7, so a draft could not end an answer; add them"):
        token_map.ids_by_frequency(stop_ids=[7, 0, 6])
    with pytest.raises(ValueError, match=r"^--drafter.token-map m lacks the stop token 7, "):
        check_stop_ids(token_map, [7], "--drafter.token-map m")
    for size in (0, 1, 9):
        with pytest.raises(ValueError, match=f"size is {size}; this map can be cut to 2 .* up to 8"):
            token_map.ids_by_frequency(size, stop_ids=[5])


def test_another_tokenizer_is_refused_with_what_to_do() -> None:
    token_map = build([1, 2], 1, [])
    check_tokenizer(token_map, "t")
    with pytest.raises(ValueError, match=r"^draft.vocabulary m was counted with another tokenizer \(t; the target's"):
        check_tokenizer(token_map, "other", "draft.vocabulary m")
    with pytest.raises(ValueError, match="make a map for this target with slipstream frequency-map"):
        check_tokenizer(token_map, "other")
    check_tokenizer(TokenMap(token_map.ids, token_map.counts, {}), "any")  # a file that does not say


def test_file_round_trip(tmp_path: Path) -> None:
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


def test_public_formats(tmp_path: Path) -> None:
    token_map = build([3, 0, 5, 6, 1], 3, [1])
    token_map.write_sglang(tmp_path / "sglang.pt")
    token_map.write_fr_spec(tmp_path / "fr_spec.pt")
    raw = torch.load(tmp_path / "sglang.pt", weights_only=True)
    assert (raw.dtype, raw.shape, raw.tolist()) == (torch.int64, (3,), [1, 2, 3])
    assert torch.load(tmp_path / "fr_spec.pt", weights_only=True) == [1, 3, 2]


def test_fr_spec_lists_keep_the_faults_of_their_first_script_out(tmp_path: Path) -> None:
    """That script put the end token in twice, one entry too many, and left ties in any order."""
    counts = Counter({5: 9, 2: 9, 7: 9, 1: 4})
    listed = [counts[token] for token in range(10)]
    build(listed, 3, [0]).write_fr_spec(tmp_path / "ids.pt")
    assert torch.load(tmp_path / "ids.pt", weights_only=True) == [0, 2, 5]


@pytest.mark.parametrize(
    ("size", "kept", "message"),
    [
        (1, [0, 1], "size is 1; it must hold the 2 special"),
        (6, [0], "at most the vocabulary of 5"),
        (2, [5], "special token 5 lies outside the vocabulary of 5"),
    ],
)
def test_impossible_sizes_are_refused(size: int, kept: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build([1, 1, 1, 1, 1], size, kept)


def test_nothing_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="no supervised token"):
        build([0, 0, 0], 1, [])


def test_damaged_and_contradicting_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    build([3, 0, 5, 5, 1], 3, [1]).write(path)
    tensors, whole = load_file(path), path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="damaged"):
        TokenMap.read(path)
    save_file({"d2t": tensors["d2t"]}, path)
    with pytest.raises(ValueError, match="lacks counts, t2d"):
        TokenMap.read(path)
    save_file({**tensors, "t2d": ~tensors["t2d"]}, path, {"token_map": "{}"})
    with pytest.raises(ValueError, match="name different tokens"):
        TokenMap.read(path)
    save_file({**tensors, "d2t": tensors["d2t"] + 9}, path, {"token_map": "{}"})
    with pytest.raises(ValueError, match="ids 10 to 12 leave the vocabulary of 5"):
        TokenMap.read(path)
