"""Replaces the answers of conversations by the target's own: a draft learns what its target says, not what others say.

    python data_tools/regenerate.py --data chats.jsonl --target Qwen/Qwen3-8B --output answers.jsonl
    slipstream regenerate --data chats.jsonl --endpoint http://a:8000/v1 http://b:8000/v1 --output answers.jsonl

Invariant: a row's answer depends on the row, the options and the seed alone, never on when or beside what it is made.
Rows are appended as they come; the same command goes on after an interrupt and ends with the same file. Rows that are
left out on purpose are listed in OUTPUT.dropped; OUTPUT.report counts everything.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from slipstream.data_tools.chat_template import ChatTemplate
from slipstream.data_tools.command_line import run, show_table
from slipstream.data_tools.dialogue import Dialogue, DialogueReader, Result
from slipstream.data_tools.endpoint_answers import EndpointAnswers, EndpointOptions, served_models
from slipstream.data_tools.engine_answers import EngineAnswers
from slipstream.data_tools.journal import Journal, sort_rows
from slipstream.data_tools.regenerate_options import RegenerateConfig
from slipstream.data_tools.target_tokenizer import load_target_tokenizer
from slipstream.models.atomic import atomic_file
from slipstream.models.checkpoint import read_json
from slipstream.models.outputs import check_output_file
from slipstream.serve.llm import LLM


class Progress:
    """Writes results as they come and counts them."""

    def __init__(self, kept: Journal, dropped: Journal, bar: "tqdm[Any]") -> None:
        self._kept, self._dropped, self._bar = kept, dropped, bar
        self._start = time.monotonic()
        self.tokens = 0
        self.failures: Counter[str] = Counter()

    def write(self, result: Result) -> None:
        if result.row is not None:
            self._kept.append(result.row)
        elif result.dropped:
            self._dropped.append({"id": result.id, "reason": result.dropped})
        else:
            self.failures[result.failed] += 1
        self._bar.update()

    @property
    def num_kept(self) -> int:
        return len(self._kept.ids)

    def say(self, line: str) -> None:
        """Prints above the progress bar."""
        self._bar.write(line)

    def count(self, num_tokens: int) -> None:
        self.tokens += num_tokens
        rate = self.tokens / max(1e-9, time.monotonic() - self._start)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)


def main(argv: Sequence[str] | None = None) -> None:
    run(
        regenerate,
        RegenerateConfig,
        argv,
        prog="slipstream regenerate",
        description="Replace the answers of conversations by the target's own.",
    )


def regenerate(config: RegenerateConfig) -> None:
    """Writes, or continues, the file that `config` asks for. Raises ValueError at the end if rows failed."""
    output = Path(config.output)
    dropped_path, report_path = (output.with_name(output.name + ending) for ending in (".dropped", ".report"))
    check_files(config, dropped_path, report_path)
    if output.exists() and not config.overwrite:
        check_options(config, output, dropped_path, report_path)
    reader = DialogueReader(config)
    with ExitStack() as stack:
        kept = stack.enter_context(Journal(output, anew=config.overwrite))
        # What lies beside a file that is gone tells of another run.
        dropped = stack.enter_context(Journal(dropped_path, anew=config.overwrite or kept.is_new))
        bar = stack.enter_context(tqdm(unit=" rows", desc="regenerate"))
        write_report(report_path, {"options": config.answer_options})
        progress = Progress(kept, dropped, bar)
        done = kept.ids | dropped.ids
        answer_all(config, (dialogue for dialogue in reader if dialogue.id not in done), progress)
        for path in (output, dropped_path):
            sort_rows(path, reader.ids)
    report = summary(config, reader, progress, dropped_path)
    write_report(report_path, report)
    print(f"{output}:")
    show_table({name.replace("_", " "): value for name, value in report.items() if name != "options"})
    _check_outcome(report, progress)


def answer_all(config: RegenerateConfig, dialogues: Iterator[Dialogue], progress: Progress) -> None:
    """Answers `dialogues` with the engine in this process or with the endpoints, whichever `config` names."""
    chat = context = None
    if config.target:
        target = load_target_tokenizer(config)
        context = target.context
        chat = ChatTemplate(target.tokenizer, date=config.date, variables=config.template, tokenizer_hash=target.hash)
    progress.say(rendering_rule(config, chat))
    keep_cut = config.cut == "keep"
    if config.endpoint:
        answers = EndpointAnswers(endpoint_options(config, context), chat, config.sampling(), keep_cut=keep_cut)
        answers.run(dialogues, progress.write, progress.count)
        return
    assert chat is not None
    model = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    llm = LLM(config.target, config.draft, **{**model, **config.engine})
    engine = EngineAnswers(llm, chat, config.sampling(), keep_cut=keep_cut)
    for result in engine.run(dialogues, progress.count):
        progress.write(result)


def rendering_rule(config: RegenerateConfig, chat: ChatTemplate | None) -> str:
    """One line that says who renders prompts, and what the template does with today's date."""
    if chat is None:
        return "The endpoints render the messages: today's date and rewritten turns in their template go unseen."
    date = f"; today's date in the template is frozen at {config.date}" if chat.inserts_date else ""
    return f"Prompts are rendered here with the chat template of {config.target}{date}."


def endpoint_options(config: RegenerateConfig, context: int | None) -> EndpointOptions:
    """`context` is the target's own: an endpoint may hold fewer tokens, or more."""
    api_key = None if config.api_key_file is None else Path(config.api_key_file).read_text().strip()
    try:
        models = served_models(config.urls[0], api_key)
    except ValueError:
        if config.model is None:
            raise
        models = {}  # a gateway may list nothing; the context of a model that is named is then the target's
    model = config.model or next(iter(models))
    return EndpointOptions(
        urls=config.urls,
        model=model,
        context=models.get(model) or context,
        api_key=api_key,
        concurrency=config.concurrency,
        retries=config.retries,
        first_pause_s=config.retry_pause,
        max_failures=config.max_failures,
    )


def check_files(config: RegenerateConfig, dropped_path: Path, report_path: Path) -> None:
    """Raises ValueError, before anything is written, unless each file is absent, empty or of an earlier run, and none
    is an input."""
    kinds = (
        (str(report_path), is_report, "a report of slipstream regenerate"),
        (str(dropped_path), is_dropped, "a list of rows that slipstream regenerate dropped"),
        (config.output, lambda _: is_report(report_path), f"a file of answers, with {report_path.name} beside it,"),
    )
    for name, is_ours, what in kinds:
        check_output_file(name, is_ours, what, config.inputs(), overwrite=True)


def is_report(path: Path) -> bool:
    try:
        return "max_tokens" in read_json(path)["options"]
    except (ValueError, KeyError, TypeError):
        return False


def is_dropped(path: Path) -> bool:
    try:
        return all(json.loads(line).keys() == {"id", "reason"} for line in whole_lines(path))
    except (ValueError, AttributeError):
        return False


def whole_lines(path: Path) -> list[bytes]:
    """The last one left out if a kill cut it off."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def check_options(config: RegenerateConfig, output: Path, dropped_path: Path, report_path: Path) -> None:
    """Raises ValueError when `output` holds rows made under other options, so that one file has one recipe.

    A run that ended before its first row, such as one with a misspelt target, binds the next one to nothing.
    """
    if not any(path.exists() and path.stat().st_size for path in (output, dropped_path)):
        return
    earlier = read_json(report_path).get("options", {})
    for name, value in config.answer_options.items():
        if earlier.get(name) != value:
            raise ValueError(
                f"{name} is {value!r}, but {output} was begun with {earlier.get(name)!r}; use that, name "
                "another output or add --overwrite"
            )


def summary(config: RegenerateConfig, reader: DialogueReader, progress: Progress, dropped_path: Path) -> dict[str, Any]:
    with dropped_path.open() as file:
        dropped = reader.dropped + Counter(json.loads(line)["reason"] for line in file)
    num_failed = progress.failures.total()
    return {
        "options": config.answer_options,
        "rows_in": len(reader.ids) + reader.dropped.total(),
        "rows_kept": progress.num_kept,
        "rows_dropped": dict(dropped.most_common()),
        "rows_failed": num_failed,
        "tokens_this_run": progress.tokens,
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(report, indent=2) + "\n")


def _check_outcome(report: dict[str, Any], progress: Progress) -> None:
    if report["rows_in"] == 0:
        raise ValueError("no conversation to answer: the data is empty, or no row passes --where")
    if progress.failures:
        first = next(iter(progress.failures))
        raise ValueError(f"{report['rows_failed']:,} rows failed ({first}); the same command tries them again")


if __name__ == "__main__":
    main()
