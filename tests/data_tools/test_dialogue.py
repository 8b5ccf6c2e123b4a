"""Dialogues: which conversations are answered, under which ids, and when a row is given up. And the journal."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.data_tools.dialogue import Answer, Dialogue, DialogueReader, Result, converse, row_seed, split_questions
from slipstream.data_tools.options import ConversationOptions
from slipstream.data_tools.regenerate import Journal, sort_rows
from slipstream.data_tools.rows import RowError
from slipstream.data_tools.target_tokenizer import ChatTemplate
from slipstream.tests.data_tools.chats import CHATML, THINKING, build_tokenizer, chat, write_jsonl
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error


def turns(letters: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "c": "assistant"}
    calls = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]}
    return [
        {"role": roles[letter], "content": str(number), **(calls if letter == "c" else {})}
        for number, letter in enumerate(letters)
    ]


@each_case()
def test_every_user_turn_gets_an_answer(letters, questions):
    messages = turns(letters)
    assert split_questions(messages) == [[messages[index] for index in question] for question in questions]


def read(folder: Path, rows: list[Any], **options: Any) -> tuple[list[Dialogue], DialogueReader]:
    reader = DialogueReader(ConversationOptions(data=(str(write_jsonl(folder / "rows.jsonl", rows)),), **options))
    return list(reader), reader


def test_ids_are_unique_and_stable(tmp_path):
    rows = [
        {"id": "a", "messages": chat("Hello", "one")},
        {"id": "a", "messages": chat("Hello", "two")},  # the same question: a duplicate, whatever its answer was
        {"id": "a", "messages": chat("What?", "one")},  # another one under the same id
        {"messages": chat("Hello", "one")},
        {"conversations": [{"from": "human", "value": "Hello"}]},  # the same content without an id
        {"id": 3, "messages": chat("Hello")},
    ]
    dialogues, reader = read(tmp_path, rows)
    ids = [dialogue.id for dialogue in dialogues]
    assert ids[0] == "a"
    assert ids[1].startswith("a-")
    assert len(ids[2]) == 32
    assert ids[3] == "3"
    assert reader.dropped == {"duplicate": 2}
    assert reader.ids == {identity: position for position, identity in enumerate(ids)}
    assert [dialogue.id for dialogue in read(tmp_path, rows)[0]] == ids


def test_ids_of_samples_are_unique_and_stable(tmp_path):
    rows = [{"id": "a#1", "messages": chat("Hi")}, {"id": "a", "messages": chat("Hello")}, {"messages": chat("What?")}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = ConversationOptions(data=(str(path),))
    ids = [[dialogue.id for dialogue in DialogueReader(options, samples)] for samples in (1, 2, 3)]
    assert [len(set(names)) for names in ids] == [3, 6, 9]
    assert ids[1] == [name for first in ids[0] for name in (first, f"{first}#1")]
    assert ids[2] == [name for first in ids[0] for name in (first, f"{first}#1", f"{first}#2")]
    assert ids[0][1] == "a"


@each_case()
def test_questions_of_every_form_are_answered(tmp_path, columns, questions):
    [dialogue], _ = read(tmp_path, [columns])
    assert dialogue.questions == [chat(question) for question in questions]


def test_what_cannot_be_answered_is_counted(tmp_path):
    rows = [{"messages": turns("sa")}, {"text": "no chat"}, {"messages": chat("b")}]
    rows.append({"messages": [*chat("c"), {"role": "assistant", "content": "d", "tool_calls": []}]})
    dialogues, reader = read(tmp_path, rows, skip_bad=True)
    assert len(dialogues) == 2
    assert reader.dropped == {"no_user_turn": 1, "malformed": 1}
    with pytest.raises(RowError, match="line 2: is not a conversation"):
        read(tmp_path, rows)


def test_where_and_limit(tmp_path):
    rows = [{"id": str(n), "split": "ab"[n % 2], "messages": chat(f"{n}")} for n in range(9)]
    dialogues, _ = read(tmp_path, rows, where=("split=b",), limit=3)
    assert [dialogue.id for dialogue in dialogues] == ["1", "3", "5"]


def test_row_seeds_fit_31_bits_and_differ():
    seeds = {row_seed(seed, str(row)) for seed in range(3) for row in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**31 for seed in seeds)


def drive(template: str | None, questions: list[str], answers: list[Answer], keep_cut: bool = True) -> Any:
    """The prompts that a dialogue asks for and its result."""
    wrapped = None
    end_ids = set()
    if template is not None:
        tokenizer = build_tokenizer(template)
        wrapped = ChatTemplate(tokenizer, date="2024-07-26", variables={})
        end_ids = {tokenizer.eos_token_id}
    dialogue = Dialogue("x", [chat(question) for question in questions])
    conversing = converse(dialogue, wrapped, keep_cut=keep_cut, end_ids=end_ids)
    prompts = []
    try:
        prompts.append(next(conversing))
        for answer in answers:
            prompts.append(conversing.send(answer))
    except StopIteration as stop:
        return prompts, stop.value
    raise AssertionError("the dialogue did not end")


def say(content: str, *, reasoning: str = "", ids: bool = False, **fields: Any) -> Answer:
    """An answer that came back as text, or with `ids` as tokens, the end token included."""
    message = {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
    fields = {"finish_reason": "stop", "text": content, **fields}
    token_ids = build_tokenizer(CHATML)(fields["text"])["input_ids"] if ids else None
    if token_ids is not None and fields["finish_reason"] == "stop":
        token_ids = [*token_ids, build_tokenizer(CHATML).eos_token_id]
    return Answer(message=message, num_tokens=1, token_ids=token_ids, **fields)


def test_a_dialogue_asks_turn_by_turn_with_its_own_answers():
    prompts, result = drive(CHATML, ["Hello", "What?"], [say("fine"), say("four")])
    messages = chat("Hello", "fine", "What?", "four")
    assert [prompt.messages for prompt in prompts] == [messages[:1], messages[:3]]
    tokenizer = build_tokenizer(CHATML)
    for prompt in prompts:
        expected = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=True)
        assert prompt.token_ids == expected["input_ids"]
    assert result == Result(id="x", row={"id": "x", "messages": messages, "finish_reason": "stop"})


def test_exact_tokens_are_written_where_prompts_go_on_with_them():
    answers = [say("fine", ids=True), say("four", ids=True)]
    prompts, result = drive(CHATML, ["Hello", "What?"], answers)
    tokens = [(prompt.token_ids, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    assert result.row["input_ids"] == tokens[1][0] + tokens[1][1]
    ends = [len(tokens[0][0]), len(tokens[0][0] + tokens[0][1]), len(tokens[1][0]), len(result.row["input_ids"])]
    assert result.row["loss_mask"] == [int(ends[0] <= place < ends[1] or ends[2] <= place) for place in range(ends[3])]
    _, result = drive(CHATML, ["Hello", "What?"], [answers[0], say("four")])
    assert result.row.keys() == {"id", "messages", "finish_reason"}


def test_rows_without_exact_tokens_render_as_what_was_written():
    thought = say("<think>hm</think>fine", ids=True)
    prompts, result = drive(THINKING, ["Hello", "What?"], [thought, thought])
    assert len(prompts) == 2, "a prompt without the earlier thinking is what a server would hold"
    assert result.row["messages"][1::2] == [thought.message] * 2
    assert "input_ids" not in result.row
    assert "input_ids" in drive(THINKING, ["Hello"], [thought])[1].row
    # The template writes less than came back, and the row is no proof of what the model would write.
    for text in ("<|head|>fine", "fine ", "hm fine"):
        answer = say("fine", text=text)
        assert drive(CHATML, ["Hello"], [answer])[1] == Result(id="x", dropped="answer_rewritten")
        assert drive(None, ["Hello"], [answer])[1].row is not None, "the endpoint renders"
    answer = say("fine", reasoning="hm", text="hm fine")
    assert drive(CHATML, ["Hello"], [answer])[1] == Result(id="x", dropped="reasoning_not_rendered")
    assert drive(CHATML, ["Hello"], [say("<|head|>fine", text="fine")])[1].row, "special tokens may not come back"


def test_a_template_that_refuses_drops_the_row():
    assert drive("{{ raise_exception('no') }}", ["Hello"], []) == ([], Result(id="x", dropped="template_refuses"))


def test_a_cut_answer_ends_its_dialogue():
    cut = say("fi", finish_reason="length")
    prompts, result = drive(CHATML, ["Hello", "What?"], [cut])
    assert len(prompts) == 1
    assert result.row == {"id": "x", "messages": chat("Hello", "fi"), "finish_reason": "length"}
    prompts, result = drive(CHATML, ["Hello", "What?", "Are you?"], [say("fine", ids=True), cut])
    assert result.row == {"id": "x", "messages": chat("Hello", "fine", "What?", "fi"), "finish_reason": "length"}
    answer = say("fi", finish_reason="length", ids=True)
    (prompt,), result = drive(CHATML, ["Hello", "What?"], [answer])
    assert result.row["input_ids"] == [*prompt.token_ids, *answer.token_ids], "the only answer, whose tokens are known"
    assert drive(CHATML, ["Hello", "What?"], [cut], keep_cut=False)[1] == Result(id="x", dropped="cut_by_max_tokens")


def test_an_answer_that_calls_a_tool_ends_its_dialogue():
    calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    answer = Answer(
        message={"role": "assistant", "content": "", "tool_calls": calls}, finish_reason="stop", num_tokens=1
    )
    prompts, result = drive(None, ["Hello", "What?"], [answer])
    assert (len(prompts), result.row["messages"]) == (1, [*chat("Hello"), answer.message])


def test_calls_of_the_input_are_history():
    dialogue = Dialogue("x", [turns("uct")])
    conversing = converse(dialogue, None, keep_cut=True)
    assert next(conversing).messages == turns("uct")
    with pytest.raises(StopIteration) as stop:
        conversing.send(say("fine"))
    messages = stop.value.value.row["messages"]
    assert messages == [
        turns("u")[0], {**turns("uc")[1], "weight": 0}, turns("uct")[2], {"role": "assistant", "content": "fine"}
    ]  # fmt: skip


def test_a_row_keeps_its_weight_and_category(tmp_path):
    rows = [{"prompt": "Hello", "weight": 0.5}, {"prompt": "What?", "category": "math"}]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    weights = []
    for dialogue in DialogueReader(ConversationOptions(data=(str(data),))):
        conversing = converse(dialogue, None, keep_cut=True)
        next(conversing)
        with pytest.raises(StopIteration) as stop:
            conversing.send(say("fine"))
        weights.append((stop.value.value.row.get("weight"), stop.value.value.row.get("category")))
    assert weights == [(0.5, None), (None, "math")]


def test_empty_answers_are_dropped():
    assert drive(CHATML, ["Hello"], [say("")])[1] == Result(id="x", dropped="empty_answer")


def test_reasoning_returned_apart_is_kept_apart():
    for content, reason in (("fine", "stop"), ("", "length")):
        _, result = drive(None, ["Hello"], [say(content, reasoning="hm", finish_reason=reason)])
        assert result.row["messages"][-1] == {"role": "assistant", "content": content, "reasoning_content": "hm"}


def test_a_journal_cuts_off_a_half_written_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    for half in (b'{"id": "c", "mess', b'{"id": "c"}', b""):
        path.write_bytes(b'{"id": "a"}\n{"id": "b"}\n' + half)
        with Journal(path) as journal:
            assert journal.ids == {"a", "b"}
            journal.append({"id": "d", "text": "ü"})
            lines = path.read_text().splitlines()  # flushed before the journal is closed
        assert [json.loads(line)["id"] for line in lines] == ["a", "b", "d"]


def test_a_journal_refuses_foreign_files_and_second_writers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n{"text": "b"}\n')
    with user_error(r"rows.jsonl, line 2: is not a row with an id"):
        Journal(path)
    assert path.read_text() == '{"id": "a"}\n{"text": "b"}\n'
    with Journal(path, anew=True) as journal:
        journal.append({"id": "c"})
        for anew in (False, True):
            with user_error("being written by another process"):
                Journal(path, anew=anew)
    assert path.read_text() == '{"id": "c"}\n'


def test_rows_are_put_in_the_order_of_the_input(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"id": identity} for identity in "dxbcya"])
    sort_rows(path, {identity: position for position, identity in enumerate("abcd")})
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == list("abcdxy")
