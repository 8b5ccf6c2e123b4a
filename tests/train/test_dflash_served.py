"""What training computes for a block is what the server drafts it from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models.dflash import load_dflash
from slipstream.models.frozen_target import load_frozen_target
from slipstream.models.layers import RotaryEmbedding
from slipstream.models.target import load_config
from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams
from slipstream.tests.random_drafts import save_random_dflash
from slipstream.train.batches import collate
from slipstream.train.blocks import find_blocks
from slipstream.train.dflash import DFlashTraining, DraftOptions

CPU, BLOCK_SIZE = torch.device("cpu"), 6
PROMPTS = [[5, 9, 33, 71, 20, 8, 64], [90, 14, 2, 45, 45, 45, 17, 3, 60, 101, 7]]


def load_training(target: Path, draft: Path, depth: int) -> DFlashTraining:
    config = load_config(target)
    module = load_dflash(draft, config, torch.float32, CPU)
    frozen = load_frozen_target(target, module.config.feature_layers, CPU)
    rope = RotaryEmbedding(config.rope, config.head_dim, 256)
    return DFlashTraining(module, frozen, rope, DraftOptions(), depth, seed=0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"draft_vocab_size": 50},
        {"sliding_window": 5, "windowed_layers": (0, 1)},
        {"sliding_window": 4, "windowed_layers": (1,)},
        {"num_layers": 3},
    ],
    ids=["plain", "reduced", "windowed", "mixed", "deep"],
)
def test_the_server_drafts_from_the_states_of_training(
    target_path: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Every block of two greedy answers: its final states, the drafted tokens and, in the end, the accept length."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    alone = LLM(str(target_path)).generate(PROMPTS, params)
    texts = [(len(prompt), prompt + answer.tokens) for prompt, answer in zip(PROMPTS, alone, strict=True)]
    save_random_dflash(target_path, tmp_path / "draft", texts, block_size=BLOCK_SIZE, mask_token_id=7, **fields)
    llm = LLM(str(target_path), str(tmp_path / "draft"), max_running=1)
    drafter: Any = llm.engine.drafter
    served: list[tuple[int, Tensor, list[int]]] = []  # position of the anchor, states (S, H), drafted tokens
    drafter.module.register_forward_hook(lambda _module, _inputs, states: seen.append(states))
    seen: list[Tensor] = []
    propose = drafter.propose

    def recorded(batch: Any, width: int) -> Any:
        proposal = propose(batch, width)
        served.append((int(batch.lengths[0]), seen.pop(), proposal.tokens[0, 1:].tolist()))
        return proposal

    drafter.propose = recorded
    training = load_training(target_path, tmp_path / "draft", BLOCK_SIZE - 1).eval()
    emitted = rounds = 0
    rows = []
    for prompt in PROMPTS:
        served.clear()
        (answer,) = llm.generate([prompt], params)
        tokens = prompt + answer.tokens
        rows.append([(tokens, [i >= len(prompt) for i in range(len(tokens))])])
        emitted += answer.stats.completion_tokens - answer.stats.prefills
        rounds += answer.stats.rounds
        compared = [item for item in served if item[0] < len(tokens)]
        assert len(compared) >= 4
        check_blocks(training, tokens, compared)
    with torch.no_grad():
        _, metrics = training(collate(rows, 64))
    assert metrics["accept_length"].tolist() == [emitted, rounds]
    assert emitted > 1.2 * rounds


def check_blocks(training: DFlashTraining, tokens: list[int], served: list[tuple[int, Tensor, list[int]]]) -> None:
    batch = collate([[(tokens, [False] + [True] * (len(tokens) - 1))]], 64)
    blocks = find_blocks(batch, torch.tensor([anchor for anchor, _, _ in served]), BLOCK_SIZE)
    with torch.no_grad():
        states = training.states(blocks, *training.read(batch))
        drafted = training.predictions(states[:, 1:].flatten(0, 1)).view(len(served), -1)
    for number, (_, expected, proposed) in enumerate(served):
        torch.testing.assert_close(states[number], expected, rtol=1e-4, atol=1e-4)
        assert drafted[number].tolist() == proposed
