"""No draft against any number of drafts, by concurrency, on questions with known answers.

    python bench/sweep.py --draft runs/qwen3-8b/best --draft ngram --target Qwen/Qwen3-8B --output runs/sweep
    python bench/sweep.py --draft runs/demo/draft/best,depth=5 --draft runs/demo/draft/best,depth=2 --questions 32

A draft is written NAME[,option=value...] with its own options (`--drafter.*` of `serve`) and those of the engine that
should differ for it (width=4). Every level asks the same questions and no level knows what another has said. Warm-up
rounds come first and do not count. Rows are written to OUTPUT/rows.jsonl as they come; the same command goes on where
it was interrupted. At the end OUTPUT has table.md and sweep.png, and each row is printed as a JSON line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml

from slipstream.bench.gpu import revision
from slipstream.bench.serving import measuring
from slipstream.bench.serving_options import ServingConfig
from slipstream.bench.serving_run import device_name
from slipstream.bench.sweep_questions import Question, is_right, read_questions
from slipstream.bench.sweep_report import plot, table
from slipstream.bench.workload import QUESTIONS, Task
from slipstream.config import parse
from slipstream.models.chat_template import PromptTemplate
from slipstream.models.checkpoint import is_checkpoint, resolve
from slipstream.models.messages import DEFAULT_DATE
from slipstream.models.pretrained import load_tokenizer
from slipstream.serve.options import EngineConfig, find_target

WARMUP_TOKENS = 32  # of each answer
ENGINE_OPTIONS = {one.name for one in fields(EngineConfig)} - {"target", "draft", "drafter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """Options of this benchmark."""

    draft: list[str] = field(default_factory=list)
    """Drafts beside none, NAME[,option=value...] each: checkpoints, or drafters that need none."""
    target: str = ""
    """Target checkpoint. Empty: the one that the first checkpoint among the drafts names."""
    concurrency: str = "1,2,4,8,16,32,64"
    """Requests open at once, parted by commas."""
    data: str = str(QUESTIONS)
    """JSON lines (also .gz) with `question` and `answer`, or `messages`; the answer ends in its number."""
    split: str = "heldout"
    """Rows that name another `split` are left out."""
    questions: int = 64
    """Questions to ask at each level."""
    max_tokens: int = 512
    """Longest answer."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    """Seed of the first request; each further one takes the next."""
    mode: str = "offline"
    """offline: an engine in this process; http: a server of our own and streaming clients."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine by name (with http: of `serve`), for all drafts and without."""
    output: str = "runs/sweep"
    """Folder of rows, table and plot."""

    def __post_init__(self) -> None:
        configs = [self.serving(draft, "target") for draft in self.drafts]
        if self.questions < max(configs[0].levels):
            raise ValueError(f"questions is {self.questions}; a level of concurrency cannot have more requests open")

    @property
    def drafts(self) -> list[str]:
        return list(dict.fromkeys(("none", *self.draft)))

    @property
    def target_name(self) -> str:
        """Raises ValueError where neither the options nor a draft name a target."""
        names = (split_draft(draft)[0] for draft in self.drafts)
        first = next((name for name in names if is_checkpoint(name)), "none")
        return find_target(EngineConfig(target=self.target, draft=first))[0]

    def serving(self, draft: str, target: str) -> ServingConfig:
        """What bench/serving.py runs for this draft. Raises ValueError."""
        name, own = split_draft(draft)
        return ServingConfig(
            draft=name,
            target=target,
            concurrency=self.concurrency,
            mode=self.mode,
            temperature=self.temperature,
            ignore_eos=False,
            seed=self.seed,
            engine={**self.engine, **{key: value for key, value in own.items() if key in ENGINE_OPTIONS}},
            drafter={key: value for key, value in own.items() if key not in ENGINE_OPTIONS},
        )

    def settings(self, target: str) -> dict[str, Any]:
        """What rows must share to be compared."""
        names = ("split", "questions", "max_tokens", "temperature", "seed", "mode", "template", "engine")
        return {"target": target, "data": Path(self.data).name} | {name: getattr(self, name) for name in names}


def split_draft(draft: str) -> tuple[str, dict[str, Any]]:
    """NAME,option=value,... -> name and options."""
    name, *options = draft.split(",")
    if not name or not all("=" in option for option in options):
        raise ValueError(f"draft is {draft!r}; write NAME or NAME,option=value,option=value")
    pairs = (option.split("=", 1) for option in options)
    return name, {key.strip().replace("-", "_"): yaml.safe_load(value) for key, value in pairs}


def label(draft: str) -> str:
    """A draft in a table: a path's last two parts, and the options."""
    name, *options = draft.split(",")
    return ", ".join(("/".join(Path(name).parts[-2:]), *options))


class Rows:
    """The rows of a folder's earlier runs, and those that come. A line that broke off is dropped."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self._rows: dict[tuple[str, int], dict[str, Any]] = {}
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole)
        for row in map(json.loads, whole.splitlines()):
            if row["settings"] == settings:
                self._rows[row["draft"], row["batch"]] = row

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._rows

    def add(self, row: dict[str, Any]) -> None:
        self._rows[row["draft"], row["batch"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def compared(self, drafts: Sequence[str], levels: Sequence[int]) -> list[dict[str, Any]]:
        """Each beside the row without a draft at the same level, in order, without the answers."""
        found = []
        for draft, level in ((draft, level) for draft in drafts for level in levels):
            row, baseline = self._rows[draft, level], self._rows["none", level]
            same = sum(one == other for one, other in zip(row["answers"], baseline["answers"], strict=True))
            speed_up = None if draft == "none" else round(row["tok_s"] / baseline["tok_s"], 3)
            against = {"speed_up": speed_up, "num_identical": None if draft == "none" else same}
            found.append({key: value for key, value in row.items() if key != "answers"} | against)
        return found


def sweep(config: SweepConfig) -> list[dict[str, Any]]:
    """Measures what OUTPUT/rows.jsonl does not have yet; returns all rows of this sweep."""
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    target = config.target_name
    rows = Rows(output / "rows.jsonl", config.settings(target))
    questions = read_questions(Path(config.data), config.split, config.questions)
    levels = config.serving("none", target).levels
    for draft in config.drafts:
        missing = [level for level in levels if (draft, level) not in rows]
        for row in measure(config, draft, target, questions, missing) if missing else ():
            rows.add(row)
    return rows.compared(config.drafts, levels)


def measure(
    config: SweepConfig, draft: str, target: str, questions: Sequence[Question], levels: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One row per level, as it is done."""
    serving = config.serving(draft, target)
    tokenizer = load_tokenizer(resolve(target))
    tasks = [Task(prompt, config.max_tokens) for prompt in encode(tokenizer, questions, config.template)]
    short = [replace(task, max_tokens=min(config.max_tokens, WARMUP_TOKENS)) for task in tasks]
    with measuring(serving, serving.draft) as run:
        for level in levels:
            run(short[:level], level, f"warm-up at {level}")
            done = run(tasks, level, f"at {level}")
            texts = [
                text if isinstance(text, str) else tokenizer.decode(text, skip_special_tokens=True)
                for text in done.answers
            ]
            num_right = sum(map(is_right, questions, texts))
            yield {
                **origin(config, draft, target, level),
                **done.figures(),
                "accuracy": round(num_right / len(questions), 4),
                "answers": [zlib.crc32(text.encode()) for text in texts],
            }


def encode(tokenizer: Any, questions: Sequence[Question], template: dict[str, Any]) -> list[list[int]]:
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    prompts = PromptTemplate(tokenizer, date=DEFAULT_DATE, variables={})
    texts = [prompts.render(chat, prompt=True, variables=template) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def origin(config: SweepConfig, draft: str, target: str, level: int) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available() and config.engine.get("device") != "cpu"
    return {
        "bench": "sweep",
        "device": device_name("cuda" if on_gpu else "cpu"),
        "date": date.today().isoformat(),
        "revision": revision(),
        "target": target,
        "draft": draft,
        "label": label(draft),
        "batch": level,
        "floor_ms": None,  # the least that a round can take is not known here: bench/round.py
        "settings": config.settings(target),
    }


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(SweepConfig, argv, prog="bench/sweep.py", description="Drafts against none, by concurrency.")
    try:
        rows = sweep(config)
    except (ValueError, OSError) as error:
        raise SystemExit(f"bench/sweep.py: error: {error}") from error
    except KeyboardInterrupt as error:
        raise SystemExit("bench/sweep.py: interrupted; the same command goes on from here") from error
    output, markdown = Path(config.output), table(rows)
    (output / "table.md").write_text(markdown + "\n")
    title = f"{label(rows[0]['target'])}: {config.questions} questions of {Path(config.data).name}, {rows[0]['device']}"
    plot(rows, title, output / "sweep.png")
    print(f"{markdown}\n\n{output}/table.md, {output}/sweep.png")
    print("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
