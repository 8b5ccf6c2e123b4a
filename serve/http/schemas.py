"""Request bodies of /v1/completions and /v1/chat/completions, checked field by field.

A field is either understood, or sent with a value that is known to have no effect, or refused by name. No field is
silently ignored.
"""

import json
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from slipstream.models.chat import messages as chat
from slipstream.models.chat.messages import TEXT_PARTS, Message, MessageError
from slipstream.models.chat.quotes import PLACE_CHARS, quote, shorten
from slipstream.models.files.tables import read_tables
from slipstream.serve.chat.tools import ToolError, read_calls
from slipstream.serve.http import limits
from slipstream.serve.http.limits import ApiError
from slipstream.serve.options import TRIAL_ROUNDS
from slipstream.serve.request import MOST_LOGPROBS, Grammar, Speculation

Values = dict[str, Any]  # of JSON
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI for /v1/completions; a chat answer may fill the context
MESSAGE_FIELDS = {"role", "content", "name", "refusal"}
FIELDS_OF_ROLE = {"assistant": {"tool_calls", "reasoning_content", "reasoning"}, "tool": {"tool_call_id"}}

# Fields that are not implemented, and their values without effect; None: any value.
Neutral = dict[str, Sequence[Any] | None]
UnderstoodFields = Callable[[Values, set[str], Neutral, str], Values]
NEUTRAL_BY_PLACE = read_tables(Path(__file__).with_name("neutral.yaml"))
NEUTRAL: Neutral = NEUTRAL_BY_PLACE["completions"]


def understood_fields(
    body: Values, understood: set[str], neutral: Neutral, path: str, *, ignore_unknown: bool
) -> Values:
    """Returns the understood fields of `body` that are not null. Raises ApiError naming an unsupported field and,
    unless these are ignored, an unknown field."""
    unknown = sorted(body.keys() - understood - neutral.keys())
    if unknown and not ignore_unknown:
        names = shorten(", ".join(path + shorten(name) for name in unknown), PLACE_CHARS)
        raise ApiError(400, f"unknown field: {names}", path + shorten(unknown[0]))
    for name in (body.keys() & neutral.keys()) - understood:
        allowed = neutral[name]
        if allowed is not None and body[name] is not None and not is_one_of(body[name], allowed):
            remedy = " or ".join(["leave it out", *(f"send {json.dumps(value)}" for value in allowed)])
            raise ApiError(400, f"{path}{name} is not supported by this server; {remedy}", path + name)
    return {name: value for name, value in body.items() if name in understood and value is not None}


def is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    """Whether a value is allowed. False differs from 0: `logprobs: 0` requests something, `logprobs: false` does
    not."""
    return any(value == other and (type(value) is bool) == (type(other) is bool) for other in allowed)


def ignores_unknown(info: ValidationInfo) -> bool:
    return bool(info.context and info.context["ignore_unknown"])


def read_messages(value: Any, info: ValidationInfo) -> list[Message]:
    """Reads messages for the chat template. Raises ApiError naming a wrong or unknown field."""
    if isinstance(value, list):
        check_length(value, limits.MAX_MESSAGES, "messages")
        check_parts((message.get("content") for message in value if isinstance(message, dict)), "messages")
        ignore = ignores_unknown(info)
        value = [known_message(message, f"messages.{index}", ignore) for index, message in enumerate(value)]
    try:
        return chat.read_messages(value)
    except MessageError as error:
        raise ApiError(400, str(error), error.field) from error


def check_parts(contents: Iterable[Any], field: str) -> None:
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > limits.MAX_PARTS:
        raise ApiError(400, f"{field} has {num_parts} content parts; the limit is {limits.MAX_PARTS}", field)


def known_message(message: Any, path: str, ignore_unknown: bool) -> Any:
    """Returns `message` without fields that have no effect. Reads the calls of an assistant's and checks the call id of
    a tool's. Raises ApiError for a field that this server does not know; `chat.read_messages` checks the rest."""
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    content = message.get("content")
    understood = MESSAGE_FIELDS | (FIELDS_OF_ROLE.get(role, set()) if isinstance(role, str) else set())
    understood_fields(message, understood, NEUTRAL_BY_PLACE["message"], f"{path}.", ignore_unknown=ignore_unknown)
    for index, part in enumerate(content if isinstance(content, list) else []):
        if isinstance(part, dict) and part.get("type") in TEXT_PARTS:
            place = f"{path}.content.{index}."
            neutral = NEUTRAL_BY_PLACE["part"]
            understood_fields(part, {"type", part["type"]}, neutral, place, ignore_unknown=ignore_unknown)
    message = {name: entry for name, entry in message.items() if name in understood}
    if not isinstance(message.get("tool_call_id"), str | None):
        raise ApiError(400, f"{path}.tool_call_id must be a string", f"{path}.tool_call_id")
    if message.get("tool_calls"):
        try:
            calls = message["tool_calls"]
            place = f"{path}.tool_calls"
            message["tool_calls"] = read_calls(calls, place, ignore_unknown=ignore_unknown)
        except ToolError as error:
            raise ApiError(400, str(error), error.field) from error
    return message


def read_prompts(value: Any) -> list[str | list[int]]:
    """Reads a string, a list of token ids, or a list of either."""
    is_one = not isinstance(value, list) or all(type(item) is int for item in value)
    prompts = [value] if is_one else value
    for index, prompt in enumerate(prompts):
        is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        if not is_tokens and not isinstance(prompt, str):
            path = "prompt" if is_one else f"prompt.{index}"
            raise ApiError(400, f"{path} must be a string or a list of token ids, and not empty", "prompt")
    return prompts


def read_top_k(value: int) -> int:
    return 0 if value == -1 else value  # both mean off


def read_strings(value: Any, *, field: str, limit: int) -> list[str]:
    strings = value if isinstance(value, list) else [value]
    check_length(strings, limit, field)
    if not all(isinstance(string, str) and string for string in strings):
        raise ApiError(400, f"{field} must be a string or a list of strings, none of them empty", field)
    longest = max(map(len, strings), default=0)
    if longest > limits.MAX_STRING_CHARS:
        message = f"{field} has a string of {longest} characters; the limit is {limits.MAX_STRING_CHARS}"
        raise ApiError(400, message, field)
    return strings


def read_bias(value: Any) -> dict[int, float]:
    """Reads OpenAI's logit biases by token id; ids are strings, since they are keys of JSON."""
    if not isinstance(value, dict):
        raise ApiError(400, "logit_bias must be an object from token ids to numbers", "logit_bias")
    check_length(value, limits.MAX_BIASES, "logit_bias")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ApiError(400, f"logit_bias has the key {quote(token)}; it must be a token id", "logit_bias")
        if type(bias) not in (int, float):
            raise ApiError(400, f"logit_bias of token {shorten(token)} must be a number", "logit_bias")
    return {int(token): bias for token, bias in value.items()}


def check_logprobs(value: int, info: ValidationInfo) -> int:
    if not 0 <= value <= MOST_LOGPROBS:
        message = f"{info.field_name} is {quote(value)}; it must be between 0 and {MOST_LOGPROBS}"
        raise ApiError(400, message, info.field_name)
    return value


def no_logprobs(value: Any) -> Any:
    """Reads false as null, since clients of the chat endpoint send it."""
    return None if value is False else value


NumLogprobs = Annotated[int, AfterValidator(check_logprobs)]
NumTokens = Annotated[int, Field(lt=2**31)]  # SamplingParams checks the rest


def check_length(items: Sized, limit: int, field: str) -> None:
    if len(items) > limit:
        raise ApiError(400, f"{field} has {len(items)} entries; the limit is {limit}", field)


class Options(BaseModel):
    """The fields of a body, or of an object at `place` in one. The server understands the fields of the class; null
    means left out."""

    model_config = ConfigDict(strict=True)
    neutral: ClassVar[Neutral] = {}
    place: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, options: Any, info: ValidationInfo) -> Any:
        if not isinstance(options, dict):
            raise ApiError(400, f"{cls.place} must be an object", cls.place)
        path = cls.place and f"{cls.place}."
        return understood_fields(
            options, set(cls.model_fields), cls.neutral, path, ignore_unknown=ignores_unknown(info)
        )


class Fields(Options):
    """The fields of a request."""

    model: str | None = None


class StreamOptions(Options):
    neutral = {"include_obfuscation": (False,)}
    place = "stream_options"

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's, with include_usage: the usage so far in every event


class SpeculationFields(Options):
    """See Speculation in serve/request.py."""

    place = "speculation"

    enabled: bool = True
    trace: bool = False


class SamplingBody(Fields):
    """Fields of all endpoints that answer. SamplingParams checks the ranges of sampling values."""

    prompt_field: ClassVar[str]

    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(lt=2**31), AfterValidator(read_top_k)] | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(read_bias)] = {}
    min_tokens: NumTokens = 0
    bad_words: Annotated[
        list[str], PlainValidator(partial(read_strings, field="bad_words", limit=limits.MAX_BAD_WORDS))
    ] = []
    # Grammars of the answer, as vLLM and SGLang name them; see `grammar_of`.
    structured_outputs: Values | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], PlainValidator(partial(read_strings, field="stop", limit=limits.MAX_STOP_STRINGS))] = []
    stop_token_ids: Annotated[list[int], Field(max_length=limits.MAX_STOP_IDS)] = []
    ignore_eos: bool = False
    # Requests share cached prompt prefixes only with requests of the same salt.
    cache_salt: str = ""
    speculation: SpeculationFields | None = None
    draft_adapter: str | None = None

    @property
    def asked_speculation(self) -> Speculation:
        fields = self.speculation
        return Speculation() if fields is None else Speculation(fields.enabled, fields.trace)

    @property
    def answer_logprobs(self) -> int | None:
        """Number of likeliest tokens to list for each token of the answer; None: no log-probabilities."""
        raise NotImplementedError

    def grammars_of_format(self, read_fields: UnderstoodFields) -> list[tuple[Grammar, str]]:
        """Returns the grammar that OpenAI's field of the answer's format asks for, and the path of the field."""
        raise NotImplementedError


class Body(SamplingBody):
    """Fields of the older two endpoints."""

    neutral = NEUTRAL
    length_field: ClassVar[str] = "max_tokens"

    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    response_format: Values | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES_PER_PROMPT)] = 1
    return_token_ids: bool = False  # vLLM's: `token_ids` beside the text of a choice
    # vLLM's: number of likeliest tokens to list for each token of the prompt.
    prompt_logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> "Body":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true; add that or leave it out", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs does not go with stream: true; leave one of them out"
            raise ApiError(400, message, "prompt_logprobs")
        return self

    @property
    def all_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens to list for each token of the prompt, for any field that needs them; None:
        none."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def grammars_of_format(self, read_fields: UnderstoodFields) -> list[tuple[Grammar, str]]:
        value = self.response_format or {"type": "text"}
        path = "response_format"
        if value.get("type") == "structural_tag":
            return [(structural_tag(value, path, read_fields), path)]
        if value.get("type") != "json_schema":
            return grammars_of_kind(value, path, "text, json_object, json_schema or structural_tag", read_fields)
        read_fields(value, {"type", "json_schema"}, {}, f"{path}.")
        path += ".json_schema"
        json_schema = value.get("json_schema")
        if not isinstance(json_schema, dict) or not isinstance(json_schema.get("schema"), dict | bool):
            raise ApiError(400, f"{path} must hold name and schema, an object", path)
        return grammar_of_schema(json_schema, path, set(), read_fields)


class ChatBody(Body):
    """POST /v1/chat/completions."""

    neutral = NEUTRAL | {"echo": (False,)}
    prompt_field = "messages"
    effort_field: ClassVar[str] = "reasoning_effort"

    messages: Annotated[list[Message], BeforeValidator(read_messages)]
    max_completion_tokens: NumTokens | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Values = {}
    tools: list[Any] = []
    tool_choice: str | Values | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    @property
    def answer_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def check_top_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true; add that or leave it out", "top_logprobs")
        return self

    @model_validator(mode="after")
    def merge_alias(self) -> "ChatBody":
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ApiError(400, "max_tokens and max_completion_tokens differ; send one of them", "max_tokens")
            self.max_tokens = self.max_completion_tokens
        return self


class CompletionBody(Body):
    """POST /v1/completions."""

    neutral = NEUTRAL | {"top_logprobs": (0,)}
    prompt_field = "prompt"

    prompt: Annotated[list[str | list[int]], PlainValidator(read_prompts)]
    logprobs: Annotated[NumLogprobs | None, BeforeValidator(no_logprobs)] = None
    echo: bool = False  # the prompt before its answer, and its log-probabilities with `logprobs`

    @property
    def answer_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def all_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        if self.echo and self.max_tokens == 0:  # the prompt alone has to be computed
            echoed = self.logprobs or 0
        return max((k for k in (self.prompt_logprobs, echoed) if k is not None), default=None)


def grammar_of(body: SamplingBody, *, ignore_unknown: bool = False) -> tuple[Grammar, str] | None:
    """Returns the grammar that a body asks for, and the field that holds it. Raises ApiError."""
    read_fields = partial(understood_fields, ignore_unknown=ignore_unknown)
    grammars = [
        *body.grammars_of_format(read_fields),
        *_structured_outputs(body.structured_outputs or {}, read_fields),
        *((Grammar(kind, text), kind) for kind in ("regex", "ebnf") if (text := getattr(body, kind)) is not None),
        *([(Grammar("json_schema", body.json_schema), "json_schema")] if body.json_schema is not None else []),
    ]
    if len(grammars) > 1:
        fields = [field for _, field in grammars[:2]]
        raise ApiError(400, f"{fields[0]} and {fields[1]} both restrict the answer; send one of them", fields[1])
    return grammars[0] if grammars else None


def grammars_of_kind(value: Values, path: str, kinds: str, read_fields: UnderstoodFields) -> list[tuple[Grammar, str]]:
    """Reads a format at `path` that is no schema. `kinds`: all that it may be."""
    kind = value.get("type")
    if kind not in ("text", "json_object"):
        raise ApiError(400, f"{path}.type is {quote(kind)}; it must be {kinds}", f"{path}.type")
    read_fields(value, {"type"}, {}, f"{path}.")
    return [(Grammar("json_object"), path)] if kind == "json_object" else []


def grammar_of_schema(
    value: Values, path: str, names: set[str], read_fields: UnderstoodFields
) -> list[tuple[Grammar, str]]:
    """Reads an object that holds a JSON schema, with further fields of these names. The schema is always kept to the
    letter, so `strict` changes nothing."""
    read_fields(value, {"name", "schema", *names}, {"strict": None, "description": None}, f"{path}.")
    return [(Grammar("json_schema", json.dumps(value["schema"])), f"{path}.schema")]


def structural_tag(value: Any, path: str, read_fields: UnderstoodFields) -> Grammar:
    """Reads xgrammar's structural tag: an object or its JSON text, also in the older form with `structures` and
    `triggers`."""
    tag = value
    if isinstance(value, str):
        limits.check_structure(value, limits.MAX_NODES)  # as of the body, since what follows is recursive
        try:
            tag = json.loads(value)
        except ValueError as error:
            raise ApiError(400, f"{path} is not valid JSON: {error}", path) from error
    if isinstance(tag, dict) and "structures" in tag:
        read_fields(tag, {"type", "structures", "triggers"}, {}, f"{path}.")
        tag = {"format": triggered_tags(tag["structures"], tag.get("triggers"), f"{path}.structures", read_fields)}
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise ApiError(400, f"{path} must hold format, an object", f"{path}.format")
    read_fields(tag, {"type", "format"}, {}, f"{path}.")
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag["format"]}))


def triggered_tags(structures: Any, triggers: Any, path: str, read_fields: UnderstoodFields) -> Values:
    is_list = isinstance(structures, list) and structures
    names = {"begin", "schema", "end"}
    if not is_list or not all(isinstance(structure, dict) and names <= structure.keys() for structure in structures):
        raise ApiError(400, f"{path} must be a list of objects with begin, schema and end", path)
    for index, structure in enumerate(structures):
        read_fields(structure, names, {}, f"{path}.{index}.")
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"]},
            "end": structure["end"],
        }
        for structure in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _structured_outputs(value: Values, read_fields: UnderstoodFields) -> list[tuple[Grammar, str]]:
    """Returns the grammars of vLLM's `structured_outputs` and their fields."""
    path = "structured_outputs"
    grammars = list[tuple[Grammar, str]]()
    neutral: Neutral = {"whitespace_pattern": (), "disable_any_whitespace": (False,)}
    neutral |= {"disable_fallback": None, "disable_additional_properties": (False,)}
    understood = {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}
    for name, entry in read_fields(value, understood, neutral, f"{path}.").items():
        place = f"{path}.{name}"
        if name == "json" and isinstance(entry, dict | bool | str):
            grammars.append((Grammar("json_schema", entry if isinstance(entry, str) else json.dumps(entry)), place))
        elif name == "json_object" and isinstance(entry, bool):
            grammars += [(Grammar("json_object"), place)] if entry else []
        elif name == "choice" and entry == []:
            raise ApiError(400, f"{place} is an empty list; name at least one text", place)
        elif name == "choice" and isinstance(entry, list) and all(isinstance(text, str) for text in entry):
            check_length(entry, limits.MAX_GRAMMAR_CHOICES, place)
            grammars.append((Grammar("choice", json.dumps(entry)), place))
        elif name == "structural_tag":
            grammars.append((structural_tag(entry, place, read_fields), place))
        elif name in ("regex", "grammar") and isinstance(entry, str):
            grammars.append((Grammar("regex" if name == "regex" else "ebnf", entry), place))
        else:
            raise ApiError(400, f"{place} has the wrong type; it must be a schema, a list of texts, or a text", place)
    return grammars


class TokenizeBody(Fields):
    """POST /tokenize, as vLLM has it: a text, or messages through the chat template."""

    prompt_field: ClassVar[str] = "messages"

    prompt: str | None = None
    messages: Annotated[list[Message], BeforeValidator(read_messages)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: Values = {}
    tools: list[Any] = []
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either prompt or messages", "prompt")
        return self


class DraftBody(Fields):
    """POST /v1/drafts."""

    draft: str
    trial_rounds: Annotated[int, Field(ge=0)] = TRIAL_ROUNDS


class DetokenizeBody(Fields):
    """POST /detokenize."""

    tokens: list[int]


AnyBody = TypeVar("AnyBody", bound=Fields)


def read_body(kind: type[AnyBody], fields: Values, *, ignore_unknown: bool = False) -> AnyBody:
    """Reads a body. Raises ApiError for the first fault, naming its field."""
    try:
        return kind.model_validate(fields, context={"ignore_unknown": ignore_unknown})
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        param = ".".join(shorten(str(part)) for part in fault["loc"])
        raise ApiError(400, fault_sentence(param, fault["msg"], fault["input"]), param) from error


def fault_sentence(param: str, message: str, value: object) -> str:
    """Returns what is wrong with a field. Repeats numbers alone: the log has the sentence, but no text of users."""
    start = "Input should be "
    if message.startswith(start) and isinstance(value, bool | int | float | None):
        return f"{param} is {shorten(json.dumps(value))}; it must be {message.removeprefix(start)}"
    return f"{param}: {message}"
