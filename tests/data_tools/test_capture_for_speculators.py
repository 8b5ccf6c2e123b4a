"""Captures in speculators' layout: rows, states and flags, against the dataset, transformers and the package itself."""

import re
import shlex
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import DatasetDict, load_from_disk
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.data_tools import state_folders
from slipstream.data_tools.capture_states import main
from slipstream.data_tools.state_folders import trainer_flags
from slipstream.models.files.atomic import staging_path
from slipstream.models.files.state_store import ShardRange, StateStore, save_tensors
from slipstream.tests.data_tools.conftest import MAX_LENGTH, Flags
from slipstream.tests.tables import each_case

LAYOUT = "--layout=speculators"
STATES = (LAYOUT, "--layers", "1", "2", "3")


@pytest.fixture(scope="module")
def folder(flags, tmp_path_factory) -> Path:
    """States 1, 2, 3 of a target with four layers."""
    output = tmp_path_factory.mktemp("speculators") / "states"
    main(flags(output, *STATES))
    return output


def printed_flags(folder: Path, flags: Flags, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The flags for speculators' trainer that a finished capture prints: flag -> values."""
    main(flags(folder, *STATES))
    words = shlex.split(capsys.readouterr().out.split("speculators train ")[1])
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    return {words[i]: words[i + 1 : j] for i, j in zip(starts, [*starts[1:], len(words)], strict=True)}


def read_states(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "hidden_states").glob("hs_*")}


def test_rows_and_states_are_those_of_the_data_and_of_transformers(folder, capture_data, capture_target):
    data = load_from_disk(str(capture_data))
    rows = load_from_disk(str(folder))
    model = AutoModelForCausalLM.from_pretrained(capture_target, dtype=torch.float32)
    outputs = {}
    for layer, module in enumerate(model.model.layers):
        module.register_forward_hook(lambda _m, _i, output, layer=layer: outputs.update({layer: output}))
    originals = [row for split in ("train", "heldout") for row in data[split]]
    assert len(rows) == len(originals) == len(list((folder / "hidden_states").iterdir()))
    for number, row in enumerate(originals):
        ids = row["input_ids"][:MAX_LENGTH]
        mask = row["loss_mask"][:MAX_LENGTH]
        sample = rows[number]
        states = load_file(folder / "hidden_states" / f"hs_{number}.safetensors")
        assert (sample["input_ids"].tolist(), sample["loss_mask"].tolist()) == (ids, list(map(int, mask)))
        assert sample["seq_len"] == len(ids)
        assert states["token_ids"].tolist() == ids
        with torch.no_grad():
            model(torch.tensor([ids]))
        expected = torch.stack([outputs[layer][0] for layer in (1, 2, 3, 3)], dim=1)
        torch.testing.assert_close(states["hidden_states"], expected, rtol=1e-5, atol=1e-5)
    counts = Counter(
        token
        for row in originals
        for token, counted in zip(row["input_ids"][:MAX_LENGTH], row["loss_mask"][:MAX_LENGTH], strict=True)
        if counted
    )
    assert torch.load(folder / "token_freq.pt") == dict(counts)


def test_the_package_reads_every_row(folder, flags, capture_data, tmp_path, capsys):
    pytest.importorskip("speculators")
    from speculators.data_generation.offline import check_hidden_states, get_existing_hidden_state_indices
    from speculators.train.data import ArrowDataset
    from speculators.train.vocab_mapping import save_token_frequency_distribution

    splits = load_from_disk(str(capture_data))
    rows = load_from_disk(str(folder))
    ratio = float(printed_flags(folder, flags, capsys)["--train-data-ratio"][0])
    for name, split in (("train", "train"), ("heldout", "val")):
        read = ArrowDataset(MAX_LENGTH, folder, on_missing="raise", train_ratio=ratio, split=split)
        assert len(read) == len(splits[name])
        for number, row in enumerate(splits[name]):
            item = read[number]
            ids = row["input_ids"][:MAX_LENGTH]
            assert item["input_ids"].tolist() == ids
            assert item["hidden_states"].shape == (len(ids), 3 * 32)
            assert torch.equal(item["verifier_last_hidden_states"], item["hidden_states"][:, -32:])
            assert item["loss_mask"].tolist() == list(map(int, row["loss_mask"][:MAX_LENGTH]))
    assert get_existing_hidden_state_indices(folder / "hidden_states") == list(range(len(rows)))
    for number in range(len(rows)):
        states = load_file(folder / "hidden_states" / f"hs_{number}.safetensors")
        check_hidden_states(states, rows[number]["input_ids"].tolist())
    save_token_frequency_distribution(rows, tmp_path / "counts.pt")
    assert torch.load(tmp_path / "counts.pt") == torch.load(folder / "token_freq.pt")


def test_the_flags_name_its_layers_and_cut_between_the_splits(folder, flags, capture_data, capsys):
    printed = printed_flags(folder, flags, capsys)
    assert printed["--data-path"] == [str(folder)]
    assert printed["--target-layer-ids"] == ["2", "3", "4"]
    assert printed["--on-missing"] == ["raise"]
    sizes = {name: len(rows) for name, rows in load_from_disk(str(capture_data)).items()}
    assert int(sum(sizes.values()) * float(printed["--train-data-ratio"][0])) == sizes["train"]


@pytest.mark.parametrize("total", [2, 3, 70, 1140, 7092, 999_983])
def test_the_ratio_survives_rounding(total, tmp_path):
    for count in {1, total // 3, total // 2, total - 1} - {0}:
        shards = [ShardRange("train", 0, count, 0, 0), ShardRange("heldout", 0, total - count, 0, 0)]
        index = SimpleNamespace(form=SimpleNamespace(layers=(1, 3)), shards=shards)
        words = trainer_flags(tmp_path, index)
        assert int(total * float(words[words.index("--train-data-ratio") + 1])) == count


def test_a_stopped_capture_continues_with_what_is_missing(tmp_path, flags, folder, monkeypatch):
    def write_some(path, tensors):
        if path.name == "hs_20.safetensors":
            staging_path(path).mkdir()
            (staging_path(path) / "new").write_text("half")
            raise OSError("the process ends here")
        save_tensors(path, tensors)

    output = tmp_path / "states"
    with monkeypatch.context() as patch:
        patch.setattr(state_folders, "save_tensors", write_some)
        with pytest.raises(SystemExit):
            main(flags(output, *STATES))
    states = read_states(output)
    assert states.items() < read_states(folder).items()
    before = {name: (output / "hidden_states" / name).stat().st_mtime_ns for name in states}
    main(flags(output, *STATES))
    assert read_states(output) == read_states(folder)
    unchanged = [name for name, time in before.items() if (output / "hidden_states" / name).stat().st_mtime_ns == time]
    assert len(unchanged) >= 15  # all but those of the shard that was being written
    assert not list((output / "hidden_states").glob(".*"))


def test_damage_is_named_and_repaired(tmp_path, flags, folder, capsys):
    output = tmp_path / "states"
    shutil.copytree(folder, output)
    main(flags(output, *STATES, "--verify"))
    assert "shards are whole" in capsys.readouterr().out
    path = output / "hidden_states"
    states = load_file(path / "hs_1.safetensors")
    save_tensors(path / "hs_1.safetensors", states | {"token_ids": states["token_ids"] + 1})
    (path / "hs_30.safetensors").write_bytes(b"half")
    (path / "hs_69.safetensors").unlink()
    with pytest.raises(SystemExit):
        main(flags(output, *STATES, "--verify"))
    message = capsys.readouterr().err
    for number, fault in ((1, "its tokens are not those of row 1"), (30, "is damaged ("), (69, "is missing")):
        assert f"hs_{number}.safetensors" in message
        assert fault in message
    shards = re.findall(r"--shards (\d+) --yes", message)
    assert len(shards) == 3
    main(flags(output, *STATES, "--shards", *shards))
    assert read_states(output) == read_states(folder)


@each_case()
def test_what_the_layout_cannot_hold_is_refused(words, message, tmp_path, flags, exits):
    with exits(message):
        main(flags(tmp_path / "new", LAYOUT, *words))
    assert not (tmp_path / "new").exists()


def test_each_layout_keeps_to_its_folders(tmp_path, flags, folder, captured, capsys):
    (tmp_path / "mine").touch()
    for output, words, message in (
        (folder, (), "holds states with another format, shards, layout;"),
        (captured, STATES, "holds states with another format, shards, layout;"),
        (tmp_path, STATES, "exists and is not empty; name another folder"),
    ):
        with pytest.raises(SystemExit):
            main(flags(output, *words))
        assert message in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match="have the layout of speculators"):
        StateStore(folder)


def test_weights_have_no_place_in_the_layout(tmp_path, flags, capture_data, exits):
    splits = load_from_disk(str(capture_data))
    weighted = {name: split.add_column("loss_weights", list(split["loss_mask"])) for name, split in splits.items()}
    DatasetDict(weighted).save_to_disk(tmp_path / "data")
    shutil.copy(capture_data / "report.json", tmp_path / "data")
    with exits("has weights of tokens (loss_weights), for which layout speculators has no place"):
        main([*flags(tmp_path / "states", *STATES), f"--data={tmp_path / 'data'}"])
