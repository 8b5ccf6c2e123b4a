"""The command line of the data programs and benchmarks: shared options and their checks, tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.models.chat.messages import DEFAULT_DATE, check_date, date_of
from slipstream.models.files.names import check_checkpoint, check_file, may_be_hub_id
from slipstream.serve.options import check_at_least

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow")  # of files of rows


def check_source(option: str, name: str) -> None:
    """Raises ValueError for data that is neither a file, nor a folder, nor, by its name, on the hub."""
    is_remote = may_be_hub_id(name) and not name.endswith(SUFFIXES)
    if not is_remote and not Path(name).exists():
        raise ValueError(f"{option} {name} does not exist; name a file, a folder or a hub dataset such as owner/name")


def show_table(rows: Mapping[str, object]) -> None:
    """Prints names and values in two columns."""
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value:,}" if type(value) is int else f"  {name:<{width}}  {value}")


def counted(counts: Mapping[str, int]) -> str:
    """Names with their counts on one line."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions:
    """Conversations to read, and the target whose tokenizer and chat template render them."""

    data: tuple[str, ...] = ()
    """Files (.jsonl .json .parquet .arrow, also .gz), folders of them, saved datasets or hub ids."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    """Split of a hub or saved dataset."""
    where: tuple[str, ...] = ()
    """Keep rows with this column value: column=value. Several must all hold."""
    limit: int | None = None
    """Take only this many rows, the first that `where` keeps."""
    skip_bad: bool = False
    """Count malformed rows instead of stopping at the first."""
    target: str = ""
    """Target model (folder or hub id), for its tokenizer and chat template."""
    revision: str | None = None
    """Hub revision of the target."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target's tokenizer."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as --template.enable_thinking false."""
    date: str = DEFAULT_DATE
    """Date (year-month-day, or today) that chat templates see as today's; `serve` has the same option."""

    def __post_init__(self) -> None:
        for condition in self.where:
            if "=" not in condition:
                raise ValueError(f"where is {condition!r}; write column=value, such as split=train")
        check_at_least(self, 1, "limit")
        check_date(self.date)
        # Reports and continued files need the day itself, not `today`.
        object.__setattr__(self, "date", date_of(self.date).isoformat())

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        for name in self.data:
            check_source("data", name)
        check_checkpoint("target", self.target)
        check_file("chat_template", self.chat_template, "a text file")

    def inputs(self) -> dict[str, Sequence[str | None]]:
        """Option -> the inputs it names, to which no program may write."""
        return {"data": self.data, "target": [self.target], "chat_template": [self.chat_template]}

    @property
    def conditions(self) -> dict[str, str]:
        return dict(condition.split("=", 1) for condition in self.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions(ConversationOptions):
    """How rows become tokens and loss masks."""

    turns: Literal["all", "last"] = "all"
    """Answers to supervise. `last` also fits templates that rewrite earlier answers (thinking removed)."""
    max_length: int = 4096
    """Longer rows are cut to this many tokens."""
    min_supervised: int = 1
    """Rows with fewer supervised tokens, after the cut, are dropped."""
    num_proc: int | None = None
    """Processes that tokenize, threads for served answers. Default: one per usable core, or one for little data."""

    def __post_init__(self) -> None:
        ConversationOptions.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        check_at_least(self, 1, "max_length", "min_supervised", "num_proc")
