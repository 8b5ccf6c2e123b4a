"""The `slipstream` command: its verbs, and how they refuse wrong options before they import anything large."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream import cli
from slipstream.config import build_parser, option_names
from slipstream.serve.cli import options_class
from slipstream.tests.sources import ROOT
from slipstream.tests.tables import table_of

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "matplotlib")
# Verb -> options with which it would run, an option with a wrong value, and a line that names an input that is missing.
LINES = table_of(__file__, "lines")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"^    (?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:slipstream ((?:train )?[a-z0-9-]+)|(serve)) (.*)", re.MULTILINE
)
SCRIPT = """
import contextlib, io, sys
from slipstream import cli
for line in {lines}:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            cli.main(line.split())
        except SystemExit as ended:
            status = ended.code
    print(status, said.getvalue().replace("\\n", " "))
    loaded = [name for name in {heavy} if name in sys.modules]
    assert not loaded, (line, loaded)
"""


def answers(lines: list[str], folder: Path) -> list[tuple[int, str]]:
    """Exit status and words of each command line, one process for all; it fails if anything heavy was imported."""
    (folder / "here").mkdir()
    script = SCRIPT.format(lines=lines, heavy=HEAVY)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    statuses = [line.partition(" ") for line in ended.stdout.splitlines()]
    return [(int(status), words) for status, _, words in statuses]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "mtp"])
def test_a_training_program_answers_before_it_imports_torch(name: str, tmp_path: Path) -> None:
    """`accelerate launch` runs the file itself. torch cannot be imported here."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    missing = ("--target=/no/target", "--output=o", "--data.path=here")
    for words, status, reply in (
        (("--help",), 0, f"usage: train/{name}.py"),
        (("--optim.lr=x",), 2, "optim.lr is 'x'; give a number"),
        (missing, 1, "target /no/target does not exist; name a folder or a hub id"),
    ):
        command = [sys.executable, str(ROOT / "train" / f"{name}.py"), *words]
        path = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT.parent}"}
        ended = subprocess.run(command, capture_output=True, text=True, env=path)
        assert (ended.returncode, reply in ended.stdout + ended.stderr) == (status, True), ended.stderr


def test_every_verb_is_tried() -> None:
    assert LINES.keys() == cli.VERBS.keys()


def test_help_imports_little(tmp_path: Path) -> None:
    replies = answers([f"{verb} --help" for verb in LINES], tmp_path)
    for verb, (status, words) in zip(LINES, replies, strict=True):
        assert status == 0
        assert f"usage: slipstream {verb}" in words


def test_unknown_options_and_wrong_values_are_refused_at_once(tmp_path: Path) -> None:
    wrong = [(f"{verb} {line}", option) for verb, (line, value, _) in LINES.items() for option in ("--outptu=x", value)]
    replies = answers([f"{line} {option}" for line, option in wrong], tmp_path)
    for (_, option), (status, words) in zip(wrong, replies, strict=True):
        name = option.removeprefix("--").partition("=")[0]
        assert status == 2
        assert f"error: {name.replace('-', '_')} " in words or f"error: unrecognized arguments: --{name}" in words


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_required_options_are_marked_and_asked_for_at_once(tmp_path: Path) -> None:
    required = [(verb, name) for verb in LINES for name in getattr(cli.load(cli.VERBS[verb].options), "REQUIRED", ())]
    lines = []
    for verb, name in required:
        options = [word for word in LINES[verb][0].split() if not word.startswith(f"{flag_of(name)}=")]
        lines.append(" ".join((verb, *options)))
    replies = answers([*lines, *(f"{verb} --help" for verb, _ in required)], tmp_path)
    for (_, name), (status, words) in zip(required, replies, strict=False):
        assert status == 2
        assert f"error: {name} is empty; name " in words
    for (_, name), (_, words) in zip(required, replies[len(required) :], strict=True):
        assert " Required. " in words.partition(f" {flag_of(name)} ")[2].partition(" --")[0]


def test_missing_inputs_are_refused_at_once(tmp_path: Path) -> None:
    replies = answers([f"{verb} {missing}" for verb, (_, _, missing) in LINES.items()], tmp_path)
    for (_, _, missing), (status, words) in zip(LINES.values(), replies, strict=True):
        option, _, value = missing.split()[0].removeprefix("--").partition("=")
        assert status == 1
        assert f"error: {option.replace('-', '_')} {value} does not exist; name " in words


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("prepar", "did you mean prepare?"),
        ("trian", "did you mean train?"),
        ("x", "valid verbs: prepare, re"),
        ("serve", "the server is the command `serve`"),
    ],
)
def test_an_unknown_verb_is_answered_with_the_nearest(word: str, remedy: str, exits: Any) -> None:
    with exits(f"unknown verb {word!r}; {remedy}", 2):
        cli.main([word])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of all options, by verb; those of `serve` with every drafter."""
    classes = {verb: [cli.load(parts.options)] for verb, parts in cli.VERBS.items()}
    classes["serve"] = [options_class("ngram")]
    for drafter in ("eagle", "eagle3", "dflash"):
        draft = tmp_path_factory.mktemp(drafter)
        (draft / "config.json").write_text(json.dumps({"drafter": drafter, "target": "someone/target"}))
        classes["serve"].append(options_class(str(draft)))
    return {
        verb: {name for options in group for name in option_names(build_parser(options, prog="", description=""))}
        for verb, group in classes.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_pages_have_options_that_exist(page: Path, options: dict[str, set[str]]) -> None:
    for verb, server, words in COMMAND.findall(page.read_text().replace("\\\n", " ")):
        names = options[verb or server] | {"config", "print_config", "help", "fast"}
        for flag in re.findall(r"(?<=--)[a-z][\w.-]*", words.partition("#")[0]):
            name = flag.replace("-", "_").removeprefix("no_")
            group = name.rpartition(".")[0]  # of options by name, such as template.enable_thinking
            assert name in names or (group in names and f"{group}." not in " ".join(names)), (verb or server, flag)
