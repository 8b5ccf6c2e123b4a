"""The main job on the bundled target: its own answers, a draft trained on them, and the pair served.

Oracles: the same engine without a draft, transformers' generate, and the accept length that training simulated.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.data_tools.dataset import Conversation, Tokens, write_dataset
from slipstream.data_tools.frequency_map import main as make_token_map
from slipstream.models.files.checkpoint import read_json, tokenizer_hash
from slipstream.serve.llm import LLM, Generation
from slipstream.serve.request import SamplingParams
from slipstream.tests.random_targets import change_json
from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.train.runs import emitted_per_round
from slipstream.train.dflash import main as train_dflash
from slipstream.train.eagle3 import main as train
from slipstream.train.trackers import read_metrics

DEPTH = 3
DRAFTERS = {  # program; to learn by heart: its flags, the drafter's options, tokens of a round, questions, rounds
    "eagle3": (train, ["--draft.ttt_steps", str(DEPTH), "--optim.steps", "40"], {"depth": DEPTH}, DEPTH + 1, 1, 4),
    "dflash": (train_dflash, ["--draft.num_layers", "2", "--optim.steps", "60"], {}, 16, 1, 2),
}


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM(str(TINY))


def prompts(llm: LLM, split: str, count: int) -> list[list[int]]:
    with gzip.open(ROOT / "assets" / "gsm8k.jsonl.gz", "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["split"] == split][:count]
    return [
        llm.tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        for row in rows
    ]


def answer(llm: LLM, questions: list[list[int]], max_tokens: int, temperature: float = 0.0) -> list[Generation]:
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed) for seed in range(len(questions))
    ]
    return llm.generate(questions, params)


def rows_of(questions: list[list[int]], answers: list[Generation]) -> list[Tokens]:
    rows = []
    for question, reply in zip(questions, answers, strict=True):
        ids = np.array(question + reply.tokens, dtype=np.int32)
        rows.append((ids, np.arange(len(ids)) >= len(question)))
    return rows


def save_answers(llm: LLM, path: Path, train_rows: list[Tokens], heldout_rows: list[Tokens]):
    described = {
        "tokenizer_hash": tokenizer_hash(llm.tokenizer),
        "vocab_size": 4096,
        "special_ids": [],
        "end_ids": [0, 2],
    }
    train = [Conversation([row]) for row in train_rows]
    heldout = [Conversation([row]) for row in heldout_rows]
    described |= {"target": ""}
    write_dataset(train, path, heldout=0.0, seed=0, describe=lambda: described, heldout_conversations=heldout)


@pytest.mark.parametrize("drafter", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_an_overfitted_draft_is_accepted_whole(target, tmp_path, caplog, drafter):
    """One batch learnt by heart: every round emits as many tokens as the draft and the target's own make."""
    program, flags, options, length, num_questions, num_rounds = DRAFTERS[drafter]
    questions = prompts(target, "heldout", num_questions)
    answers = answer(target, questions, max_tokens=num_rounds * length + 1)
    assert {reply.finish_reason for reply in answers} == {"length"}
    rows = rows_of(questions, answers)
    # Held out are the same rows: with another token at the end, since copies would not be trained on.
    longer = [(np.append(ids, np.int32(0)), np.append(mask, False)) for ids, mask in rows]
    save_answers(target, tmp_path / "data", rows, longer)
    program(
        ["--target", str(TINY), "--output", str(tmp_path / "draft"), "--data.path", str(tmp_path / "data")]
        + ["--data.max_length", "512", "--optim.name", "muon", "--optim.lr", "5e-3", *flags]
        + ["--evaluation.every", "1000", "--checkpoint.every", "1000"]
    )
    caplog.clear()
    drafted = LLM(draft=str(tmp_path / "draft" / "best"), drafter=options, width=length)
    served = answer(drafted, questions, max_tokens=num_rounds * length + 1)
    assert [reply.tokens for reply in served] == [reply.tokens for reply in answers]
    assert emitted_per_round(served) == length
    check_warning_for_another_tokenizer(tmp_path / "draft" / "best", caplog)


def check_warning_for_another_tokenizer(draft: Path, caplog: pytest.LogCaptureFixture):
    assert not caplog.messages
    change_json(draft / "config.json", tokenizer_hash="0" * 64)
    LLM(draft=str(draft))
    assert "was trained for other tokenizer rules" in caplog.text


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory) -> Path:
    """The target's answers and their token map; the tests serve the held-out questions."""
    folder = tmp_path_factory.mktemp("main_job")
    splits = {split: prompts(target, split, count) for split, count in (("train", 400), ("heldout", 64))}
    rows = {split: rows_of(questions, answer(target, questions, max_tokens=192)) for split, questions in splits.items()}
    save_answers(target, folder / "data", rows["train"], rows["heldout"])
    make_token_map(["--data", str(folder / "data"), "--size", "1024", "--output", str(folder / "map.safetensors")])
    return folder


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
def trained(request, folder) -> Path:
    """A draft trained for about two minutes by its recipe."""
    program, *_ = DRAFTERS[request.param]
    output = folder / request.param
    program(
        ["--config", str(ROOT / "configs" / request.param / "tiny.yaml"), "--target", str(TINY), "--output"]
        + [str(output), "--data.path", str(folder / "data"), "--draft.vocabulary"]
        + [str(folder / "map.safetensors"), "--optim.epochs", "2", "--evaluation.documents", "64"]
    )
    return output


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_64_answers_are_the_same_with_and_without_the_draft(target, trained, temperature):
    questions = prompts(target, "heldout", 64)
    alone = LLM(str(TINY), max_running=1)
    expected = [reply.tokens for reply in answer(alone, questions, 128, temperature)]
    for draft in ("none", str(trained / "best")):
        for max_running in (1, 8):
            llm = LLM(str(TINY), draft, max_running=max_running)
            served = answer(llm, questions, 128, temperature)
            assert [reply.tokens for reply in served] == expected, f"{draft} at batch {max_running}"
            assert draft == "none" or emitted_per_round(served) > 1.2


@pytest.mark.slow
def test_64_greedy_answers_are_those_of_transformers(target, trained):
    questions = prompts(target, "heldout", 64)
    served = answer(LLM(str(TINY), str(trained / "best")), questions, 128)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for question, reply in zip(questions, served, strict=True):
        output = model.generate(torch.tensor([question]), do_sample=False, max_new_tokens=128)
        assert output[0, len(question) :].tolist() == reply.tokens


@pytest.mark.slow
def test_the_simulated_accept_length_is_the_served_one(target, trained):
    """Both walk the same texts; they differ by bf16 weights on disk only."""
    records = read_metrics(trained / "metrics.jsonl")
    simulated = max(record["eval_accept_length"] for record in records if "eval_accept_length" in record)
    options, width = DRAFTERS[trained.name][2:4]
    width = read_json(trained / "best" / "config.json").get("block_size", width)  # the recipe's block, not the default
    served = answer(LLM(draft=str(trained / "best"), drafter=options, width=width), prompts(target, "heldout", 64), 192)
    assert emitted_per_round(served) == pytest.approx(simulated, rel=0.03)
