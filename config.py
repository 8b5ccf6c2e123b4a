"""Program options: a dataclass, overridden by YAML files, overridden by dotted flags (jsonargparse).

Flags may be written with dashes (--max-length), switches without a value (--skip-bad, --no-exact) and lists as
several words (--merge a b) or several flags (--endpoint a --endpoint b), of numbers with commas (--rows 1,8), too.

A dataclass of options may also have these attributes, without annotations since they are no options:

    REQUIRED = {"output": "the folder to write"}    options that may not be empty, and what to name
    ALIASES = {"--fast": "--no-exact"}              words that stand for others
    FIRST = "run"                                   the option that a first word without a flag gives, or a tuple:
                                                    the options that the first words give
    HIDDEN = frozenset({"width"})                   fields that programs set and users do not
    choose_defaults(values) -> defaults             (class method) by dotted names, in view of all values: they hold
                                                    where neither a file nor a flag gives the option
"""

import argparse
import errno
import json
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings
from yaml.parser import ParserError
from yaml.scanner import ScannerError

set_parsing_settings(docstring_parse_attribute_docstrings=True)

ConfigT = TypeVar("ConfigT")

SWITCHES = (bool, bool | None)  # types of options that need no value
MAPPINGS = ("engine", "drafter")  # ends of names of options whose keys are options, too
LIST = "a list such as [1, 2]"
WORDS = {  # for types in messages; null is omitted
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": LIST,
    "tuple": LIST,
}


ROOM = "make room and run the same command again"
REMEDIES = {errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EFBIG: ROOM}  # for errors of files


class HelpFormatter(DefaultHelpFormatter):
    """Spells options as the documentation does: --max-length, and --exact/--no-exact for a switch."""

    required: Mapping[str, str] = {}
    aliases: Mapping[str, str] = {}

    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action)
        if action.dest in self.required:
            text = f"Required. {text}"
        if action.default == "":  # nothing is no value
            text = text.replace(", default: %(default)s", "")
        listed = get_origin(getattr(action, "_typehint", None)) is Literal  # the metavar has its values
        return text.replace("type: %(type)s, ", "") if listed else text

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._HelpAction):
            return ", ".join(action.option_strings)
        first = super()._format_action_invocation(action).split(", --")[0]  # a list has another one, to append to it
        flag, _, value = first.partition(" ")
        name = flag.replace("_", "-")
        if value in ("{true,false}", "{true,false,null}"):
            words = {name: name, f"--no-{name.removeprefix('--')}": name}
            return "/".join((*words, *(alias for alias, word in self.aliases.items() if word in words)))
        return f"{name} {value}".strip()


def build_parser(config_class: type, *, prog: str, description: str) -> ArgumentParser:
    """Parser with one dotted flag per field of `config_class` (nested dataclasses included), `--config` and
    `--print-config`. Help marks the options that the class lists in REQUIRED, and shows its ALIASES."""
    attributes = {"required": getattr(config_class, "REQUIRED", {}), "aliases": getattr(config_class, "ALIASES", {})}
    parser = ArgumentParser(
        prog=prog,
        usage="%(prog)s [options]",
        description=description,
        formatter_class=type("Formatter", (HelpFormatter,), attributes),
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with these options; may be given more than once")
    parser.add_class_arguments(config_class, as_group=False, skip=set(getattr(config_class, "HIDDEN", ())))
    return parser


def option_names(parser: ArgumentParser) -> list[str]:
    """Every option of `parser` in dotted form, sorted; the frozen-options tests compare them."""
    skipped = {"help", "config", "print_config", "print_shtab"}
    names = {action.dest for action in parser._actions if action.option_strings}
    return sorted(name for name in names if name.split(".")[0] not in skipped and not name.endswith(".help"))


def parse(config_class: type[ConfigT], argv: Sequence[str] | None = None, *, prog: str, description: str) -> ConfigT:
    """Reads `argv` (default: the command line) into `config_class`.

    Exits with status 2 and one message on a bad value or an unknown key; the message then lists the valid keys.
    """
    parser = build_parser(config_class, prog=prog, description=description)
    words = list(sys.argv[1:] if argv is None else argv)
    first = getattr(config_class, "FIRST", ())
    for place, option in enumerate((first,) if isinstance(first, str) else first):
        if len(words) <= place or words[place].startswith("-"):
            break
        words[place] = f"--{option}={words[place]}"
    words = expand(config_class, files_first(words))
    choose_defaults: Any = getattr(config_class, "choose_defaults", None)
    if choose_defaults is not None:
        values = parse_or_exit(parser, [word for word in words if not word.startswith("--print")])
        parser.set_defaults(choose_defaults(values.as_dict()))
    return instantiate(parser, config_class, parse_or_exit(parser, words))


def run(
    program: Callable[[ConfigT], object], config_class: type[ConfigT], prog: str, argv: Sequence[str] | None = None
) -> None:
    """Reads the options by `read` and calls `program` with them."""
    raise_interrupts()
    config = read(config_class, argv, prog)
    with errors_reported(config, prog):
        program(config)


def read(config_class: type[ConfigT], argv: Sequence[str] | None, prog: str) -> ConfigT:
    """Parses `argv` (default: the command line) and checks the inputs if `config_class` has `check_inputs`; --help
    shows the docstring of `config_class`."""
    with errors_reported(None, prog):
        config = parse(config_class, argv, prog=prog, description=config_class.__doc__ or "")
    with errors_reported(config, prog):
        getattr(config, "check_inputs", lambda: None)()
    return config


def begin(config_class: type[Any], prog: str) -> None:
    """Checks the command line before the imports of a program, which take seconds and which Ctrl-C ends at once."""
    end_at_interrupts(prog)
    read(config_class, None, prog)


def end_at_interrupts(prog: str) -> None:
    """Has Ctrl-C end the process at once, until `raise_interrupts`: in libraries that are being imported an exception
    is lost, becomes another one (numpy) or aborts the process (torch)."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else it is ignored, or another program's
        signal.signal(signal.SIGINT, partial(_end, prog))


def _end(prog: str, *_: object) -> None:
    os.write(2, f"{prog}: interrupted\n".encode())
    os._exit(130)


def raise_interrupts() -> None:
    """Has Ctrl-C raise KeyboardInterrupt again after `end_at_interrupts`."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, partial) and handler.func == _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def errors_reported(config: object, prog: str) -> Iterator[None]:
    """Turns a ValueError or OSError into one sentence on stderr and exit status 1, an interrupt into status 130. Where
    the reader of stdout has enough, as head may, the program ends silently with status 141, as other commands do."""
    try:
        yield
        if sys.stdout is not None:  # closed before the program began
            sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and has_no_reader(sys.stdout):
            raise SystemExit(141) from None
        message = file_fault(config, error) if isinstance(error, OSError) else error
        print(f"{prog}: error: {message}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt as interrupt:
        print("; ".join((f"{prog}: interrupted", *interrupt.args)), file=sys.stderr)
        raise SystemExit(130) from None


def has_no_reader(output: TextIO | None) -> bool:
    """Whether `output` is a pipe that nobody reads any more; the rest of it is then dropped."""
    if output is None:
        return False
    pipe = select.poll()
    pipe.register(output.fileno(), 0)  # errors alone
    if not pipe.poll(0):
        return False
    drop(output)
    return True


def drop(output: TextIO) -> None:
    """Lets what is and will be written to `output` go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())


def is_full(output: TextIO | None) -> bool:
    """Whether `output` takes not even a line feed; the rest of it is then dropped."""
    if output is None:
        return False
    try:
        print(file=output, flush=True)
    except OSError:
        drop(output)
        return True
    return False


def file_fault(config: object, error: OSError) -> str:
    """The system's error as the option that names the file, the file and a remedy, as far as they can be told."""
    if error.errno in REMEDIES and error.filename is None and is_full(sys.stdout):
        return f"stdout cannot be written ({error.strerror}); {REMEDIES[error.errno]}"
    if error.errno is None or error.filename is None:
        return str(error)
    file = os.fsdecode(error.filename)
    fault = os.strerror(error.errno)
    remedy = REMEDIES.get(error.errno, "check the path, or name another")
    for option, path in paths_of(config):
        if concerns(path, Path(file).absolute()):
            return f"{option} {path} cannot be used ({fault}{'' if path == file else f': {file}'}); {remedy}"
    return f"{file}: {fault}; {remedy}"


def paths_of(config: object) -> list[tuple[str, str]]:
    """Options and the texts that they hold, any of which may be a path; those with a folder first."""
    values = flatten(asdict(config)) if is_dataclass(config) and not isinstance(config, type) else {}
    listed = [(name, value if isinstance(value, list | tuple) else [value]) for name, value in values.items()]
    texts = [(name, text) for name, items in listed for text in items if isinstance(text, str) and text]
    return sorted(texts, key=lambda option: os.sep not in option[1])


def concerns(text: str, file: Path) -> bool:
    """Whether `file` is the path `text`, in it, what a writer makes beside it first, or a folder that `text` names."""
    path = Path(text).absolute()
    staged = path.with_name(f".{path.name}.tmp")
    is_inside = not {path, staged}.isdisjoint((file, *file.parents))
    return is_inside or (os.sep in text and file in path.parents)


def parse_or_exit(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    try:
        for file in config_files(argv):  # these errors name the file; the parser's do not
            check_sections(parser, file, read_options(file))
        return parser.parse_args(argv)
    except Exception as error:  # jsonargparse and argparse raise several unrelated types; the process ends here
        message = sentence(str(error).strip())
        if any(words in message for words in ("unrecognized", "does not accept", "is not accepted")):
            message = f"{message}; {suggestion(parser, message)}"
        print(f"{parser.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2) from error


def suggestion(parser: ArgumentParser, message: str) -> str:
    """Names the options that the unknown ones in a message resemble, or else those of their group, or else all."""
    options = [name.replace("_", "-") for name in option_names(parser)]
    unknown = [word.replace("_", "-") for word in re.findall(r"[A-Za-z][\w.-]*", message)]
    names = list(dict.fromkeys(name for word in unknown for name in alike(word, options)))
    if names:
        return f"did you mean {' or '.join(f'--{name}' for name in names)}?"
    groups = {f"{name.split('.')[0]}." for name in unknown if "." in name}
    group = [name for name in options if name.startswith(tuple(groups))]
    return f"the options are {', '.join(f'--{name}' for name in group or options)}"


def alike(word: str, options: Iterable[str]) -> list[str]:
    """The option most like `word`, or none: of its group, if there is one, compared without the group's name."""
    section, dot, name = word.rpartition(".")
    group = [option.removeprefix(section + dot) for option in options if dot and option.startswith(section + dot)]
    if group:
        return [section + dot + option for option in nearest(name, group)]
    return nearest(word, options, cutoff=0.75)


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The name most like `word`, or none."""
    return get_close_matches(word, names, n=1, cutoff=cutoff)


def check_sections(parser: ArgumentParser, file: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError for an empty section."""
    for name in (name for name, value in values.items() if value is None):
        below = [option for option in option_names(parser) if option.startswith(f"{name}.")]
        if below:
            raise ValueError(f"{name} in {file} is empty; give {below[0]} or another option below it, or leave it out")


def sentence(message: str) -> str:
    """The parser's message on a value of the wrong type as field, value and remedy; other messages unchanged."""
    key = re.match(r'Parser key "([\w.]+)":', message)
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    expected = re.findall(r"<class '(\w+)'>|Literal\[([^]]*)\]|\b(tuple|list)\[", message.split("Given value type")[0])
    names = [(name or container, choices) for name, choices, container in expected if name != "NoneType"]
    words = [WORDS.get(name) or choices.replace("'", "").replace(", ", " or ") for name, choices in names]
    if key is None or value is None or not all(words):
        return message
    return f"{key[1]} is {value[1]!r}; give {' or '.join(dict.fromkeys(words))}"


def instantiate(parser: ArgumentParser, config_class: type[ConfigT], namespace: Namespace) -> ConfigT:
    try:
        for name, value in flatten(namespace.as_dict()).items():
            if value != value:
                raise ValueError(f"{name} is {value}; give a number")
        values = parser.instantiate(namespace).as_dict()
        values.pop("config", None)
        for name, remedy in getattr(config_class, "REQUIRED", {}).items():
            if not values[name]:
                raise ValueError(f"{name} is empty; name {remedy}")
        return config_class(**values)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def files_first(argv: Sequence[str]) -> list[str]:
    """`argv` with its --config words moved to the front: the parser lets later words win, and flags must."""
    words = list(argv)
    files: list[str] = []
    flags: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--config":
            files += [word, *words[:1]]
            del words[:1]
        else:
            (files if word.startswith("--config=") else flags).append(word)
    return files + flags


def config_files(argv: Sequence[str]) -> list[str]:
    following = [word for flag, word in zip(argv, argv[1:], strict=False) if flag == "--config"]
    return following + [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]


def read_options(file: str) -> dict[str, Any]:
    """The options in a --config file. Raises ValueError that names a file which is not a mapping."""
    try:
        options = yaml.safe_load(Path(file).read_text())
    except yaml.MarkedYAMLError as error:  # its text quotes the file, which may hold a key
        words = [error.context, error.problem] if isinstance(error, (ScannerError, ParserError)) else []
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        reason = ", ".join(filter(None, (*words, place)))
        raise ValueError(f"config {file} is not valid YAML: {reason}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config {file} is not valid YAML: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise ValueError(f"config {file} cannot be read ({error.strerror}); name a YAML file of options") from error
    if not isinstance(options, dict):
        raise ValueError(f"config {file} holds no options; it must hold one `name: value` per line")
    return options


def expand(config_class: type, argv: Sequence[str]) -> list[str]:
    """Rewrites `argv` into the form that the parser accepts: --name=value, underscores in names, lists as JSON."""
    types = option_types(config_class)
    aliases = getattr(config_class, "ALIASES", {})
    words = [aliases.get(word, word) for word in argv]
    lists = dict[str, list[Any]]()
    result: list[str] = []
    while words:
        name, value = _option(words.pop(0), types)
        option = name.removeprefix("--") if name.startswith("--") else ""  # a value may have an option's name
        if get_origin(types.get(option)) in (list, tuple):
            values = [value] if value is not None else _take_values(words)
            has_numbers = get_args(types[option])[0] in (int, float)
            lists.setdefault(option, []).extend(chain.from_iterable(_items(value, has_numbers) for value in values))
        elif types.get(option) in SWITCHES and value is None and (not words or words[0].startswith("-")):
            result.append(f"{name}=true")
        else:
            result.append(name if value is None else f"{name}={value}")
    return result + [f"--{option}={json.dumps(values)}" for option, values in lists.items()]


def option_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Type of every option by its dotted name."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(config_class).items():
        types |= (
            option_types(kind, f"{prefix}{name}.")
            if isinstance(kind, type) and is_dataclass(kind)
            else {prefix + name: kind}
        )
    return types


def option_defaults(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Default of every option that has one, by its dotted name; of an optional section (None) also those of the options
    below it."""
    types = get_type_hints(config_class)
    defaults = dict[str, Any]()
    for option in fields(config_class):
        name = prefix + option.name
        kind = types[option.name]
        for section in (kind, *get_args(kind)):
            if isinstance(section, type) and is_dataclass(section):
                defaults |= option_defaults(section, f"{name}.")
        value: Any = option.default if option.default_factory is MISSING else option.default_factory()
        if value is not MISSING:
            is_section = is_dataclass(value) and not isinstance(value, type)
            defaults |= flatten({name: asdict(value) if is_section else value})
    return defaults


def complete(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Flat `values` and, from `option_defaults`, the options that they lack, but not those below a section that they
    leave out."""
    present = {section for name in values for section in sections_of(name)}
    absent = (defaults.keys() | values.keys()) - present
    fill = {name: value for name, value in defaults.items() if name in absent and absent.isdisjoint(sections_of(name))}
    return fill | dict(values)


def sections_of(name: str) -> list[str]:
    """a.b.c -> a, a.b."""
    return list(accumulate(name.split(".")[:-1], "{}.{}".format))


def _option(word: str, types: dict[str, Any]) -> tuple[str, str | None]:
    """Name with underscores and the value after '=', if any. Other words pass unchanged, and so do keys that are no
    options of ours: names of folders, adapters, template variables and fields of requests."""
    if word == "-o":
        return "--output", None
    if not word.startswith("--"):
        return word, None
    name, equals, value = word[2:].partition("=")
    option = name.replace("-", "_")
    if types.get(option.removeprefix("no_")) in SWITCHES and option not in types and not equals:
        return f"--{option.removeprefix('no_')}", "false"
    if option not in types:
        mappings = (mapping for mapping in types if mapping.endswith(MAPPINGS))
        depth = next((mapping.count(".") + 2 for mapping in mappings if option.startswith(f"{mapping}.")), 1)
        parts = name.split(".", depth)
        option = ".".join([part.replace("-", "_") for part in parts[:depth]] + parts[depth:])
    return f"--{option}", value if equals else None


def _take_values(words: list[str]) -> list[str]:
    values = []
    while words and not words[0].startswith("-"):
        values.append(words.pop(0))
    return values


def _items(value: str, has_numbers: bool) -> list[Any]:
    """The items of one word of a flag: a list in brackets, or numbers between commas; else the word itself."""
    try:
        items = yaml.safe_load(value) if value.startswith("[") else None
    except yaml.YAMLError:  # such as a file [1].jsonl
        items = None
    if isinstance(items, list):
        return items
    return list(value.split(",")) if has_numbers else [value]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
