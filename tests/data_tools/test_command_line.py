"""Flags of the data programs, and the `slipstream` command with its verbs."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from slipstream import cli
from slipstream.config import parse, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    data: tuple[str, ...] = ()
    output: str = ""
    max_length: int = 5
    skip_bad: bool = False
    template: dict[str, Any] = field(default_factory=dict)


def read(*words: str) -> Options:
    return parse(Options, words, prog="test", description="test")


def test_the_forms_of_a_flag():
    everything = Options(data=("a", "b"), output="c", max_length=7, skip_bad=True)
    assert read("--data", "a", "b", "-o", "c", "--max-length", "7", "--skip-bad") == everything
    assert read("--skip-bad", "--data", "a", "--data=b", "--output=c", "--max_length=7") == everything
    assert read("--data", "[a, b]", "--skip_bad", "true", "-o", "c", "--max-length=7") == everything
    for off in ("--skip-bad=false", "--no-skip-bad"):
        assert read(off, "--data", "-o", "c") == Options(output="c")


def test_values_and_keys_stay_as_they_are():
    assert read("--output", "data") == Options(output="data")
    options = read("--data", "my-file", "--template.enable-it", "false", "--output", "a-b")
    assert options == Options(data=("my-file",), output="a-b", template={"enable-it": False})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"output: [", "is not valid YAML: while parsing a flow node"),
        (b"output: *secret", "is not valid YAML: line 1, column 9"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        (b"- output", "holds no options; it must hold one `name: value` per line"),
        (None, "cannot be read (No such file or directory); name a YAML file of options"),
    ],
)
@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_a_bad_file_of_options_is_named(tmp_path, content, message, form, exits):
    file = tmp_path / "options.yaml"
    if content is not None:
        file.write_bytes(content)
    with exits(f"test: error: config {file} {message}", 2):
        read("-o", "c", *form.format(file).split())


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (ValueError("a is 1; make it 2"), 1, "error: a is 1; make it 2"),
        (
            FileNotFoundError(2, "No such file", "x"),
            1,
            "error: x: No such file or directory; check the path, or name another",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_faults_become_one_sentence(raised, status, message, capsys):
    def program(_):
        raise raised

    with pytest.raises(SystemExit) as caught:
        run(program, Options, "test", [])
    assert caught.value.code == status
    assert capsys.readouterr().err == f"test: {message}\n"


def test_verbs_are_listed(capsys):
    for words in ([], ["--help"], ["-h"]):
        cli.main(words)
        output = capsys.readouterr().out
        assert all(f"  {verb} " in output for verb in cli.VERBS)


def test_verbs_of_several_words_are_listed_too(capsys):
    for words in (["train"], ["train", "--help"]):
        cli.main(words)
        output = capsys.readouterr().out
        assert "usage: slipstream train VERB [options]" in output
        assert re.findall("^  train ([a-z0-9]+) ", output, re.MULTILINE) == ["eagle3", "dflash", "eagle", "mtp"]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_each_verb_is_its_program(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*verb.split(), "--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert f"slipstream {verb}" in output
    assert {"push": "--repo", "kernels": "--rows", "deploy": "--replicas"}.get(verb, "--output") in output
