"""The training benchmark on a tiny shape: its arithmetic against torch's own count, and what it prints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slipstream.bench.lines import read_lines
from slipstream.bench.training import HEADS, StepConfig, build, main, make_batch
from slipstream.bench.training_flops import step_flops
from slipstream.models.drafts.heads.selector import SelectorConfig
from slipstream.tests.pairwise import gate_of
from slipstream.tests.tables import each_case
from slipstream.train.batches import Batch
from slipstream.train.dflash import DFlashTraining

SIZES = ["--shape=tiny", "--sequence=96", "--rows=2", "--document=32", "--anchors=9", "--block=5", "--layers=2"]


@pytest.mark.parametrize(
    ("heads", "reduced"), [*((heads, False) for heads in HEADS), ("none", True), ("dflash2", True), ("dspark", True)]
)
def test_the_arithmetic_is_what_torch_counts(heads, reduced):
    """All products forward and backward, but attention's of target and draft, which torch's count does not see on a
    CPU, and those of the convolutions' taps, which are no matrix products; a scorer's attention it sees."""
    sizes = {"sequence": 96, "rows": 2, "document": 32, "anchors": 9, "block": 5, "layers": 2}
    config = StepConfig(shape="tiny", heads=heads, reduced=reduced, **sizes)
    training = build(config, torch.device("cpu"))
    batch = make_batch(config)
    assert isinstance(training, DFlashTraining)
    with FlopCounterMode(display=False) as counter:
        training.loss(batch)[0].backward()
    counted = step_flops(training, batch)
    unseen = {"target attention", "block attention", "convolutions' taps"}
    assert sum(count for name, count in counted.items() if name not in unseen) + repeated(training, batch) == sum(
        counter.get_flop_counts()["Global"].values()
    )
    assert all(counted.values())


def repeated(training: DFlashTraining, batch: Batch) -> int:
    """Work that the step does and does not need: logits of candidates (LiLiCorr's with the label) beside those of all
    tokens, forward and backward."""
    config = training.draft.config
    if config.head(SelectorConfig) is not None:
        slots = len(training.backbone(batch).states)
        columns = config.num_candidates
    else:
        slots = len(training.backbone(batch).whole_blocks) * config.num_proposals
        columns = config.num_candidates + 1
    join = training.draft.joining
    return 4 * config.hidden_size * slots * columns if join is not None and join.trains_candidates else 0


def test_taps_count_a_multiplication_and_an_addition():
    """Three times, forward and for both gradients; nothing comes before a block's first row."""
    config = StepConfig(shape="tiny", heads="dflash2", sequence=32, document=32, anchors=3, block=4, layers=1)
    training = build(config, torch.device("cpu"))
    batch = make_batch(config)
    blocks = 3
    hidden = 64
    convolutions = 4
    terms = sum(1 for row in range(4) for tap in range(2) if row >= tap)
    assert step_flops(training, batch)["convolutions' taps"] == 3 * 2 * terms * blocks * hidden * convolutions


@each_case()
def test_unknown_heads_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        StepConfig(**fields)


@pytest.mark.parametrize(
    ("drafter", "heads"), gate_of([("dflash", "dspark"), ("eagle3", "none")], [("dflash", "dspark")])
)
def test_it_ends_in_a_line_of_json(drafter, heads, capsys):
    main([*SIZES, "--steps=1", "--ttt_steps=2", f"--drafter={drafter}", f"--heads={heads}", "--profile"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "training"
    assert (line["drafter"], line["heads"]) == (drafter, heads)
    assert line["tokens_per_second"] > 0
    assert 0 < line["share_of_peak"] < 1
    assert set(line["parts_ms"]) == {"target", "draft and loss", "backward", "update"}


@pytest.mark.slow
def test_states_of_an_engine(tmp_path):
    """Another process gives them in every way."""
    output = tmp_path / "states.jsonl"
    program = Path(__file__).parents[2] / "bench" / "states.py"
    sizes = "--shape tiny --sequence 128 --rows 1 --steps 1 --answers 2"
    subprocess.run([sys.executable, program, *sizes.split(), "--output", output], check=True)
    (line,) = read_lines(output)
    assert line["gb_per_second"].keys() == {"TCP", "Unix socket", "memory"}
    assert min(line["tokens_per_second"].values()) > 0
