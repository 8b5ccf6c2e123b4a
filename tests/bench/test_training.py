"""The training benchmark on a tiny shape: its arithmetic against torch's own count, and what it prints."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slipstream.bench.training import StepConfig, build, main, make_batch
from slipstream.bench.training_flops import step_flops

SIZES = ["--shape=tiny", "--sequence=96", "--rows=2", "--document=32", "--anchors=9", "--block=5", "--layers=2"]


@pytest.mark.parametrize("reduced", [False, True])
def test_the_arithmetic_is_what_torch_counts(reduced: bool) -> None:
    """All products but attention's, forward and backward; torch's count sees no attention on a CPU."""
    sizes = {"sequence": 96, "rows": 2, "document": 32, "anchors": 9, "block": 5, "layers": 2}
    config = StepConfig(shape="tiny", reduced=reduced, **sizes)  # type: ignore[arg-type]
    training, batch = build(config, torch.device("cpu")), make_batch(config)
    counter = FlopCounterMode(display=False)
    with counter:
        training.loss(batch)[0].backward()
    products = sum(
        count for operation, count in counter.get_flop_counts()["Global"].items() if "attention" not in str(operation)
    )
    counted = step_flops(training, batch)
    assert sum(count for name, count in counted.items() if "attention" not in name) == products
    assert all(counted.values())


@pytest.mark.parametrize("drafter", ["dflash", "eagle3"])
def test_it_ends_in_a_line_of_json(drafter: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SIZES, "--steps=1", "--ttt_steps=2", f"--drafter={drafter}", "--profile"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "training"
    assert line["drafter"] == drafter
    assert line["tokens_per_second"] > 0
    assert 0 < line["share_of_peak"] < 1
    assert set(line["parts_ms"]) == {"target", "draft and loss", "backward", "update"}
    assert sum(line["groups_ms"].values()) > 0
