"""Loss masks against tokens put together by hand."""

import datetime
import json
from typing import Any

import pytest

from slipstream.data_tools.masking import Document, mask_conversation
from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped
from slipstream.models.chat.template import freeze_date
from slipstream.tests.data_tools.chats import (
    CHATML,
    CHATML_TAGGED,
    GEMMA4,
    GLM,
    THINKING,
    build_tokenizer,
    chat,
    join,
)
from slipstream.tests.pairwise import grouped
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

CONVERSATION = [{"role": "system", "content": "You are fine."}, *chat("Hello there", "How are you?", "What?", "four. ")]
CHATML_PIECES = [
    ("<|im_start|>system\n", False),
    ("You are fine.<|im_end|>\n<|im_start|>user\n", False),
    ("Hello there<|im_end|>\n<|im_start|>assistant\n", False),
    ("How are you?<|im_end|>", True),
    ("\n<|im_start|>user\n", False),
    ("What?<|im_end|>\n<|im_start|>assistant\n", False),
    ("four. <|im_end|>", True),
]


def documents(
    template: str, messages: list[Any], *, end: str = "<|im_end|>", variables: Any = None, **options: Any
) -> list[Document]:
    tokenizer = build_tokenizer(template, end)
    wrapped = ChatTemplate(tokenizer, date="2023-03-05", variables=variables or {})
    options = {"turns": "all", "end_ids": {tokenizer.eos_token_id}, **options}
    return mask_conversation(wrapped, messages, None, **options)


def mask(template: str, messages: list[Any], **options: Any) -> Document:
    [document] = documents(template, messages, **options)
    return document


@pytest.mark.parametrize(("options", "answers"), [({"turns": "last"}, {6}), ({"weights": {2: 0}}, {6}),
                                                  ({"weights": {4: 0}}, {3}),
                                                  ({"weights": {4: 0}, "turns": "last"}, {3})])  # fmt: skip
def test_some_answers_are_supervised(options, answers):
    pieces = [(text, index in answers) for index, (text, _) in enumerate(CHATML_PIECES[: max(answers) + 1])]
    for template in (CHATML, CHATML_TAGGED):
        assert mask(template, CONVERSATION, **options) == join(build_tokenizer(template), pieces)


def test_the_tokens_of_an_answer_have_its_weight():
    pieces = [(text, {3: 0.5, 6: 2.0}.get(index, 0.0)) for index, (text, _) in enumerate(CHATML_PIECES)]
    assert mask(CHATML, CONVERSATION, weights={2: 0.5, 4: 2.0}) == join(build_tokenizer(CHATML), pieces)


def test_a_row_with_no_answer_to_supervise_is_dropped():
    with pytest.raises(RowDropped, match="no_assistant_turn: every answer has weight 0"):
        mask(CHATML, CONVERSATION, weights={2: 0, 4: 0})


def test_turns_after_the_last_answer_are_left_out():
    assert mask(CHATML, [*CONVERSATION, {"role": "user", "content": "more"}]) == mask(CHATML, CONVERSATION)


def test_without_a_known_end_token_the_whole_turn_is_supervised():
    pieces = [*CHATML_PIECES[:3], ("How are you?<|im_end|>\n", True)]
    assert mask(CHATML, CONVERSATION[:3], end="<|eot|>") == join(build_tokenizer(CHATML), pieces)


THINKING_CHAT = chat("Hello", "<think>hm</think>fine", "What?", "<think>so</think>four")


def test_an_answer_that_is_rendered_otherwise_later_begins_another_document():
    first = [
        ("<|im_start|>user\n", False),
        ("Hello<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>hm</think>fine<|im_end|>", True),
    ]
    second = [
        *first[:2],
        ("fine<|im_end|>\n<|im_start|>user\n", False),
        ("What?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>so</think>four<|im_end|>", True),
    ]
    tokenizer = build_tokenizer(THINKING)
    expected = [join(tokenizer, first), join(tokenizer, second)]
    assert documents(THINKING, THINKING_CHAT) == expected
    assert documents(THINKING, THINKING_CHAT, turns="last") == expected[1:]
    assert documents(THINKING, THINKING_CHAT[:2]) == expected[:1]


CALL = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}


def test_an_answer_ends_with_the_token_that_begins_the_next_message():
    first, second = ({"role": "assistant", "content": text, "reasoning_content": "hm"} for text in ("fine", "four"))
    messages = [*chat("Hello"), first, *chat("What?"), second]
    hello = [("<|head|>", False), ("\nHello<|/head|>", False)]
    middle = [("\n<think></think>\nfine<|head|>", False), ("\nWhat?<|/head|>", False)]
    tokenizer = build_tokenizer(GLM, "<|head|>")
    assert documents(GLM, messages, end="<|head|>") == [
        join(tokenizer, [*hello, ("\n<think>hm</think>\nfine<|head|>", True)]),
        join(tokenizer, [*hello, *middle, ("\n<think>hm</think>\nfour<|head|>", True)]),
    ]
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    end_ids = set(tokenizer.convert_tokens_to_ids(["<|head|>", "<|eot|>"]))
    pieces = [*hello, ("\n<think></think>\n\nweather<|eot|>", True)]
    assert mask(GLM, [*messages[:1], call], end="<|head|>", end_ids=end_ids) == join(tokenizer, pieces)
    ids, _ = mask(GLM, messages[:2], end="<|head|>", is_cut=True)
    assert ids[-1] != tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("is_thinking", "reasoning", "opening", "answer"),
    [
        (False, "", "<|channel>thought\n<channel|>", "fine<|im_end|>"),
        (True, "hm\n", "", "<|channel>thought\nhm\n<channel|>fine<|im_end|>"),
        (True, "", "", "fine<|im_end|>"),
    ],
)
def test_thinking_that_a_template_leaves_out_is_supervised(is_thinking, reasoning, opening, answer):
    message = {"role": "assistant", "content": "fine", **({"reasoning_content": reasoning} if reasoning else {})}
    pieces = [("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" + opening, False), (answer, True)]
    options = {"variables": {"enable_thinking": is_thinking}}
    assert mask(GEMMA4, [*chat("Hello"), message], **options) == join(build_tokenizer(GEMMA4), pieces)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        # "Assistant:" + " " is how the prompt ends, but " fine" is one token with its space.
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
         "{% if add_generation_prompt %}assistant: {% endif %}", chat("Hello", "fine"), "unstable_boundary"),
        ("{% for m in messages %}{{ '<|head|>' + m['content'] }}{% endfor %}"
         "{% if add_generation_prompt %}<|head|><think>{% endif %}", chat("Hello", "fine"), "prompt_rewritten"),
        (CHATML, chat("Hello", "fine")[1:], "starts_with_assistant"),
        (CHATML_TAGGED, chat("Hello", "fine", "What?")[1:] + chat("", "four")[1:], "starts_with_assistant"),
        (CHATML, chat("Hello"), "no_assistant_turn: the row has no answer; make answers with `slipstream regenerate`"),
        (CHATML, chat("Hello", ""), "empty_answer: message 2"),
        (CHATML, [*chat("Hello"), {**chat("", "fine")[1], "reasoning_content": "hm"}], "reasoning_not_rendered"),
        (GEMMA4, [*chat("Hello"), {**chat("", "fine")[1], "reasoning_content": "hm"}], "reasoning_not_rendered"),
        ("{% for m in messages %}{{ m['role'] + '\n' + m['content'].split('</think>')[-1] + '\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}", THINKING_CHAT[:2], "reasoning_not_rendered"),
        (CHATML, [*chat("Hello"), {"role": "assistant", "content": "", "tool_calls": [CALL]}], "calls_not_rendered"),
        ("{% for m in messages %}{{ m['role'] + '\n' + (m.tool_calls or m.content) | string + '\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}",
         [*chat("Hello"), {"role": "assistant", "content": "fine", "tool_calls": [CALL]}], "content_not_rendered"),
        ("{{ raise_exception('roles must alternate') }}", chat("Hello", "fine"), "template_refuses: roles must"),
        ("{{ messages[0].content.index('x') }}", chat("Hello", "fine"), "template_refuses: substring not found"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_masked_are_dropped_with_a_reason(template, messages, reason):
    with pytest.raises(RowDropped, match=reason):
        mask(template, messages)


def test_missing_and_broken_templates_are_refused():
    with user_error("no chat template; give one with --chat-template"):
        ChatTemplate(build_tokenizer(None), date="2024-07-26", variables={})
    for broken in ("{% if %}", "{{ 'a"):
        with user_error("not valid Jinja"):
            mask(broken, CONVERSATION)


def test_a_frozen_date_changes_nothing_else():
    source = "  {%- if true %}\n    {%- set d = strftime_now('%d %b %Y, %A') %}\n{%- endif %}\n{{ d }} end\n"
    tokenizer = build_tokenizer(source)
    unfrozen = tokenizer.apply_chat_template(chat("x"), tokenize=False)
    frozen = freeze_date(source, datetime.date(2023, 3, 5))
    rendered = tokenizer.apply_chat_template(chat("x"), chat_template=frozen, tokenize=False)
    assert rendered == "05 Mar 2023, Sunday" + unfrozen[unfrozen.index(" end") :]
    assert unfrozen[0].isdigit()
    assert freeze_date("no date", datetime.date(2023, 3, 5)) == "no date"


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_cut_answer_has_no_end_token(template, turns):
    ids, supervised = mask(template, CONVERSATION, turns=turns)
    assert ids[-1] == build_tokenizer(template).eos_token_id
    assert mask(template, CONVERSATION, turns=turns, is_cut=True) == (ids[:-1], supervised[:-1])


@each_case()
def test_a_cut_answer_ends_where_it_was_cut(message, answer):
    """A template closes the thinking that max_tokens ended."""
    thinking = CHATML.replace("m['content']", "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content "
                                              "else '') + m.content")  # fmt: skip
    messages = [*chat("Hello"), {"role": "assistant", **message}]
    pieces = [("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", False), (answer, True)]
    assert mask(thinking, messages, is_cut=True) == join(build_tokenizer(thinking), pieces)
    trimmed = thinking.replace("m.reasoning_content +", "m.reasoning_content[:1] +")
    with pytest.raises(RowDropped, match="reasoning_not_rendered"):
        mask(trimmed, messages, is_cut=True)


CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{% set c = c.function or c %}{{ '<call>' + ARGUMENTS }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@grouped()
@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("(c.arguments | tojson)", '{"city": "Köln", "days": [1, 2]}'),  # Llama's and Qwen2.5's
        ("c.arguments", '{"city": "Köln", "days": [1, 2]}'),  # DeepSeek's: fails on an object
        ("(c.arguments | string)", '{"city": "Köln", "days": [1, 2]}'),  # would write an object as Python does
        ("(c.arguments if c.arguments is string else c.arguments | tojson)", '{"city": "Köln", "days": [1, 2]}'),
        # Gemma's: an object in a form of its own, a text as it is.
        ("((c.arguments | list | join('+')) if c.arguments is mapping else c.arguments)", "city+days"),
    ],
)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "weather"}}]])
def test_arguments_come_as_the_template_takes_them(form, expected, is_text, is_wrapped, tools):
    """OpenAI writes them as JSON text, data often as objects."""
    arguments = {"city": "Köln", "days": [1, 2]}
    call = {"name": "weather", "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = call if is_text else {**call, "arguments": arguments}
    call = {"id": "c0", "type": "function", "function": call} if is_wrapped else call
    messages = [*chat("How are you?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = ChatTemplate(build_tokenizer(CALLS.replace("ARGUMENTS", form)), date="2023-03-05", variables={})
    assert template.render(messages, tools).endswith(f"assistant\n<call>{expected}<|im_end|>\n")
    assert messages[1]["tool_calls"] == [call]
