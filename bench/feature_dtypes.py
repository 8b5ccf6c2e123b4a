"""What storing features in fp8 costs a draft: it is trained from bf16 and from fp8 ones, and judged by the same states.

    python bench/feature_dtypes.py --data runs/demo/dataset --vocabulary runs/demo/token_map.safetensors --seeds 0 1 2

Captures both, trains configs/DRAFTER/tiny.yaml from each with every seed, and walks the held-out answers with the
trained drafts on the target's own states, as a server does, whatever they were trained from. Continues where it was
stopped. Prints a table and ends in one JSON line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from datasets import load_from_disk
from safetensors.torch import load_file

from slipstream.config import parse
from slipstream.data_tools import capture_features
from slipstream.models.feature_store import FeatureStore
from slipstream.train import dflash, eagle3
from slipstream.train.batches import PackedRows, evaluation_batches
from slipstream.train.checkpoints import step_folders
from slipstream.train.draft_setup import DraftRunOptions, TargetFiles
from slipstream.train.training import Metrics, add, reduce

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS: dict[str, tuple[Any, type[DraftRunOptions]]] = {
    "eagle3": (eagle3, eagle3.Eagle3Options),
    "dflash": (dflash, dflash.DFlashOptions),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypesConfig:
    """Options of this benchmark."""

    data: str
    """Prepared dataset of the target's own answers."""
    vocabulary: str
    """Token map of the draft."""
    target: str = str(ROOT / "assets" / "tiny-target")
    """Target model."""
    drafter: str = "eagle3"
    """eagle3 or dflash."""
    dtypes: tuple[str, ...] = ("bf16", "fp8")
    """Compared with the first."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the weights and of the order of the data; their spread says what a difference is worth."""
    output: str = "runs/feature-dtypes"
    """Folder for features and drafts."""

    def __post_init__(self) -> None:
        if self.drafter not in PROGRAMS:
            raise ValueError(f"drafter is {self.drafter!r}; choose one of {', '.join(PROGRAMS)}")


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(DtypesConfig, argv, prog="bench/feature_dtypes.py", description="What fp8 features cost a draft.")
    lengths: dict[str, list[float]] = {}
    for seed in config.seeds:
        for dtype in config.dtypes:
            features = capture(config, dtype)
            lengths.setdefault(dtype, []).append(judge(train(config, dtype, features, seed)))
            print(f"{dtype}, seed {seed}: accept length {lengths[dtype][-1]:.3f}", flush=True)
    report(config, lengths)


def capture(config: DtypesConfig, dtype: str) -> Path:
    output = Path(config.output) / f"features-{dtype}"
    options = {"target": config.target, "data": config.data, "output": output, "dtype": dtype, "max_length": 512}
    words = [f"--{name}={value}" for name, value in options.items()]
    capture_features.main([*words, f"--drafters={config.drafter}", "--batch_tokens=4096", "--yes"])
    return output


def train(config: DtypesConfig, dtype: str, features: Path, seed: int) -> DraftRunOptions:
    program, options_class = PROGRAMS[config.drafter]
    output = Path(config.output) / f"{config.drafter}-{dtype}-{seed}"
    words = [f"--config={ROOT / 'configs' / config.drafter / 'tiny.yaml'}", f"--output={output}", f"--seed={seed}"]
    words += [f"--target={config.target}", f"--data.path={config.data}", f"--data.features={features}"]
    words += [f"--draft.vocabulary={config.vocabulary}"]
    program.main(words)
    return parse(options_class, words, prog="", description="")


def judge(options: DraftRunOptions) -> float:
    """Simulated accept length of the last step's draft over the held-out answers, on the target's own states."""
    program, _ = PROGRAMS["dflash" if isinstance(options, dflash.DFlashOptions) else "eagle3"]
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    options = replace(options, data=replace(options.data, features=None))
    training, _ = program.build(options, TargetFiles.find(options), accelerator)
    training.load_state_dict(load_file(step_folders(Path(options.output))[-1] / "state" / "model.safetensors"))
    training.to(accelerator.device).eval()
    rows = PackedRows(load_from_disk(options.data.path)["heldout"], options.data.max_length)
    totals: Metrics = {}
    with torch.no_grad():
        for batch, _ in evaluation_batches(rows, options.data.batch_size, 0, 1):
            add(totals, training.evaluate(batch))
    total, count = reduce(accelerator, totals)["accept_length"]
    return total / count


def report(config: DtypesConfig, lengths: dict[str, list[float]]) -> None:
    baseline = mean(lengths[config.dtypes[0]])
    print(f"\n{'features':<10}{'bytes/token':>12}{'accept length':>15}{'against ' + config.dtypes[0]:>16}   by seed")
    for dtype, found in lengths.items():
        form = FeatureStore(Path(config.output) / f"features-{dtype}").index.form
        by_seed = ", ".join(f"{length:.3f}" for length in found)
        change = f"{mean(found) / baseline - 1:+.2%}"
        print(f"{dtype:<10}{form.num_bytes(0, 1, 0):>12,}{mean(found):>15.3f}{change:>16}   {by_seed}")
    line = {"benchmark": "feature_dtypes", "date": date.today().isoformat(), "drafter": config.drafter}
    print(json.dumps(line | {"seeds": list(config.seeds), "accept_length": lengths}))


if __name__ == "__main__":
    main()
