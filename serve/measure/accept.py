"""Measures how many tokens a draft gives per pass of the target, and what that gains, by category.

    slipstream accept --url http://127.0.0.1:8000                          # a server: ours, vLLM's, SGLang's, others
    slipstream accept --draft runs/my-draft/best --questions gsm8k         # a draft, in this process
    slipstream accept --url ... --questions question.jsonl --temperature 0,1 --concurrency 1,8 --fail-below 2.5

Answers are kept in OUTPUT/answers.jsonl as they come: the same command continues an interrupted run. OUTPUT also gets
accept.json (all figures) and accept.png. docs/accept.md says what the figures mean.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from slipstream.config import run
from slipstream.models.files.atomic import atomic_file, write_json
from slipstream.models.files.outputs import check_working_folder
from slipstream.models.files.text import read_key
from slipstream.serve.load import read_levels
from slipstream.serve.measure.accept_report import ESTIMATED, Figures, figures_of, plot, shown_table
from slipstream.serve.measure.conversations import (
    THINKING,
    Conversation,
    CountedAnswer,
    MeasureOptions,
    RequestOptions,
    ServerResponder,
    Setting,
    server_responder,
)
from slipstream.serve.measure.identity import Identity, checkpoint_identity, server_identities
from slipstream.serve.measure.journal import Journal
from slipstream.serve.measure.questions import Question, read_questions
from slipstream.serve.options import EngineChoice, check_at_least, check_checkpoints

DRAFT_OPTIONS = ("width", "simulate_accept_length")  # engine options that mean nothing without a draft


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptConfig(EngineChoice, MeasureOptions):
    """Measures accept length and speed-up of a draft by category, on a server or in this process."""

    url: str = ""
    """OpenAI-compatible server that drafts, with or without /v1. Empty: a target and draft in this process."""
    baseline_url: str = ""
    """The same target's server without a draft, for the speed-up. Default: our servers are asked not to draft."""
    baseline: bool = True
    """Ask every question without a draft, too, for the speed-up."""
    questions: list[str] = field(default_factory=lambda: ["gsm8k"])
    """Bundled sets (gsm8k, mt_bench), or files of questions: JSON lines (also .gz) or .parquet with `turns`, `messages`
    or `prompt`."""
    num_questions: int | None = 80
    """Questions of each category and file, from the beginning; null: all."""
    concurrency: str = "1"
    """Conversations open at once; several comma-separated levels are measured one after another."""
    temperature: str = "0"
    """Temperatures, separated by commas. 0: greedy."""
    thinking: str = "default"
    """How the target should think, by its chat template: default, on, off, or an effort such as low; several are
    separated by commas."""
    max_tokens: int = 1024
    """Longest answer in tokens."""
    seed: int = 0
    """Seed of all answers; each has its own, derived from this one."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request, such as --fields.top_k 20; without --url those of SamplingParams."""
    output: str = "runs/accept"
    """Folder for answers, figures and plot; an interrupted run in it continues."""
    fail_below: float | None = None
    """Exit with status 1 if a setting's accept length, the mean over categories, is below this."""

    def __post_init__(self) -> None:
        if bool(self.url) == (self.draft != "none"):
            raise ValueError(f"url is {self.url!r} and draft {self.draft!r}; give one of them")
        if self.url and (self.engine or self.drafter or self.target):
            raise ValueError("target, engine and drafter are for a draft in this process; leave them out, or url")
        if self.baseline_url and not self.url:
            raise ValueError("baseline_url goes with url; in this process the target is measured without a draft")
        check_at_least(self, 1, "max_tokens", "num_questions")
        if not self.settings:
            raise ValueError("questions is empty; name a file, or gsm8k")

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        if not self.url:
            check_checkpoints(self.target, self.draft)
        MeasureOptions.check_inputs(self)

    @property
    def settings(self) -> list[Setting]:
        """Returns all combinations of temperatures, thinking and concurrency. Raises ValueError for a bad list."""
        try:
            temperatures = [float(word) for word in self.temperature.split(",")]
        except ValueError:
            temperatures = [-1.0]
        if not all(0 <= value <= 100 for value in temperatures):
            raise ValueError(f"temperature is {self.temperature!r}; give numbers from 0 up, separated by commas")
        efforts = [word.strip() for word in self.thinking.split(",")]
        if not set(efforts) <= set(THINKING):
            raise ValueError(f"thinking is {self.thinking!r}; choose from {', '.join(THINKING)}")
        levels = read_levels(self.concurrency)
        return [Setting(*values) for values in product(temperatures, efforts, levels)] if self.questions else []

    @property
    def request_options(self) -> RequestOptions:
        return RequestOptions(max_tokens=self.max_tokens, seed=self.seed, template=self.template, fields=self.fields)


class Record:
    """The answers of a run: those of an earlier one, and new ones as they come."""

    def __init__(self, journal: Journal, questions: Sequence[Question], bar: "tqdm[Any]") -> None:
        self.journal = journal
        self.bar = bar
        self.questions = questions
        self.failures = Counter[str]()
        key = itemgetter("question", "turn", "drafted", "temperature", "thinking", "concurrency")
        self._texts = {key(row): row["answer"] for row in journal.results if "question" in row}

    @property
    def num_answers(self) -> int:
        """Number of answers of earlier runs."""
        return len(self._texts)

    def expect(self, settings: Sequence[Setting], num_responders: int) -> None:
        """Tells the progress bar how many answers there will be, and how many there are. Raises ValueError if none is
        missing and they may be of another draft."""
        num_turns = sum(question.num_turns for question in self.questions)
        self.bar.total = num_turns * len(settings) * num_responders
        self.bar.update(self.num_answers)
        if self.num_answers >= self.bar.total:
            self.journal.check_unfinished()

    def missing(self, setting: Setting, *, drafted: bool) -> Iterator[Conversation]:
        """Yields conversations that have not ended, each at the turn that it has reached."""
        for question in self.questions:
            conversation = Conversation(question)
            more = True
            while more:
                text = self._texts.get((question.id, conversation.turn, drafted, *astuple(setting)))
                if text is None:
                    yield conversation
                    break
                more = conversation.take(text)

    def by_turns(self, setting: Setting, kinds: Sequence[bool]) -> Iterator[tuple[bool, list[Conversation]]]:
        """Yields conversations that have not ended: a few of the first kind (with a draft, or without), a few of the
        second, and so on, so that a machine that becomes slower favours neither."""
        size = 4 * setting.concurrency
        left = {drafted: list(self.missing(setting, drafted=drafted)) for drafted in kinds}
        while any(left.values()):
            for drafted, conversations in left.items():
                if conversations:
                    yield drafted, conversations[:size]
                    del conversations[:size]

    def add(
        self, setting: Setting, conversation: Conversation, counted_answer: CountedAnswer, *, drafted: bool
    ) -> None:
        answer = counted_answer.answer
        if answer.error is not None:
            self.failures[answer.error] += 1
            return
        self.journal.add(
            {
                "question": conversation.question.id,
                "turn": conversation.turn,
                "category": conversation.question.category,
                "drafted": drafted,
                **asdict(setting),
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.num_tokens,
                "latency_s": round(answer.latency_s, 6),
                "source": counted_answer.source,
                "rounds": answer.rounds,
                "decoded_tokens": answer.decoded_tokens,
                "drafted_tokens": answer.drafted_tokens,
                "accepted_by_position": answer.accepted_by_position,
                "answer": answer.text,
            }
        )
        self.bar.update()


def accept(config: AcceptConfig) -> None:
    """Measures, or goes on measuring, and writes the report. Raises ValueError if requests failed, or if an accept
    length is below `fail_below`."""
    questions = read_questions(config.questions, config.num_questions)
    output = Path(config.output)
    inputs = {"questions": config.questions, "draft": [config.draft], "target": [config.target]}
    check_working_folder(config.output, inputs)
    journal = Journal(
        output / "answers.jsonl", "slipstream accept", config.result_options, identity_of(config), anew=config.overwrite
    )
    with journal, tqdm(desc="accept", unit=" answers") as bar:
        record = Record(journal, questions, bar)
        if record.num_answers:
            tqdm.write(f"{journal.path} has {record.num_answers} answers already; --overwrite measures them again")
        try:
            if config.url:
                asyncio.run(measure_servers(config, record))
            else:
                measure_here(config, record)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the same command continues from {journal.path}") from None
    report(config, figures_of(journal.results, config.settings), record.failures)


def identity_of(config: AcceptConfig) -> Identity | None:
    if not config.url:
        return checkpoint_identity(config.target_name, config.draft)
    urls = [url for url in (config.url, config.baseline_url) if url]
    return asyncio.run(server_identities(urls, model=config.model, api_key=read_key(config.api_key_file)))


async def measure_servers(config: AcceptConfig, record: Record) -> None:
    """Measures each setting with the draft and, if the server can do without it, also without."""
    shared: dict[str, Any] = {"connections": max(read_levels(config.concurrency)), "model": config.model}
    shared |= {"api_key": read_key(config.api_key_file), "request_options": config.request_options}
    salt = secrets.token_hex(4)  # another run's prompts are not in the cache of this one
    async with AsyncExitStack() as stack:
        responder = await stack.enter_async_context(server_responder(config.url, speculates=True, salt=salt, **shared))
        responders = {True: responder}
        if config.baseline and (config.baseline_url or responder.kind == "slipstream"):
            url = config.baseline_url or config.url
            responders[False] = await stack.enter_async_context(
                server_responder(url, speculates=False, salt=salt, **shared)
            )
        elif config.baseline:
            tqdm.write("No speed-up without --baseline-url: this server cannot be asked not to draft.")
        if not responder.reports_rounds:
            tqdm.write(how_counted(responder))
        record.expect(config.settings, len(responders))
        for setting in config.settings:
            for drafted, batch in record.by_turns(setting, list(responders)):
                await measure_batch(responders[drafted], batch, setting, record, drafted=drafted)


async def measure_batch(
    responder: ServerResponder,
    conversations: Sequence[Conversation],
    setting: Setting,
    record: Record,
    *,
    drafted: bool,
) -> None:
    before = await responder.count() if drafted else None
    num_before = len(record.journal.results)
    await responder.ask(conversations, setting, partial(record.add, setting, drafted=drafted))
    after = await responder.count() if before is not None else None
    if before is not None and after is not None:
        counts = {"counters": asdict(after.since(before)), "answers": len(record.journal.results) - num_before}
        record.journal.add({**counts, **asdict(setting)})


def how_counted(responder: ServerResponder) -> str:
    """Says how we count rounds where answers do not tell them, and which server option makes answers tell them."""
    remedies = {
        "vllm": " Start vLLM with --per-request-spec-decode-metrics summary, and each answer tells its rounds.",
        "sglang": " SGLang tells them in answers of a version that knows return_meta_info; start it with "
        "--enable-metrics for its counters.",
    }
    remedy = remedies.get(responder.kind, "")
    alone = "one at a time its counters tell them, else " if responder.counts else ""
    if not responder.reports_usage:
        return (
            f"The server's answers tell neither their rounds nor their tokens (usage): {alone}accept lengths are not "
            f"known, and speeds count streamed pieces.{remedy}"
        )
    return f"The server's answers do not tell their rounds: {alone}they are {ESTIMATED}.{remedy}"


def measure_here(config: AcceptConfig, record: Record) -> None:
    """Measures with the draft and without it by turns; on a GPU, which one engine fills, first all answers with it."""
    from slipstream.serve.measure.in_process import engine_responder, fills_memory

    kinds = (True, False) if config.baseline else (True,)
    record.expect(config.settings, len(kinds))
    sizes = {"max_running": max(read_levels(config.concurrency))}
    options = {**sizes, **config.engine, "target": config.target_name}
    thinking = sorted({setting.thinking for setting in config.settings})
    with_draft: dict[str, Any] = {"draft": config.draft, "drafter": config.drafter}
    draft_options = {True: with_draft, False: dict.fromkeys(DRAFT_OPTIONS)}
    for together in [(kind,) for kind in kinds] if fills_memory(options) else [kinds]:
        left = product(config.settings, together)
        if not any(next(record.missing(setting, drafted=drafted), None) for setting, drafted in left):
            continue
        with ExitStack() as stack:
            responders = {
                drafted: stack.enter_context(
                    engine_responder({**options, **draft_options[drafted]}, thinking, config.request_options)
                )
                for drafted in together
            }
            for setting in config.settings:
                for drafted, batch in record.by_turns(setting, together):
                    responders[drafted].ask(batch, setting, partial(record.add, setting, drafted=drafted))


def report(config: AcceptConfig, figures: Sequence[Figures], failures: Counter[str]) -> None:
    """Prints the table; writes accept.json and accept.png. Raises ValueError for failures and `fail_below`."""
    output = Path(config.output)
    if figures:
        print(shown_table(figures))
        name = config.url or config.draft
        result = {"options": config.result_options, "figures": [asdict(entry) for entry in figures]}
        write_json(output / "accept.json", result)
        with atomic_file(output / "accept.png") as temporary:
            plot(figures, name, temporary)
        print(f"\n{output}/accept.json, accept.png, answers.jsonl")
    if failures:
        first, count = failures.most_common(1)[0]
        raise ValueError(f"{failures.total()} requests failed, {count} with: {first}; the same command asks them again")
    if config.fail_below is not None:
        for entry in figures:
            length = entry.by_answers
            if entry.is_whole and (length is None or length < config.fail_below):
                value = "not known" if length is None else f"{length:.3f}"
                raise ValueError(f"the accept length is {value} at {entry.setting_text}, below {config.fail_below}")


main = partial(run, accept, AcceptConfig, "slipstream accept")

if __name__ == "__main__":
    main()
