"""Replaces the answers of conversations with the target's own, which are what a draft has to predict.

    python data_tools/regenerate.py --data chats.jsonl --target Qwen/Qwen3-8B --output answers.jsonl
    slipstream regenerate --data chats.jsonl --endpoint http://a:8000/v1 http://b:8000/v1 --output answers.jsonl

Invariant: an answer depends on the row, the model, the options and the seed alone, not on time or on other rows. Rows
are appended as they finish; after an interrupt the same command continues and ends with the same file. OUTPUT.dropped
lists the rows left out on purpose; OUTPUT.report counts everything, and lists the rows that failed, which the next run
asks last: rows that always fail do not keep the others from being answered.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from slipstream.config import option_defaults, run
from slipstream.data_tools.answer_states import AnswerStates
from slipstream.data_tools.answers import AnswerReader, EngineAnswers
from slipstream.data_tools.capture_states import choose_format
from slipstream.data_tools.dialogue import Dialogue, DialogueReader, Result
from slipstream.data_tools.endpoints import EndpointAnswers, shared_model
from slipstream.data_tools.options import counted, show_table
from slipstream.data_tools.rows import check_data
from slipstream.data_tools.target_tokenizer import ChatTemplate, TargetTokenizer, load_target_tokenizer
from slipstream.data_tools.verb_options import CaptureConfig, RegenerateConfig
from slipstream.models.files.atomic import FolderLock, LineFile, atomic_file, write_json
from slipstream.models.files.checkpoint import Values, read_json, resolve, weights_fingerprint
from slipstream.models.files.outputs import check_output_file, check_working_folder
from slipstream.models.files.state_store import StateIndex
from slipstream.models.files.text import read_key
from slipstream.serve.llm import LLM

# Options that change answers: only the same ones continue a file.
ANSWER_OPTIONS = (
    *("target", "revision", "chat_template", "template", "date", "model"),
    *("temperature", "top_p", "top_k", "max_tokens", "seed", "cut", "samples"),
)


class Journal(LineFile):
    """A JSONL file of rows with an `id`; `ids` are those in it.

    Every line is whole: opening the file cuts off a row that a killed writer left unfinished.
    Locks the file before reading it or, with `anew`, emptying it. Raises ValueError for other content and while another
    process writes the file, and leaves it unchanged.
    """

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        self.ids: set[str] = set()
        self.is_new = not path.exists()
        super().__init__(path)
        try:
            self._file.truncate(0 if anew else self._read())
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> int:
        """Fills `ids`; returns the number of bytes in whole lines."""
        self._file.seek(0)
        size = 0
        for number, line in enumerate(self._file, 1):
            if line.endswith(b"\n"):
                self.ids.add(_row_id(self.path, number, line))
                size += len(line)
        return size

    def append(self, row: Values) -> None:
        assert row["id"] not in self.ids
        self.write(row)
        self.ids.add(row["id"])


def sort_rows(path: Path, position: Mapping[str, int]) -> None:
    """Sorts the rows by `position`; rows without one go last. The order of arrival is gone."""
    places = []
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            places.append((position.get(_row_id(path, number, line), len(position)), start, len(line)))
            start += len(line)
        with atomic_file(path) as temporary, temporary.open("wb") as ordered:
            for _, start, length in sorted(places):
                file.seek(start)
                ordered.write(file.read(length))


def _row_id(path: Path, number: int, line: bytes) -> str:
    try:
        return str(json.loads(line)["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: is not a row with an id; name another file") from error


class Progress:
    """Writes and counts results as they arrive."""

    def __init__(self, journal: Journal, dropped: Journal, bar: "tqdm[Any]") -> None:
        self.journal = journal
        self._dropped = dropped
        self._bar = bar
        self._start = time.monotonic()
        self.tokens = 0
        self.failures: dict[str, str] = {}  # id -> fault

    def write(self, result: Result) -> None:
        if result.row is not None:
            self.journal.append(result.row)
        elif result.dropped:
            self._dropped.append({"id": result.id, "reason": result.dropped})
        else:
            self.failures[result.id] = result.failed
        self._bar.update()

    def count(self, num_tokens: int) -> None:
        self.tokens += num_tokens
        rate = self.tokens / max(1e-9, time.monotonic() - self._start)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)


def regenerate(config: RegenerateConfig) -> None:
    """Writes, or continues, the file that `config` asks for. Raises ValueError at the end if rows failed."""
    output = Path(config.output)
    dropped_path, report_path = (output.with_name(output.name + ending) for ending in (".dropped", ".report"))
    check_files(config, dropped_path, report_path)
    check_data(config)
    source = Source.find(config)
    options = {name: getattr(config, name) for name in ANSWER_OPTIONS}
    options |= {"model": source.model, "target_hash": source.target_hash}
    continues = output.exists() and not config.overwrite
    failed = set[str]()  # ids of rows in earlier runs
    if continues:
        check_options(options, output, dropped_path, report_path)
        failed = set(read_json(report_path).get("failed_ids", ())) if report_path.exists() else failed
    reader = DialogueReader(config, config.samples)
    total = sum(1 for _ in tqdm(reader, unit=" rows", desc="read", leave=False))
    if not total and not reader.dropped:
        raise ValueError("no conversation to answer: the data is empty, or no row passes --where")
    with (
        Journal(output, anew=config.overwrite) as journal,
        # If the output is gone, the list of dropped rows is from another run.
        Journal(dropped_path, anew=config.overwrite or journal.is_new) as dropped,
        tqdm(
            total=total, initial=len((journal.ids | dropped.ids) & reader.ids.keys()), unit=" rows", desc="answer"
        ) as bar,
    ):
        progress = Progress(journal, dropped, bar)
        write_json(report_path, {"options": options, "failed_ids": sorted(failed)})
        waiting = in_order(DialogueReader(config, config.samples), journal.ids | dropped.ids, failed)
        try:
            answer_all(config, source, waiting, progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the same command continues from {output}") from None
        finally:
            report = summary(options, reader, progress, dropped, failed)
            write_json(report_path, report)
        for path in (output, dropped_path):
            sort_rows(path, reader.ids)
    show_report(output, report)
    if progress.failures:
        first = next(iter(progress.failures.values()))
        raise ValueError(f"{report['rows_failed']:,} rows failed ({first}); the same command tries them again")


@dataclass(frozen=True, slots=True)
class Source:
    """The model that answers, and how it is reached."""

    target: TargetTokenizer | None  # None: the endpoints render the messages
    model: str | None = None  # at the endpoints
    context: int | None = None  # tokens of a prompt and its answer, where known
    api_key: str | None = None
    target_hash: str | None = None  # of tokenizer, chat template and, in this process, weights

    @classmethod
    def find(cls, config: RegenerateConfig) -> "Source":
        """Raises ValueError if the target is missing, or the endpoints do not have one model in common."""
        target = load_target_tokenizer(config) if config.target else None
        own_context = None if target is None else target.context
        target_hash = None if target is None else hash_of(target, config)
        if not config.endpoint:
            return cls(target, context=own_context, target_hash=target_hash)
        api_key = read_key(config.api_key_file)
        model, context = shared_model(config.urls, config.model, api_key)
        return cls(target, model, context or own_context, api_key, target_hash)


def hash_of(target: TargetTokenizer, config: RegenerateConfig) -> str:
    """Returns the hash of what makes prompts and, in this process, answers; files may change under one name."""
    parts = [target.hash, str(target.tokenizer.chat_template)]
    if not config.endpoint:
        folder = resolve(config.target, config.revision, trust_remote_code=config.trust_remote_code)
        parts.append(weights_fingerprint(folder))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def in_order(reader: Iterable[Dialogue], done: Set[str], failed: Set[str]) -> Iterator[Dialogue]:
    """The dialogues that are not done, those that failed in an earlier run last."""
    last = []
    for dialogue in reader:
        if dialogue.id in failed and dialogue.id not in done:
            last.append(dialogue)
        elif dialogue.id not in done:
            yield dialogue
    yield from last


def answer_all(config: RegenerateConfig, source: Source, dialogues: Iterator[Dialogue], progress: Progress) -> None:
    """Answers `dialogues` with the engine in this process or with the endpoints, whichever `config` names."""
    chat = None
    target = source.target
    if target is None:
        tqdm.write("The endpoints render the messages: dates and rewritten turns in their templates go unnoticed.")
    else:
        chat = ChatTemplate(target.tokenizer, date=config.date, variables=config.template, tokenizer_hash=target.hash)
        tqdm.write(f"Prompts are rendered here with the chat template of {config.target}{chat.date_note}.")
    shared: dict[str, Any] = {
        "chat": chat,
        "reader": None if target is None else AnswerReader(target.tokenizer),
        "end_ids": frozenset() if target is None else target.end_ids,
        "params": config.sampling(),
        "keep_cut": config.cut == "keep",
        "on_result": progress.write,
        "on_tokens": progress.count,
    }
    if source.model is not None:
        answers = EndpointAnswers(
            **shared,
            urls=config.urls,
            model=source.model,
            context=source.context,
            api_key=source.api_key,
            concurrency=config.concurrency,
            retries=config.retries,
            retry_pause=config.retry_pause,
            timeout=config.timeout,
            max_failures=config.max_failures,
        )
        answers.run(dialogues)
        return
    model = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    engine = {**model, **config.engine}
    if config.states is None:
        EngineAnswers(**shared, llm=LLM(config.target, config.draft, **engine)).run(dialogues)
        return
    with open_states(config, source) as states:
        llm = LLM(config.target, config.draft, keep_states=states.layers, **engine)
        llm.engine.on_states = lambda sequence, read: states.note(
            sequence.request.id, sequence.tokens, read(len(sequence.tokens))
        )

        def end(result: Result) -> None:
            states.end(result.id, result.row)
            progress.write(result)

        shared["on_result"] = end
        EngineAnswers(**shared, llm=llm).run(dialogues)


@contextmanager
def open_states(config: RegenerateConfig, source: Source) -> Iterator[AnswerStates]:
    """Yields the states to keep, and writes what is left of them in the end. Raises ValueError for a folder with other
    states, and for one that another process writes."""
    assert config.states is not None
    assert source.target is not None
    path = resolve(config.target, config.revision, trust_remote_code=config.trust_remote_code)
    capture = CaptureConfig(
        target=config.target,
        trust_remote_code=config.trust_remote_code,
        drafters=config.drafters,
        layers=config.layers,
        dtype=config.states_dtype,
    )
    identity = StateIndex(
        target_fingerprint=weights_fingerprint(path),
        tokenizer_hash=source.target.hash,
        data_hash="",
        max_length=0,
        form=choose_format(capture, path),
        shards=(),
        command=f"slipstream regenerate --states {config.states}",
    )
    with FolderLock(Path(config.states), "states"):
        states = AnswerStates(Path(config.states), identity, int(capture.shard_gb * 1e9))
        try:
            yield states
        finally:
            states.write()


def check_files(config: RegenerateConfig, dropped_path: Path, report_path: Path) -> None:
    """Raises ValueError unless each file is absent, empty or from an earlier run, and none is an input."""
    kinds = (
        (str(report_path), is_report, "a report of slipstream regenerate"),
        (str(dropped_path), is_dropped, "a list of rows that slipstream regenerate dropped"),
        (config.output, lambda _: is_report(report_path), f"a file of answers, with {report_path.name} beside it,"),
    )
    for name, is_ours, kind in kinds:
        check_output_file(name, is_ours, kind, config.inputs(), overwrite=True)
    if config.states is not None:
        check_working_folder(config.states, config.inputs(), "states")


def is_report(path: Path) -> bool:
    try:
        return "max_tokens" in read_json(path)["options"]
    except (ValueError, KeyError, TypeError):
        return False


def is_dropped(path: Path) -> bool:
    try:
        lines = path.read_bytes().splitlines(keepends=True)  # a kill may have cut off the last
        return all(json.loads(line).keys() == {"id", "reason"} for line in lines if line.endswith(b"\n"))
    except (ValueError, AttributeError):
        return False


def check_options(options: Values, output: Path, dropped_path: Path, report_path: Path) -> None:
    """Raises ValueError if `output` has rows made with other options, or with more samples; an option that their
    version did not have counts as its default. A run that ended before its first row, for example with a misspelt
    target, does not bind the next."""
    if not any(path.exists() and path.stat().st_size for path in (output, dropped_path)):
        return
    earlier = option_defaults(RegenerateConfig) | read_json(report_path).get("options", {})
    if earlier.get("target_hash", options["target_hash"]) != options["target_hash"]:
        raise ValueError(
            f"target {options['target']} or its chat template has changed since {output} was started; name another "
            "output or add --overwrite"
        )
    if earlier["samples"] > options["samples"]:
        raise ValueError(
            f"samples is {options['samples']}, but {output} was started with {earlier['samples']}; give as many "
            "or more, name another output or add --overwrite"
        )
    earlier |= {"target_hash": options["target_hash"], "samples": options["samples"]}
    for name, value in options.items():
        if earlier.get(name) != value:
            raise ValueError(
                f"{name} is {value!r}, but {output} was started with {earlier.get(name)!r}; use that, name "
                "another output or add --overwrite"
            )


def summary(
    options: Values, reader: DialogueReader, progress: Progress, dropped: Journal, failed: Set[str]
) -> dict[str, Any]:
    """`reader` has read all rows; `failed` are ids of earlier runs."""
    with dropped.path.open() as file:
        reasons = reader.dropped + Counter(json.loads(line)["reason"] for line in file)
    return {
        "options": options,
        "rows_in": len(reader.ids) // reader.samples + reader.dropped.total(),
        "samples": len(reader.ids),
        "rows_kept": len(progress.journal.ids),
        "rows_dropped": dict(reasons.most_common()),
        "rows_failed": len(progress.failures),
        "tokens_this_run": progress.tokens,
        "failed_ids": sorted((failed | progress.failures.keys()) - progress.journal.ids - dropped.ids),
    }


def show_report(output: Path, report: Values) -> None:
    figures = {**report, "rows_dropped": counted(report["rows_dropped"])}
    print(f"{output}:")
    show_table({name.replace("_", " "): figures[name] for name in figures if name not in ("options", "failed_ids")})


main = partial(run, regenerate, RegenerateConfig, "slipstream regenerate")

if __name__ == "__main__":
    main()
