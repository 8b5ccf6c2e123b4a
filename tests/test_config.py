"""Values of the wrong type, empty sections of a file, and errors of files, as programs tell them."""

import errno
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from slipstream.config import complete, errors_reported, option_defaults, parse, run
from slipstream.serve.logs import release_streams
from slipstream.tests.tables import each_case


@dataclass(frozen=True, kw_only=True)
class Section:
    """Options of a part."""

    rate: float = 0.5
    """A number."""
    kind: Literal["fast", "exact", "none"] = "fast"
    """One of three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a test."""

    size: int = 3
    """A whole number."""
    limit: int | None = None
    """A whole number or nothing."""
    layers: tuple[int, ...] | None = None
    """A list."""
    quick: bool = True
    """A switch."""
    part: Section = field(default_factory=Section)
    """A section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """Options of several values."""

    sizes: tuple[int, ...] = ()
    """Numbers."""
    names: tuple[str, ...] = ()
    """Texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mappings:
    """Options with keys that a user names."""

    @dataclass(frozen=True)
    class Part:
        first_engine: dict[str, Any] = field(default_factory=dict)

    part: Part = field(default_factory=Part)
    weights: dict[str, float] = field(default_factory=dict)


def test_keys_that_are_names_of_options_may_have_dashes():
    flags = ["--part.first-engine.max-running", "3", "--weights.my-data=2"]
    options = parse(Mappings, flags, prog="test", description="A test.")
    assert (options.part.first_engine, options.weights) == ({"max_running": 3}, {"my-data": 2.0})


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(Options, argv, prog="test", description="A test.")
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


@each_case()
def test_a_value_of_the_wrong_type(flag, sentence, capsys, tmp_path):
    assert refusal(capsys, flag) == f"test: error: {sentence}"
    name, value = flag.removeprefix("--").split("=")
    file = tmp_path / "options.yaml"
    file.write_text(f"part:\n  {name.removeprefix('part.')}: {value}\n" if "." in name else f"{name}: {value}\n")
    message = refusal(capsys, "--config", str(file))
    assert message.replace("'7.5'", "7.5") == f"test: error: {sentence}".replace("'7.5'", "7.5")


@pytest.mark.parametrize("words", ["--sizes 1 8", "--sizes 1,8", "--sizes=[1,8]", "--sizes [1] 8"])
def test_lists_of_numbers(words):
    assert parse(Lists, words.split(), prog="test", description="A test.").sizes == (1, 8)


def test_items_that_are_no_lists():
    words = ["--names", "[1].jsonl", "a,b", "[c, d]"]
    assert parse(Lists, words, prog="test", description="A test.").names == ("[1].jsonl", "a,b", "c", "d")


def test_an_empty_section(capsys, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("size: 4\npart:\n")
    assert refusal(capsys, "--config", str(file)) == (
        f"test: error: part in {file} is empty; give part.kind or another option below it, or leave it out"
    )
    file.write_text("size: 4\nlimit: null\n")
    assert parse(Options, ["--config", str(file)], prog="test", description="A test.").size == 4


@dataclass(frozen=True, kw_only=True)
class Nested:
    """Options with sections that are required, optional and with values of their own."""

    place: str
    needed: Section
    extra: Section | None = None
    slow: Section = field(default_factory=lambda: Section(rate=0.1))


DEFAULTS = {"needed.rate": 0.5, "needed.kind": "fast", "slow.rate": 0.1, "slow.kind": "fast"}


@pytest.mark.parametrize(
    ("saved", "added"),
    [
        ({}, {**DEFAULTS, "extra": None}),
        ({"place": "here", "extra": None, "slow.rate": 0.1}, {k: v for k, v in DEFAULTS.items() if k != "slow.rate"}),
        ({"extra.rate": 7.0, "gone": 1}, {**DEFAULTS, "extra.kind": "fast"}),
    ],
)
def test_saved_options_are_completed_by_defaults(saved, added):
    assert complete(saved, option_defaults(Nested)) == saved | added


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Options that name files."""

    dtype: str = "auto"
    """Not a file."""
    data: tuple[str, ...] = ()
    """Files."""
    output: str = ""
    """A file."""


FULL = "No space left on device"
ABSENT = "No such file or directory"
NO_ROOM = "make room and run the same command again"
NO_FILE = "check the path, or name another"


@pytest.mark.parametrize(
    ("code", "file", "sentence"),
    [
        (errno.ENOSPC, "/x/out", f"output /x/out cannot be used ({FULL}); {NO_ROOM}"),
        (
            errno.ENOSPC,
            "/x/out/train/0.arrow",
            f"output /x/out cannot be used ({FULL}: /x/out/train/0.arrow); {NO_ROOM}",
        ),
        (errno.ENOSPC, "/x/.out.tmp/new", f"output /x/out cannot be used ({FULL}: /x/.out.tmp/new); {NO_ROOM}"),
        (errno.ENOENT, "/x", f"output /x/out cannot be used ({ABSENT}: /x); {NO_FILE}"),
        (errno.ENOENT, "/y/b", f"data /y/b cannot be used ({ABSENT}); {NO_FILE}"),
        (errno.ENOENT, "/z", f"/z: {ABSENT}; {NO_FILE}"),
        (errno.ENOENT, None, f"[Errno {errno.ENOENT}] {ABSENT}"),
    ],
)
def test_errors_of_files_name_option_file_and_remedy(code, file, sentence, capsys):
    def program(_):
        raise OSError(code, os.strerror(code), *([] if file is None else [file]))

    with pytest.raises(SystemExit) as ended:
        run(program, Files, "test", ["--data", "/y/a", "/y/b", "--output", "/x/out"])
    assert (ended.value.code, capsys.readouterr().err) == (1, f"test: error: {sentence}\n")


def test_an_output_that_takes_no_more(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as ending, errors_reported(None, "program"):
            print("text")
    assert ending.value.code == 141
    assert not capsys.readouterr().err
    with open("/dev/full", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit), errors_reported(None, "program"):
            print("text")
    assert "program: error: stdout cannot be written (No space left on device); make" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)  # as where the caller has closed it
    with errors_reported(None, "program"):
        print("text")
    release_streams()


def test_ctrl_c_while_options_are_read_is_told_in_a_line(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.config.parse_or_exit", interrupt)
    with pytest.raises(SystemExit) as ended:
        run(print, Options, "test", [])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "test: interrupted\n"
