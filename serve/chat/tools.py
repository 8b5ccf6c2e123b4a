"""Tools of a request and the tools that an answer may or must call, as in OpenAI's API."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from slipstream.models.chat.messages import FieldError
from slipstream.models.chat.quotes import quote, shorten

Fields = dict[str, Any]
MOST_TOOLS = 128  # as OpenAI
MOST_CHARS = 64 * 2**10  # of a tool as JSON; a grammar has the same limit
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}
# Further fields of the Responses API's functions, with their values that have no effect.
NEUTRAL_FIELDS: Fields = {
    "allowed_callers": ["direct"],
    "async": False,
    "defer_loading": False,
    "output_schema": None,
}
NO_PARAMETERS: Fields = {"type": "object", "properties": {}}


class ToolError(FieldError):
    """A wrong tool or choice of tools."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. `field`: the place of its parameters in the request."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema
    is_strict: bool
    field: str

    @property
    def definition(self) -> Fields:
        """The definition that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that the prompt names, and how the answer uses them. `allowed`: the names that the answer may call;
    `is_parallel`: it may contain several calls."""

    tools: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    allowed: frozenset[str] = frozenset()
    is_parallel: bool = True

    @property
    def callable_tools(self) -> list[Tool]:
        return [tool for tool in self.tools if tool.name in self.allowed]

    @property
    def is_enforced(self) -> bool:
        """Whether a grammar enforces the calls."""
        if self.mode == "none":
            return False
        has_strict = any(tool.is_strict for tool in self.callable_tools)
        return self.mode == "required" or has_strict or not self.is_parallel or len(self.allowed) < len(self.tools)


def read_choice(
    tools: Any, choice: Any, is_parallel: bool | None, *, is_flat: bool = False, ignore_unknown: bool = False
) -> ToolChoice:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls` of a request. `is_flat`: in the form of the Responses API,
    in which a function's fields stand beside its type. Raises ToolError."""
    functions = read_tools(tools, is_flat=is_flat, ignore_unknown=ignore_unknown)
    mode, names = read_mode(choice, functions, is_flat=is_flat, ignore_unknown=ignore_unknown)
    if mode == "none":
        return ToolChoice()  # hides the tools from the model, which would otherwise write calls into the content
    return ToolChoice(tuple(functions), mode, names, is_parallel is not False)


def read_tools(value: Any, *, is_flat: bool = False, ignore_unknown: bool = False) -> list[Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ToolError("tools", "must be a list of functions")
    if len(value) > MOST_TOOLS:
        raise ToolError("tools", f"has {len(value)} entries; the limit is {MOST_TOOLS}")
    tools = list[Tool]()
    for index, entry in enumerate(value):
        function, place = read_function(entry, f"tools.{index}", is_flat=is_flat, ignore_unknown=ignore_unknown)
        tools.append(read_tool(function, place))
        if tools[-1].name in {tool.name for tool in tools[:-1]}:
            raise ToolError(f"{place}.name", f"is {tools[-1].name!r} again; give each tool a name of its own")
    return tools


def read_function(value: Any, path: str, *, is_flat: bool, ignore_unknown: bool) -> tuple[Fields, str]:
    """Returns the fields of a function that are not null, and its place in the request."""
    form = '{"type": "function", "name": ...}' if is_flat else '{"type": "function", "function": {"name": ...}}'
    if not isinstance(value, Mapping):
        raise ToolError(path, f"must be an object: {form}")
    check_kind(value, path)
    function = value.get("function")
    place = f"{path}.function"
    if is_flat:
        function = {name: entry for name, entry in value.items() if name != "type"}
        place = path
    else:
        check_keys(value, {"type", "function"}, path, ignore_unknown)
    if not isinstance(function, Mapping):
        raise ToolError(place, "must be an object with name, description and parameters")
    neutral = NEUTRAL_FIELDS if is_flat else {}
    check_keys(function, FUNCTION_FIELDS | neutral.keys(), place, ignore_unknown)
    for name in function.keys() & neutral.keys():
        if function[name] not in (None, neutral[name]):
            raise ToolError(f"{place}.{name}", "is not supported by this server; leave it out")
    fields = {name: function[name] for name in FUNCTION_FIELDS if function.get(name) is not None}
    return fields, place


def check_kind(value: Mapping[str, Any], path: str) -> None:
    if value.get("type", "function") != "function":
        raise ToolError(f"{path}.type", f"is {quote(value['type'])}; this server has functions alone: send function")


def check_keys(value: Mapping[str, Any], fields: Set[str], path: str, ignore_unknown: bool) -> None:
    unknown = sorted(value.keys() - fields)
    if unknown and not ignore_unknown:
        raise ToolError(f"{path}.{shorten(unknown[0])}", "is an unknown field; leave it out")


def read_tool(function: Mapping[str, Any], place: str) -> Tool:
    name = function.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        fault = f"is {quote(name)}; it must be 1 to 64 letters, digits, _ and -"
        raise ToolError(f"{place}.name", fault)
    for field, kind, type_name in (
        ("description", str, "a string"),
        ("parameters", Mapping, "an object, a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if field in function and not isinstance(function[field], kind):
            raise ToolError(f"{place}.{field}", f"must be {type_name}")
    parameters = dict(function.get("parameters") or NO_PARAMETERS)
    if parameters.setdefault("type", "object") != "object":
        fault = f"is {quote(parameters['type'])}; parameters are members of an object: send object"
        raise ToolError(f"{place}.parameters.type", fault)
    size = len(json.dumps(function, ensure_ascii=False))
    if size > MOST_CHARS:
        raise ToolError(place, f"has {size} characters as JSON; the limit is {MOST_CHARS}")
    return Tool(name, function.get("description", ""), parameters, function.get("strict", False), f"{place}.parameters")


def read_mode(
    choice: Any, tools: Sequence[Tool], *, is_flat: bool, ignore_unknown: bool
) -> tuple[Literal["none", "auto", "required"], frozenset[str]]:
    """Returns the mode of a choice and the names of the tools that the answer may call."""
    names = frozenset(tool.name for tool in tools)
    if choice is None or choice == "none":
        return ("auto" if choice is None and tools else "none"), names
    if choice in ("auto", "required"):
        if not tools and choice == "required":
            raise ToolError("tool_choice", "is 'required', and tools are missing; send some")
        return choice if tools else "none", names
    read_name = partial(named, names=names, is_flat=is_flat, ignore_unknown=ignore_unknown)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return "required", frozenset([read_name(choice, "tool_choice")])
    if kind == "allowed_tools":
        allowed, place = (choice, "tool_choice") if is_flat else (choice.get(kind), f"tool_choice.{kind}")
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        entries = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(entries, list) or not entries:
            raise ToolError(place, "must hold mode, auto or required, and tools, a list of some")
        check_keys(choice, {"type", "mode", "tools"} if is_flat else {"type", kind}, "tool_choice", ignore_unknown)
        check_keys(allowed, {"type", "mode", "tools"} if is_flat else {"mode", "tools"}, place, ignore_unknown)
        return mode, frozenset(read_name(entry, f"{place}.tools.{index}") for index, entry in enumerate(entries))
    form = '"name": ...' if is_flat else '"function": {"name": ...}'
    remedy = f'none, auto, required, {{"type": "function", {form}}} or {{"type": "allowed_tools", ...}}'
    raise ToolError("tool_choice", f"is {quote(choice)}; it must be {remedy}")


def named(value: Any, field: str, names: frozenset[str], *, is_flat: bool, ignore_unknown: bool) -> str:
    function, place = (value, field) if is_flat else (None, f"{field}.function")
    if isinstance(value, Mapping):
        check_kind(value, field)
        if not is_flat:
            check_keys(value, {"type", "function"}, field, ignore_unknown)
            function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise ToolError(f"{place}.name", f"is {quote(name)}; it must be the name of one of the tools")
    assert isinstance(function, Mapping)
    check_keys(function, {"type", "name"} if is_flat else {"name"}, place, ignore_unknown)
    return name


def read_calls(value: Any, field: str, *, ignore_unknown: bool = False) -> list[Fields]:
    """Reads the calls of an assistant's earlier turn for a chat template. Raises ToolError."""
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise ToolError(field, f"must be a list of at most {MOST_TOOLS} calls")
    return [read_call(call, f"{field}.{index}", ignore_unknown) for index, call in enumerate(value)]


def read_call(value: Any, field: str, ignore_unknown: bool) -> Fields:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type", "function") != "function":
        raise ToolError(field, 'must be an object: {"id": ..., "type": "function", "function": {...}}')
    if not isinstance(value.get("id", ""), str):
        raise ToolError(f"{field}.id", "must be a string")
    check_keys(value, {"id", "type", "function", "index"}, field, ignore_unknown)  # joined streams leave an index
    check_keys(function, {"name", "arguments"}, f"{field}.function", ignore_unknown)
    call = {"type": "function", "function": read_called(function, f"{field}.function")}
    return {"id": value["id"], **call} if "id" in value else call


def read_called(function: Mapping[str, Any], field: str) -> dict[str, str]:
    """Reads the name and the arguments, as JSON text, of a call. Raises ToolError."""
    name = function.get("name")
    arguments = function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ToolError(f"{field}.name", "is missing; it must be a string")
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ToolError(f"{field}.arguments", "must be the JSON text of an object")
    text = arguments if isinstance(arguments, str) and arguments else json.dumps(parsed, ensure_ascii=False)
    return {"name": name, "arguments": text}
