"""Captured states against transformers' own, and captures that are stopped, damaged, repeated or refused."""

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from slipstream.config import parse
from slipstream.data_tools import capture_features
from slipstream.data_tools.capture_features import main
from slipstream.data_tools.capture_options import CaptureConfig
from slipstream.data_tools.dataset import write_dataset
from slipstream.data_tools.feature_plan import measure, plan_shards
from slipstream.models.checkpoint import tokenizer_hash
from slipstream.models.feature_format import FeatureFormat, needed_tokens
from slipstream.models.feature_shard import shard_path, write_shard
from slipstream.models.feature_store import FeatureStore

ROOT = Path(__file__).parents[2]
MAX_LENGTH = 40
Flags = Callable[..., list[str]]


def random_row(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Up to 60 tokens in turns; some rows supervise nothing."""
    length = int(generator.integers(1, 60))
    mask = np.repeat(generator.random(12) < 0.4, 5)[:length] & (generator.random() < 0.8)
    return generator.integers(0, 120, length, dtype=np.int32), mask


@pytest.fixture(scope="module")
def target(make_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "target"
    shutil.copytree(make_target("qwen3"), path)
    words = {str(number): number for number in range(120)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0"))).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(target: Path) -> Path:
    generator, path = np.random.default_rng(4), target.with_name("data")
    described = {"tokenizer_hash": tokenizer_hash(AutoTokenizer.from_pretrained(target))}
    rows = [random_row(generator) for _ in range(70)]
    write_dataset(rows, path, heldout=0.2, seed=0, describe=lambda: described)
    return path


@pytest.fixture(scope="module")
def flags(target: Path, data: Path) -> Flags:
    """Flags of a capture of some ten small shards; `changes` replace or add options."""
    standard = {"target": target, "data": data, "max-length": MAX_LENGTH, "batch-tokens": 64, "shard-gb": 4e-5}

    def build(output: Path, *words: str, **changes: Any) -> list[str]:
        options = {**standard, "dtype": "fp32", "output": output} | changes
        return [f"--{name}={value}" for name, value in options.items()] + ["--yes", *words]

    return build


@pytest.fixture(scope="module")
def finished(flags: Flags, target: Path) -> Path:
    output = target.with_name("finished")
    main(flags(output))
    return output


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def check_states(folder: Path, data: Path, target: Path) -> int:
    """Every document's states are those of transformers for that document alone. Returns their number."""
    store = FeatureStore(folder)
    form, model = store.index.form, AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    outputs: dict[int, torch.Tensor] = {}
    for layer, module in enumerate(model.model.layers):
        module.register_forward_hook(lambda _m, _i, output, layer=layer: outputs.update({layer: output}))
    checked = 0
    for split, rows in load_from_disk(str(data)).items():
        for number, row in enumerate(rows):
            tokens = torch.tensor(row["input_ids"][: store.index.max_length])
            mask = torch.tensor([False, *row["loss_mask"][1 : len(tokens)]])
            place = store.find(split, number)
            assert place is not None
            stored, count = store.read(*place), max([0, *mask.nonzero().flatten().tolist()])
            with torch.no_grad():
                outputs[form.num_layers] = model.model(tokens[None]).last_hidden_state
            expected = torch.stack([outputs[layer][0, :count] for layer in form.layers], dim=1)
            torch.testing.assert_close(stored["features"], expected, rtol=1e-5, atol=1e-5)
            assert stored["tokens"].tolist() == tokens[:count].tolist()
            assert torch.equal(stored["supervised"], mask[:count])
            assert ("last_hidden" in stored) == form.last_hidden
            if form.last_hidden:
                final = outputs[form.num_layers][0, :count][mask[:count]]
                torch.testing.assert_close(stored["last_hidden"], final, rtol=1e-5, atol=1e-5)
            checked += count > 0
    return checked


def test_states_are_those_of_transformers(finished: Path, data: Path, target: Path) -> None:
    form = FeatureStore(finished).index.form
    assert (form.layers, form.last_hidden) == ((1, 2, 3), True)
    assert len(shards(finished)) > 5
    assert check_states(finished, data, target) > 30


@pytest.mark.parametrize(
    ("words", "layers", "last_hidden"),
    [
        (("--drafters", "eagle"), (4,), False),
        (("--drafters", "dflash"), (1, 2, 3), False),
        (("--drafters", "dflash", "--last-hidden"), (1, 2, 3), True),
        (("--drafters", "eagle3", "eagle"), (1, 2, 3, 4), False),
        (("--layers", "3", "0"), (3, 0), True),
    ],
)
def test_other_states(
    tmp_path: Path, flags: Flags, data: Path, target: Path, words: list[str], layers: list[int], last_hidden: bool
) -> None:
    main(flags(tmp_path, *words))
    form = FeatureStore(tmp_path).index.form
    assert (form.layers, form.last_hidden) == (layers, last_hidden)
    check_states(tmp_path, data, target)


def test_the_plan_covers_every_document_once_in_shards_that_fit() -> None:
    generator = np.random.default_rng(1)
    rows = [random_row(generator) for _ in range(200)]
    masks = [mask.tolist() for _, mask in rows]
    needs = measure(Dataset.from_dict({"loss_mask": masks}), MAX_LENGTH)
    for mask, tokens, supervised in zip(masks, needs.tokens, needs.supervised, strict=True):
        cut = torch.tensor([False, *mask[1:MAX_LENGTH]])
        assert tokens == needed_tokens(cut)
        assert supervised == int(cut[:tokens].sum())
    form = FeatureFormat(layers=(1,), num_layers=4, hidden_size=8, dtype="fp8", last_hidden=True)
    spans = plan_shards({"train": needs, "heldout": needs}, form, shard_bytes=2000)
    for split in ("train", "heldout"):
        chosen = [span for span in spans if span.split == split]
        listed = [number for span in chosen for number in range(span.first, span.first + span.count)]
        assert listed == list(range(200))
        assert sum(span.num_tokens for span in chosen) == needs.tokens.sum()
    sizes = [(span.count, form.num_bytes(span.count, span.num_tokens, span.num_supervised)) for span in spans]
    assert all(size <= 2000 or count == 1 for count, size in sizes)
    assert max(size for _, size in sizes) > 1500


def test_a_stopped_capture_continues_with_what_is_missing(
    tmp_path: Path, flags: Flags, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_three(folder: Path, number: int, *rest: Any) -> None:
        if number == 3:
            (folder / ".shard-00003.safetensors.1.tmp").write_text("half")
            raise OSError("the process ends here")
        write_shard(folder, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(capture_features, "write_shard", write_three)
        with pytest.raises(SystemExit):
            main(flags(tmp_path))
    assert sorted(shards(tmp_path)) == [f"shard-0000{number}.safetensors" for number in range(3)]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    main(flags(tmp_path))
    assert shards(tmp_path) == shards(finished)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert not list(tmp_path.glob("*.tmp"))


def start(arguments: list[str], *launcher: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *launcher, str(ROOT / "data_tools" / "capture_features.py"), *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_two_processes_write_what_one_does(tmp_path: Path, flags: Flags, finished: Path) -> None:
    torch.set_num_threads(1)
    program = start(flags(tmp_path), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    printed, _ = program.communicate(timeout=300)
    assert program.returncode == 0, printed
    assert shards(tmp_path) == shards(finished)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path: Path, flags: Flags, finished: Path) -> None:
    """At random moments of a run of about a second; the files end up the same, byte for byte."""
    moments = random.Random(7)
    for _ in range(20):
        program = start(flags(tmp_path))
        while program.poll() is None and not (tmp_path / "index.json").exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        number = len(list(tmp_path.glob("*.safetensors")))
        while program.poll() is None and len(list(tmp_path.glob("*.safetensors"))) <= number:
            time.sleep(moments.uniform(0, 0.002))
        program.kill()
        program.communicate()
    main(flags(tmp_path))
    assert shards(tmp_path) == shards(finished)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_damaged_shard_is_named_and_made_anew_alone(
    tmp_path: Path, flags: Flags, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    main(flags(tmp_path, "--verify"))
    assert "shards are whole" in capsys.readouterr().out
    content = bytearray(shard_path(tmp_path, 2).read_bytes())
    content[len(content) // 2] ^= 8
    shard_path(tmp_path, 2).write_bytes(content)
    shard_path(tmp_path, 4).unlink()
    with pytest.raises(SystemExit):
        main(flags(tmp_path, "--verify"))
    message = capsys.readouterr().err
    assert f"{shard_path(tmp_path, 2)} is damaged" in message
    assert f"{shard_path(tmp_path, 4)} is missing" in message
    assert message.count("rebuild it") == 2
    command = message.split("rebuild it: ")[1].split("\n")[0]
    others = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    words = shlex.split(command)[2:]
    assert words[-3:] == ["--shards", "2", "--yes"]
    words[words.index("--output") + 1] = str(tmp_path)  # the folder was copied
    words[-2] = "2,4"
    main(words)
    assert shards(tmp_path) == shards(finished)
    del others[shard_path(tmp_path, 2)]
    assert others == {path: path.stat().st_mtime_ns for path in others}


def test_the_command_repeats_the_capture() -> None:
    words = ["--target", "a b", "--data", "d", "--output", "o", "--layers", "3", "0", "--last-hidden", "--dtype", "fp8"]
    words += ["--shard-gb", "0.5", "--trust-remote-code", "--train-documents", "7", "--drafters", "eagle", "dflash"]
    config = parse(CaptureConfig, words, prog="", description="")
    repeated = parse(CaptureConfig, shlex.split(config.command())[2:], prog="", description="")
    assert repeated == config
    assert config.layers == (3, 0)


def test_size_and_time_are_shown_before_anything_is_written(
    tmp_path: Path, flags: Flags, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([word for word in flags(tmp_path / "new") if word != "--yes"])
    printed = capsys.readouterr()
    assert "nothing was written: there is no terminal to ask; add --yes" in printed.err
    assert not (tmp_path / "new").exists()
    index = FeatureStore(finished).index
    tokens = sum(span.num_tokens for span in index.shards)
    table = dict(line.strip().split("  ", 1) for line in printed.out.splitlines() if line.startswith("  "))
    table = {name: value.strip() for name, value in table.items()}
    assert table["tokens"] == f"{tokens:,}"
    assert table["bytes per token"] == f"{3 * 32 * 4 + 4 + 1}"
    assert table["bytes more per supervised token"] == f"{32 * 4}"
    assert "tokens per second" in table["time"]
    assert table["size"] == f"{sum(map(index.num_bytes, range(len(index.shards)))) / 1e9:.2f} GB"


@pytest.mark.parametrize(("answer", "written"), [("y", True), ("", False), ("n", False)])
def test_the_question(
    tmp_path: Path, flags: Flags, monkeypatch: pytest.MonkeyPatch, answer: str, written: bool
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    words = [word for word in flags(tmp_path / "new", **{"train-documents": 3}) if word != "--yes"]
    try:
        main(words)
    except SystemExit:
        assert not written
    assert (tmp_path / "new").exists() == written


def test_a_disk_without_room_is_noticed_before_the_target_is_loaded(
    tmp_path: Path, flags: Flags, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore
    monkeypatch.setattr(capture_features, "Capturer", None)
    with pytest.raises(SystemExit):
        main(flags(tmp_path / "new"))
    assert "GB are free; use --dtype fp8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bf16"}, "holds features with another format, shards; give the options they were captured with"),
        ({"max-length": 30}, "another max_length, shards"),
        ({"shards": "99"}, "shards is 99; there are shards 0 to"),
        ({"shards": "3;4"}, "shards is '3;4'; write numbers with commas"),
        ({"layers": "[5]"}, "feature_layers is [5]; name distinct states 0..3"),
        ({"max-length": 1}, "max_length is 1; give at least 2"),
        ({"target": ""}, "target is empty"),
        ({"data": "/nowhere"}, "/nowhere has no report.json"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    finished: Path, flags: Flags, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = shards(finished)
    with pytest.raises(SystemExit):
        main(flags(finished, **changes))
    assert message in capsys.readouterr().err
    assert shards(finished) == before


def test_another_tokenizer_or_target_is_refused(
    tmp_path: Path, flags: Flags, finished: Path, data: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "data"
    shutil.copytree(data, other)
    report = json.loads((other / "report.json").read_text())
    (other / "report.json").write_text(json.dumps(report | {"tokenizer_hash": "0" * 64}))
    with pytest.raises(SystemExit):
        main(flags(tmp_path / "new", data=other))
    assert "was prepared with another tokenizer (hash 000000000000" in capsys.readouterr().err
    tuned = tmp_path / "target"
    shutil.copytree(target, tuned)
    model = AutoModelForCausalLM.from_pretrained(tuned)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.1)
    model.save_pretrained(tuned)
    with pytest.raises(SystemExit):
        main(flags(finished, target=tuned))
    assert "another target_fingerprint; give the options" in capsys.readouterr().err


def test_a_complete_capture_is_left_alone(
    finished: Path, flags: Flags, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_features, "Capturer", None)
    main(flags(finished))
    assert "is complete" in capsys.readouterr().out
