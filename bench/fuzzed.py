"""Random bodies of requests for tests and for soaks of a real server, grown from the schemas of the API.

Each field of a body's class gets values of its type, ends of its range among them, so a new field is covered as it is
written. Fields whose types do not say what is right have examples in fuzzed.yaml.
"""

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slipstream.models.files.tables import read_tables
from slipstream.serve.http.responses_body import ResponsesBody
from slipstream.serve.http.schemas import ChatBody, CompletionBody

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
Body = ChatBody | CompletionBody | ResponsesBody
BODIES: dict[str, type[Body]] = {
    CHAT: ChatBody,
    COMPLETIONS: CompletionBody,
    RESPONSES: ResponsesBody,
}
MODEL = "byte-model"
TABLES = read_tables(Path(__file__).with_suffix(".yaml"))
EXAMPLES: dict[str, list[Any]] = TABLES["examples"]  # values that are right in some body
EXAMPLES_IN_RESPONSES = EXAMPLES | TABLES["in_responses"]
NEEDS: dict[str, dict[str, Any]] = {  # fields that others are refused without
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
}
NEEDS_IN_RESPONSES = NEEDS | {"top_logprobs": {"include": ["message.output_text.logprobs"]}}
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**64, -(2**70), 1.5, 1e308, "", "x", "é\ud83d", "\u0000", "7", "(" * 60, "[" * 300,
    [], [[]], [{}], [None], ["x"] * 20, [1, "x"], [-1], [2**40],
    {}, {"a": {}}, {"type": "x"}, {"type": None}, {"": ""}, {"5": "x"},
]  # fmt: skip
TEXTS = ["x", "", "hello", "the ", "é漢😀", "\u0000", "\n", " " * 70, "<|im_end|>", '{"a": 1}', "a" * 300]
TOKENS = [0, 1, 2, 5, 7, 30, 101]
INTEGERS = [-1, 20, 21, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**70]
NUMBERS = [0, 1, 0.5, 2, -2, 0.7, 1e-4, 1e-300, 5e-324, 0.999999999, 1.2, 20, 100, -100, 1e4, 1e38, 1e39, -1e308]


class Generator:
    """Draws bodies from `rng`, for a target whose token ids are below `vocab_size`."""

    def __init__(self, rng: random.Random, vocab_size: int = 260) -> None:
        self.rng = rng
        self.integers = [*INTEGERS, *3 * TOKENS, vocab_size - 1, vocab_size]

    def body(self, path: str, *names: str) -> dict[str, Any]:
        """Fields that may each be right, `names` among them."""
        kind = BODIES[path]
        rng = self.rng
        more = rng.sample(list(kind.model_fields), rng.randrange(8))
        fields = {name: self.field(kind, name) for name in dict.fromkeys((kind.prompt_field, *names, *more))}
        if rng.random() < 0.2:
            name, allowed = rng.choice(list(kind.neutral.items()))
            fields.setdefault(name, deepcopy(rng.choice(ODD if allowed is None else [None, *allowed])))
        needs = NEEDS_IN_RESPONSES if path == RESPONSES else NEEDS
        for name in list(fields):
            fields |= deepcopy(needs.get(name, {})) if rng.random() < 0.8 else {}
        fields.setdefault(kind.length_field, 3)
        return fields

    def field(self, kind: type[Body], name: str) -> Any:
        """A value of a field: an example, where there are some, or any of its type."""
        examples = (EXAMPLES_IN_RESPONSES if issubclass(kind, ResponsesBody) else EXAMPLES).get(name, [])
        if examples and self.rng.random() < (0.95 if name == kind.prompt_field else 0.8):
            return deepcopy(self.rng.choice(examples))
        field = kind.model_fields[name]
        return self.value(field.annotation, field.metadata)

    def value(self, kind: Any, metadata: Sequence[Any] = ()) -> Any:
        """A value of a type, as JSON has it. Where `metadata` of pydantic bounds it, mostly within its bounds."""
        rng = self.rng
        origin = get_origin(kind)
        parts = get_args(kind)
        if origin is Annotated:
            return self.value(parts[0], [*parts[1:], *metadata])
        if origin in (Union, UnionType):
            part = rng.choice([part for part in parts if part is not NoneType])
            return None if NoneType in parts and rng.random() < 0.1 else self.value(part, metadata)
        if origin is Literal:
            return rng.choice(parts)
        if origin is list:
            return [self.value(parts[0]) for _ in range(self.length(metadata))]
        if origin is dict:
            values = {self.value(parts[0]): self.value(parts[1]) for _ in range(self.length(metadata))}
            return {str(key): value for key, value in values.items()}
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names = [name for name in kind.model_fields if rng.random() < 0.7]
            fields = {name: kind.model_fields[name] for name in names}
            return {name: self.value(field.annotation, field.metadata) for name, field in fields.items()}
        if kind is bool:
            return rng.random() < 0.5
        if kind is int:
            return self.integer(metadata)
        return deepcopy(rng.choice(NUMBERS if kind is float else TEXTS if kind is str else ODD))

    def length(self, metadata: Sequence[Any]) -> int:
        """Length of a list: mostly short, now and then the largest that is allowed, or one more."""
        limit = bounds_of(metadata).get("max_length", 20)
        return self.rng.choice([0, 1, 1, 1, 2, 2, 3, 3, limit, limit + 1])

    def integer(self, metadata: Sequence[Any]) -> int:
        """Mostly within the bounds, often at one of them."""
        bounds = bounds_of(metadata)
        ends = [bounds[name] for name in ("ge", "le") if name in bounds]
        ends += [bounds[name] + step for name, step in (("gt", 1), ("lt", -1)) if name in bounds]
        if ends and self.rng.random() < 0.1:
            return self.rng.choice([min(ends) - 1, max(ends) + 1])
        low = max((bounds[name] for name in ("ge", "gt") if name in bounds), default=-(2**80))
        high = min((bounds[name] for name in ("le", "lt") if name in bounds), default=2**80)
        return self.rng.choice([*ends, *(value for value in self.integers if low <= value <= high)])


def bounds_of(metadata: Sequence[Any]) -> dict[str, int]:
    """Bounds that pydantic knows, by their names in its Field."""
    bounds = dict[str, int]()
    for part in metadata:
        if isinstance(part, FieldInfo):
            bounds |= bounds_of(part.metadata)
        for name in ("ge", "gt", "le", "lt", "max_length"):
            if isinstance(bound := getattr(part, name, None), int):
                bounds[name] = bound
    return bounds


def body(rng: random.Random, path: str) -> dict[str, Any]:
    """A body that is often a little wrong."""
    fields: dict[str, Any] = json.loads(json.dumps(Generator(rng).body(path)))
    for _ in range(rng.choice((0, 0, 1, 2))):
        mutate(fields, rng)
    return fields


def mutate(fields: dict[str, Any], rng: random.Random) -> None:
    """Replaces, drops or adds something at a random place."""
    place: Any = fields
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys or rng.random() < 0.1:
            break
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and rng.random() < 0.7:
            place = place[key]
            continue
        if rng.random() < 0.15:
            del place[key]
        else:
            place[key] = deepcopy(rng.choice(ODD))
        return
    if isinstance(place, dict):
        place[rng.choice(["type", "name", "unknown", "function", "strict", "content", "schema"])] = deepcopy(
            rng.choice(ODD)
        )
    else:
        place.append(deepcopy(rng.choice(ODD)))
