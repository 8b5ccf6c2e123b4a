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
from slipstream.tests.tables import objects_of

BEGIN = "{% generation %}"
FINISH = "{% endgeneration %}"


@dataclass(frozen=True, slots=True)
class Family:
    """A chat template in which [ and ] are where tags would stand, and the answers that a target writes with it."""

    template: str
    end: str
    answers: tuple[str, ...]
    thoughts: tuple[str, ...] = ()
    variables: dict[str, Any] = field(default_factory=dict)
    num_documents: int = 1

    @property
    def messages(self) -> list[dict[str, str]]:
        messages = chat("Hello", "It is 4.", "What?", "So it is.")
        for message, thought in zip(messages[1::2], self.thoughts, strict=False):
            message["reasoning_content"] = thought
        return messages

    def read(self, tags: tuple[str, str] = ("", "")) -> tuple[Any, ChatTemplate, list[list[int]]]:
        """The tokenizer, the template with its tags, and the prompts before both answers."""
        tokenizer = build_tokenizer(self.template.replace("[", tags[0]).replace("]", tags[1]), self.end)
        options = {"add_generation_prompt": True, "return_dict": True, **self.variables}
        prompts = [tokenizer.apply_chat_template(self.messages[:turn], **options)["input_ids"] for turn in (1, 3)]
        return tokenizer, ChatTemplate(tokenizer, date="2024-07-26", variables=self.variables), prompts


ZOO = objects_of(__file__, "zoo", Family)


@grouped()
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("tags", [("", ""), (BEGIN, FINISH)], ids=["plain", "tagged"])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_what_is_supervised_is_what_the_target_has_to_write(name, tags, turns):
    family = ZOO[name]
    tokenizer, chat_template, prompts = family.read(tags)
    answers = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in family.answers]
    expected = list(zip(prompts, answers, strict=True))[-1 if turns == "last" else 0 :]

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
    tokenizer, chat_template, prompts = family.read()
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
