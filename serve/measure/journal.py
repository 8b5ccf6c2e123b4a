"""Keeps the results of a measurement, so that an interrupted one continues.

Invariant: the first line of the file holds the options that decide what is measured and the identity of target and
draft, every other line one result. A line that a killed writer left unfinished is cut off.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.models.files.atomic import LineFile

Fields = Mapping[str, Any]
OPTIONS = "options"
IDENTITY = "identity"
REMEDY = "name another output, or add --overwrite"


class Journal(LineFile):
    """The results in `path`.

    `identity` says which target and draft are measured; None: nobody tells. Raises ValueError, and leaves the file as
    it is, if another process writes it, if it is not one of `program`'s, or if its results are of other options or of
    another identity. `anew` empties a file of `program`.
    """

    def __init__(
        self,
        path: Path,
        program: str,
        options: Fields,
        identity: Fields | None,
        *,
        anew: bool = False,
    ) -> None:
        self.results: list[dict[str, Any]] = []
        self.is_identified = True  # the results are of the same target and draft as those to come
        new_head = json.loads(json.dumps({"program": program, OPTIONS: options, IDENTITY: identity}))  # as in the file
        super().__init__(path)
        try:
            head = self._read(program)
            if self.results and not anew:
                self._check_options(head[OPTIONS], new_head[OPTIONS])
                self._check_identity(head.get(IDENTITY), new_head[IDENTITY])
            else:
                self._file.truncate(0)
                self.results = []
                self.write(new_head)
        except BaseException:
            self._file.close()
            raise

    def _read(self, program: str) -> dict[str, Any]:
        """Fills `results`, cuts off an unfinished line. Returns the first line, without options if there was none."""
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        complete_lines = [line for line in lines if line.endswith(b"\n")]
        try:
            head, *self.results = [dict(json.loads(line)) for line in complete_lines] or [
                {"program": program, OPTIONS: None}
            ]
            if head["program"] != program:
                raise ValueError
            head[OPTIONS]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is not a file of {program}; name another output") from error
        self._file.truncate(sum(map(len, complete_lines)))
        return head

    def _check_options(self, earlier: Fields, options: Fields) -> None:
        for name, value in options.items():
            if earlier.get(name) != value:
                raise ValueError(
                    f"{name} is {value!r}, but {self.path} was begun with {earlier.get(name)!r}; use that, {REMEDY}"
                )

    def _check_identity(self, earlier: Fields | None, identity: Fields | None) -> None:
        self.is_identified = earlier is not None and identity is not None
        if earlier is None or identity is None:
            return
        for name, value in identity.items():
            if earlier.get(name) != value:
                raise ValueError(
                    f"{name} is not what {self.path} was begun with: {earlier.get(name)} then, {value} now; {REMEDY}"
                )

    def check_unfinished(self) -> None:
        """Raises ValueError if the results of an earlier run, which are all that were asked for, may be of another
        target or draft."""
        if not self.is_identified:
            raise ValueError(
                f"{self.path} is finished, but nothing tells whether target and draft are still the same; {REMEDY}"
            )

    def add(self, result: Fields) -> None:
        self.results.append(dict(result))
        self.write(result)
