"""Options that benchmarks of engines share, and drafts written as NAME[,option=value...]."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml

from slipstream.bench.workload import KINDS, Workload
from slipstream.models.files.checkpoint import resolve
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.options import EngineChoice, EngineConfig

ENGINE_OPTIONS = {option.name for option in fields(EngineConfig)} - {"target", "draft", "drafter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchConfig(EngineChoice):
    output: str | None = None
    """File to append the JSON lines to."""

    @property
    def device(self) -> str:
        return "cpu" if self.engine.get("device") == "cpu" or not torch.cuda.is_available() else "cuda"

    def engine_options(self, draft: str, **sizes: Any) -> dict[str, Any]:
        """Fields of EngineConfig for NAME[,option=value...]; `sizes` hold where no option sets them."""
        name, options = split_draft(draft)
        drafter = {} if name == "none" else dict(self.drafter)
        drafter |= {key: value for key, value in options.items() if key not in ENGINE_OPTIONS}
        engine = {key: value for key, value in options.items() if key in ENGINE_OPTIONS}
        values = {**sizes, **self.engine, **engine, "target": self.target_name, "draft": name}
        return values | {"drafter": drafter} if drafter else values


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBenchConfig(EngineBenchConfig):
    prompts: str = "gsm8k"
    """gsm8k, or a file of questions and answers: questions, after solved examples if prompts are long; random: token
    ids."""
    seed: int = 0
    """Seed of prompts and lengths. Request i samples with seed + i."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    def check_prompts(self) -> None:
        if self.prompts not in KINDS and not Path(self.prompts).is_file():
            raise ValueError(f"prompts is {self.prompts!r}; choose one of {', '.join(KINDS)}, or a file of questions")

    def workload(self, **lengths: Any) -> Workload:
        tokenizer = load_tokenizer(resolve(self.target_name))
        return Workload(tokenizer=tokenizer, kind=self.prompts, template=self.template, **lengths)


def split_draft(draft: str) -> tuple[str, dict[str, Any]]:
    """NAME,option=value,... -> name and options."""
    name, *options = draft.split(",")
    if not name or not all("=" in option for option in options):
        raise ValueError(f"draft is {draft!r}; write NAME or NAME,option=value,option=value")
    pairs = (option.split("=", 1) for option in options)
    return name, {key.strip().replace("-", "_"): yaml.safe_load(value) for key, value in pairs}


def label(draft: str) -> str:
    """A draft's name in a table: the last two parts of its path, and its options."""
    name, *options = draft.split(",")
    return ", ".join(("/".join(Path(name).parts[-2:]), *options))
