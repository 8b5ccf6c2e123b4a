"""Captured states against transformers' own, the plan of their shards, and captures that are refused."""

import json
import os
import shlex
import shutil
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, load_from_disk
from transformers import AutoModelForCausalLM

from slipstream.config import parse
from slipstream.data_tools import capture_states
from slipstream.data_tools.capture_states import CaptureConfig, choose_format, main
from slipstream.data_tools.dataset import Conversation, write_dataset
from slipstream.data_tools.state_shards import measure, plan_shards
from slipstream.models.files.state_store import StateFormat, StateStore, needed_tokens
from slipstream.tests.data_tools.conftest import MAX_LENGTH, random_row, shards
from slipstream.tests.random_targets import change_json
from slipstream.tests.tables import each_case
from slipstream.tests.train.runs import refusal


def check_states(folder: Path, data: Path, target: Path, tolerance: float = 1e-5, limit: int | None = None) -> int:
    """The states of a split's (first) documents are those of transformers for each alone. Returns their number."""
    store = StateStore(folder)
    form = store.index.form
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    outputs = {}
    for layer, module in enumerate(model.model.layers):
        module.register_forward_hook(lambda _m, _i, output, layer=layer: outputs.update({layer: output}))
    checked = 0
    for split, rows in load_from_disk(str(data)).items():
        for number, row in enumerate(islice(rows, limit)):
            tokens = torch.tensor(row["input_ids"][: store.index.max_length])
            mask = torch.tensor([False, *row["loss_mask"][1 : len(tokens)]])
            place = store.find(split, number)
            assert place is not None
            stored = store.read(*place)
            count = max([0, *mask.nonzero().flatten().tolist()])
            with torch.no_grad():
                outputs[form.num_layers] = model.model(tokens[None]).last_hidden_state
            expected = torch.stack([outputs[layer][0, :count] for layer in form.layers], dim=1)
            torch.testing.assert_close(stored["features"], expected, rtol=tolerance, atol=tolerance)
            assert stored["tokens"].tolist() == tokens[:count].tolist()
            assert torch.equal(stored["supervised"], mask[:count])
            assert ("last_hidden" in stored) == form.last_hidden
            if form.last_hidden:
                final = outputs[form.num_layers][0, :count][mask[:count]]
                torch.testing.assert_close(stored["last_hidden"], final, rtol=tolerance, atol=tolerance)
            checked += count > 0
    return checked


def test_states_are_those_of_transformers(captured, capture_data, capture_target):
    form = StateStore(captured).index.form
    assert (form.layers, form.last_hidden) == ((1, 2, 3), True)
    assert len(shards(captured)) > 5
    assert check_states(captured, capture_data, capture_target) > 30


@each_case()
def test_drafts_decide_the_states(words, layers, last_hidden, flags, tmp_path, capture_target):
    form = choose_format(parse(CaptureConfig, flags(tmp_path, *words), prog="", description=""), capture_target)
    assert (form.layers, form.last_hidden) == (tuple(layers), last_hidden)


def test_states_of_a_target_with_delta_nets(tmp_path, flags, capture_data, capture_target, make_target):
    target = tmp_path / "target"
    shutil.copytree(make_target("qwen3-5"), target)
    for file in capture_target.glob("tokenizer*"):
        shutil.copy(file, target)
    words = ["--layers", "2", "3", "--train-documents", "12", "--heldout-documents", "6"]
    main(flags(tmp_path / "states", *words, target=target))
    checked = check_states(tmp_path / "states", capture_data, target, tolerance=1e-4, limit=6)  # it computes in chunks
    assert checked > 8


def test_the_plan_covers_every_document_once_in_shards_that_fit():
    generator = np.random.default_rng(1)
    rows = [random_row(generator) for _ in range(200)]
    masks = [mask.tolist() for _, mask in rows]
    needs, cut = measure(Dataset.from_dict({"loss_mask": masks}), MAX_LENGTH)
    assert cut.num_documents == sum(len(mask) > MAX_LENGTH for mask in masks) > 0
    assert cut.num_supervised == sum(sum(mask[MAX_LENGTH:]) for mask in masks)
    for mask, (tokens, supervised) in zip(masks, needs.tolist(), strict=True):
        cut = torch.tensor([False, *mask[1:MAX_LENGTH]])
        assert tokens == needed_tokens(cut)
        assert supervised == int(cut[:tokens].sum())
    form = StateFormat(layers=(1,), num_layers=4, hidden_size=8, dtype="fp8", last_hidden=True)
    spans = list(plan_shards("train", needs, form, shard_bytes=2000))
    assert [n for span in spans for n in range(span.first, span.first + span.count)] == list(range(200))
    assert sum(span.num_tokens for span in spans) == needs[:, 0].sum()
    sizes = [(span.count, form.num_bytes(span.count, span.num_tokens, span.num_supervised)) for span in spans]
    assert all(size <= 2000 or count == 1 for count, size in sizes)
    assert max(size for _, size in sizes) > 1500


def test_the_command_repeats_the_capture():
    words = ["--target", "a b", "--data", "d", "--output", "o", "--layers", "3", "0", "--last-hidden", "--dtype", "fp8"]
    words += ["--shard-gb", "0.5", "--trust-remote-code", "--train-documents", "7", "--drafters", "eagle", "dflash"]
    config = parse(CaptureConfig, words, prog="", description="")
    repeated = parse(CaptureConfig, shlex.split(config.command())[2:], prog="", description="")
    assert repeated == config
    assert config.layers == (3, 0)


def test_size_and_time_are_shown_before_anything_is_written(tmp_path, flags, captured, capture_data, capsys):
    with pytest.raises(SystemExit):
        main([word for word in flags(tmp_path / "new") if word != "--yes"])
    printed = capsys.readouterr()
    assert "nothing was written: no terminal to ask for confirmation; add --yes" in printed.err
    assert not (tmp_path / "new").exists()
    index = StateStore(captured).index
    tokens = sum(span.num_tokens for span in index.shards)
    table = dict(line.strip().split("  ", 1) for line in printed.out.splitlines() if line.startswith("  "))
    table = {name: value.strip() for name, value in table.items()}
    assert table["tokens"] == f"{tokens:,}"
    assert table["bytes per token"] == f"{3 * 32 * 4 + 4 + 1}"
    assert table["bytes more per supervised token"] == f"{32 * 4}"
    assert "tokens per second" in table["time"]
    for split, rows in load_from_disk(str(capture_data)).items():
        cut = [mask[MAX_LENGTH:] for mask in rows["loss_mask"] if len(mask) > MAX_LENGTH]
        sentence = f"{len(cut)} documents cut, {sum(map(sum, cut))} supervised tokens beyond max_length {MAX_LENGTH}"
        assert f"{split}: {sentence}" in printed.out
    assert table["size"] == f"{sum(map(index.num_bytes, range(len(index.shards)))) / 1e9:.2f} GB"


@pytest.mark.parametrize(("words", "is_said"), [(["dflash"], True), (["dflash", "--layers", "1"], False)])
def test_the_depth_that_a_block_draft_is_taken_to_have_is_said(words, is_said, tmp_path, flags, capsys):
    refusal([word for word in flags(tmp_path, "--drafters", *words) if word != "--yes"], main)
    assert ("those of DFLASH drafts of 5 layers, the default of draft.num_layers" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(("answer", "is_written"), [("y", True), ("", False), ("n", False)])
def test_the_question(tmp_path, flags, monkeypatch, answer, is_written):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    words = [word for word in flags(tmp_path / "new", **{"train-documents": 3}) if word != "--yes"]
    try:
        main(words)
    except SystemExit:
        assert not is_written
    assert (tmp_path / "new").exists() == is_written


def test_a_disk_without_room_is_noticed_before_the_target_is_loaded(tmp_path, flags, monkeypatch, exits):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    monkeypatch.setattr(capture_states, "Capturer", None)
    with exits("GB are free; use --dtype fp8"):
        main(flags(tmp_path / "new"))


@each_case()
def test_what_cannot_be_continued_is_refused(captured, flags, changes, message, exits):
    before = shards(captured)
    with exits(message):
        main(flags(captured, **changes))
    assert shards(captured) == before


@pytest.mark.parametrize("layout", ["slipstream", "speculators"])
def test_a_second_capture_into_the_folder_is_refused(layout, tmp_path, flags, monkeypatch):
    """Even one with the same options, while the first one writes."""
    output = tmp_path / "output"
    capture_shards = capture_states.capture_shards
    messages = []
    words = flags(output, layout=layout)

    def capture_twice(*arguments, **options):
        if not messages:
            messages.append("begun")
            messages[0] = refusal(words, main)
        capture_shards(*arguments, **options)

    monkeypatch.setattr(capture_states, "capture_shards", capture_twice)
    main(words)
    assert f"{output} is being written by process {os.getpid()} on host" in messages[0]
    assert not list(output.glob(".*"))
    main([*words, "--verify"])


def test_another_tokenizer_or_target_is_refused(tmp_path, flags, captured, capture_data, monkeypatch, exits):
    other = tmp_path / "data"
    shutil.copytree(capture_data, other)
    change_json(other / "report.json", tokenizer_hash="0" * 64)
    with exits("was prepared with another tokenizer (hash 000000000000"):
        main(flags(tmp_path / "new", data=other))
    monkeypatch.setattr(capture_states, "weights_fingerprint", lambda _: "of other weights")
    with exits("another target_fingerprint; give the options"):
        main(flags(captured))


def test_data_with_nothing_to_capture_are_refused(flags, capture_data, tmp_path, exits):
    output = tmp_path / "features"
    first = np.arange(9) == 0  # nothing predicts the first token
    described = {"tokenizer_hash": json.loads((capture_data / "report.json").read_text())["tokenizer_hash"]}
    rows = [(np.arange(number, number + 9, dtype=np.int32), first) for number in range(4)]
    write_dataset(
        [Conversation([row]) for row in rows], tmp_path / "data", heldout=0.5, seed=0, describe=lambda: described
    )
    with exits("has nothing to capture: no document has a supervised token"):
        main(flags(output, data=tmp_path / "data"))
    assert not output.exists()
