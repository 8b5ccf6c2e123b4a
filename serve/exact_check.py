"""Checks that answers do not depend on what runs beside them: `slipstream exact-check --draft CKPT`.

The same prompts are answered without a draft one at a time, and then among others, with the draft, in chunks, from
cached prefixes, preempted, and without CUDA graphs. Each answer must be equal token by token. Prompts are random token
ids: a target is not sure of what follows them, so the smallest difference shows.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from os.path import commonprefix  # of any sequences
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from slipstream.config import run
from slipstream.serve.options import EngineChoice, EngineConfig, check_at_least, check_checkpoints
from slipstream.serve.request import Request, SamplingParams

if TYPE_CHECKING:
    from slipstream.serve.engine.engine import Engine

Answers = dict[str, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactCheckConfig(EngineChoice):
    """Compares answers alone, among others and with a draft, token by token."""

    requests: int = 64
    """Prompts. Half of the answers are greedy, the others sampled at temperature 0.8."""
    longest_prompt: int = 600
    """Tokens of the longest prompt. A quarter of the prompts begin like another one."""
    output_len: int = 64
    """Tokens of an answer."""
    seed: int = 0
    """Seed of the prompts."""
    tp: list[int] = field(default_factory=lambda: [1])
    """Numbers of devices that share the target, one after another; answers are compared with those of the first."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "requests", "longest_prompt", "output_len")
        if not self.tp:
            raise ValueError("tp is empty; give at least one number of devices")

    def check_inputs(self) -> None:
        """Raises ValueError for a checkpoint that does not exist, and if none names the target."""
        check_checkpoints(self.target, self.draft)

    def options(self, draft: str, **overrides: Any) -> EngineConfig:
        drafter = self.drafter if draft != "none" else {}
        defaults = {"max_running": 64, "max_model_len": self.longest_prompt + self.output_len, "exact": True}
        return EngineConfig(target=self.target_name, draft=draft, drafter=drafter, **defaults | overrides | self.engine)


def check(config: ExactCheckConfig) -> int:
    """Prints a table and returns the number of answers that differ."""
    # Room for six of the longest requests: the engine preempts the rest.
    small = {
        "max_running": 16,
        "kv_cache_tokens": 6 * (config.longest_prompt + config.output_len),
        "prefill_budget": 200,
    }
    settings: list[tuple[str, str, dict[str, Any], Sequence[int]]] = [("no draft", "none", {}, (1, 64))]
    if config.draft != "none":
        settings.append(("the draft", config.draft, {}, (1, 8, 64)))
    settings.append(("short chunks, few pages", config.draft, small, (16,)))
    settings.append(("and no CUDA graphs", config.draft, small | {"cuda_graph": False}, (16,)))
    expected: Answers = {}
    differing = 0
    for tp, (name, draft, options, levels) in product(config.tp, settings):
        setting = name if config.tp == [1] else f"{name}, tp {tp}"
        with running(config.options(draft, tp=tp, **options)) as engine:
            if not expected:
                print("| setting | requests at once | equal answers | first difference |\n|---|---|---|---|")
            requests = make_requests(config, engine.info.vocab_size)
            for level in levels:
                answers = answer(engine, requests, level, f"{setting}, {level} at once")
                expected = expected or answers
                wrong = [key for key in expected if answers[key] != expected[key]]
                first = min((len(commonprefix([expected[key], answers[key]])) for key in wrong), default=None)
                place = "" if first is None else f"token {first}"
                print(f"| {setting} | {level} | {len(answers) - len(wrong)} of {len(answers)} | {place} |", flush=True)
                differing += len(wrong)
    return differing


@contextmanager
def running(config: EngineConfig) -> "Iterator[Engine]":
    import torch

    from slipstream.serve.engine.build import build_engine

    engine = build_engine(config)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def make_requests(config: ExactCheckConfig, vocab_size: int) -> list[Request]:
    rng = random.Random(config.seed)
    longest = config.longest_prompt
    requests: list[Request] = []
    for index in range(config.requests):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
        if requests and rng.random() < 0.25:
            prompt = [*requests[-1].prompt[: longest // 2], *prompt[: longest // 2]]
        params = SamplingParams(
            max_tokens=config.output_len, temperature=0.8 * (index % 2), seed=index, ignore_eos=True
        )
        requests.append(Request(id=str(index), prompt=prompt, params=params))
    return requests


def answer(engine: "Engine", requests: Sequence[Request], level: int, name: str) -> Answers:
    """Keeps `level` requests running. A request that fails raises ValueError with its error."""
    answers: Answers = {request.id: [] for request in requests}
    waiting = list(reversed(requests))
    num_open = 0
    with tqdm(total=len(requests), desc=name, unit="answer", leave=False) as bar:
        while waiting or num_open:
            while waiting and num_open < level:
                engine.add(waiting.pop())
                num_open += 1
            for output in engine.step():
                if output.error:
                    raise ValueError(f"request {output.request_id} failed: {output.error}")
                answers[output.request_id] += output.tokens
                if output.finish_reason is not None:
                    num_open -= 1
                    bar.update()
    return answers


def check_and_report(config: ExactCheckConfig) -> None:
    differing = check(config)
    if differing:
        raise ValueError(f"{differing} answers differ; please report this with the table and {asdict(config)}")


main = partial(run, check_and_report, ExactCheckConfig, "slipstream exact-check")

if __name__ == "__main__":
    main()
