"""A row's columns to an example, whatever the format.

Formats, in this order: `input_ids` + `loss_mask`, or `token_rows` of both; a conversation; `text`; questions alone.
Columns of a conversation: `messages` or `conversations` (OpenAI's role/content or ShareGPT's from/value), `prompt` +
`completion`, `instruction` + `output` (Alpaca's), `prompt` + `chosen` (preferences), `turns` (MT-bench's); several must
agree. Where there are none of these, a question may have a `response` or an `answer`. `weight` of a message or a row
says how much its tokens count. A malformed row raises RowError with its place and fault.

Invariant: a row passes the checks that the server makes of a request's messages; only other names of roles are read
beyond, and calls in forms that came before `tool_calls`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slipstream.data_tools.rows import Columns, Row, RowError
from slipstream.models.chat.messages import ROLES, Message, check_text, read_messages
from slipstream.models.chat.quotes import json_type
from slipstream.serve.chat.tools import read_calls, read_tools

Forms = dict[str, Any]
ROLE_ALIASES = {  # in lower case
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",  # OpenAI's older name
    "function_response": "tool",
    "tool_response": "tool",
}
CALLING_ROLES = ("function_call", "tool_call")  # the content of such a turn is an assistant's call, as JSON
SHAREGPT = {"from": "role", "value": "content"}
QUESTIONS = ("prompt", "question", "instruction")  # columns
FORMATS = (
    "messages, conversations, prompt + completion, instruction + output, prompt + chosen, turns, text, prompt, "
    "question or instruction with or without response, or input_ids + loss_mask"
)

TOKEN_COLUMNS = ("input_ids", "loss_mask", "loss_weights", "token_rows")
MAX_WEIGHT = 1e9  # keeps products in the range of fp32
Tokens = tuple[Sequence[int], Sequence[float]]  # input_ids, and their weights: 0 where nothing is supervised
Conversation = tuple[list[Message], Mapping[int, float]]  # messages, and by index the weights that are not 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Exactly one of `documents`, `messages` and `text` is set."""

    id: str | None = None
    documents: Sequence[Tokens] | None = None
    tokenizer_hash: str | None = None  # of the tokenizer that the documents come from, where the row says so
    messages: list[Message] | None = None
    weights: Mapping[int, float] = field(default_factory=dict)  # of answers, by index, where they are not 1
    row_weight: float = 1.0  # of the whole row
    tools: list[Any] | None = None
    text: str | None = None
    prompt: str = ""  # precedes `text`, not supervised
    category: str | None = None
    is_cut: bool = False  # max_tokens ended the last answer: it has no end token


def to_example(row: Row, columns: Columns, *, has_template: bool = True) -> Example:
    """The example that `columns` hold. A `prompt` and `completion` of plain text are a user and an assistant turn, or,
    for a target without a chat template, two texts that follow each other."""
    identity = None if columns.get("id") is None else str(columns["id"])
    is_cut = columns.get("finish_reason") == "length"
    present = {name for name, value in columns.items() if value is not None}
    try:
        check_text("id", identity)
        example = partial(Example, id=identity, row_weight=read_weight("weight", columns.get("weight")))
        documents = _documents(columns, present)
        if documents is not None:
            return example(documents=documents, tokenizer_hash=columns.get("tokenizer_hash"))
        conversation = _conversation(_answered_forms(columns, present, has_template))
        is_pair = {"prompt", "completion"} <= present
        if conversation is None and not is_pair and "text" not in present:
            conversation = _conversation(_question_forms(columns, present))
        if conversation is not None:
            messages, weights = conversation
            return example(messages=messages, weights=weights, tools=_tools(columns.get("tools")), is_cut=is_cut)
        if is_pair:
            prompt, text = (_string(name, columns[name]) for name in ("prompt", "completion"))
            return example(prompt=prompt, text=text, is_cut=is_cut)
        if "text" in present:
            return example(text=_string("text", columns["text"]))
    except ValueError as error:
        raise RowError(f"{row.place}: {error}") from error
    except RecursionError as error:
        raise RowError(f"{row.place}: is nested too deep") from error
    raise RowError(f"{row.place}: has {', '.join(sorted(present)) or 'no column'}; expected {FORMATS}")


def content_hash(messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
    """Hash of a conversation's content."""
    text = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _conversation(forms: Columns) -> Conversation | None:
    """The longest of `forms`, the raw messages by the columns that hold them; None without any. Raises ValueError if
    they contradict each other; one with the same questions and no answers does not."""
    conversations = {name: _messages(messages, name) for name, messages in forms.items()}
    if not conversations:
        return None
    name, longest = max(conversations.items(), key=lambda item: len(item[1][0]))
    questions = [message for message in longest[0] if message["role"] != "assistant"]
    for another, (messages, _) in conversations.items():
        if messages not in (longest[0], questions):
            raise ValueError(f"{name} and {another} hold different conversations; leave the columns of one out")
    return longest


def _answered_forms(columns: Columns, present: set[str], has_template: bool) -> Forms:
    """The raw messages of each form that gives answers or several turns, by the columns that hold them."""
    forms: Forms = {}
    for column in ("messages", "conversations"):
        if column in present:
            forms[column] = _parse_json(columns[column], column)
    if {"prompt", "completion"} <= present:
        texts = [columns["prompt"], columns["completion"]]
        if has_template or not any(isinstance(text, str) for text in texts):
            forms["prompt + completion"] = [*_turns(columns, "prompt"), *_turns(columns, "completion", "assistant")]
    if {"instruction", "output"} <= present:
        forms["instruction + output"] = [*_instruction(columns), *_turns(columns, "output", "assistant")]
    if "chosen" in present and {"prompt", "rejected"} & present:
        forms["prompt + chosen"] = _chosen(columns)
    if isinstance(columns.get("turns"), list):
        texts = [_string(f"turns.{index}", text) for index, text in enumerate(columns["turns"])]
        forms["turns"] = [{"role": "user", "content": text} for text in texts]
    return _with_system(columns, forms)


def _question_forms(columns: Columns, present: set[str]) -> Forms:
    """The raw messages of each form that gives a question, by the column that holds it, with its answer if the row has
    a `response`, or an `answer` to a `question`."""
    forms: Forms = {}
    for column in (column for column in QUESTIONS if column in present):
        forms[column] = _question(columns, column)
        answer = "answer" if column == "question" and "response" not in present else "response"
        if isinstance(columns.get(answer), str):
            forms[column] = [*forms[column], *_turns(columns, answer, "assistant")]
    return _with_system(columns, forms)


def _question(columns: Columns, column: str) -> list[Any]:
    """The messages of a column that asks; texts in a list are a user's turns, as in copies of MT-bench."""
    if column == "instruction":
        return _instruction(columns)
    turns = _turns(columns, column)
    return [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]


def _turns(columns: Columns, column: str, role: str = "user") -> list[Any]:
    """The messages of a column that holds them, or one of `role` with the text that it holds."""
    value = columns[column]
    return value if isinstance(value, list) else [{"role": role, "content": _string(column, value)}]


def _instruction(columns: Columns) -> list[Message]:
    """Alpaca's question: the instruction, and on the next line its input, if there is one; Dolly calls it context."""
    names = ("instruction", "input", "context")
    texts = [_string(column, columns[column]) for column in names if columns.get(column)]
    return [{"role": "user", "content": "\n".join(texts)}]


def _chosen(columns: Columns) -> list[Any]:
    """The prompt and the chosen answer to it, which may repeat the prompt; without a prompt, another question of the
    row and the answer. Raises ValueError for another prompt."""
    prompt = [] if columns.get("prompt") is None else _turns(columns, "prompt")
    answer = _turns(columns, "chosen", "assistant")
    turns = _messages(answer, "chosen")[0]
    if turns[0]["role"] == "assistant":
        names = (name for name in (*QUESTIONS, "input") if columns.get(name) is not None)
        column = next(names, None)
        if column is None:
            raise ValueError(
                "chosen holds an answer alone; add its question as prompt, or make chosen a list of messages"
            )
        return [*_question(columns, column), *answer]
    questions = _messages(prompt, "prompt")[0] if prompt else []
    is_prefix = turns[: len(questions)] == questions
    is_turn = isinstance(columns.get("prompt"), str) and questions[0] in turns
    if not is_prefix and not is_turn:
        raise ValueError("prompt and chosen hold different questions; leave one out, or the row")
    return answer


def _with_system(columns: Columns, forms: Columns) -> Forms:
    """`forms` after the system prompt that rows may have in a column of its own."""
    system = columns.get("system")
    if not system or not forms:
        return dict(forms)
    message = {"role": "system", "content": _string("system", system)}
    return {name: [message, *form] if isinstance(form, list) else form for name, form in forms.items()}


def _documents(columns: Columns, present: set[str]) -> list[Tokens] | None:
    """The tokens that a row holds: those of one document, or a list of several; None if it has none."""
    if {"input_ids", "loss_mask"} <= present:
        return [_tokens(columns)]
    if "token_rows" not in present:
        return None
    rows = columns["token_rows"]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError("token_rows must be a list of objects with input_ids and loss_mask that is not empty")
    return [_tokens(row) for row in rows]


def _tokens(columns: Columns) -> Tokens:
    input_ids = columns.get("input_ids")
    loss_mask = columns.get("loss_mask")
    if not isinstance(input_ids, list) or not isinstance(loss_mask, list) or not input_ids:
        raise ValueError("input_ids and loss_mask must be lists that are not empty")
    if len(input_ids) != len(loss_mask):
        raise ValueError(f"input_ids has {len(input_ids)} entries, loss_mask {len(loss_mask)}")
    wrong = next((value for value in loss_mask if value not in (0, 1)), None)
    if wrong is not None:
        raise ValueError(f"loss_mask holds {wrong!r}; it must be 0 or 1")
    loss_weights = columns.get("loss_weights")
    if loss_weights is None:
        return input_ids, loss_mask
    if not isinstance(loss_weights, list) or len(loss_weights) != len(loss_mask):
        raise ValueError(f"loss_weights must be a list of {len(loss_mask)} weights, as many as loss_mask has entries")
    weights = [read_weight("loss_weights", weight) for weight in loss_weights]
    return input_ids, [weight * value for weight, value in zip(weights, loss_mask, strict=True)]


def _messages(entries: Any, column: str) -> Conversation:
    """Messages as the server reads them, and their weights."""
    if not isinstance(entries, list):
        return read_messages(entries, column), {}
    messages = [_openai_form(entry, f"{column}.{index}") for index, entry in enumerate(entries)]
    weights = {
        index: read_weight(f"{column}.{index}.weight", message.pop("weight", None))
        for index, message in enumerate(messages)
        if isinstance(message, dict)
    }
    return read_messages(messages, column), {index: weight for index, weight in weights.items() if weight != 1}


def read_category(columns: Columns, column: str, place: str) -> str | None:
    """The category that a column names: a text that is not empty, or a number. None for anything else."""
    value = columns.get(column)
    try:
        check_text(column, value)
    except ValueError as error:
        raise RowError(f"{place}: {error}") from error
    return str(value) if isinstance(value, str | int | float) and value != "" else None


def read_weight(name: str, value: Any) -> float:
    """The weight of a message, a row or a token; 1 for null."""
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or not 0 <= value <= MAX_WEIGHT:
        raise ValueError(f"{name} is {value!r}; give a number from 0 to {MAX_WEIGHT:g}, or leave it out for 1")
    return float(value)


def _openai_form(entry: Any, field: str) -> Any:
    """ShareGPT's `from` and `value` as `role` and `content`, roles by OpenAI's names, and calls as `tool_calls`."""
    if not isinstance(entry, dict):
        return entry
    message = {key: value for key, value in entry.items() if key not in SHAREGPT}
    for key, name in SHAREGPT.items():
        if message.get(name) is None and key in entry:
            message[name] = entry[key]
    role = message.get("role")
    if isinstance(role, str) and role not in ROLES:
        role = role.strip().lower()
        message["role"] = ROLE_ALIASES.get(role, role if role in ROLES else message["role"])
    calls = message.get("tool_calls")
    if role in CALLING_ROLES:
        calls = _parse_json(message.get("content"), f"{field}.content")
        if not calls:
            raise ValueError(f"{field}.content is empty; a turn of {message['role']} holds a call as JSON")
        message |= {"role": "assistant", "content": ""}
    elif message.get("function_call") is not None and not calls:
        calls = message.pop("function_call")
    if calls:
        calls = [_with_function_key(call) for call in (calls if isinstance(calls, list) else [calls])]
        message["tool_calls"] = read_calls(calls, f"{field}.tool_calls", ignore_unknown=True)
    return message


def _with_function_key(function: Any) -> Any:
    """A call or a tool in OpenAI's form; older and home-made data have the function alone."""
    is_bare = isinstance(function, dict) and "name" in function and "function" not in function
    return {"function": function} if is_bare else function


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} holds {json_type(value)}, not text")
    check_text(name, value)
    return value


def _tools(value: Any) -> list[Any] | None:
    """Tools as the server reads them and shows them to the template."""
    tools = _parse_json(value, "tools")
    if not tools:
        return None
    functions = [_with_function_key(tool) for tool in tools] if isinstance(tools, list) else tools
    check_text("tools", functions)
    return [tool.definition for tool in read_tools(functions, ignore_unknown=True)]


def _parse_json(value: Any, column: str) -> Any:
    """The value that JSON text holds; other values as they are."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{column} is not valid JSON: {error}") from error
