"""How drafters are found, and that EAGLE3 proposes what a draft computed from nothing would propose.

Wrong draft KV never shows in the output, only in fewer accepted tokens. So every proposal that the engine stores is
compared with transformers' hidden states put through tests/naive_eagle3.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.kernels.sampling import noise_key
from slipstream.serve.drafters.base import build_options, find_drafter
from slipstream.serve.drafters.eagle3 import Drafter as Eagle3Drafter
from slipstream.serve.drafters.none import Drafter as NoneDrafter
from slipstream.serve.engine import Engine
from slipstream.serve.request import Request
from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import Answer, build_engine, collect, make_request, random_prompt


class Oracle:
    """What the draft should propose behind any text."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        self.naive = NaiveEagle3(draft, self.model.get_input_embeddings().weight.detach())
        self.layers = self.naive.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

    @torch.no_grad()
    def propose(self, tokens: list[int], request: Request, depth: int) -> list[int]:
        states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        last = self.model.config.num_hidden_layers
        features = torch.cat([states[-1 if layer == last else layer + 1][0] for layer in self.layers], dim=-1)
        key = noise_key(request.seed, request.choice)
        return self.naive.chain(features, tokens, depth, key, request.params.temperature)


def run_checked(engine: Engine, oracle: Oracle, requests: list[Request]) -> dict[str, Answer]:
    """Runs to the end; after every step each decoding request's stored proposal must be the oracle's."""
    answers: dict[str, Answer] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        collect(engine.step(), answers)
        for sequence in engine.scheduler._running:
            if sequence.decoding:
                expected = oracle.propose(sequence.tokens, sequence.request, engine.width - 1)
                stored = engine.state.tokens[sequence.row].tolist()
                assert stored == [sequence.tokens[-1], *expected], f"{sequence.request.id} at {len(sequence.tokens)}"
    engine.scheduler.check()
    return answers


def partial_rounds(answers: dict[str, Answer], depth: int) -> tuple[int, int, int]:
    """Rounds that accepted none, some and all of the `depth` drafted tokens."""
    counts = [answer.counts for answer in answers.values()]
    at_least = [sum(one.rounds for one in counts)]
    at_least += [sum((one.accepted_by_position + [0] * depth)[j] for one in counts) for j in range(depth)]
    return at_least[0] - at_least[1], at_least[1] - at_least[depth], at_least[depth]


@pytest.fixture(scope="module")
def make_draft(make_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("drafts") / family
            save_random_draft(make_target(family), folders[family], draft_vocab_size=100)
        return folders[family]

    return make


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("options", [{"page_size": 16}, {"page_size": 1, "prefill_budget": 7}])
def test_proposals_of_a_batch_equal_the_oracle(
    family: str,
    temperature: float,
    options: dict[str, Any],
    make_target: Callable[[str], Path],
    make_draft: Callable[[str], Path],
) -> None:
    engine = build_engine(make_target(family), make_draft(family), **options)
    requests = [
        make_request(f"{length} tokens", random_prompt(length, length), temperature=temperature, seed=length)
        for length in (1, 9, 33)
    ]
    answers = run_checked(engine, Oracle(make_target(family), make_draft(family)), requests)
    none, _, _ = partial_rounds(answers, depth=3)
    assert 0 < none < sum(answer.counts.rounds for answer in answers.values()), "some rounds accept, some do not"


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_proposals_of_any_depth_equal_the_oracle(
    depth: int, make_target: Callable[[str], Path], make_draft: Callable[[str], Path]
) -> None:
    engine = build_engine(make_target("qwen3"), make_draft("qwen3"), drafter={"depth": depth})
    requests = [make_request(str(seed), random_prompt(12, seed), temperature=0.7, seed=seed) for seed in range(2)]
    answers = run_checked(engine, Oracle(make_target("qwen3"), make_draft("qwen3")), requests)
    none, some, _ = partial_rounds(answers, depth)
    assert none > 0
    assert some > 0 or depth == 1


@pytest.mark.parametrize("page_size", [1, 16])
def test_proposals_after_a_prefix_hit_equal_the_oracle(
    page_size: int, make_target: Callable[[str], Path], make_draft: Callable[[str], Path]
) -> None:
    """Shared KV must fit the token that follows it too: the second request parts from the first behind 32 tokens."""
    engine = build_engine(make_target("qwen3"), make_draft("qwen3"), page_size=page_size)
    oracle, prompt = Oracle(make_target("qwen3"), make_draft("qwen3")), random_prompt(40, 1)
    first = run_checked(engine, oracle, [make_request("first", prompt)])
    longer = prompt + first["first"].tokens[:10]
    variants = ((prompt, 40), (prompt[:32] + random_prompt(9, 2), 32), (longer + random_prompt(3, 3), 50))
    for variant, num_shared in variants:
        answers = run_checked(engine, oracle, [make_request("next", variant)])
        assert answers["next"].counts.cached_tokens == (num_shared - 1) // page_size * page_size


def test_proposals_after_preemption_equal_the_oracle(
    make_target: Callable[[str], Path], make_draft: Callable[[str], Path]
) -> None:
    engine = build_engine(make_target("llama"), make_draft("llama"), kv_cache_tokens=96)
    requests = [make_request(str(seed), random_prompt(15, seed), max_tokens=40, seed=seed) for seed in range(3)]
    run_checked(engine, Oracle(make_target("llama"), make_draft("llama")), requests)
    assert engine.scheduler.num_preemptions > 0


def test_drafters_are_found_by_name_and_by_checkpoint(tmp_path: Path, make_draft: Callable[[str], Path]) -> None:
    assert find_drafter("none") is NoneDrafter
    assert find_drafter("eagle3") is Eagle3Drafter
    assert find_drafter(str(make_draft("llama"))) is Eagle3Drafter
    for architecture in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert find_drafter(str(tmp_path)) is Eagle3Drafter


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MedusaModel"]}, "architecture MedusaModel; known drafts: LlamaForCausalLMEagle3"),
        ({}, r"architecture \(none\); known drafts"),
        (
            {"drafter": "medusa"},
            "drafter 'medusa' does not exist; name a checkpoint folder or one of: .*eagle3, .*none",
        ),
        ({"drafter": "base"}, "drafter 'base' does not exist"),
    ],
)
def test_unknown_checkpoints_are_refused_with_the_known_ones(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        find_drafter(str(tmp_path))


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    for name in ("medusa", "base", ""):
        with pytest.raises(ValueError, match=f"drafter '{name}' does not exist; name .* one of: .*eagle3, .*none"):
            find_drafter(name)
    with pytest.raises(ValueError, match="checkpoint ../medusa does not exist"):
        find_drafter("../medusa")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        find_drafter(str(tmp_path))


def test_options_are_checked() -> None:
    assert build_options(Eagle3Drafter, {}).depth == 3
    assert build_options(Eagle3Drafter, {"depth": 5}).depth == 5
    with pytest.raises(ValueError, match=r"drafter option 'width' does not exist; valid: depth"):
        build_options(Eagle3Drafter, {"width": 2})
    with pytest.raises(ValueError, match=r"drafter option 'depth' does not exist; valid: \(none\)"):
        build_options(NoneDrafter, {"depth": 2})
    for depth in (0, -1, 64):
        with pytest.raises(ValueError, match=f"drafter.depth is {depth}; it must be between 1 and 63"):
            build_options(Eagle3Drafter, {"depth": depth})


def test_a_checkpoint_drafter_without_a_checkpoint_is_refused(make_target: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="checkpoint eagle3 does not exist; name a folder or a hub id"):
        build_engine(make_target("llama"), "eagle3")
