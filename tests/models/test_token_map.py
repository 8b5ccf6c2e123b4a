"""Token maps against a sort written out in plain Python, and their files."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.models.checkpoint import atomic_file
from slipstream.models.token_map import TokenMap, read_fr_spec, read_sglang, reported_sizes

SPECIAL = [0, 1, 63]


def build(counts: list[int], size: int, kept: list[int]) -> TokenMap:
    metadata = {"tokenizer_hash": "t", "data_hash": "d"}
    return TokenMap.build(torch.tensor(counts, dtype=torch.int64), size, kept, metadata)


def expected_ids(counts: list[int], size: int, kept: list[int]) -> list[int]:
    others = sorted((token for token in range(len(counts)) if token not in kept), key=lambda t: (-counts[t], t))
    return sorted(kept + others[: size - len(kept)])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [3, 16, 64])
def test_holds_the_most_frequent_tokens_and_the_kept_ones(seed: int, size: int) -> None:
    counts = [random.Random(seed * 100 + token).randrange(4) for token in range(64)]  # many ties and zeros
    token_map = build(counts, size, SPECIAL)
    ids = expected_ids(counts, size, SPECIAL)
    assert token_map.ids.tolist() == ids
    assert [draft + int(offset) for draft, offset in enumerate(token_map.d2t)] == ids
    assert [token for token in range(64) if token_map.t2d[token]] == ids
    assert token_map.by_frequency().tolist() == sorted(ids, key=lambda token: (-counts[token], token))
    assert token_map.coverage == sum(counts[token] for token in ids) / sum(counts)


def test_coverage_curve_is_that_of_the_maps_of_each_size() -> None:
    counts = [random.Random(token).randrange(50) for token in range(3000)]
    curve = build(counts, 700, SPECIAL).metadata["coverage"]
    assert list(curve) == ["700", "1024", "2048", "3000"]
    for size, share in curve.items():
        assert share == pytest.approx(build(counts, int(size), SPECIAL).coverage, abs=1e-6)
    assert reported_sizes(4096, 1024) == [1024, 2048, 4096]


def test_file_round_trip(tmp_path: Path) -> None:
    token_map = build([3, 0, 5, 5, 1], 3, [1])
    token_map.write(tmp_path / "map.safetensors")
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
    assert torch.equal(read_sglang(tmp_path / "sglang.pt"), token_map.ids)
    assert torch.load(tmp_path / "fr_spec.pt", weights_only=True) == [3, 2, 1]
    assert read_fr_spec(tmp_path / "fr_spec.pt") == [3, 2, 1]


def test_fr_spec_lists_keep_the_faults_of_their_first_script_out(tmp_path: Path) -> None:
    """That script put the end token in twice, one entry too many, and left ties in any order."""
    counts = Counter({5: 9, 2: 9, 7: 9, 1: 4})
    listed = [counts[token] for token in range(10)]
    build(listed, 3, [0]).write_fr_spec(tmp_path / "ids.pt")
    assert read_fr_spec(tmp_path / "ids.pt") == [2, 5, 0]


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


def test_public_readers_refuse_other_content(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(torch.ones(2), tmp_path / "floats.pt")
    for path in (tmp_path / "list.pt", tmp_path / "floats.pt"):
        with pytest.raises(ValueError, match="1-D int64"):
            read_sglang(path)
    with pytest.raises(ValueError, match="list of token ids"):
        read_fr_spec(tmp_path / "floats.pt")
    (tmp_path / "text.pt").write_text("no pickle")
    with pytest.raises(ValueError, match="damaged"):
        read_fr_spec(tmp_path / "text.pt")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
