"""Training and the server compute the same states of a draft, and both accept as many tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.sampling.sample import gumbel, noise_key
from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.drafts.eagle import Eagle
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.frozen import load_frozen_target
from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams
from slipstream.tests.pairwise import rotating
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft, save_random_eagle
from slipstream.tests.train.runs import PROMPTS
from slipstream.train import dflash, eagle, eagle3
from slipstream.train.batches import Batch, collate
from slipstream.train.blocks import find_blocks
from slipstream.train.training import DraftTraining

CPU = torch.device("cpu")
BLOCK_SIZE = 6
DEPTH = 3
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SEED = 5  # of requests at temperature 1
HEADS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": 100},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6},
    "dspark": {"markov_rank": 8, "confidence_head": True, "sample_from_anchor": True},
    "lilicorr": {"lilicorr": LiLiCorrConfig(candidate_topk=2, hidden_size=32, num_heads=2, factor_dim=16)},
}
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "eagle": (eagle.EagleTraining, Eagle, eagle.DraftOptions()),
    "eagle3": (eagle3.Eagle3Training, Eagle3, eagle3.DraftOptions()),
    "dflash": (dflash.DFlashTraining, DFlash, dflash.DraftOptions()),
}
Served = list[tuple[int, Tensor, list[int]]]  # position of the root, the draft's states there, drafted tokens


def answers_alone(target: Path) -> list[tuple[int, list[int]]]:
    """The target's own greedy answers, as (length of the prompt, all tokens)."""
    alone = LLM(str(target)).generate(PROMPTS, PARAMS)
    return [(len(prompt), prompt + answer.tokens) for prompt, answer in zip(PROMPTS, alone, strict=True)]


def load_training(kind: Any, network: Any, options: Any, target: Path, draft: Path, depth: int) -> Any:
    config = load_config(target)
    module = load_draft(network, draft, config, torch.float32, CPU)
    frozen = load_frozen_target(target, module.config.aux_layers, CPU)
    return kind(
        module, frozen, RotaryEmbedding(module.config.rope, module.config.head_dim, 256), options, depth, seed=0
    ).eval()


def check_served(
    llm: LLM, states: Callable[[Batch], Tensor], training: DraftTraining, check: Callable[[list[int], Served], None]
):
    """Runs `check` on the tokens and rounds of two greedy answers; `states` of a request whose draft was just made.
    Then the accept length: what the server counted is what evaluation counts."""
    drafter = llm.engine.runner.drafter
    propose = drafter.propose
    served = []

    def recorded(batch, width):
        proposal = propose(batch, width)
        served.append((int(batch.lengths[0]), states(batch), proposal.tokens[0, 1:].tolist()))
        return proposal

    drafter.propose = recorded
    rows = []
    emitted = 0
    rounds = 0
    for prompt in PROMPTS:
        served.clear()
        (answer,) = llm.generate([prompt], PARAMS)
        tokens = prompt + answer.tokens
        rows.append([(tokens, [i >= len(prompt) for i in range(len(tokens))])])
        emitted += answer.stats.completion_tokens - answer.stats.prefills
        rounds += answer.stats.rounds
        check(tokens, served)
    with torch.no_grad():
        _, metrics = training(collate(rows, 64))
    assert metrics["accept_length"].tolist() == [emitted, rounds]
    assert emitted > 1.2 * rounds


def whole(tokens: list[int]) -> Batch:
    """One document that is supervised as a whole."""
    return collate([[(tokens, [False] + [True] * (len(tokens) - 1))]], 64)


@pytest.mark.parametrize(
    ("target_name", "fields"), [("target_path", {}), ("gemma_path", {"draft_vocab_size": 100, "fc_bias": False})]
)
def test_eagle(target_name, tmp_path, fields, request):
    """A draft for Gemma reads unscaled rows of the embedding and caps no logits, in training as in serving."""
    target = request.getfixturevalue(target_name)
    texts = answers_alone(target)[:1]
    draft = tmp_path / "draft"
    save_random_eagle(target, draft, texts, intermediate_size=64, **fields)
    check_chain(target, draft, load_training(eagle.EagleTraining, Eagle, eagle.DraftOptions(), target, draft, DEPTH))


def test_eagle3_of_two_layers(target_path, tmp_path):
    """Its upper layer's KV of committed tokens depends on the rows before."""
    draft = tmp_path / "draft"
    save_random_draft(target_path, draft, num_layers=2, fc_norm=True, norm_output=True)
    training = load_training(eagle3.Eagle3Training, Eagle3, eagle3.DraftOptions(), target_path, draft, DEPTH)
    check_chain(target_path, draft, training)


def check_chain(target: Path, draft: Path, training: Any):
    llm = LLM(str(target), str(draft), max_running=1, width=DEPTH + 1)
    drafter = llm.engine.runner.drafter

    def check(tokens, served):
        """The state at the row before each root, and the first drafted token."""
        rows, flat, aux_states, _ = training.read(whole(tokens), 1)
        with torch.no_grad():
            (states,) = training.chain(rows, flat, aux_states, 1)
            drafted = training.predictions(states)
        place = {row: index for index, row in enumerate(rows.of_taught(rows.asking).tolist())}
        compared = [item for item in served if item[0] < len(tokens) - DEPTH]
        assert len(compared) >= 4
        for position, state, proposed in compared:
            index = place[position - 1]
            torch.testing.assert_close(states[index], state, rtol=1e-4, atol=1e-4)
            assert int(drafted[index]) == proposed[0]

    check_served(llm, lambda batch: drafter._start(batch)[0], training, check)


@pytest.mark.parametrize(
    "fields",
    [
        {"draft_vocab_size": 50, "num_layers": 3},
        {"sliding_window": 4, "windowed_layers": (1,)},
        {"rank": 2},
    ],
    ids=["reduced and deep", "mixed", "adapter"],
)
def test_dflash(target_path, tmp_path, fields):
    """`rank`: of an adapter that is trained, and served to requests of the draft."""
    texts = answers_alone(target_path)
    draft = tmp_path / "draft"
    rank = fields.get("rank", 0)
    fields = {name: value for name, value in fields.items() if name != "rank"}
    save_random_dflash(target_path, draft, texts, block_size=BLOCK_SIZE, mask_token_id=7, **fields)
    options = dflash.DraftOptions()
    training = load_training(dflash.DFlashTraining, DFlash, options, target_path, draft, BLOCK_SIZE - 1)
    drafter_options = write_random_adapter(training, rank, draft, tmp_path / "adapter") if rank else {}
    llm = LLM(str(target_path), str(draft), max_running=1, width=BLOCK_SIZE, drafter=drafter_options)
    outputs = []
    drafter = llm.engine.runner.drafter
    drafter.module.register_forward_hook(lambda _module, _inputs, states: outputs.append(states))

    def check(tokens, served):
        """The final states of every block, and all drafted tokens."""
        compared = [item for item in served if item[0] < len(tokens)]
        assert len(compared) >= 4
        batch = whole(tokens)
        blocks = find_blocks(batch, torch.tensor([anchor for anchor, _, _ in compared]), BLOCK_SIZE)
        with torch.no_grad():
            states = training.states(blocks, training.read(batch))
            drafted = training.predictions(states[:, 1:].flatten(0, 1)).view(len(compared), -1)
        for number, (_, expected, proposed) in enumerate(compared):
            torch.testing.assert_close(states[number], expected, rtol=1e-4, atol=1e-4)
            assert drafted[number].tolist() == proposed

    check_served(llm, lambda _batch: outputs.pop(), training, check)


def write_random_adapter(training: DraftTraining, rank: int, draft: Path, folder: Path) -> dict[str, Any]:
    """Returns options with which all requests take it."""
    training.adapt(rank, str(draft))
    torch.manual_seed(0)
    for parameter in training.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape) / 20
    folder.mkdir()
    training.write(training.state_dict(), folder, {})
    return {"adapters": {"x": str(folder)}, "ab": {"x": 1.0}}


@pytest.mark.parametrize(("heads", "temperature"), rotating(HEADS, [1.0, 0.0]))
def test_chains_of_heads(target_path, tmp_path, heads, temperature):
    save_random_dflash(
        target_path, tmp_path / "draft", answers_alone(target_path), block_size=BLOCK_SIZE, **HEADS[heads]
    )
    check_accept_length("dflash", target_path, tmp_path / "draft", temperature)


def test_chains_at_temperature_1(target_path, gemma_path, tmp_path):
    for drafter, target in (("eagle", target_path), ("eagle3", gemma_path)):
        save_random_chain(drafter, target, tmp_path / drafter)
        check_accept_length(drafter, target, tmp_path / drafter, 1.0)


def save_random_chain(drafter: str, target: Path, draft: Path):
    if drafter == "eagle":
        save_random_eagle(target, draft, answers_alone(target)[:1], draft_vocab_size=100, intermediate_size=64)
    else:
        save_random_draft(target, draft, num_layers=2, fc_norm=True, norm_output=True)


def check_accept_length(drafter: str, target: Path, draft: Path, temperature: float):
    """Evaluation counts exactly what the server accepts; above temperature 0 with the requests' own noise."""
    training, rounds, emitted, batch = serve_and_load(drafter, target, draft, temperature, PROMPTS)
    training.temperature = temperature
    training.reads_final_state |= temperature > 0
    training.text_noise = noise_of_requests(training)
    _, metrics = training(batch)
    assert metrics["accept_length"].tolist() == [emitted, rounds]
    assert emitted > 1.05 * rounds


@pytest.mark.slow
@pytest.mark.parametrize("heads", [*HEADS, "eagle", "eagle3"])
def test_noise_that_is_drawn_for_texts_is_worth_as_much(target_path, tmp_path, heads):
    """Without the requests' keys, evaluation at temperature 1 finds the served accept length within 3 %."""
    if heads in HEADS:
        save_random_dflash(
            target_path, tmp_path / "draft", answers_alone(target_path), block_size=BLOCK_SIZE, **HEADS[heads]
        )
    else:
        save_random_chain(heads, target_path, tmp_path / "draft")
    prompts = [[3 + i % 100, 9 + i % 7, 40 + i % 50] for i in range(300)]
    drafter = "dflash" if heads in HEADS else heads
    training, rounds, emitted, batch = serve_and_load(drafter, target_path, tmp_path / "draft", 1.0, prompts)
    training.temperature = 1.0
    training.reads_final_state = True
    _, metrics = training(batch)
    total, count = metrics["accept_length"].tolist()
    assert total == emitted
    assert total / count == pytest.approx(emitted / rounds, rel=0.03)


@torch.no_grad()
def serve_and_load(
    drafter: str, target: Path, draft: Path, temperature: float, prompts: list[list[int]]
) -> tuple[Any, int, int, Batch]:
    """The draft in training, and its rounds, their tokens and the texts when it serves answers to `prompts`."""
    kind, network, options = KINDS[drafter]
    config = load_draft(network, draft, load_config(target), torch.float32, CPU).config
    depth = config.num_proposals if isinstance(config, DFlash.Config) else DEPTH
    llm = LLM(str(target), str(draft), width=depth + 1)
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True, seed=SEED + index)
        for index in range(len(prompts))
    ]
    answers = llm.generate(prompts, params)
    rows = [
        [(prompt + answer.tokens, [i >= len(prompt) for i in range(len(prompt) + 24)])]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    rounds = sum(answer.stats.rounds for answer in answers)
    emitted = sum(answer.stats.completion_tokens - answer.stats.prefills for answer in answers)
    training = load_training(kind, network, options, target, draft, depth)
    return training.requires_grad_(False), rounds, emitted, collate(rows, 64)


def noise_of_requests(training: Any) -> Any:
    """`DraftTraining.text_noise` with the requests' keys, whose seeds are SEED and those after it."""

    def noise(batch, rows, _tokens, _final):
        width = batch.tokens.shape[1]
        keys = torch.tensor([noise_key(SEED + row, 0) for row in (rows // width).tolist()])
        return training.temperature * gumbel(keys, rows % width + 1, training.target_ids)

    return noise
