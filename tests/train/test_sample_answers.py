"""Answers that become samples, and their spans, which hold the characters of the accepted tokens."""

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.tests.train.conftest import Document
from slipstream.train.acceptance import walk_answers
from slipstream.train.batches import collate
from slipstream.train.samples import Sample, SampleAnswers
from slipstream.train.trackers import read_lines


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: characters beyond ASCII take several."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def document(tokenizer: Any, *turns: tuple[str, str]) -> Document:
    tokens = []
    mask = []
    for prompt, answer in turns:
        for text, supervised in ((prompt, False), (answer, True)):
            ids = tokenizer(text).input_ids
            tokens = tokens + ids
            mask = mask + [supervised] * len(ids)
    return tokens, mask


def samples(tokenizer: Any, rows: list[list[Document]], accepted: list[int], limit: int = 9) -> list[Sample]:
    """`accepted` by row of the flattened batch."""
    batch = collate(rows, 64)
    collected = SampleAnswers(tokenizer, limit)
    asking = torch.arange(batch.tokens.numel())
    counts = torch.zeros(len(asking), dtype=torch.int64)
    counts[: len(accepted)] = torch.tensor(accepted)
    collected.add(batch, walk_answers(batch, asking, counts))
    answers = collected.take()
    assert collected.take() == [], "they are handed out once"
    return answers


def test_spans_hold_the_accepted_tokens(tokenizer):
    # Rounds begin at the roots a, e and g of "abcdefg": rows 2, 6 and 8. Accepted: bcd, f, none.
    (sample,) = samples(tokenizer, [[document(tokenizer, ("1: ", "abcdefg"))]], [0, 0, 3, 9, 9, 9, 1, 9, 0])
    assert sample == Sample("1: ", "abcdefg", ((1, 4), (5, 6)))
    assert sample.html() == "a<mark>bcd</mark>e<mark>f</mark>g"


def test_a_character_of_several_tokens_is_drafted_with_the_one_that_ends_it(tokenizer):
    # "xäyü": x, 2 tokens, y, 2 tokens. From x one token, half of ä, then the target's other half;
    # from there y and half of ü.
    (sample,) = samples(tokenizer, [[document(tokenizer, ("1:", "xäyü"))]], [0, 1, 0, 2, 0, 0])
    assert sample == Sample("1:", "xäyü", ((2, 3),))


def test_the_first_answer_of_each_document_up_to_the_limit(tokenizer):
    documents = [document(tokenizer, (f"{n}: ", "ab"), ("again: ", "cd")) for n in range(3)]
    answers = samples(tokenizer, [documents[:2], documents[2:]], [], limit=2)
    assert [(sample.prompt, sample.answer, sample.spans) for sample in answers] == [
        ("0: ", "ab", ()),
        ("1: ", "ab", ()),
    ]
    assert len(samples(tokenizer, [documents], [])) == 3
    assert samples(tokenizer, [documents], [], limit=0) == []


def test_long_answers_are_cut(tokenizer, monkeypatch):
    monkeypatch.setattr("slipstream.train.samples.ANSWER_TOKENS", 4)
    monkeypatch.setattr("slipstream.train.samples.PROMPT_TOKENS", 2)
    (sample,) = samples(tokenizer, [[document(tokenizer, ("012: ", "abcdefgh"))]], [0, 0, 0, 0, 5, 0])
    assert sample == Sample(": ", "abcd", ((1, 4),))


def test_a_run_writes_samples_at_every_evaluation(finished):
    lines = read_lines(finished / "metrics.jsonl")
    answers = [(line["step"], Sample.from_record(line)) for line in lines if "sample" in line]
    assert [step for step, _ in answers] == [3] * 4 + [6] * 4
    assert all(sample.answer and sample.prompt for _, sample in answers)
    run = json.loads((finished / "best" / "run.json").read_text())
    assert {"platform", "cpus", "gpus", "cuda", "processes"} == run["system"].keys()
