"""Compares the speed of OpenAI-compatible servers that answer the same questions.

    slipstream compare --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --concurrency 1,8
    slipstream compare --url http://127.0.0.1:8000 --questions mine.jsonl      # one server's speed alone

The servers take turns: the first to the last answer the same few questions, then the last to the first the next ones,
and so on, so that neither a drift of the machine nor the choice of questions favours one. Every such pass there and
back gives one ratio of speeds, and their spread the interval. Passes are kept in OUTPUT/passes.jsonl: the same command
continues an interrupted run. OUTPUT also gets compare.json and compare.png. See docs/accept.md.
"""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from slipstream.config import run
from slipstream.models.files.atomic import atomic_file, write_json
from slipstream.models.files.outputs import check_working_folder
from slipstream.models.files.text import read_key
from slipstream.serve.contexts import context_class
from slipstream.serve.load import Answer, Client, LoadResult, Prompt, read_levels, send_all
from slipstream.serve.measure.compare_report import Comparison, compare_passes, plot, shown_table
from slipstream.serve.measure.conversations import THINKING, MeasureOptions, chat_fields
from slipstream.serve.measure.identity import server_identities
from slipstream.serve.measure.intervals import LEAST_PAIRS
from slipstream.serve.measure.journal import Journal
from slipstream.serve.measure.questions import read_questions
from slipstream.serve.measure.server_counts import kind_of
from slipstream.serve.options import check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig(MeasureOptions):
    """Measures the speed of a server, or of several side by side, with confidence intervals."""

    REQUIRED = {"url": "the servers, --url A --url B, or one alone"}

    url: list[str] = field(default_factory=list)
    """OpenAI-compatible servers, with or without /v1; the others are compared with the first."""
    questions: list[str] = field(default_factory=lambda: ["gsm8k"])
    """gsm8k, mt_bench, or files of questions, as for `accept`; of several turns the first is asked."""
    concurrency: str = "1,8"
    """Requests open at once; several comma-separated levels are measured one after another."""
    seconds: float = 120.0
    """Time to measure at each level, all servers together; at least six passes."""
    requests: int | None = None
    """Questions that a server answers before the next has its turn. Default: twice the concurrency, at least 4."""
    max_tokens: int = 128
    """Longest answer in tokens."""
    temperature: float = 0.0
    """0: greedy; answers of the servers are then compared, too."""
    thinking: str = "default"
    """How the target should think: default, on, off, or an effort such as low."""
    seed: int = 0
    """Seed of the first question; each further one adds 1."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request, such as --fields.ignore_eos true for answers of equal lengths."""
    output: str = "runs/compare"
    """Folder for passes, figures and plot; an interrupted run in it continues."""

    def __post_init__(self) -> None:
        read_levels(self.concurrency)
        check_at_least(self, 1, "max_tokens", "requests")
        if self.thinking not in THINKING:
            raise ValueError(f"thinking is {self.thinking!r}; choose one of {', '.join(THINKING)}")
        if self.temperature < 0 or self.seconds < 0:
            raise ValueError(f"temperature is {self.temperature} and seconds {self.seconds}; they must be at least 0")

    def request_fields(self, prompt: Prompt) -> dict[str, Any]:
        fields: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature, "stream": True}
        if prompt and isinstance(prompt[0], dict):
            fields |= chat_fields(self.thinking, self.template)
        return fields | self.fields


class Side:
    """One of the servers. `salts`: its requests may say which prompts share cached text."""

    def __init__(self, client: Client, *, salts: bool) -> None:
        self.client = client
        self._salts = salts

    async def answer(self, tasks: Sequence[tuple[Prompt, dict[str, Any]]], level: int, salt: str) -> LoadResult:
        """Raises ValueError if a request fails."""
        extra = {"cache_salt": salt} if self._salts else {}
        result = await send_all(self.client, [(prompt, {**fields, **extra}) for prompt, fields in tasks], level)
        if result.errors:
            raise ValueError(
                f"{len(result.errors)} of {len(tasks)} requests to {self.client.root} failed, the first with: "
                f"{result.errors[0]}; the same command continues"
            )
        return result


def compare(config: CompareConfig) -> None:
    """Measures, or goes on measuring, and writes the report."""
    prompts = [question.first for question in read_questions(config.questions)]
    check_working_folder(config.output, {"questions": config.questions})
    output = Path(config.output)
    identity = asyncio.run(server_identities(config.url, model=config.model, api_key=read_key(config.api_key_file)))
    passes = output / "passes.jsonl"
    with Journal(passes, "slipstream compare", config.result_options, identity, anew=config.overwrite) as journal:
        if journal.results:
            print(f"{journal.path} has {len(journal.results)} passes already; --overwrite measures them again")
            if all(is_measured(config, journal.results, level) for level in read_levels(config.concurrency)):
                journal.check_unfinished()
        try:
            asyncio.run(measure(config, prompts, journal))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the same command continues from {journal.path}") from None
        report(config, compare_passes(journal.results, len(config.url)))


def is_measured(config: CompareConfig, passes: Sequence[dict[str, Any]], level: int) -> bool:
    """Whether the passes at a level took as long as was asked for."""
    passes = [entry for entry in passes if entry["concurrency"] == level]
    return len(passes) >= LEAST_PAIRS and seconds_of(passes) >= config.seconds


def seconds_of(passes: Sequence[dict[str, Any]]) -> float:
    return sum(block["wall_s"] for entry in passes for block in entry["sides"])


async def measure(config: CompareConfig, prompts: Sequence[Prompt], journal: Journal) -> None:
    levels = read_levels(config.concurrency)
    async with AsyncExitStack() as stack:
        sides = []
        for url in config.url:
            client = Client(url, connections=max(levels), model=config.model, api_key=read_key(config.api_key_file))
            await stack.enter_async_context(client)
            salts = kind_of(await client.read("/metrics")) in ("slipstream", "vllm")
            sides.append(Side(client, salts=salts))
        for level in levels:
            await measure_level(config, prompts, level, sides, journal)


async def measure_level(
    config: CompareConfig, prompts: Sequence[Prompt], level: int, sides: Sequence[Side], journal: Journal
) -> None:
    """Measures passes until the level's time is up. Each server warms up first."""
    done = [entry for entry in journal.results if entry["concurrency"] == level]
    blocks = blocks_of(config, prompts, level, first=2 * len(done))
    salt = secrets.token_hex(4)
    warm = False
    with tqdm(
        total=config.seconds, desc=f"{level} at once", unit="s", bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} s"
    ) as bar:
        spent = seconds_of(done)
        bar.update(min(spent, config.seconds))
        while spent < config.seconds or len(done) < LEAST_PAIRS:
            if not warm:
                tasks = next(blocks_of(config, prompts, level, first=-1))
                for place, side in enumerate(sides):
                    await side.answer(tasks, level, f"{salt}/{place}/warm")
                warm = True
            results = await both_ways(sides, next(blocks), next(blocks), level, f"{salt}/{len(done)}")
            done.append({"concurrency": level, "sides": results})
            journal.add(done[-1])
            took = sum(block["wall_s"] for block in results)
            spent += took
            bar.update(min(took, config.seconds - bar.n))


def blocks_of(
    config: CompareConfig, prompts: Sequence[Prompt], level: int, first: int
) -> Iterator[list[tuple[Prompt, dict[str, Any]]]]:
    """Yields the questions of one turn after another, from turn `first` on, with their fields; after the last question
    comes the first again."""
    size = config.requests or max(4, 2 * level)
    turn = first
    while True:
        places = [place % len(prompts) for place in range(turn * size, (turn + 1) * size)]
        yield [(prompts[at], {**config.request_fields(prompts[at]), "seed": config.seed + at}) for at in places]
        turn += 1


async def both_ways(
    sides: Sequence[Side], outward: Sequence[Any], back: Sequence[Any], level: int, salt: str
) -> list[dict[str, Any]]:
    """Sends one block to each side in order, the other in reverse order. Returns the figures of each side."""
    results: list[list[LoadResult]] = [[] for _ in sides]
    order = [(outward, place) for place in range(len(sides))] + [(back, place) for place in reversed(range(len(sides)))]
    for number, (tasks, place) in enumerate(order):
        results[place].append(await sides[place].answer(tasks, level, f"{salt}/{number}"))
    return [block_of(blocks) for blocks in results]


def block_of(results: Sequence[LoadResult]) -> dict[str, Any]:
    """Returns the figures of one side: times in milliseconds, but for `wall_s`; `answers`: hashes, in the order of the
    questions."""
    answers = [answer for result in results for answer in result.answers]
    streams = [answer.arrivals_s for answer in answers if answer.arrivals_s]
    gaps = [later - earlier for times in streams for earlier, later in pairwise(times)]
    return {
        "wall_s": round(sum(result.wall_s for result in results), 6),
        "tokens": sum(answer.num_tokens for answer in answers),
        "ttft_ms": [round(1000 * times[0], 2) for times in streams],
        "token_ms": [round(1000 * time, 3) for time in map(time_per_token, answers) if time is not None],
        "gaps_ms": [round(1000 * gap, 2) for gap in gaps],
        "rounds": sum(answer.rounds for answer in answers),
        "decoded_tokens": sum(answer.decoded_tokens for answer in answers),
        "contexts": contexts_of(answers),
        "answers": [
            blake2b((answer.reasoning + "\0" + answer.text).encode(), digest_size=6).hexdigest() for answer in answers
        ],
    }


def contexts_of(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Returns the figures of the classes of context lengths in the middle of answers that occur."""
    contexts: dict[str, dict[str, Any]] = {}
    for answer in answers:
        if not answer.prompt_tokens:
            continue
        name = context_class(answer.prompt_tokens + answer.num_tokens // 2)
        counts = contexts.setdefault(name, {"answers": 0, "rounds": 0, "decoded_tokens": 0, "token_ms": []})
        counts["answers"] += 1
        counts["rounds"] += answer.rounds
        counts["decoded_tokens"] += answer.decoded_tokens
        time = time_per_token(answer)
        counts["token_ms"] += [] if time is None else [round(1000 * time, 3)]
    return contexts


def time_per_token(answer: Answer) -> float | None:
    """Returns seconds for each token after the first piece; None for an answer of one piece."""
    times = answer.arrivals_s
    tokens = answer.num_tokens
    return (times[-1] - times[0]) / (tokens - 1) if len(times) > 1 and tokens > 1 else None


def report(config: CompareConfig, comparisons: Sequence[Comparison]) -> None:
    output = Path(config.output)
    print(shown_table(comparisons, config.url, greedy=config.temperature == 0))
    result = {"options": config.result_options, "figures": [asdict(entry) for entry in comparisons]}
    write_json(output / "compare.json", result)
    with atomic_file(output / "compare.png") as temporary:
        plot(comparisons, config.url, temporary)
    print(f"\n{output}/compare.json, compare.png, passes.jsonl")


main = partial(run, compare, CompareConfig, "slipstream compare")

if __name__ == "__main__":
    main()
