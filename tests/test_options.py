"""Options and sampling parameters: a bad value is a sentence with its name, itself and what to do."""

import json
import re
from pathlib import Path

import pytest

from slipstream.serve.options import EngineConfig, ServeConfig, find_target
from slipstream.serve.request import SamplingParams
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error


@each_case()
def test_bad_engine_options_are_sentences(field, value, remedy):
    with user_error(f"^{field} is {value!r}; {remedy}$"):
        EngineConfig(**{"target": "owner/model", field: value})


@pytest.mark.parametrize(("objective", "ms"), [("throughput", None), ("itl=20ms", 20.0), ("itl=0.5ms", 0.5)])
def test_an_objective_may_be_a_time(objective, ms):
    assert EngineConfig(target="owner/model", objective=objective).itl_ms == ms


@pytest.mark.parametrize(
    ("budget", "captured", "tokens"),
    [(1024, 1024, 1024), (100, 1024, 100), (1024, 7, 7), (1024, 0, 0), (4096, None, 4096), (None, None, 1024)],
)
def test_captured_passes_take_no_more_of_a_prompt_than_any_other(budget, captured, tokens):
    config = EngineConfig(target="owner/model", prefill_budget=budget, prefill_graph_tokens=captured)
    assert config.captured_tokens == tokens


def test_the_server_checks_the_engines_options_too():
    with user_error("dtype is 'int8'"):
        ServeConfig(dtype="int8")


@each_case()
def test_bad_sampling_parameters_are_sentences(field, value, remedy):
    with user_error(f"^{field} is {value}; it must be {remedy}$"):
        SamplingParams(**{"max_tokens": 5, field: value})


@each_case()
def test_a_bad_logit_bias_is_a_sentence(bias, message):
    with user_error(f"^{message}$"):
        SamplingParams(max_tokens=5, logit_bias=bias)


@pytest.mark.parametrize("token", [-1, -(2**70), 1.5, "5", None])
@pytest.mark.parametrize(
    ("field", "holding"),
    [
        ("stop_token_ids", lambda token: (3, token)),
        ("logit_bias", lambda token: {token: 0.0}),
        ("bad_words", lambda token: ((4, 5), (6, token))),
    ],
)
def test_what_is_no_token_id_is_a_sentence(field, holding, token):
    message = f"{field} has the token id {token!r}; it must be an integer from 0 up"
    with user_error(f"^{re.escape(message)}$"):
        SamplingParams(max_tokens=5, **{field: holding(token)})


def test_stop_token_ids_are_kept_as_a_tuple():
    assert SamplingParams(max_tokens=5, stop_token_ids=[7, 8]).stop_token_ids == (7, 8)
    with user_error("^stop_token_ids is 7; it must be a list of token ids$"):
        SamplingParams(max_tokens=5, stop_token_ids=7)


def test_a_logit_bias_is_kept_as_pairs():
    params = SamplingParams(max_tokens=5, logit_bias={9: -100, 3: 0.5})
    assert params.logit_bias == ((3, 0.5), (9, -100))
    assert params == SamplingParams(max_tokens=5, logit_bias=params.logit_bias)
    assert hash(params) == hash(SamplingParams(max_tokens=5, logit_bias=params.logit_bias))


def test_limits_themselves_are_allowed():
    SamplingParams(max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    SamplingParams(max_tokens=1, temperature=100.0, top_k=10**6, top_p=1e-6, min_p=1.0)
    SamplingParams(max_tokens=1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3, logit_bias={0: 100})
    EngineConfig(max_model_len=1, max_running=1, prefill_budget=1, kv_cache_tokens=1, mem_fraction=0.98)


def test_simulated_acceptance_is_a_length():
    EngineConfig(simulate_accept_length=2.5)
    for length in (0.5, float("inf"), float("nan")):
        with user_error(f"simulate_accept_length is {length}; it must be a number of tokens, at"):
            EngineConfig(simulate_accept_length=length)


def test_the_target_is_the_one_asked_for_or_the_drafts(tmp_path):
    folders = {name: tmp_path / name for name in ("draft", "named", "asked")}
    for folder in folders.values():
        folder.mkdir()
    (folders["draft"] / "config.json").write_text(json.dumps({"target": str(folders["named"])}))
    draft, draft_target, user_target = (str(folder) for folder in folders.values())
    assert find_target(EngineConfig(draft=draft)) == (draft_target, folders["named"])
    assert find_target(EngineConfig(draft=draft, target=user_target)) == (user_target, folders["asked"])
    assert find_target(EngineConfig(target=user_target)) == (user_target, folders["asked"])


def test_the_drafts_target_is_sought_where_it_lay_in_training(tmp_path, monkeypatch):
    """Never on the hub, whose ids a relative folder may look like."""
    monkeypatch.chdir(tmp_path)
    draft = tmp_path / "draft"
    target = tmp_path / "old" / "models" / "target"
    draft.mkdir()
    target.mkdir(parents=True)
    (draft / "config.json").write_text(json.dumps({"target": "models/target"}))
    (draft / "run.json").write_text(json.dumps({"target_path": str(target)}))
    assert find_target(EngineConfig(draft=str(draft))) == (str(target), target)
    folder = Path("models") / "target"
    folder.mkdir(parents=True)
    assert find_target(EngineConfig(draft=str(draft))) == (str(folder), folder)
    folder.rmdir()
    target.rmdir()
    message = f"target models/target is not a folder here, and {target}, its path in training, does not exist.*--target"
    with user_error(message):
        find_target(EngineConfig(draft=str(draft)))


def test_the_drafts_target_has_to_be_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"target": "/nowhere/model"}))
    with user_error("the target that draft .* names cannot be read .* add --target"):
        find_target(EngineConfig(draft=str(tmp_path)))


def test_a_draft_without_a_target_needs_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with user_error(f"draft {tmp_path} names no target; add --target"):
        find_target(EngineConfig(draft=str(tmp_path)))
    with user_error("target is empty and draft 'none' is not a checkpoint .* add --target"):
        find_target(EngineConfig())
