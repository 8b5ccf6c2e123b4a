"""Measures how many drafted tokens are accepted by the length of the context, for several windows of the draft.

    python bench/draft_window.py --draft runs/dflash/best --input-len "[512,1024,2048]" --window "[0,256,1024]"

Prompts are held-out questions after solved examples that fill them; answers are greedy, so all windows draft for the
same text, and an engine whose text differs from that of the first window is an error. Prints a line of accept lengths,
(tokens - 1) / rounds, for each window, then JSON lines.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.lines import Lines, origin, table
from slipstream.bench.serving import default_device
from slipstream.bench.workload import Workload
from slipstream.config import run
from slipstream.data_tools.options import check_at_least
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.engine.build import build_engine
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.request import Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowConfig:
    """Accept length by the length of the context and the draft's window."""

    draft: str
    """Draft checkpoint, trained without a window."""
    target: str = ""
    """Target checkpoint. Default: the target of the draft."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the drafter by name."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine by name."""
    input_len: list[int] = field(default_factory=lambda: [512, 2048, 8192])
    """Tokens of a prompt."""
    window: list[int] = field(default_factory=lambda: [0, 512, 2048])
    """Tokens that the draft's layers see; 0: all."""
    prompts: int = 32
    """Prompts of each length."""
    new_tokens: int = 128
    """Tokens of an answer."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompts", "new_tokens")
        if not self.input_len or min(self.input_len) < 1 or not self.window or min(self.window) < 0:
            raise ValueError(
                f"input_len is {self.input_len} and window {self.window}; give lengths from 1 on, and 0 for no window"
            )


def main(config: WindowConfig) -> None:
    target, path = find_target(EngineConfig(target=config.target, draft=config.draft))
    tokenizer, lines, texts = load_tokenizer(path), Lines(config.output), dict[int, list[list[int]]]()
    columns = [("window", "window", "d"), *((f"context {size}", f"at_{size}", ".3f") for size in config.input_len)]
    for window in config.window:
        drafter = config.drafter | ({"window": window} if window else {})
        longest = max(config.input_len) + config.new_tokens
        options = {"max_model_len": longest, **config.engine, "target": target, "drafter": drafter}
        engine = build_engine(EngineConfig(draft=config.draft, **options))
        line = {**origin("draft_window", default_device()), "draft": config.draft, "window": window}
        for size in config.input_len:
            tasks = Workload(tokenizer=tokenizer, kind="gsm8k", input_len=size, output_len=config.new_tokens)
            requests = [
                Request(id=str(index), prompt=task.prompt, params=greedy(config.new_tokens))
                for index, task in enumerate(tasks.tasks(config.prompts, "windows"))
            ]
            answers, accepted = serve(engine, requests)
            if texts.setdefault(size, answers) != answers:
                raise ValueError(f"window {window} changed an answer after {size} tokens: please report this")
            line[f"at_{size}"] = round(accepted, 3)
        lines.add(line)
        print(table(columns, lines.all[-1:], heading=window == config.window[0]), flush=True)
    lines.print()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def serve(engine: Any, requests: list[Request]) -> tuple[list[list[int]], float]:
    """Their tokens, and the accept length over all of them."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    rounds = 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
            rounds += output.stats.rounds if output.stats is not None else 0
    drafted = sum(len(answer) - 1 for answer in tokens.values())
    return list(tokens.values()), drafted / max(rounds, 1)


if __name__ == "__main__":
    run(main, WindowConfig, None, "bench/draft_window.py")
