"""Logs of served answers: every kind of row, against tokens put together by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.data_tools.options import ConversationOptions, TokenizeOptions
from slipstream.data_tools.rows import Row, RowError
from slipstream.data_tools.target_tokenizer import TargetTokenizer, load_target_tokenizer
from slipstream.data_tools.tokenization import AnswerTokenizer, tokenize_rows
from slipstream.tests.tables import each_case, table_of


@pytest.fixture(scope="module")
def loaded(target) -> TargetTokenizer:
    return load_target_tokenizer(ConversationOptions(target=str(target)))


def row(columns: object, number: int = 1) -> Row:
    return Row(f"log, line {number}", json.dumps(columns).encode())


def tokens(target: Path, *pieces: str) -> list[int]:
    """Each piece tokenised by itself."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def choice(text: Any, reason: str = "stop", **more: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, **more}, "finish_reason": reason}


CASES: dict[str, tuple[dict[str, Any], list[str]]] = table_of(__file__, "cases")


@pytest.mark.parametrize("case", CASES)
def test_texts_and_their_ends_are_counted(case, target, loaded):
    columns, expected = CASES[case]
    (outcome,) = tokenize_rows([row(columns)], AnswerTokenizer(loaded, TokenizeOptions()))
    assert outcome.status == "kept"
    [(ids, mask)] = outcome.documents
    assert ids.tolist() == tokens(target, *expected)
    assert mask.all()


def test_token_ids_are_taken_as_they_are(loaded):
    rows = [
        {"choices": [{"text": "not this", "token_ids": [9, 8, 2], "finish_reason": "stop"}]},
        {"text": "nor this", "output_ids": [7, 7], "meta_info": {"finish_reason": {"type": "stop"}}},
        {"token_ids": [5]},
        {"input_ids": [9, 9, 4, 2], "loss_mask": [0, 0, 1, 1], "tokenizer_hash": loaded.hash},
        {
            "token_rows": [
                {"input_ids": [9, 9, 4, 2], "loss_mask": [0, 0, 1, 1]},
                {"input_ids": [7, 6], "loss_mask": [0, 1]},
            ]
        },
    ]
    outcomes = list(tokenize_rows([row(columns) for columns in rows], AnswerTokenizer(loaded, TokenizeOptions())))
    answers = [ids.tolist() for outcome in outcomes for ids, _ in outcome.documents]
    assert answers == [[9, 8, 2], [7, 7], [5], [4, 2], [4, 2, 6]]


def test_failed_requests_and_tool_calls_are_dropped(loaded):
    rows = [
        {"custom_id": "a", "response": None, "error": {"message": "overloaded"}},
        {"error": {"message": "overloaded"}},
        {"choices": [choice(None, "tool_calls", tool_calls=[{"function": {"name": "f"}}])]},
        {"choices": []},
        {"choices": [choice("")]},
    ]
    outcomes = list(tokenize_rows([row(columns) for columns in rows], AnswerTokenizer(loaded, TokenizeOptions())))
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("dropped", "no_answer")] * 5


@each_case(
    ({"response": "a\ud83d"}, "message holds \\\\ud83d at character 1, half of a surrogate pair"),
    ({"choices": [choice("a\ud83d")]}, "message holds \\\\ud83d at character 1, half of a surrogate pair"),
)
def test_other_rows_are_named_with_their_place(columns, message, loaded):
    rows = [row(columns, 7), row({"text": "Hello"})]
    with pytest.raises(RowError, match=f"log, line 7: .*{message}.* \\(--skip-bad counts such rows instead\\)"):
        list(tokenize_rows(rows, AnswerTokenizer(loaded, TokenizeOptions())))
    skipped = list(tokenize_rows(rows, AnswerTokenizer(loaded, TokenizeOptions(skip_bad=True))))
    assert [outcome.status for outcome in skipped] == ["bad", "kept"]
