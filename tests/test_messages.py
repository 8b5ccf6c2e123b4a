"""A chat template sees the same of a message in a request to the server and in a row of training data."""

import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.data_tools.conversations import to_example
from slipstream.data_tools.options import ConversationOptions
from slipstream.data_tools.rows import Row
from slipstream.data_tools.target_tokenizer import ChatTemplate
from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.limits import ApiError
from slipstream.serve.http.schemas import ChatBody
from slipstream.serve.measure.questions import read_texts
from slipstream.serve.options import ServeConfig
from slipstream.tests.data_tools.chats import build_tokenizer, chat
from slipstream.tests.serve.fake_engine import CONTEXT, info
from slipstream.tests.tables import each_case, table_of
from slipstream.tests.user_errors import user_error

# Everything in a message or a tool shows in the text, and the date in both ways that templates ask for it.
TEMPLATE = (
    '{% if tools %}<tool_call>"arguments"{{ tools | tojson }}{% endif %}'
    "{{ date_string }}|{{ strftime_now('%Y-%m-%d') }}"
    "{% for m in messages %}{{ '<|im_start|>' + m | dictsort | string + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target")
    build_tokenizer(TEMPLATE).save_pretrained(path)
    return path


def served(folder: Path, messages: Any, tools: Any = (), **options: Any) -> str:
    front = Frontend(ServeConfig(target=str(folder), **options), info(10 * CONTEXT))
    [request], _ = front.read(ChatBody(messages=messages, tools=list(tools)), "r")
    return front.tokenizer.decode(request.prompt)


def trained(columns: dict[str, Any], **options: Any) -> str:
    row = Row("file, line 1", columns)
    config = ConversationOptions(**options)
    template = ChatTemplate(build_tokenizer(TEMPLATE), date=config.date, variables=config.template)
    example = to_example(row, columns)
    assert example.messages is not None
    return template.tokenizer.decode(
        template.encode([template.render(example.messages, example.tools, prompt=True)])[0]
    )


def text(part: str) -> dict[str, str]:
    return {"type": "text", "text": part}


SEEN = table_of(__file__, "seen")


@pytest.mark.parametrize(("message", "role", "content", "name"), SEEN)
def test_requests_and_rows_show_the_template_the_same(folder, message, role, content, name):
    messages = [*chat("How are you?", "fine"), message, *chat("What?")]
    plain = {"content": content, "role": role} | ({} if name is None else {"name": name})
    turn = f"<|im_start|>{sorted(plain.items())}<|im_end|>"
    assert turn in served(folder, messages)
    assert served(folder, messages) == trained({"messages": messages})
    assert read_texts({"messages": messages})[0][2] == {"role": role, "content": content}


@each_case()
def test_calls_and_reasoning_are_shown_the_same(folder, message):
    messages = [*chat("How are you?"), message, *chat("What?")]
    assert served(folder, messages) == trained({"messages": messages})


@each_case()
def test_tools_are_shown_the_same(folder, function):
    tools = [{"type": "function", "function": function}]
    assert '"name": "add"' in (rendered := served(folder, chat("Hi"), tools))
    assert rendered == trained({"messages": chat("Hi"), "tools": tools})


@each_case()
def test_what_a_request_may_not_hold_a_row_may_not(folder, message, fault):
    messages = [*chat("How are you?"), message]
    with user_error(re.escape(fault)):
        trained({"messages": messages})
    with pytest.raises((ApiError, ValueError), match=re.escape(fault)):
        served(folder, messages)


@pytest.mark.parametrize("options", [{}, {"date": "2025-03-05"}, {"date": "today"}])
def test_requests_and_rows_see_the_same_date(folder, options):
    rendered = served(folder, chat("Hi"), **options)
    assert rendered == trained({"messages": chat("Hi")}, **options)
    if options == {}:
        assert rendered.startswith("26 Jul 2024|2024-07-26<")
    if options == {"date": "2025-03-05"}:
        assert rendered.startswith("05 Mar 2025|2025-03-05<")


@pytest.mark.parametrize("config", [ConversationOptions, ServeConfig])
def test_a_bad_date_is_a_sentence(config):
    with user_error("date is '26 July'; write year-month-day, such as 2024-07-26, or today"):
        config(target="owner/model", date="26 July")


def test_rows_remember_the_day_that_was_today():
    assert len(ConversationOptions(date="today").date) == len("2024-07-26")
