"""The program that compares greedy answers with transformers': the bundled target, and answers that differ."""

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams
from slipstream.tests.serve.transformers_answers import AnswersConfig, Difference, compare, first_difference
from slipstream.tests.sources import TINY


def test_answers_with_a_draft_are_those_of_transformers(capsys):
    engine = {"device": "cpu", "kv_cache_tokens": 4096}
    config = AnswersConfig(
        target=str(TINY), draft="ngram", questions=["gsm8k"], num_questions=3, max_tokens=40, engine=engine
    )
    assert compare(config) == [None] * 3
    assert "3 of 3 answers are those of transformers: 120 tokens in" in capsys.readouterr().out


def test_another_token_and_an_early_end_are_noticed():
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    llm = LLM(str(TINY), device="cpu", kv_cache_tokens=1024)
    prompt = [5, 6, 7]
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0))
    assert first_difference(model, prompt, answer, 8) is None
    cut = replace(answer, tokens=answer.tokens[:5])
    assert first_difference(model, prompt, cut, 8) == Difference(5, float("inf"))
    tokens = [*answer.tokens[:4], answer.tokens[4] + 1, *answer.tokens[5:]]
    difference = first_difference(model, prompt, replace(answer, tokens=tokens), 8)
    assert difference.place == 4
    assert difference.gap > 0
