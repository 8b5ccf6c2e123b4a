"""`serve --answer-log FILE`: appends the token ids of each whole answer and its prompt, as `prepare` and `slipstream
adapt` read them. They are the text of users, so nothing is written without this option; requests with a `cache_salt`
never are.

Invariant: a slow or full disk costs whole lines, never a request: a thread writes, and a line for which there is no
room is dropped. The file is opened for each line, so that it can be moved away.
"""

import json
import logging
import os
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from queue import Full, Queue
from typing import Any

from slipstream.serve.request import Request

MOST_UNWRITTEN = 256  # lines
CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class AnswerLog:
    def __init__(self, path: Path, tokenizer_hash: str) -> None:
        self.num_lost = 0
        self._path = path
        self._tokenizer_hash = tokenizer_hash
        self._lines: Queue[dict[str, Any] | None] = Queue(MOST_UNWRITTEN)
        self._thread = threading.Thread(target=self._write, name="slipstream-answer-log", daemon=True)
        self._thread.start()

    def add(self, request: Request, answer: Sequence[int], finish_reason: str) -> None:
        """Takes an answer that is whole; drops those that were aborted, and those of requests that opted out."""
        if request.namespace or finish_reason not in ("stop", "length"):
            return
        line = {
            "served_at": datetime.now(UTC).isoformat(timespec="seconds"),  # first: ANSWER_LOG of serve/options.py
            "kind": " ".join(request.labels),
            "input_ids": [*request.prompt, *answer],
            "loss_mask": [0] * len(request.prompt) + [1] * len(answer),
            "finish_reason": finish_reason,
            "tokenizer_hash": self._tokenizer_hash,
        }
        try:
            self._lines.put_nowait(line)
        except Full:
            self.num_lost += 1

    def close(self) -> None:
        """Waits a little for lines to be written."""
        try:
            self._lines.put(None, timeout=CLOSE_SECONDS)
        except Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                with open(self._path, "ab", buffering=0, opener=private) as file:
                    append(file, json.dumps(line).encode() + b"\n")
            except OSError as error:
                self.num_lost += 1
                if self.num_lost == 1:
                    logger.warning("answer_log %s: answers are not logged: %s", self._path, error.strerror)


def append(file: FileIO, line: bytes) -> None:
    """Raises OSError, and leaves the file as it was, if there is no room for the line: its beginning alone would spoil
    the line after it, too."""
    size = file.tell()
    try:
        num_written = 0
        while num_written < len(line):
            num_written += file.write(line[num_written:])
    except OSError:
        file.truncate(size)
        raise


def private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
