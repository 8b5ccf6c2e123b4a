"""The `slipstream` command: its verbs, and how they refuse wrong options before they import anything large."""

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from slipstream import cli
from slipstream.config import build_parser, option_names
from slipstream.serve.cli import options_class
from slipstream.tests.sources import ROOT
from slipstream.tests.tables import each_case, table_of

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "matplotlib")
# Verb -> options with which it would run, an option with a wrong value, and a line that names an input that is missing.
LINES = table_of(__file__, "lines")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"^    (?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:slipstream ((?:train )?[a-z0-9-]+)|(serve)) (.*)", re.MULTILINE
)
SCRIPT = """
import contextlib, functools, io, runpy, sys
from docstring_parser.attrdoc import AttributeDocstrings
from slipstream import cli
read = AttributeDocstrings.get_attr_docs  # reads and parses a file
descriptions = functools.cache(lambda component: read(AttributeDocstrings(), component))
AttributeDocstrings.get_attr_docs = lambda _, component: descriptions(component)
for line in {lines}:
    sys.argv = line.split()
    said = io.StringIO()
    status = None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            if sys.argv[0].endswith(".py"):
                runpy.run_path("{root}/" + sys.argv[0], run_name="__main__")
            else:
                cli.main(sys.argv)
        except SystemExit as ended:
            status = ended.code
    print(status, said.getvalue().replace("\\n", " "))
    loaded = [name for name in {heavy} if name in sys.modules]
    assert not loaded, (line, loaded)
"""
REQUIRED = [(verb, name) for verb in LINES for name in getattr(cli.load(cli.VERBS[verb].options), "REQUIRED", ())]
TRAINING = [  # programs of `accelerate launch`, which runs the file itself
    (f"train/{name}.py {words}", status, words_of_reply)
    for name in ("eagle", "eagle3", "dflash", "mtp")
    for words, status, words_of_reply in (
        ("--help", 0, f"usage: train/{name}.py"),
        ("--optim.lr=x", 2, "optim.lr is 'x'; give a number"),
        ("--target=/no/target --output=o --data.path=here", 1, "/no/target does not exist; name a folder or a hub id"),
    )
]
INTERRUPTED = """
import runpy, signal, sys
from slipstream import cli
class Library:  # makes something else of an interrupt, as numpy does
    def find_spec(self, name, *_):
        if name != "torch":
            return
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("read the manual") from None
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Library())
del sys.argv[0]
if sys.argv[0] in cli.VERBS:
    cli.load(cli.VERBS[sys.argv[0]].program, f"slipstream {sys.argv[0]}")
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
WRONG = [(f"{verb} {line}", option) for verb, (line, value, _) in LINES.items() for option in ("--outptu=x", value)]
Reply = Callable[[str], tuple[str, str]]


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def without(verb: str, name: str) -> str:
    """A verb's line that lacks a required option."""
    return " ".join((verb, *(word for word in LINES[verb][0].split() if not word.startswith(f"{flag_of(name)}="))))


@pytest.fixture(scope="module")
def reply(tmp_path_factory) -> Reply:
    """line -> exit status and words of the command. One process answers all lines, and imports nothing heavy."""
    folder = tmp_path_factory.mktemp("lines")
    (folder / "here").mkdir()
    lines = [line for line, _, _ in TRAINING] + [f"{verb} --help" for verb in LINES]
    lines += [f"{line} {option}" for line, option in WRONG] + [without(*option) for option in REQUIRED]
    lines += [f"{verb} {missing}" for verb, (_, _, missing) in LINES.items()]
    script = SCRIPT.format(lines=lines, heavy=HEAVY, root=ROOT)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    replies = [tuple(line.split(" ", 1)) for line in ended.stdout.splitlines()]
    return dict(zip(lines, replies, strict=True)).__getitem__


@pytest.mark.parametrize(("line", "status", "words"), TRAINING)
def test_a_training_program_answers_before_it_imports_torch(line, status, words, reply):
    assert reply(line)[0] == str(status)
    assert words in reply(line)[1]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (["prepare"], "slipstream prepare"),
        (["train/eagle.py", "--target=assets/tiny-target", "--output=o", "--data.path=."], "train/eagle.py"),
    ],
)
def test_ctrl_c_ends_a_program_that_is_being_imported(program, words):
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, *program], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (130, f"{words}: interrupted\n")


def test_every_verb_is_tried():
    assert LINES.keys() == cli.VERBS.keys()


@pytest.mark.parametrize("verb", LINES)
def test_help_imports_little(verb, reply):
    status, words = reply(f"{verb} --help")
    assert status == "0"
    assert f"usage: slipstream {verb}" in words


@pytest.mark.parametrize(("line", "option"), WRONG)
def test_unknown_options_and_wrong_values_are_refused_at_once(line, option, reply):
    status, words = reply(f"{line} {option}")
    name = option.removeprefix("--").partition("=")[0]
    assert status == "2"
    assert f"error: {name.replace('-', '_')} " in words or f"error: unrecognized arguments: --{name}" in words


@pytest.mark.parametrize(("verb", "name"), REQUIRED)
def test_required_options_are_marked_and_asked_for_at_once(verb, name, reply):
    status, words = reply(without(verb, name))
    assert status == "2"
    assert f"error: {name} is empty; name " in words
    assert " Required. " in reply(f"{verb} --help")[1].partition(f" {flag_of(name)} ")[2].partition(" --")[0]


@pytest.mark.parametrize("verb", LINES)
def test_missing_inputs_are_refused_at_once(verb, reply):
    status, words = reply(f"{verb} {LINES[verb][2]}")
    option, _, value = LINES[verb][2].split()[0].removeprefix("--").partition("=")
    assert status == "1"
    assert f"error: {option.replace('-', '_')} {value} does not exist; name " in words


@each_case()
def test_an_unknown_verb_is_answered_with_the_nearest(word, remedy, exits):
    with exits(f"unknown verb {word!r}; {remedy}", 2):
        cli.main([word])


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict[str, set[str]]:
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
def test_commands_of_pages_have_options_that_exist(page, options):
    for verb, server, words in COMMAND.findall(page.read_text().replace("\\\n", " ")):
        names = options[verb or server] | {"config", "print_config", "help", "fast"}
        for flag in re.findall(r"(?<=--)[a-z][\w.-]*", words.partition("#")[0]):
            name = flag.replace("-", "_").removeprefix("no_")
            group = name.rpartition(".")[0]  # of options by name, such as template.enable_thinking
            assert name in names or (group in names and f"{group}." not in " ".join(names)), (verb or server, flag)
