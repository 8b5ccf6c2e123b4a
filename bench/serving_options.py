"""Options of bench/serving.py, and what they mean to an engine in this process and to a server."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.workload import KINDS
from slipstream.serve.options import EngineConfig, find_target


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Options of this benchmark."""

    draft: str = "none"
    """Draft checkpoint; `none` measures the baseline alone."""
    target: str = ""
    """Target checkpoint. Empty: the one that the draft names."""
    baseline: bool = True
    """Measure without the draft, too, first."""
    mode: str = "offline"
    """offline: an engine in this process; http: a server of our own and streaming clients."""
    concurrency: str = "1,8,32,64"
    """Requests open at once; several levels, parted by commas, are measured one after another."""
    requests: int | None = None
    """Requests at each level. Default: four per open one, at least 8."""
    prompts: str = "random"
    """random: token ids; gsm8k: real questions, behind answered ones up to the input length."""
    input_len: int = 512
    """Longest prompt in tokens; 0, with gsm8k: the bare question."""
    output_len: int = 256
    """Longest answer in tokens."""
    range_ratio: float = 1.0
    """Lengths are drawn from this share of the longest ones up to them."""
    ignore_eos: bool = True
    """Go on after end of text, so that answers have the length asked for."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    """Seed of prompts and lengths."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine by name (with http: of `serve`), with and without the draft."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the drafter by name."""
    simulate_accept_length: float | None = None
    """Pretend that the draft's rounds emit so many tokens on average, for drafts that say nothing."""
    floor_ms: list[float] = field(default_factory=list)
    """The least a round can take, one value per line of the table, in its order."""
    output: str | None = None
    """File to append the JSON lines to."""
    answers: str | None = None
    """File to append prompts and answers to, as token ids, for bench/regret.py; offline only."""

    def __post_init__(self) -> None:
        if not all(level.strip().isdigit() and int(level) > 0 for level in self.concurrency.split(",")):
            raise ValueError(f"concurrency is {self.concurrency!r}; give positive numbers parted by commas")
        for name, valid, remedy in (
            ("mode", self.mode in ("offline", "http"), "choose offline or http"),
            ("prompts", self.prompts in KINDS, f"choose one of {', '.join(KINDS)}"),
            ("requests", self.requests is None or self.requests > 0, "it must be at least 1"),
            ("input_len", self.input_len >= (self.prompts != "gsm8k"), "it must be at least 1, or 0 with gsm8k"),
            ("output_len", self.output_len > 0, "it must be at least 1"),
            ("range_ratio", 0.0 < self.range_ratio <= 1.0, "it must be above 0 and at most 1"),
            ("answers", self.answers is None or self.mode == "offline", "over HTTP they are text: give --mode offline"),
            ("floor_ms", len(self.floor_ms) in (0, self.num_lines), f"give {self.num_lines} values, one per line"),
        ):
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}; {remedy}")

    @property
    def levels(self) -> list[int]:
        return [int(level) for level in self.concurrency.split(",")]

    @property
    def drafts(self) -> list[str]:
        return ["none", self.draft] if self.baseline and self.draft != "none" else [self.draft]

    @property
    def num_lines(self) -> int:
        return len(self.drafts) * len(self.levels)

    def engine_options(self, draft: str) -> dict[str, Any]:
        """Fields of EngineConfig, or of ServeConfig, for `draft`."""
        options = {"max_running": max(self.levels), **self.engine, "target": self.target_name, "draft": draft}
        if draft == "none":
            return options
        simulated: dict[str, Any] = {}
        if self.simulate_accept_length is not None:
            simulated["simulate_accept_length"] = self.simulate_accept_length
            simulated |= {"unsafe_simulate": True} if self.mode == "http" else {}
        return options | simulated | ({"drafter": self.drafter} if self.drafter else {})

    @property
    def target_name(self) -> str:
        return find_target(EngineConfig(target=self.target, draft=self.draft))[0]


def flags(options: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Options as the words of a command line, those of nested groups under dotted names."""
    words = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            words += flags(value, f"{prefix}{name}.")
        elif value is not None:
            words.append(f"--{prefix}{name}={value if isinstance(value, str) else json.dumps(value)}")
    return words
