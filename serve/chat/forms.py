"""How models write calls of tools and their reasoning: one table of forms, which a parser reads and grammars enforce.

A form is what the model writes, with placeholders: $name, $arguments, $key, $type and $value. Reading, white space may
differ from the form's, also around the punctuation of JSON. Where a form has alternatives, grammars use the first.
Sources: the chat templates of the models, and for harmony OpenAI's description of the format.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

AUTO = "auto"
NONE = "none"
ANY_CASE = str.maketrans("", "", "\\")  # templates escape quotes within quotes


@dataclass(frozen=True, slots=True)
class ToolForm:
    """Calls of tools in an answer."""

    call: tuple[str, ...]
    signs: tuple[tuple[str, ...], ...]  # a chat template that holds all of one of these has this form
    first: tuple[str, ...] = ("",)  # before the first call
    between: str = ""  # two calls
    last: tuple[str, ...] = ("",)  # after the last call, any of them; the first is written
    arguments: Literal["json", "parameters", "python", "quoted"] = "json"
    parameter: str = ""  # one of "parameters"
    quote: str = ""  # around a text in "quoted" ones, which are JSON otherwise, with bare keys
    at_start: bool = False  # nothing but calls is in an answer with calls
    ends_answer: bool = False  # the end of a call is a stop token
    id_len: int | None = None  # of a call's id, if the template insists on letters and digits of that number


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning before an answer. White space at the end of a form belongs to neither part."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    signs: tuple[tuple[str, ...], ...]
    content: tuple[str, ...] = ()  # markers that begin the content, if any
    content_end: tuple[str, ...] = ()
    next_message: str = ""  # between reasoning and what follows it
    is_first: bool = True  # the reasoning is at the beginning, or in the middle, too
    message_field: str = "reasoning_content"  # of an assistant's message, as the template reads it
    is_rendered: bool = True  # by the chat template, in the last answer of a conversation


HARMONY_START = "<|start|>assistant"
HARMONY_JSON = (" <|constrain|>json", " json", "")
HARMONY_CALLS = (
    *(f"<|channel|>commentary to=functions.$name{kind}<|message|>$arguments<|call|>" for kind in HARMONY_JSON),
    *(f" to=functions.$name<|channel|>commentary{kind}<|message|>$arguments<|call|>" for kind in HARMONY_JSON),
)

TOOL_FORMS: Mapping[str, ToolForm] = {
    "harmony": ToolForm(  # gpt-oss
        call=HARMONY_CALLS,
        first=("", HARMONY_START),
        between=HARMONY_START,
        last=("<|end|>",),
        ends_answer=True,
        signs=(("<|channel|>", "<|message|>"),),
    ),
    "qwen3_coder": ToolForm(  # and Qwen3.5
        call=("<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",),
        between="\n",
        arguments="parameters",
        parameter="<parameter=$key>\n$value\n</parameter>\n",
        signs=(("<tool_call>", "<function=", "<parameter="),),
    ),
    "glm": ToolForm(  # GLM-4.5 and later, Laguna
        call=("<tool_call>$name\n$arguments</tool_call>",),
        between="\n",
        arguments="parameters",
        parameter="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
        signs=(("<tool_call>", "<arg_key>", "<arg_value>"),),
    ),
    "minimax_m2": ToolForm(
        call=('<invoke name="$name">\n$arguments</invoke>',),
        first=("<minimax:tool_call>\n",),
        between="\n",
        last=("\n</minimax:tool_call>",),
        arguments="parameters",
        parameter='<parameter name="$key">$value</parameter>\n',
        signs=(("<minimax:tool_call>", "<invoke name="),),
    ),
    "gemma4": ToolForm(
        call=("<|tool_call>call:$name{$arguments}<tool_call|>",),
        arguments="quoted",
        quote='<|"|>',
        signs=(("<|tool_call>call:",),),
    ),
    "hermes": ToolForm(  # Qwen2.5, Qwen3
        call=('<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>',),
        between="\n",
        signs=(("<tool_call>", '"arguments"'),),
    ),
    "deepseek_v3_2": ToolForm(
        call=('<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>',),
        first=("<｜DSML｜function_calls>\n", "<｜DSML｜tool_calls>\n"),
        between="\n",
        last=("\n</｜DSML｜function_calls>", "\n</｜DSML｜tool_calls>"),
        arguments="parameters",
        parameter='<｜DSML｜parameter name="$key" string="$type">$value</｜DSML｜parameter>\n',
        signs=(("｜DSML｜",),),
    ),
    "deepseek_v3": ToolForm(  # and R1
        call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",),
        first=("<｜tool▁calls▁begin｜>", ""),
        between="\n",
        last=("<｜tool▁calls▁end｜>",),
        signs=(("<｜tool▁call▁begin｜>", "```json"),),
    ),
    "deepseek_v3_1": ToolForm(
        call=("<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",),
        first=("<｜tool▁calls▁begin｜>", ""),
        last=("<｜tool▁calls▁end｜>",),
        signs=(("<｜tool▁call▁begin｜>",),),
    ),
    "mistral_v11": ToolForm(  # and v13
        call=("[TOOL_CALLS]$name[ARGS]$arguments", "[TOOL_CALLS]$name[CALL_ID]$id[ARGS]$arguments"),
        id_len=9,
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    "mistral": ToolForm(  # v3 to v7
        call=('{"name": "$name", "arguments": $arguments}', '{"name": "$name", "arguments": $arguments, "id": "$id"}'),
        first=("[TOOL_CALLS][",),
        between=", ",
        last=("]",),
        id_len=9,
        signs=(("[TOOL_CALLS]",),),
    ),
    "llama_pythonic": ToolForm(  # Llama 3.2 of 1B and 3B, Llama 4
        call=("$name($arguments)",),
        first=("[", "<|python_start|>["),
        between=", ",
        last=("]", "<|python_end|>"),
        arguments="python",
        at_start=True,
        signs=(("func_name1(",),),
    ),
    "llama_json": ToolForm(  # Llama 3
        call=(
            '{"name": "$name", "parameters": $arguments}',
            '{"type": "function", "name": "$name", "parameters": $arguments}',
            '{"name": "$name", "arguments": $arguments}',
        ),
        first=("", "<|python_tag|>"),
        between="; ",
        at_start=True,
        signs=(('"parameters"', "ipython"),),
    ),
}

REASONING_FORMS: Mapping[str, ReasoningForm] = {
    "harmony": ReasoningForm(
        begin=("<|channel|>analysis<|message|>", f"{HARMONY_START}<|channel|>analysis<|message|>"),
        end=("<|end|>",),
        content=tuple(
            f"{start}<|channel|>{name}<|message|>"
            for name, start in itertools.product(("final", "commentary"), ("", HARMONY_START))
        ),
        content_end=("<|end|>", "<|return|>"),
        next_message=HARMONY_START,
        is_first=False,
        message_field="thinking",
        signs=(("<|channel|>", "<|message|>"),),
    ),
    "gemma4": ReasoningForm(
        begin=("<|channel>thought\n",),
        end=("<channel|>",),
        is_rendered=False,
        signs=(("<|channel>thought", "<channel|>"),),
    ),
    "think": ReasoningForm(  # Qwen3, GLM, MiniMax, DeepSeek
        begin=("<think>\n",), end=("\n</think>\n\n",), signs=(("</think>",), ("<think>",))
    ),
    "mistral": ReasoningForm(begin=("[THINK]",), end=("[/THINK]",), signs=(("[THINK]",),)),  # Magistral
}

Form = TypeVar("Form", ToolForm, ReasoningForm)


def find_form(forms: Mapping[str, Form], name: str, source: str) -> Form | None:
    """Returns the form with this name; for `auto`, the form that the chat template shows, if any; for `none`, None."""
    if name == AUTO:
        plain = source.translate(ANY_CASE)
        fits = (form for form in forms.values() if any(all(sign in plain for sign in signs) for signs in form.signs))
        return next(fits, None)
    return None if name == NONE else forms[name]


def template_source(tokenizer: Any) -> str:
    """Returns all chat templates of a tokenizer, which may have several by name."""
    template = tokenizer.chat_template or ""
    return "\n".join(template.values()) if isinstance(template, Mapping) else str(template)


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ValueError for an unknown name."""
    options: list[tuple[str, str, Mapping[str, Any]]] = [
        ("tool_parser", tool_parser, TOOL_FORMS),
        ("reasoning_parser", reasoning_parser, REASONING_FORMS),
    ]
    for option, value, forms in options:
        if value not in (AUTO, NONE, *forms):
            raise ValueError(f"{option} is {value!r}; choose one of {', '.join((AUTO, NONE, *forms))}")
