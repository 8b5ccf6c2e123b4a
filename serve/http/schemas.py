"""Request bodies of /v1/completions and /v1/chat/completions, checked field by field.

A field is either understood, or known and sent with a value that has no effect, or refused by name. None is silently
ignored.
"""

import json
from collections.abc import Callable, Sized
from functools import partial
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
from slipstream.serve.chat.tools import ToolError, read_calls
from slipstream.serve.http import limits
from slipstream.serve.http.limits import ApiError
from slipstream.serve.request import MOST_LOGPROBS, Grammar, Speculation

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI for /v1/completions; a chat answer may fill the context
MESSAGE_FIELDS = {"role", "content", "name", "refusal"}
FIELDS_OF_ROLE = {"assistant": {"tool_calls", "reasoning_content", "reasoning"}, "tool": {"tool_call_id"}}

# Fields of OpenAI and other servers that are not implemented, with the values that have no effect: clients send them by
# default. null is always accepted; None here means that any value is. Other values are refused by name.
Neutral = dict[str, tuple[Any, ...] | None]
UnderstoodFields = Callable[[dict[str, Any], set[str], Neutral, str], dict[str, Any]]

NEUTRAL_OF_OPENAI: Neutral = {
    "metadata": None,
    "parallel_tool_calls": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "user": None,
    "audio": (),
    "best_of": (1,),
    "include_reasoning": (True,),
    "function_call": ("none", "auto"),  # OpenAI's older names of tool_choice and tools
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
NEUTRAL_OF_OTHERS: Neutral = {  # vLLM's and SGLang's
    "allowed_token_ids": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "no_stop_trim": (False,),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "thinking_token_budget": (),
    "skip_special_tokens": (True,),
    "stop_regex": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
NEUTRAL = NEUTRAL_OF_OPENAI | NEUTRAL_OF_OTHERS
NEUTRAL_IN_STREAM_OPTIONS: Neutral = {
    "include_obfuscation": (False,),
}
NEUTRAL_IN_MESSAGE: Neutral = {  # fields of an answer that a client sends back as a turn
    "annotations": None,
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def understood_fields(
    body: dict[str, Any], understood: set[str], neutral: Neutral, where: str = "", *, ignore_unknown: bool = False
) -> dict[str, Any]:
    """The understood fields of `body` that are not null. Raises ApiError naming an unsupported field and, unless these
    are ignored, an unknown one."""
    unknown = sorted(body.keys() - understood - neutral.keys())
    if unknown and not ignore_unknown:
        names = shorten(", ".join(where + shorten(name) for name in unknown), PLACE_CHARS)
        raise ApiError(400, f"unknown field: {names}", where + shorten(unknown[0]))
    for name in (body.keys() & neutral.keys()) - understood:
        allowed = neutral[name]
        if allowed is not None and body[name] is not None and not is_one_of(body[name], allowed):
            remedy = " or ".join(["leave it out", *(f"send {json.dumps(value)}" for value in allowed)])
            raise ApiError(400, f"{where}{name} is not supported by this server; {remedy}", where + name)
    return {name: value for name, value in body.items() if name in understood and value is not None}


def is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Equality that tells False from 0: `logprobs: 0` requests something, `logprobs: false` does not."""
    return any(value == other and (type(value) is bool) == (type(other) is bool) for other in allowed)


def ignores_unknown(info: ValidationInfo) -> bool:
    return bool(info.context and info.context["ignore_unknown"])


def read_messages(value: Any, info: ValidationInfo) -> list[Message]:
    """Messages for the chat template. Raises ApiError naming a wrong or unknown field."""
    if isinstance(value, list):
        check_length(value, limits.MAX_MESSAGES, "messages")
        check_parts(value)
        ignore = ignores_unknown(info)
        value = [known_message(message, f"messages.{index}", ignore) for index, message in enumerate(value)]
    try:
        return chat.read_messages(value)
    except MessageError as error:
        raise ApiError(400, str(error), error.field) from error


def check_parts(messages: list[Any]) -> None:
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > limits.MAX_PARTS:
        message = f"messages has {num_parts} content parts; the limit is {limits.MAX_PARTS}"
        raise ApiError(400, message, "messages")


def known_message(message: Any, where: str, ignore_unknown: bool) -> Any:
    """`message` without fields that have no effect. Raises ApiError for a field that this server does not know;
    `chat.read_messages` checks the rest."""
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    content = message.get("content")
    understood = MESSAGE_FIELDS | (FIELDS_OF_ROLE.get(role, set()) if isinstance(role, str) else set())
    understood_fields(message, understood, NEUTRAL_IN_MESSAGE, f"{where}.", ignore_unknown=ignore_unknown)
    for index, part in enumerate(content if isinstance(content, list) else []):
        if isinstance(part, dict) and part.get("type") in TEXT_PARTS:
            place = f"{where}.content.{index}."
            understood_fields(part, {"type", part["type"]}, {}, place, ignore_unknown=ignore_unknown)
    return with_calls({name: entry for name, entry in message.items() if name in understood}, where, ignore_unknown)


def with_calls(message: dict[str, Any], where: str, ignore_unknown: bool) -> dict[str, Any]:
    """An assistant's or a tool's message and its calls."""
    if not isinstance(message.get("tool_call_id"), str | None):
        raise ApiError(400, f"{where}.tool_call_id must be a string", f"{where}.tool_call_id")
    if message.get("tool_calls"):
        try:
            calls = message["tool_calls"]
            place = f"{where}.tool_calls"
            message["tool_calls"] = read_calls(calls, place, ignore_unknown=ignore_unknown)
        except ToolError as error:
            raise ApiError(400, str(error), error.field) from error
    return message


def read_prompts(value: Any) -> list[str | list[int]]:
    """A string, a list of token ids, or a list of either."""
    prompts = value if isinstance(value, list) and not all(type(item) is int for item in value) else [value]
    for index, prompt in enumerate(prompts):
        is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        if not is_tokens and not isinstance(prompt, str):
            where = f"prompt.{index}" if isinstance(value, list) else "prompt"
            raise ApiError(400, f"{where} must be a string or a list of token ids, and not empty", "prompt")
    return prompts


def read_top_k(value: int) -> int:
    return 0 if value == -1 else value  # both mean off


def read_stop(value: Any) -> list[str]:
    return read_strings("stop", value, limits.MAX_STOP_STRINGS)


def read_bad_words(value: Any) -> list[str]:
    return read_strings("bad_words", value, limits.MAX_BAD_WORDS)


def read_strings(field: str, value: Any, most: int) -> list[str]:
    strings = value if isinstance(value, list) else [value]
    check_length(strings, most, field)
    if not all(isinstance(string, str) and string for string in strings):
        raise ApiError(400, f"{field} must be a string or a list of strings, none of them empty", field)
    longest = max(map(len, strings), default=0)
    if longest > limits.MAX_STRING_CHARS:
        message = f"{field} has a string of {longest} characters; the limit is {limits.MAX_STRING_CHARS}"
        raise ApiError(400, message, field)
    return strings


def read_bias(value: Any) -> dict[int, float]:
    """OpenAI's: token ids, which are strings as JSON's keys, and what is added to their logits."""
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
    """Clients of the chat endpoint say false."""
    return None if value is False else value


NumLogprobs = Annotated[int, AfterValidator(check_logprobs)]
NumTokens = Annotated[int, Field(lt=2**31)]  # SamplingParams checks the rest


def check_length(items: Sized, most: int, field: str) -> None:
    if len(items) > most:
        raise ApiError(400, f"{field} has {len(items)} entries; the limit is {most}", field)


class Fields(BaseModel):
    """The fields of a request: those of the class are understood, and null is as if left out."""

    model_config = ConfigDict(strict=True)
    neutral: ClassVar[Neutral] = {}

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, body: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return understood_fields(body, set(cls.model_fields), cls.neutral, ignore_unknown=ignores_unknown(info))


class Options(BaseModel):
    """The fields of an object in a body, which is at `place`."""

    model_config = ConfigDict(strict=True)
    neutral: ClassVar[Neutral] = {}
    place: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, options: Any, info: ValidationInfo) -> Any:
        if not isinstance(options, dict):
            raise ApiError(400, f"{cls.place} must be an object", cls.place)
        known = set(cls.model_fields), cls.neutral, f"{cls.place}."
        return understood_fields(options, *known, ignore_unknown=ignores_unknown(info))


class StreamOptions(Options):
    neutral = NEUTRAL_IN_STREAM_OPTIONS
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
    bad_words: Annotated[list[str], PlainValidator(read_bad_words)] = []
    # Grammars of the answer, as vLLM and SGLang name them; see `grammar_of`.
    structured_outputs: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], PlainValidator(read_stop)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=limits.MAX_STOP_IDS)] = []
    ignore_eos: bool = False
    # Requests share cached prompt prefixes only with requests of the same salt.
    cache_salt: str = ""
    speculation: SpeculationFields | None = None

    @property
    def asked_speculation(self) -> Speculation:
        given = self.speculation
        return Speculation() if given is None else Speculation(given.enabled, given.trace)

    @property
    def answer_logprobs(self) -> int | None:
        """How many likeliest tokens are wanted beside each token of the answer; None: no log-probabilities."""
        raise NotImplementedError

    def grammars_of_format(self, known: UnderstoodFields) -> list[tuple[Grammar, str]]:
        """What OpenAI's own field says that the answer is, and the field that holds it."""
        raise NotImplementedError


class Body(SamplingBody):
    """Fields of the older two endpoints."""

    neutral = NEUTRAL
    length_field: ClassVar[str] = "max_tokens"

    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    response_format: dict[str, Any] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES_PER_PROMPT)] = 1
    return_token_ids: bool = False  # vLLM's: `token_ids` beside the text of a choice
    # vLLM's: how many likeliest tokens at the place of each token of the prompt.
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
        """As `answer_logprobs`, of the prompt, whatever wants them."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def grammars_of_format(self, known: UnderstoodFields) -> list[tuple[Grammar, str]]:
        return _grammars_of_format(self.response_format or {"type": "text"}, known)


class ChatBody(Body):
    """POST /v1/chat/completions."""

    neutral = NEUTRAL | {"echo": (False,)}
    prompt_field = "messages"
    effort_field: ClassVar[str] = "reasoning_effort"

    messages: Annotated[list[Message], BeforeValidator(read_messages)]
    max_completion_tokens: NumTokens | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] | None = None
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
    """The grammar that a body asks for, and the field that holds it. Raises ApiError."""
    known = partial(understood_fields, ignore_unknown=ignore_unknown)
    found = [
        *body.grammars_of_format(known),
        *_structured_outputs(body.structured_outputs or {}, known),
        *((Grammar(kind, text), kind) for kind in ("regex", "ebnf") if (text := getattr(body, kind)) is not None),
        *([(Grammar("json_schema", body.json_schema), "json_schema")] if body.json_schema is not None else []),
    ]
    if len(found) > 1:
        raise ApiError(400, f"{found[0][1]} and {found[1][1]} both say what the answer is; send one", found[1][1])
    return found[0] if found else None


def _grammars_of_format(value: dict[str, Any], known: UnderstoodFields) -> list[tuple[Grammar, str]]:
    kind = value.get("type")
    where = "response_format"
    if kind in ("text", "json_object"):
        known(value, {"type"}, {}, f"{where}.")
        return [(Grammar("json_object"), where)] if kind == "json_object" else []
    if kind == "structural_tag":
        return [(structural_tag(value, where, known), where)]
    if kind != "json_schema":
        message = f"{where}.type is {quote(kind)}; it must be text, json_object, json_schema or structural_tag"
        raise ApiError(400, message, f"{where}.type")
    known(value, {"type", "json_schema"}, {}, f"{where}.")
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict | bool):
        raise ApiError(400, f"{where}.json_schema must hold name and schema, an object", f"{where}.json_schema")
    # A schema is always kept to the letter, so `strict` changes nothing.
    known(named, {"name", "schema"}, {"strict": None, "description": None}, f"{where}.json_schema.")
    return [(Grammar("json_schema", json.dumps(named["schema"])), f"{where}.json_schema.schema")]


def structural_tag(value: Any, where: str, known: UnderstoodFields) -> Grammar:
    """xgrammar's, as an object or its JSON text; in its older form with `structures` and `triggers`, too."""
    tag = value
    if isinstance(value, str):
        limits.check_structure(value, limits.MAX_NODES)  # as of the body, since what follows is recursive
        try:
            tag = json.loads(value)
        except ValueError as error:
            raise ApiError(400, f"{where} is not valid JSON: {error}", where) from error
    if isinstance(tag, dict) and "structures" in tag:
        known(tag, {"type", "structures", "triggers"}, {}, f"{where}.")
        tag = {"format": triggered_tags(tag["structures"], tag.get("triggers"), f"{where}.structures", known)}
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise ApiError(400, f"{where} must hold format, an object", f"{where}.format")
    known(tag, {"type", "format"}, {}, f"{where}.")
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag["format"]}))


def triggered_tags(structures: Any, triggers: Any, where: str, known: UnderstoodFields) -> dict[str, Any]:
    is_list = isinstance(structures, list) and structures
    if not is_list or not all(isinstance(one, dict) and {"begin", "schema", "end"} <= one.keys() for one in structures):
        raise ApiError(400, f"{where} must be a list of objects with begin, schema and end", where)
    for index, one in enumerate(structures):
        known(one, {"begin", "schema", "end"}, {}, f"{where}.{index}.")
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _structured_outputs(value: dict[str, Any], known: UnderstoodFields) -> list[tuple[Grammar, str]]:
    """vLLM's."""
    where = "structured_outputs"
    found = list[tuple[Grammar, str]]()
    neutral: Neutral = {"whitespace_pattern": (), "disable_any_whitespace": (False,)}
    neutral |= {"disable_fallback": None, "disable_additional_properties": (False,)}
    understood = {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}
    for name, given in known(value, understood, neutral, f"{where}.").items():
        place = f"{where}.{name}"
        if name == "json" and isinstance(given, dict | bool | str):
            found.append((Grammar("json_schema", given if isinstance(given, str) else json.dumps(given)), place))
        elif name == "json_object" and isinstance(given, bool):
            found += [(Grammar("json_object"), place)] if given else []
        elif name == "choice" and isinstance(given, list) and given and all(isinstance(one, str) for one in given):
            check_length(given, limits.MAX_GRAMMAR_CHOICES, place)
            found.append((Grammar("choice", json.dumps(given)), place))
        elif name == "structural_tag":
            found.append((structural_tag(given, place, known), place))
        elif name in ("regex", "grammar") and isinstance(given, str):
            found.append((Grammar("regex" if name == "regex" else "ebnf", given), place))
        else:
            raise ApiError(400, f"{place} is not what it must be: a schema, a list of texts, or a text", place)
    return found


class TokenizeBody(Fields):
    """POST /tokenize, as vLLM has it: a text, or messages through the chat template."""

    prompt_field: ClassVar[str] = "messages"

    prompt: str | None = None
    messages: Annotated[list[Message], BeforeValidator(read_messages)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Any] = []
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either prompt or messages", "prompt")
        return self


class DetokenizeBody(Fields):
    """POST /detokenize."""

    tokens: list[int]


AnyBody = TypeVar("AnyBody", bound=Fields)


def read_body(kind: type[AnyBody], fields: dict[str, Any], *, ignore_unknown: bool = False) -> AnyBody:
    """Raises ApiError for the first fault, naming its field."""
    try:
        return kind.model_validate(fields, context={"ignore_unknown": ignore_unknown})
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(shorten(str(part)) for part in fault["loc"])
        raise ApiError(400, f"{param}: {fault['msg']}", param) from error
