"""Steps after a longer proposal, and steps that emit as many tokens as they are told."""

from pathlib import Path

import pytest
import torch

from slipstream.kernels.speculation.ragged import Chunks, lay_out, verify_rows
from slipstream.serve.engine.budget import Choice
from slipstream.serve.runner.request_state import RequestState
from slipstream.serve.runner.step import simulate
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.random_targets import MakeTarget
from slipstream.tests.serve.engine_runs import build_engine, make_request, random_prompt, run


@pytest.mark.parametrize("widths", [(8, 3, 8), (8, 1, 8), (4, 8, 2)])
def test_a_shorter_proposal_leaves_no_nodes_of_the_one_before(
    widths: tuple[int, ...], make_target: MakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_draft(make_target("llama"), tmp_path / "draft")
    engine = build_engine(make_target("llama"), tmp_path / "draft", drafter={"depth": 7})
    engine.add(make_request("0", random_prompt(5, 0), max_tokens=60, ignore_eos=True))
    for width in widths:
        monkeypatch.setattr(engine.planner.policy, "choose", lambda *_, width=width, **__: Choice(8, width))
        engine.step()
        (sequence,) = engine.scheduler._running
        stored = engine.runner.state.stored
        assert (stored.tokens[sequence.slot, :width] >= 0).all()
        assert (stored.probabilities[sequence.slot, :width] > 0).all()
        for unused in (stored.tokens, stored.parents, stored.bins):
            assert (unused[sequence.slot, width:] == -1).all()
        assert not stored.probabilities[sequence.slot, width:].any()


@pytest.mark.parametrize("accept_length", [1.0, 1.3, 2.99, 4.0])
def test_the_mean_is_the_one_asked_for(accept_length: float) -> None:
    """Beside a prompt, whose token stays as it is."""
    count = 1000
    width = 4
    state = RequestState(count + 1, 30, 4, width, torch.device("cpu"), vocab_size=90)
    stored = state.stored
    slots = torch.arange(count)
    prompt = torch.tensor([count])
    stored.lengths.copy_(torch.arange(count + 2) % 97)
    state.keys.copy_(torch.arange(count + 2))
    stored.tokens.copy_(torch.arange(4 * (count + 2)).view(-1, width) % 90)
    stored.parents.copy_(torch.arange(-1, width - 1))
    unit = torch.ones(1, dtype=torch.int64)
    tokens = torch.arange(7)
    chunks = Chunks(prompt, 0 * unit, 7 * unit, unit, tokens, -unit)
    widths = torch.full((count,), width)
    num_rows = 4 * count + 7
    layout = lay_out(stored, widths, slots, chunks, state.pages[0], state.page_size, num_rows, False, state.padding)
    sampled = simulate(torch.full((4 * count + 1,), 33), layout, count, state, accept_length)
    results = torch.empty(count + 1, 2 + 2 * width, dtype=torch.int32)
    verified = verify_rows(layout, sampled, stored, chunks, count, results, state.padding)
    assert float(verified.lengths[:-1].float().mean()) == pytest.approx(accept_length, abs=0.03)
    assert {int(accept_length), int(accept_length + 0.999)} >= set(verified.lengths[:-1].tolist())
    assert verified.tokens[-1].tolist() == [33, -1, -1, -1]
    for index in range(0, count, 97):
        number = int(verified.lengths[index])
        assert verified.nodes[index].tolist() == [*range(number), *[-1] * (4 - number)]


def test_an_engine_emits_that_many(make_target: MakeTarget, tmp_path: Path) -> None:
    save_random_draft(make_target("llama"), tmp_path / "draft")
    engine = build_engine(make_target("llama"), tmp_path / "draft", simulate_accept_length=3.0)
    (answer,) = run(engine, [make_request("0", random_prompt(9, 0), max_tokens=61, ignore_eos=True)]).values()
    assert (answer.counts.rounds, answer.counts.accepted_tokens) == (20, 40)
