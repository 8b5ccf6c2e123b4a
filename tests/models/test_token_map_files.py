"""Token maps in other programs' files: what is read, in which order, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.models.token_map import TokenMap, check_tokenizer, read_token_map

VOCAB_SIZE = 10
LISTED = [7, 2, 9, 0]  # most frequent first


def saved(folder: Path, content: object, name: str = "map.pt") -> Path:
    torch.save(content, folder / name)
    return folder / name


@pytest.mark.parametrize(
    "content", [LISTED, torch.tensor(LISTED), torch.tensor(LISTED, dtype=torch.int32)], ids=["list", "int64", "int32"]
)
def test_a_list_in_order_of_frequency_can_be_cut(tmp_path: Path, content: object) -> None:
    token_map = read_token_map(saved(tmp_path, content), VOCAB_SIZE)
    assert token_map.ids.tolist() == sorted(LISTED)
    assert token_map.vocab_size == VOCAB_SIZE
    assert [token_map.ids_by_frequency(size).tolist() for size in (1, 3, None)] == [LISTED[:1], LISTED[:3], LISTED]
    assert token_map.ids_by_frequency(3, stop_ids=[0]).tolist() == [0, 7, 2]
    with pytest.raises(ValueError, match="size is 5; this map can be cut to 1 .* up to 4"):
        token_map.ids_by_frequency(5)
    with pytest.raises(ValueError, match="lacks the stop token 3,"):
        token_map.ids_by_frequency(stop_ids=[3])
    check_tokenizer(token_map, "any")


def test_ascending_ids_have_no_order_to_cut_by(tmp_path: Path) -> None:
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
        with pytest.raises(ValueError, match="holds its 4 ids without an order of frequency; leave the size out"):
            token_map.ids_by_frequency(3)


def test_our_own_files_are_read_whole(tmp_path: Path) -> None:
    counts = torch.tensor([3, 0, 5, 6, 1])
    token_map = TokenMap.build(counts, 3, [1], {"tokenizer_hash": "t"})
    token_map.write(tmp_path / "map.safetensors")
    token_map.write_fr_spec(tmp_path / "fr_spec.pt")
    token_map.write_sglang(tmp_path / "sglang.pt")
    again = read_token_map(tmp_path / "map.safetensors", 5)
    assert again.metadata == token_map.metadata
    assert again.ids_by_frequency(5).tolist() == [1, 3, 2, 0, 4]
    assert read_token_map(tmp_path / "fr_spec.pt", 5).ids_by_frequency(2).tolist() == [1, 3]
    assert read_token_map(tmp_path / "sglang.pt", 5).ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="was counted over 5 tokens, the target has 6; make a map"):
        read_token_map(tmp_path / "map.safetensors", 6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([3, 1, 4, 1, 5, 1], r"token id 1 stands at entries 1 and 3, .* \(2 entries too many\); drop the later ones"),
        ([3, 10, 4], "entry 1 is token id 10, outside the target's vocabulary of 10"),
        (torch.tensor([3, -1]), "entry 1 is token id -1, outside"),
        ([], "holds no token map"),
        ([1, True], "holds no token map"),
        ([1.0, 2.0], "holds no token map"),
        (torch.ones(2), "holds no token map"),
        (torch.ones(2, 2, dtype=torch.int64), "holds no token map"),
        ({"t2d": torch.ones(VOCAB_SIZE)}, "holds no token map"),
        ({"d2t": torch.tensor([0, 1]), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}, "name different tokens"),
        ({"d2t": torch.tensor([0, 1]), "t2d": torch.ones(3, dtype=torch.bool)}, "was counted over 3 tokens"),
        ({"d2t": torch.tensor([0, 1]), "t2d": [True]}, "t2d is no 1-D tensor"),
        ({"d2t": torch.tensor([0, -1])}, "token id 0 stands at entries 0 and 1"),
    ],
)
def test_faults_are_named(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_token_map(saved(tmp_path, content), VOCAB_SIZE)


class Evil:
    """Unpickled freely it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_nothing_but_data_is_unpickled(tmp_path: Path) -> None:
    path = saved(tmp_path, Evil(tmp_path / "ran"))
    with pytest.raises(ValueError, match="holds more than token ids"):
        read_token_map(path, VOCAB_SIZE)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["absent.pt", "absent.safetensors", "text.pt", "text.safetensors"])
def test_unreadable_files_are_named(tmp_path: Path, name: str) -> None:
    if name.startswith("text"):
        (tmp_path / name).write_text("no tensors")
    with pytest.raises(ValueError, match=f"{name} is missing, damaged or"):
        read_token_map(tmp_path / name, VOCAB_SIZE)
