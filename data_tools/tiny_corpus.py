"""Reads the bundled target's conversations, says which are held out, and cuts the bundled slice of questions.

    python data_tools/tiny_corpus.py --data "[gsm8k_train.jsonl]" --output assets/gsm8k.jsonl.gz

Invariant: whether a conversation is held out depends on its id alone.
"""

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import parse
from slipstream.data_tools.conversations import to_example
from slipstream.data_tools.options import ConversationOptions, check_at_least
from slipstream.data_tools.rows import RowError, read_rows
from slipstream.models.files.atomic import atomic_file

HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Options:
    data: list[str]
    """jsonl files whose lines hold `id` and `messages` (a list of role and content)"""
    output: str
    """.jsonl.gz file to write: all held-out conversations, then `train_rows` others"""
    train_rows: int = 3000
    """training conversations in the slice"""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "train_rows")


def id_fraction(conversation_id: str) -> float:
    """Where an id lies in [0, 1): the first 8 bytes of its SHA-256, read as a big-endian integer, over 2**64."""
    return int.from_bytes(hashlib.sha256(conversation_id.encode()).digest()[:8], "big") / 2**64


def is_held_out(conversation_id: str) -> bool:
    """The hold-out rule. The id alone decides whether the target was trained on the conversation."""
    return id_fraction(conversation_id) < HELD_OUT_SHARE


def read_conversations(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Raises ValueError naming the place of a row that is not a conversation with an id."""
    conversations = []
    for row in read_rows(ConversationOptions(data=tuple(paths))):
        example = to_example(row, row.columns())
        if example.id is None or example.messages is None:
            raise RowError(f"{row.place}: is not a conversation with an id; give an object with `id` and `messages`")
        messages = [{"role": message["role"], "content": message["content"]} for message in example.messages]
        conversations.append({"id": example.id, "messages": messages})
    return conversations


def split(conversations: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out conversations, each in the order given."""
    training = [row for row in conversations if not is_held_out(row["id"])]
    held_out = [row for row in conversations if is_held_out(row["id"])]
    if not training or not held_out:
        raise ValueError(f"data: {len(training)} training and {len(held_out)} held-out conversations: give more data")
    return training, held_out


def write_slice(options: Options) -> None:
    """Writes all held-out conversations, then the `train_rows` training ones of lowest id fraction."""
    training, held_out = split(read_conversations(options.data))
    by_fraction = sorted((row["id"] for row in training), key=id_fraction)
    chosen = set(by_fraction[: options.train_rows])
    splits = {"heldout": held_out, "train": [row for row in training if row["id"] in chosen]}
    rows = [{"id": row["id"], "split": name, "messages": row["messages"]} for name in splits for row in splits[name]]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with atomic_file(Path(options.output)) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def main(argv: list[str] | None = None) -> None:
    write_slice(parse(Options, argv, prog="tiny_corpus", description="Cut a compressed slice of conversations."))


if __name__ == "__main__":
    main()
