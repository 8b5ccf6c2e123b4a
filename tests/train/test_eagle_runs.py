"""EAGLE's training and the server agree; whole runs: what they leave behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig

from slipstream.models.config import ModelConfig
from slipstream.models.eagle import load_eagle
from slipstream.models.frozen_target import load_frozen_target
from slipstream.models.layers import RotaryEmbedding
from slipstream.models.target import load_config
from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams
from slipstream.tests.random_drafts import save_random_eagle
from slipstream.tests.train.conftest import DRAFT_VOCAB_SIZE, SaveData
from slipstream.tests.train.runs import records
from slipstream.train.batches import Batch, collate
from slipstream.train.eagle import DraftOptions, EagleTraining, main

DEPTH, MAX_LENGTH = 3, 64
PROMPTS = [[5, 9, 33, 71, 20, 8, 64], [90, 14, 2, 45, 45, 45, 17, 3, 60, 101, 7]]


def load_training(target: Path, draft: Path) -> EagleTraining:
    config, cpu = load_config(target), torch.device("cpu")
    module = load_eagle(draft, config, torch.float32, cpu)
    frozen = load_frozen_target(target, module.config.feature_layers, cpu)
    rope = RotaryEmbedding(config.rope, config.head_dim, 256)
    return EagleTraining(module, frozen, rope, DraftOptions(), DEPTH, seed=0)


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 100, "fc_bias": False}])
def test_the_server_drafts_what_training_says(target_path: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Every state that two greedy answers' rounds begin with, the drafted tokens and the accept length."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    alone = LLM(str(target_path)).generate(PROMPTS, params)
    texts = [(len(prompt), prompt + answer.tokens) for prompt, answer in zip(PROMPTS, alone, strict=True)]
    save_random_eagle(target_path, tmp_path / "draft", texts[:1], intermediate_size=64, **fields)
    llm = LLM(str(target_path), str(tmp_path / "draft"), max_running=1)
    drafter: Any = llm.engine.drafter
    served: list[tuple[int, Tensor, list[int]]] = []  # position of the root, state at the row before, drafted tokens
    propose = drafter.propose

    def recorded(batch: Batch, width: int) -> Any:
        proposal = propose(batch, width)
        served.append((int(batch.lengths[0]), drafter.hidden[batch.rows][0].clone(), proposal.tokens[0, 1:].tolist()))
        return proposal

    drafter.propose = recorded
    training, rows, emitted, rounds = load_training(target_path, tmp_path / "draft").eval(), [], 0, 0
    for prompt in PROMPTS:
        served.clear()
        (answer,) = llm.generate([prompt], params)
        tokens = prompt + answer.tokens
        rows.append([(tokens, [i >= len(prompt) for i in range(len(tokens))])])
        emitted += answer.stats.completion_tokens - answer.stats.prefills
        rounds += answer.stats.rounds
        check_states(training, tokens, [item for item in served if item[0] < len(tokens) - DEPTH])
    with torch.no_grad():
        _, metrics = training(collate(rows, MAX_LENGTH))
    assert metrics["accept_length"].tolist() == [emitted, rounds]
    assert emitted > 1.2 * rounds


def check_states(training: EagleTraining, tokens: list[int], served: list[tuple[int, Tensor, list[int]]]) -> None:
    assert len(served) >= 4
    batch = collate([[(tokens, [False] + [True] * (len(tokens) - 1))]], MAX_LENGTH)
    rows, flat, features, _ = training.read(batch, 1)
    with torch.no_grad():
        (states,) = training.chain(rows, flat, features, 1)
        drafted = training.predictions(states)
    place = {row: index for index, row in enumerate(rows.asking.tolist())}
    for position, state, proposed in served:
        index = place[position - 1]
        torch.testing.assert_close(states[index], state, rtol=1e-4, atol=1e-4)
        assert int(drafted[index]) == proposed[0]


def test_a_run_leaves_servable_checkpoints(
    tmp_path: Path, target_path: Path, run_flags: Callable[..., list[str]]
) -> None:
    main(run_flags(tmp_path, draft__bias="false", optim__name="muon"))
    target = ModelConfig.from_hf(AutoConfig.from_pretrained(target_path))
    config = load_eagle(tmp_path / "best", target, torch.float32, torch.device("cpu")).config
    assert (config.fc_bias, config.draft_vocab_size, config.target) == (False, DRAFT_VOCAB_SIZE, str(target_path))
    lines = records(tmp_path)
    assert [line["step"] for line in lines if "eval_accept_length" in line] == [3, 6]
    assert {"feature_loss_0", "accept_rate_0", "eval_accept_rate_2"} <= lines[-1].keys()


def test_accumulation_equals_a_bigger_batch(tmp_path: Path, run_flags: Callable[..., list[str]]) -> None:
    main(run_flags(tmp_path / "batch", data__batch_size=4, optim__steps=3))
    main(run_flags(tmp_path / "window", data__batch_size=2, optim__accumulation=2, optim__steps=3))
    for one, other in zip(records(tmp_path / "window"), records(tmp_path / "batch"), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_an_overfitted_draft_is_accepted_whole(
    tmp_path: Path, target_path: Path, save_data: SaveData, run_flags: Callable[..., list[str]]
) -> None:
    """One batch learnt by heart: every round emits depth + 1 tokens."""
    params = SamplingParams(max_tokens=3 * (DEPTH + 1) + 1, temperature=0.0, ignore_eos=True)
    answers = [answer.tokens for answer in LLM(str(target_path)).generate(PROMPTS, params)]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    masks = [[i >= len(prompt) for i in range(len(text))] for prompt, text in zip(PROMPTS, texts, strict=True)]
    data = save_data(*[Dataset.from_dict({"input_ids": texts, "loss_mask": masks})] * 2)
    learnt = {"data__path": data, "data__max_length": 64, "data__batch_size": 1, "draft__noise": 0}
    learnt |= {"optim__name": "muon", "optim__steps": 150, "draft__ttt_steps": DEPTH, "evaluation__every": 150}
    command = run_flags(tmp_path, checkpoint__every=1000, draft__intermediate_size=256, **learnt)
    main([flag for flag in command if "vocabulary" not in flag])
    for options in ({"depth": DEPTH}, {"depth": DEPTH, "topk": 3, "nodes": 16}):
        drafted = LLM(str(target_path), str(tmp_path / "best"), drafter=options)
        served = drafted.generate(PROMPTS, params)
        assert [answer.tokens for answer in served] == answers
        emitted = sum(answer.stats.completion_tokens - answer.stats.prefills for answer in served)
        assert emitted / sum(answer.stats.rounds for answer in served) == DEPTH + 1
