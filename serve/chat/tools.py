"""Tools of a request and which of them an answer may or must call, as OpenAI's API names them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MOST_TOOLS = 128  # as OpenAI
MOST_CHARS = 64 * 2**10  # of one tool, as JSON: as of a grammar
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class ToolError(ValueError):
    """`field` is the path of the fault, such as tools.0.function.name."""

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(f"{field} {fault}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. `index`: its place in `tools`."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema
    is_strict: bool
    index: int

    @property
    def definition(self) -> dict[str, Any]:
        """For chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def field(self) -> str:
        return f"tools.{self.index}.function.parameters"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that the prompt names, and what the answer does with them. `allowed`: the names that it may call;
    `is_parallel`: it may call more than one at once."""

    tools: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    allowed: frozenset[str] = frozenset()
    is_parallel: bool = True

    @property
    def callable_tools(self) -> list[Tool]:
        return [tool for tool in self.tools if tool.name in self.allowed]

    @property
    def is_enforced(self) -> bool:
        """A grammar decides about the calls."""
        if self.mode == "none":
            return False
        has_strict = any(tool.is_strict for tool in self.callable_tools)
        return self.mode == "required" or has_strict or not self.is_parallel or len(self.allowed) < len(self.tools)


def read_choice(tools: Any, choice: Any, is_parallel: bool | None, *, ignore_unknown: bool = False) -> ToolChoice:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a request. Raises ToolError."""
    found = read_tools(tools, ignore_unknown)
    mode, names = read_mode(choice, found)
    if mode == "none":
        return ToolChoice()  # the model does not hear of them, so that it writes no call that would be content
    return ToolChoice(tuple(found), mode, names, is_parallel is not False)


def read_tools(value: Any, ignore_unknown: bool) -> list[Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ToolError("tools", "must be a list of functions")
    if len(value) > MOST_TOOLS:
        raise ToolError("tools", f"has {len(value)} entries; the limit is {MOST_TOOLS}")
    tools = [read_tool(tool, index, ignore_unknown) for index, tool in enumerate(value)]
    for index, tool in enumerate(tools):
        if tool.name in {other.name for other in tools[:index]}:
            raise ToolError(f"tools.{index}.function.name", f"is {tool.name!r} again; give each tool a name of its own")
    return tools


def read_tool(value: Any, index: int, ignore_unknown: bool) -> Tool:
    where = f"tools.{index}"
    if not isinstance(value, Mapping):
        raise ToolError(where, 'must be an object: {"type": "function", "function": {"name": ...}}')
    if value.get("type", "function") != "function":
        raise ToolError(f"{where}.type", f"is {value['type']!r}; this server has functions alone: send function")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise ToolError(f"{where}.function", "must be an object with name, description and parameters")
    unknown = sorted(function.keys() - FUNCTION_FIELDS)
    if unknown and not ignore_unknown:
        raise ToolError(f"{where}.function.{unknown[0]}", "is an unknown field; leave it out")
    given = {name: entry for name, entry in function.items() if entry is not None}
    name = given.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        fault = f"is {name!r}; it must be 1 to 64 letters, digits, _ and -"
        raise ToolError(f"{where}.function.name", fault)
    for field, kind, called in (
        ("description", str, "a string"),
        ("parameters", Mapping, "an object, a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if field in given and not isinstance(given[field], kind):
            raise ToolError(f"{where}.function.{field}", f"must be {called}")
    parameters = dict(given.get("parameters") or NO_PARAMETERS)
    if parameters.setdefault("type", "object") != "object":
        fault = f"is {parameters['type']!r}; parameters are members of an object: send object"
        raise ToolError(f"{where}.function.parameters.type", fault)
    size = len(json.dumps(given, ensure_ascii=False))
    if size > MOST_CHARS:
        raise ToolError(f"{where}.function", f"has {size} characters as JSON; the limit is {MOST_CHARS}")
    return Tool(name, given.get("description", ""), parameters, given.get("strict", False), index)


def read_mode(choice: Any, tools: Sequence[Tool]) -> tuple[Literal["none", "auto", "required"], frozenset[str]]:
    """What the answer does, and the names of the tools that it may call."""
    names = frozenset(tool.name for tool in tools)
    if choice is None or choice == "none":
        return ("auto" if choice is None and tools else "none"), names
    if choice in ("auto", "required"):
        if not tools and choice == "required":
            raise ToolError("tool_choice", "is 'required', and tools are missing; send some")
        return choice if tools else "none", names
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return "required", frozenset([named(choice, "tool_choice", names)])
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        entries = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(entries, list) or not entries:
            raise ToolError("tool_choice.allowed_tools", "must hold mode, auto or required, and tools, a list of some")
        places = ((entry, f"tool_choice.allowed_tools.tools.{index}") for index, entry in enumerate(entries))
        return mode, frozenset(named(entry, place, names) for entry, place in places)
    remedy = 'none, auto, required, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
    raise ToolError("tool_choice", f"is {choice!r}; it must be {remedy}")


def named(value: Any, field: str, names: frozenset[str]) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        fault = f"is {name!r}; it must be the name of one of the tools"
        raise ToolError(f"{field}.function.name", fault)
    return name


def read_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """The calls of an assistant's earlier turn, for a chat template. Raises ToolError."""
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise ToolError(field, f"must be a list of at most {MOST_TOOLS} calls")
    return [read_call(call, f"{field}.{index}") for index, call in enumerate(value)]


def read_call(value: Any, field: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type", "function") != "function":
        raise ToolError(field, 'must be an object: {"id": ..., "type": "function", "function": {...}}')
    if not isinstance(value.get("id", ""), str):
        raise ToolError(f"{field}.id", "must be a string")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ToolError(f"{field}.function.name", "is missing; it must be a string")
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ToolError(f"{field}.function.arguments", "must be the JSON text of an object")
    text = arguments if isinstance(arguments, str) and arguments else json.dumps(parsed, ensure_ascii=False)
    call = {"type": "function", "function": {"name": name, "arguments": text}}
    return {"id": value["id"], **call} if "id" in value else call
