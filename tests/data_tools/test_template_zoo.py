"""Loss masks for templates in the shapes of known families: what is supervised is what the target would have to write
after the prompt that a server prefills, whether a template has `{% generation %}` tags or not."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from slipstream.data_tools.conversations import to_example
from slipstream.data_tools.dialogue import Answer, Dialogue, converse
from slipstream.data_tools.masking import mask_conversation
from slipstream.data_tools.rows import Row
from slipstream.data_tools.target_tokenizer import ChatTemplate
from slipstream.tests.data_tools.chats import build_tokenizer, chat
from slipstream.tests.pairwise import grouped

BEGIN = "{% generation %}"
FINISH = "{% endgeneration %}"
PLAIN = chat("Hello", "It is 4.", "What?", "So it is.")
THOUGHT = [
    PLAIN[0],
    {**PLAIN[1], "reasoning_content": "sum"},
    PLAIN[2],
    {**PLAIN[3], "reasoning_content": "hm"},
]


@dataclass(frozen=True, slots=True)
class Family:
    """A chat template in which [ and ] are where tags would stand, and the answers that a target writes with it."""

    template: str
    end: str
    answers: tuple[str, ...]
    messages: list[dict[str, Any]] = field(default_factory=lambda: PLAIN)
    variables: dict[str, Any] = field(default_factory=dict)
    num_documents: int = 1


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}[{{ m.content }}<|im_end|>]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>(INST) {{ m.content }} (/INST){% else %}"
    "[ {{ m.content }} <|eot|>]{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "<s>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n"
    "{% if m.role == 'assistant' %}[{{ m.content | trim }}<|eot|>]{% else %}{{ m.content | trim }}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}["
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>]{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GEMMA = (
    "<s>{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}[{{ m.content | trim }}<|im_end|>]{% else %}"
    "{{ m.content | trim }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|head|>{% else %}"
    "[{{ m.content }}<|eot|>]{% endif %}{% endfor %}"
)
PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}[{{ m.content }}<|im_end|>]{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|eot|>{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant["
    "{% if loop.last and m.reasoning_content %}<|head|>analysis<|/head|>{{ m.reasoning_content }}<|im_end|>"
    "<|im_start|>assistant{% endif %}<|head|>final<|/head|>{{ m.content }}"
    "{{ '<|eot|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}]{% else %}"
    "<|im_start|>{{ m.role }}<|/head|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
DEEPSEEK = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{% if loop.last and m.reasoning_content %}"
    "<think>[{{ m.reasoning_content }}</think>{{ m.content }}<|eot|>]{% else %}"
    "</think>[{{ m.content }}<|eot|>]{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
SMOLLM_3 = (  # tags round the header and the newline
    "{% for m in messages %}{% if m.role == 'assistant' %}[<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n]{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}{% endif %}"
)
ZOO = {
    "chatml": Family(CHATML, "<|im_end|>", ("It is 4.<|im_end|>", "So it is.<|im_end|>")),
    "llama 2": Family(LLAMA_2, "<|eot|>", (" It is 4. <|eot|>", " So it is. <|eot|>")),
    "llama 3": Family(LLAMA_3, "<|eot|>", ("It is 4.<|eot|>", "So it is.<|eot|>")),
    "gemma": Family(GEMMA, "<|im_end|>", ("It is 4.<|im_end|>", "So it is.<|im_end|>")),
    "mistral": Family(MISTRAL, "<|eot|>", ("It is 4.<|eot|>", "So it is.<|eot|>")),
    "phi 3": Family(PHI_3, "<|im_end|>", ("It is 4.<|im_end|>", "So it is.<|im_end|>")),
    "qwen 3": Family(
        QWEN_3,
        "<|im_end|>",
        ("<think>\nsum\n</think>\n\nIt is 4.<|im_end|>", "<think>\nhm\n</think>\n\nSo it is.<|im_end|>"),
        THOUGHT,
        num_documents=2,
    ),
    "qwen 3 without thinking": Family(
        QWEN_3, "<|im_end|>", ("It is 4.<|im_end|>", "So it is.<|im_end|>"), PLAIN, {"enable_thinking": False}, 2
    ),
    "harmony": Family(
        HARMONY,
        "<|eot|>",
        (
            "<|head|>analysis<|/head|>sum<|im_end|><|im_start|>assistant<|head|>final<|/head|>It is 4.<|eot|>",
            "<|head|>analysis<|/head|>hm<|im_end|><|im_start|>assistant<|head|>final<|/head|>So it is.<|eot|>",
        ),
        THOUGHT,
        num_documents=2,
    ),
    "deepseek": Family(
        DEEPSEEK,
        "<|eot|>",
        ("sum</think>It is 4.<|eot|>", "hm</think>So it is.<|eot|>"),
        THOUGHT,
        {"thinking": True},
        2,
    ),
    "deepseek without thinking": Family(DEEPSEEK, "<|eot|>", ("It is 4.<|eot|>", "So it is.<|eot|>")),
    "smollm 3": Family(SMOLLM_3, "<|im_end|>", ("It is 4.<|im_end|>", "So it is.<|im_end|>")),
    "smollm 3 without thinking": Family(
        SMOLLM_3, "<|im_end|>", ("It is 4.<|im_end|>", "So it is.<|im_end|>"), PLAIN, {"enable_thinking": False}
    ),
}


@grouped()
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("tags", [("", ""), (BEGIN, FINISH)], ids=["plain", "tagged"])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_what_is_supervised_is_what_the_target_has_to_write(name, tags, turns):
    family = ZOO[name]
    tokenizer = build_tokenizer(family.template.replace("[", tags[0]).replace("]", tags[1]), family.end)
    options = {"add_generation_prompt": True, "return_dict": True, **family.variables}
    prompts = [tokenizer.apply_chat_template(family.messages[:turn], **options)["input_ids"] for turn in (1, 3)]
    answers = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in family.answers]
    expected = list(zip(prompts, answers, strict=True))[-1 if turns == "last" else 0 :]

    chat_template = ChatTemplate(tokenizer, date="2024-07-26", variables=family.variables)
    end_ids = {tokenizer.eos_token_id}
    documents = mask_conversation(chat_template, family.messages, None, turns=turns, end_ids=end_ids)
    supervised = []
    for ids, mask in documents:
        for start in range(len(ids)):
            if mask[start] and not mask[start - 1]:
                end = next((end for end in range(start, len(ids)) if not mask[end]), len(ids))
                supervised.append((ids[:start], ids[start:end]))
    assert supervised == expected
    assert len(documents) == (1 if turns == "last" else family.num_documents)


@grouped()
@pytest.mark.parametrize("lost", ["", " Hello"])
@pytest.mark.parametrize("name", ZOO)
def test_answers_with_known_tokens_stay_where_the_template_renders_them_otherwise(name, lost):
    """A template that strips earlier thinking makes a document of each answer, after the prompt that it renders; so
    does one that cannot render an answer, part of which is `lost` in its message."""
    family = ZOO[name]
    tokenizer = build_tokenizer(family.template.replace("[", "").replace("]", ""), family.end)
    chat_template = ChatTemplate(tokenizer, date="2024-07-26", variables=family.variables)
    options = {"add_generation_prompt": True, "return_dict": True, **family.variables}
    prompts = [tokenizer.apply_chat_template(family.messages[:turn], **options)["input_ids"] for turn in (1, 3)]
    answers = [
        tokenizer(answer.replace(family.end, lost + family.end), add_special_tokens=False)["input_ids"]
        for answer in family.answers
    ]
    conversing = converse(Dialogue("x", [[family.messages[0]], [family.messages[2]]]), chat_template, keep_cut=True)
    assert next(conversing).token_ids == prompts[0]
    first, last = (
        Answer(message=message, finish_reason="stop", num_tokens=len(ids), token_ids=ids)
        for message, ids in zip(family.messages[1::2], answers, strict=True)
    )
    assert conversing.send(first).token_ids == prompts[1]
    with pytest.raises(StopIteration) as stop:
        conversing.send(last)
    row = stop.value.value.row
    assert row["messages"] == family.messages

    documents = [
        (prompt + ids, [0] * len(prompt) + [1] * len(ids)) for prompt, ids in zip(prompts, answers, strict=True)
    ]
    if family.num_documents == 1 and not lost:
        mask = documents[0][1] + documents[1][1][len(documents[0][1]) :]
        documents = [(documents[1][0], mask)]
    assert to_example(Row("file, line 1", row), row).documents == documents
    assert ("token_rows" in row, "input_ids" in row) == (len(documents) == 2, len(documents) == 1)
