"""Rounds with a given accept length: as many tokens as asked for, the target's own."""

from pathlib import Path

import pytest
import torch

from slipstream.serve.simulate import simulate
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import build_engine, make_request, random_prompt, run


@pytest.mark.parametrize("accept_length", [1.0, 1.3, 2.99, 4.0])
def test_the_mean_is_the_one_asked_for(accept_length: float) -> None:
    sampled = torch.arange(4000 * 4).view(4000, 4)
    keys, positions = torch.arange(4000), torch.arange(4000) % 97
    verdict = simulate(sampled, keys, positions, accept_length)
    assert float(verdict.lengths.float().mean()) == pytest.approx(accept_length, abs=0.03)
    assert {int(accept_length), int(accept_length + 0.999)} >= set(verdict.lengths.tolist())
    for index in range(0, 4000, 371):
        count = int(verdict.lengths[index])
        assert verdict.tokens[index].tolist() == sampled[index, :count].tolist() + [-1] * (4 - count)
        assert verdict.nodes[index].tolist() == [*range(count), *[-1] * (4 - count)]


def test_an_engine_emits_that_many(make_target, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save_random_draft(make_target("llama"), tmp_path / "draft")
    engine = build_engine(make_target("llama"), tmp_path / "draft", simulate_accept_length=3.0)
    (answer,) = run(engine, [make_request("0", random_prompt(9, 0), max_tokens=61, ignore_eos=True)]).values()
    assert (answer.counts.rounds, answer.counts.accepted_tokens) == (20, 40)
