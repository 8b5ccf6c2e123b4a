"""How models write calls of tools and their reasoning: a table, forms.yaml, which a parser reads and grammars enforce.

A form is what the model writes, with placeholders: $name, $arguments, $key, $type and $value. Reading, white space may
differ from the form's, also around the punctuation of JSON. Where a form has alternatives, grammars use the first.
Sources: the chat templates of the models, and for harmony OpenAI's description of the format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from slipstream.models.files.tables import read_tables

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


Form = TypeVar("Form", ToolForm, ReasoningForm)


def read_forms(kind: type[Form], values: Mapping[str, dict[str, Any]]) -> Mapping[str, Form]:
    """Forms by name. Lists become tuples."""
    forms = {}
    for name, fields in values.items():
        signs = tuple(tuple(signs) for signs in fields["signs"])
        tuples = {field: tuple(value) for field, value in fields.items() if isinstance(value, list)}
        forms[name] = kind(**fields | tuples | {"signs": signs})
    return forms


FORMS = read_tables(Path(__file__).with_name("forms.yaml"))
TOOL_FORMS = read_forms(ToolForm, FORMS["tools"])
REASONING_FORMS = read_forms(ReasoningForm, FORMS["reasoning"])


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
