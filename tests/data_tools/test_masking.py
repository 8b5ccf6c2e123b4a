"""Loss masks against tokens put together by hand, for templates with and without generation tags."""

import datetime
from typing import Any

import pytest

from slipstream.data_tools.masking import mask_conversation
from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped, has_generation_tag
from slipstream.models.chat.template import freeze_date
from slipstream.tests.data_tools.chats import (
    CHATML,
    CHATML_TAGGED,
    LLAMA,
    THINKING,
    Pieces,
    build_tokenizer,
    chat,
    join,
)

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
LLAMA_PIECES = [
    ("<s><|head|>system<|/head|>Today: 05 Mar 2023<|eot|>", False),
    ("<|head|>system<|/head|>\n\n", False),
    ("You are fine.<|eot|><|head|>user<|/head|>\n\n", False),
    ("Hello there<|eot|><|head|>assistant<|/head|>\n\n", False),
    ("How are you?<|eot|>", True),
    ("<|head|>user<|/head|>\n\n", False),
    ("What?<|eot|><|head|>assistant<|/head|>\n\n", False),
    ("four.<|eot|>", True),
]


def mask(
    template: str, messages: list[Any], *, turns: Any = "all", end: str = "<|im_end|>", is_cut: bool = False
) -> Any:
    tokenizer = build_tokenizer(template, end)
    wrapped = ChatTemplate(tokenizer, date="2023-03-05", variables={})
    end_ids = frozenset([tokenizer.eos_token_id])
    return mask_conversation(wrapped, messages, None, turns=turns, end_ids=end_ids, is_cut=is_cut)


@pytest.mark.parametrize(
    ("template", "end", "pieces"),
    [
        (CHATML_TAGGED, "<|im_end|>", [*CHATML_PIECES, ("\n", False)]),
        (CHATML, "<|im_end|>", [*CHATML_PIECES, ("\n", False)]),
        (LLAMA, "<|eot|>", LLAMA_PIECES),
    ],
    ids=["tags", "rendered", "llama"],
)
def test_masks_equal_the_tokens_cut_by_hand(template: str, end: str, pieces: Pieces) -> None:
    assert mask(template, CONVERSATION, end=end) == join(build_tokenizer(template, end), pieces)


def test_turns_last_supervises_the_last_answer_only() -> None:
    pieces = [(text, supervised and index == 6) for index, (text, supervised) in enumerate(CHATML_PIECES)]
    for template in (CHATML, CHATML_TAGGED):
        assert mask(template, CONVERSATION, turns="last") == join(build_tokenizer(template), [*pieces, ("\n", False)])


def test_turns_after_the_last_answer_are_left_out() -> None:
    assert mask(CHATML, [*CONVERSATION, {"role": "user", "content": "more"}]) == mask(CHATML, CONVERSATION)


def test_without_a_known_end_token_the_whole_turn_is_supervised() -> None:
    pieces = [*CHATML_PIECES[:3], ("How are you?<|im_end|>\n", True)]
    assert mask(CHATML, CONVERSATION[:3], end="<|eot|>") == join(build_tokenizer(CHATML), pieces)


THINKING_CHAT = chat("Hello", "<think>hm</think>fine", "What?", "<think>so</think>four")


def test_rewritten_history_drops_the_row_but_not_its_last_answer() -> None:
    with pytest.raises(RowDropped, match="history_rewritten"):
        mask(THINKING, THINKING_CHAT)
    pieces = [
        ("<|im_start|>user\n", False),
        ("Hello<|im_end|>\n<|im_start|>assistant\n", False),
        ("fine<|im_end|>\n<|im_start|>user\n", False),
        ("What?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>so</think>four<|im_end|>", True),
        ("\n", False),
    ]
    tokenizer = build_tokenizer(THINKING)
    assert mask(THINKING, THINKING_CHAT, turns="last") == join(tokenizer, pieces)
    ids, supervised = mask(THINKING, THINKING_CHAT[:2])  # a single turn is kept
    text = tokenizer.decode([token for token, value in zip(ids, supervised, strict=True) if value])
    assert text == "<think>hm</think>fine<|im_end|>"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        # "Assistant:" + " " is how the prompt ends, but " fine" is one token with its space.
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
         "{% if add_generation_prompt %}assistant: {% endif %}", chat("Hello", "fine"), "unstable_boundary"),
        ("{% for m in messages %}{{ '<|head|>' + m['content'] }}{% endfor %}"
         "{% if add_generation_prompt %}<|head|><think>{% endif %}", chat("Hello", "fine"), "prompt_rewritten"),
        (CHATML, chat("Hello", "fine")[1:], "starts_with_assistant"),
        (CHATML, chat("Hello"), "no_assistant_turn"),
        ("{{ raise_exception('roles must alternate') }}", chat("Hello", "fine"), "template_refuses: roles must"),
        ("{{ messages[0].content.index('x') }}", chat("Hello", "fine"), "template_refuses: substring not found"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_masked_are_dropped_with_a_reason(template: str, messages: list[Any], reason: str) -> None:
    with pytest.raises(RowDropped, match=reason):
        mask(template, messages)


def test_a_tag_inside_a_comment_or_text_is_no_tag() -> None:
    assert has_generation_tag("a{%- generation -%}b{%- endgeneration -%}")
    assert not has_generation_tag("{# {% generation %} #}{% raw %}{% generation %}{% endraw %}{{ generation }}")


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] }}{% generation %}{% endgeneration %}",
                                      "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}"])  # fmt: skip
def test_tags_that_mark_nothing_or_everything_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match="mark nothing, or everything"):
        mask(template, CONVERSATION)


def test_missing_and_broken_templates_are_refused() -> None:
    with pytest.raises(ValueError, match="no chat template; give one with --chat-template"):
        ChatTemplate(build_tokenizer(None), date="2024-07-26", variables={})
    for broken in ("{% if %}", "{{ 'a"):
        with pytest.raises(ValueError, match="not valid Jinja"):
            mask(broken, CONVERSATION)


def test_a_frozen_date_changes_nothing_else() -> None:
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
def test_the_end_token_after_a_cut_answer_is_not_supervised(template: str, turns: Any) -> None:
    tokenizer = build_tokenizer(template)
    ids, supervised = mask(template, CONVERSATION, turns=turns, is_cut=True)
    whole_ids, whole = mask(template, CONVERSATION, turns=turns)
    last = max(index for index, value in enumerate(whole) if value)
    assert whole_ids == ids
    assert ids[last] == tokenizer.eos_token_id
    assert supervised == [value and index != last for index, value in enumerate(whole)]
    assert supervised[last - 1]


CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{% set c = c.function or c %}{{ '<call>' + ARGUMENTS }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("form", ["c.arguments | tojson", "c.arguments"])  # as Llama's and Qwen2.5's, as DeepSeek's
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "weather"}}]])
def test_arguments_of_calls_are_not_quoted_twice(form: str, is_wrapped: bool, tools: list[Any] | None) -> None:
    """OpenAI writes them as JSON text, and whatever the template makes of it, the target has written that text."""
    arguments = '{"city": "Köln", "days": [1, 2]}'
    call: dict[str, Any] = {"name": "weather", "arguments": arguments}
    call = {"id": "c0", "type": "function", "function": call} if is_wrapped else call
    messages = [*chat("How are you?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = ChatTemplate(build_tokenizer(CALLS.replace("ARGUMENTS", form)), date="2023-03-05", variables={})
    assert template.render(messages, tools).endswith(f"assistant\n<call>{arguments}<|im_end|>\n")
    assert messages[1]["tool_calls"] == [call]
