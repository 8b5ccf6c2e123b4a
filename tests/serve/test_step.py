"""Steps after a longer proposal, and steps that emit as many tokens as they are told."""

import pytest

from slipstream.serve.engine.budget import Choice
from slipstream.tests.pairwise import some_of
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import (
    build_engine,
    make_request,
    plain_answers,
    random_prompt,
    run,
    sized_requests,
)


@pytest.mark.parametrize("widths", [(8, 3, 8), (8, 1, 8), (4, 8, 2)])
def test_a_shorter_proposal_leaves_no_nodes_of_the_one_before(widths, make_target, tmp_path, monkeypatch):
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


@pytest.mark.parametrize("accept_length", some_of([1.0, 1.3, 2.99, 4.0], [1.3, 4.0]))
def test_an_engine_emits_as_many_as_it_is_told(accept_length, make_target, tmp_path):
    save_random_draft(make_target("llama"), tmp_path / "draft")
    options = {"simulate_accept_length": accept_length, "kv_cache_tokens": 4096}
    engine = build_engine(make_target("llama"), tmp_path / "draft", **options)
    requests = sized_requests(range(1, 9), max_tokens=61, ignore_eos=True)
    answers = run(engine, requests)
    first = {name: tokens[0] for name, tokens in plain_answers(make_target("llama"), requests).items()}
    assert {name: answer.tokens[0] for name, answer in answers.items()} == first, "what a prompt's pass gives stays"
    for answer in answers.values():
        emitted = [end - start for start, end in zip(answer.starts[1:], answer.starts[2:], strict=False)]
        assert {int(accept_length), int(accept_length + 0.999)} >= set(emitted)
    assert 8 * 60 / sum(answer.counts.rounds for answer in answers.values()) == pytest.approx(accept_length, rel=0.05)
