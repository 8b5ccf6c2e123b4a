"""The replay accepts the engine's tokens, round by round: windows, and every head of a block."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.doctor.replay import Replay, Score, Subject
from slipstream.doctor.texts import Answered, Conversation, batches_of
from slipstream.models.drafts.base import DraftFiles, DraftNetwork
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.models.files.checkpoint import read_draft_tensors, read_json
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.tests.pairwise import gate_of
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft, save_random_eagle
from slipstream.tests.serve.engine_runs import build_engine, make_request, random_prompt, run

DEPTH = 5
TOKENS = 40
PROMPTS = [random_prompt(length, length) for length in (3, 9, 17, 30)]
SCORER = LiLiCorrConfig(candidate_topk=4, hidden_size=32, num_layers=1, num_heads=2, factor_dim=16)
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {"sliding_window": 7}),
    "eagle3": ("eagle3", {"sliding_window": 9, "draft_vocab_size": 90}),
    "eagle3-narrow": ("eagle3", {"sliding_window": 3, "norm_output": True}),
    "eagle3-two-layers": ("eagle3", {"sliding_window": 9, "num_layers": 2}),
    "dflash-windows": ("dflash", {"sliding_window": 6, "windowed_layers": (1,)}),
    "dflash2": ("dflash", {"conv_kernel_size": 2, "selector_rank": 4, "selector_top_k": 8}),
    "dspark": ("dflash", {"sample_from_anchor": True, "markov_rank": 8, "confidence_head": True}),
    "dspark-gated": ("dflash", {"markov_rank": 8, "markov_head_type": "gated", "block_size": 6}),
    "lilicorr": ("dflash", {"lilicorr": SCORER}),
}
HYBRID = "qwen3-5"  # for which random EAGLE3 drafts are right too seldom
CASES = [*product(DRAFTS, ["qwen3"]), ("eagle", HYBRID), ("dspark", HYBRID)]
GATE = [("eagle", HYBRID), ("eagle3-narrow", "qwen3"), ("dspark", "qwen3")]  # the others take longer
SAVE = {"eagle": save_random_eagle, "eagle3": save_random_draft, "dflash": save_random_dflash}


@pytest.mark.parametrize(("name", "target"), gate_of(CASES, GATE))
def test_the_replay_accepts_what_the_engine_accepts(name, target, make_target, tmp_path):
    family, fields = DRAFTS[name]
    folder = make_target(target)
    draft = tmp_path / "draft"
    texts = {} if family == "eagle3" else {"texts": known_texts(folder)}
    SAVE[family](folder, draft, **texts, **fields)
    options = {"width": block_of(draft)} if family == "dflash" else {"width": 6, "drafter": {"depth": DEPTH}}
    requests = [make_request(str(i), prompt, max_tokens=TOKENS) for i, prompt in enumerate(PROMPTS)]
    engine = build_engine(folder, draft, **options)
    answers = run(engine, requests)
    engine.close()
    outputs = [answers[str(i)] for i in range(len(PROMPTS))]
    answered = [
        Answered(prompt, answer.tokens, Conversation(())) for prompt, answer in zip(PROMPTS, outputs, strict=True)
    ]
    score = replayed(folder, draft, family, answered)
    assert [sum(outcome.answer == i for outcome in score.rounds) for i in range(len(outputs))] == [
        answer.counts.rounds for answer in outputs
    ]
    assert score.accept_length > 1.05  # else any replay would do


def known_texts(folder: Path) -> list[tuple[int, list[int]]]:
    engine = build_engine(folder)
    answers = run(engine, [make_request(str(i), prompt, max_tokens=TOKENS) for i, prompt in enumerate(PROMPTS)])
    engine.close()
    return [(len(prompt), prompt + answers[str(i)].tokens) for i, prompt in enumerate(PROMPTS)]


def block_of(draft: Path) -> int:
    values = read_json(draft / "config.json")
    return int(values["block_size"]) + bool(values["sample_from_anchor"])


def replayed(folder: Path, draft: Path, family: str, answered: list[Answered]) -> Score:
    target = load_target(folder, load_config(folder), torch.float32, torch.device("cpu"))
    subject = Subject(family=family, files=DraftFiles(read_json(draft / "config.json"), read_draft_tensors(draft)))
    replay = Replay(target, draft, batches_of(answered, 1 << 20), 63 if family == "dflash" else DEPTH)
    assert isinstance(replay.build(subject), DraftNetwork)
    return replay.score(subject)
