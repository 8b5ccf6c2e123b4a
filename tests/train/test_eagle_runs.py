"""A whole EAGLE run, and a server that accepts its proposals."""

from safetensors.torch import load_file

from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams
from slipstream.tests.train.runs import PROMPTS, emitted_per_round, records, save_answers
from slipstream.train.eagle import EagleTraining, main

DEPTH = 3


def test_an_overfitted_draft_is_accepted_whole(tmp_path, target_path, save_data, run_flags, monkeypatch):
    """One batch learnt by heart: every round emits depth + 1 tokens."""
    monkeypatch.setattr(EagleTraining, "noise_spread", 0.0)
    params = SamplingParams(max_tokens=3 * (DEPTH + 1) + 1, temperature=0.0, ignore_eos=True)
    answers, data = save_answers(target_path, params, save_data)
    learnt = {"data__path": data, "data__max_length": 64, "data__batch_size": 1}
    learnt |= {"optim__name": "muon", "optim__steps": 100, "draft__ttt_steps": DEPTH, "evaluation__every": 100}
    command = run_flags(tmp_path, checkpoint__every=1000, draft__intermediate_size=256, draft__bias="false", **learnt)
    main([flag for flag in command if "vocabulary" not in flag])
    assert "fc.bias" not in load_file(tmp_path / "best" / "model.safetensors")
    assert {"feature_loss_0", "accept_rate_2", "eval_accept_rate_2"} <= records(tmp_path)[-1].keys()
    for options in ({"depth": DEPTH}, {"depth": DEPTH, "topk": 3, "nodes": 22}):
        width = options.get("nodes", DEPTH + 1)  # all nodes, whatever a step costs here
        drafted = LLM(str(target_path), str(tmp_path / "best"), drafter=options, width=width)
        served = drafted.generate(PROMPTS, params)
        assert [answer.tokens for answer in served] == answers
        assert emitted_per_round(served) == DEPTH + 1
