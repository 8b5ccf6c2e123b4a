"""The comparison of block drafts: what it trains, keeps, serves and prints. Only a slow test's trainings are real."""

import json
import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.bench import block_drafts
from slipstream.bench.block_drafts import LOSSES, METHODS, BlockDraftsConfig, Training, main, ratios, with_loss
from slipstream.data_tools.dataset import write_dataset
from slipstream.models.drafts.block_heads import LiLiCorrConfig
from slipstream.models.drafts.dflash import DFlashConfig
from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.models.targets.decoder import load_config
from slipstream.tests.random_drafts import save_random_dflash
from slipstream.train.dflash_options import LossWeights, default_weights

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"
PROMPT, ANSWER = 6, 12  # tokens of each row
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6},
}


def prepared(target: Path, folder: Path, rows: int) -> Path:
    path, generator = folder / "data", np.random.default_rng(0)
    mask = np.arange(PROMPT + ANSWER) >= PROMPT
    documents = [(generator.integers(4, 100, PROMPT + ANSWER, dtype=np.int32), mask) for _ in range(rows)]
    described = {"tokenizer_hash": tokenizer_hash(AutoTokenizer.from_pretrained(target))}
    write_dataset([[document] for document in documents], path, heldout=0.5, seed=0, describe=lambda: described)
    return path


def given_weights(flags: str) -> dict[str, float]:
    """Those of `--draft.losses.NAME WEIGHT`."""
    words = shlex.split(flags)
    names = (number for number, word in enumerate(words) if word.startswith("--draft.losses."))
    return {words[number].removeprefix("--draft.losses."): float(words[number + 1]) for number in names}


@pytest.fixture(scope="module")
def target(make_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of numbers."""
    folder = tmp_path_factory.mktemp("blocks") / "target"
    shutil.copytree(make_target("qwen3"), folder)
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(120)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def trained(target: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trainings leave a random draft, and engines run in this process. Their names as they are trained."""
    names = list[str]()

    def run(training: Training) -> Training:
        if not training.folder.exists():
            names.append(f"{training.method} {training.lr:g} {training.seed}")
            save_random_dflash(target, training.draft, block_size=8, seed=training.seed, **HEADS[training.method])
            made = {"tokens": 1000, "step": 3, "metrics": {"accept_length": 1 + training.lr}}
            (training.draft / "run.json").write_text(json.dumps(made))
        return training

    monkeypatch.setattr(Training, "run", run)
    monkeypatch.setattr(block_drafts, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
    return names


def test_each_method_is_served_at_its_best_rate_with_every_seed(
    trained: list[str], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", str(target), "--data", str(prepared(target, tmp_path, 12)), "--choosing=2", "--others=4"]
    words += ["--methods", "dflash", "dflash2", "--lrs", "1e-3", "2e-3", "--seeds", "0", "1", "--tree=12"]
    words += ["--output", str(tmp_path / "runs"), "--concurrency=4"]
    main(words)
    assert trained == [
        *(f"{method} {lr} 0" for method in ("dflash", "dflash2") for lr in ("0.001", "0.002")),
        *("dflash 0.002 1", "dflash2 0.002 1"),
    ]
    lines = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert [(line["method"], line["lr"], line["seed"]) for line in lines] == [
        (method, 2e-3, seed) for seed in (0, 1) for method in ("dflash", "dflash2")
    ]
    for line in lines:
        for key, count in (("choosing_0", 2), ("others_0", 4), ("others_1", 4), ("tree_others_0", 4)):
            tokens, rounds = line[f"tokens_{key}"], line[f"rounds_{key}"]
            assert tokens == [ANSWER - 1] * count
            assert line[f"accept_{key}"] == pytest.approx(sum(tokens) / sum(rounds), abs=1e-4)
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| method | T = 0, others: of dflash | T = 1") for line in shown)
    [row] = ratios(lines, "dflash")[1]
    assert f"| dflash2 | {row['others_0']} | {row['others_1']} | {row['tree_others_0']} |" in shown
    main(words)  # trained and measured once
    assert len(trained) == 6
    assert len((tmp_path / "runs" / "results.jsonl").read_text().splitlines()) == 8


def test_ratios_are_of_the_lines_that_have_counts() -> None:
    lines = [
        {"method": "dflash", "tokens_others_0": [4, 6], "rounds_others_0": [2, 3]},
        {"method": "other", "tokens_others_0": [8, 12], "rounds_others_0": [2, 3]},
        {"method": "older", "accept_others_0": 3.0},
    ]
    columns, rows = ratios(lines, "dflash")
    assert columns == [("method", "method", "s"), ("T = 0, others: of dflash", "others_0", "s")]
    assert rows == [
        {"method": "other", "others_0": "2.000 (2.000, 2.000)"},
        {"method": "older", "others_0": None},
    ]


@pytest.mark.parametrize(
    ("method", "loss", "weights"),
    [
        ("dflash", "ce", None),
        ("dflash", "lk_lambda", {"lk_lambda": 1}),
        ("dflash2", "ce", {"ce": 1, "selector_ce": 1}),
        ("dflash2", "l1", {"ce": 0.1, "l1": 0.9, "selector_ce": 0.1, "selector_tv": 0.9}),
        ("dspark", "l1", None),
        ("dspark", "ce", {"ce": 1, "confidence": 1}),
        ("dspark", "kl", {"kl": 1, "confidence": 1}),
        ("markov", "tv", {"tv": 1}),
        ("lilicorr", "ce", None),
        ("lilicorr", "tv", {"tv": 1, "scorer_ce": 0.25, "scorer_regret": 0.25}),
    ],
)
def test_losses_of_a_method(method: str, loss: str, weights: dict[str, float] | None) -> None:
    flags = with_loss(METHODS[method], loss)
    assert (flags is None) == (weights is None)
    if flags is not None and weights is not None:
        assert given_weights(flags) == pytest.approx(weights)
        assert flags.startswith(METHODS[method])


@pytest.mark.parametrize(
    ("method", "heads"),
    [
        ("dflash", {}),
        ("dflash2", {"selector_rank": 8}),
        ("dspark", {"markov_rank": 8, "confidence_head": True}),
        ("lilicorr", {"lilicorr": LiLiCorrConfig()}),
    ],
)
def test_training_takes_every_loss_of_a_method(method: str, heads: dict[str, Any]) -> None:
    """What is left out is what follows from the heads."""
    sizes = {"num_layers": 3, "block_size": 8, "aux_layers": (1, 3, 5), "mask_token_id": 0}
    config = DFlashConfig.from_target(load_config(TINY), **sizes, **heads)
    usual = default_weights(config)
    for loss, own in LOSSES.items():
        flags = with_loss(METHODS[method], loss)
        found = LossWeights(**given_weights(flags or METHODS[method])).of(config)
        assert own.items() <= found.items()
        assert (flags is None) == (own != {} and {name: weight for name, weight in found.items() if weight} == usual)
    assert str(with_loss(METHODS[method], "dpace")).endswith("--draft.loss dpace")


def test_losses_are_methods_of_their_own() -> None:
    folders = {"target": "t", "data": "d", "output": "o"}
    config = BlockDraftsConfig(methods=("dflash2", "dspark", "eagle3"), losses=("default", "l1"), **folders)
    assert list(config.variants) == ["dflash2", "dflash2-l1", "dspark", "eagle3"]
    words = Training.of(config, "dflash2-l1", 1e-3, 0).words
    assert words[words.index("--draft.losses.l1") + 1] == "0.9"
    assert Training.of(config, "eagle3", 1e-3, 0).words[1].endswith("eagle3.py")
    for fields, message in (
        ({"losses": ("mse",)}, "losses has mse; known are default, ce"),
        ({"methods": ("dspark",), "losses": ("l1",)}, "losses is l1, which dspark lack or have anyway; add default"),
        ({"methods": ("medusa",)}, "methods has medusa; known are dflash"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockDraftsConfig(**folders, **fields)  # type: ignore[arg-type]


@pytest.mark.slow
def test_it_trains_and_serves_drafts_with_other_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", str(TINY), "--data", str(prepared(TINY, tmp_path, 12)), "--choosing=2", "--others=4"]
    words += ["--methods", "dflash2", "dspark", "--losses", "default", "tv", "--baseline=dflash2"]
    flags = "--optim.steps 2 --data.max_length 64 --data.batch_size 2 --draft.num_layers 1"
    main([*words, "--output", str(tmp_path / "runs"), f"--flags={flags}"])
    lines = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    names = ["dflash2", "dflash2-tv", "dspark", "dspark-tv"]
    assert [line["method"] for line in lines] == names
    assert [line["method"] for line in ratios(lines, "dflash2")[1]] == names[1:]
    assert "others: of dflash2" in capsys.readouterr().out
