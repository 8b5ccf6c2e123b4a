"""The offline API: answers in order, text and stop strings, streaming of many requests, interruption."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from slipstream import runtime
from slipstream.serve.drafters.ngram.ngram_core import NgramCore
from slipstream.serve.engine.plan import StepPlan
from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.schemas import CompletionBody
from slipstream.serve.llm import LLM, Generation
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Grammar, SamplingParams
from slipstream.serve.runner.model_runner import InFlight
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.random_targets import FAMILIES, save_random_target
from slipstream.tests.serve.cache_invariants import check_scheduler
from slipstream.tests.serve.engine_runs import VOCAB, Tokens, build_engine, make_request, random_prompt, run
from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

PROMPTS = [random_prompt(length, length) for length in (4, 20, 1, 9, 33)]
PARAMS = [
    SamplingParams(max_tokens=20 + seed, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 1.0, 1.0, 0.7, 0.0))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A target whose tokenizer gives id 17 the text "w17", and a draft for it. Ids 0..2 are special."""
    target, draft = (tmp_path_factory.mktemp("models") / name for name in ("target", "draft"))
    save_random_target(FAMILIES["qwen3"], target)
    special = ["<pad>", "<bos>", "<eos>"]
    words = special + [f"w{index}" for index in range(len(special), VOCAB)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(target)
    save_random_draft(target, draft)
    return target, draft


@pytest.fixture(scope="module")
def plain(folders) -> LLM:
    return LLM(str(folders[0]), max_running=4, kv_cache_tokens=1024)


@pytest.fixture(scope="module")
def drafted(folders) -> LLM:
    """The target comes from the draft's config."""
    return LLM(draft=str(folders[1]), max_running=4, kv_cache_tokens=1024)


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens if token > 2)


def tokens_of(answers: list[Generation]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


PAGE = ROOT / "serve" / "http" / "static" / "index.html"
EXAMPLE = re.findall(r"<textarea id=\"schema\"[^>]*placeholder='([^']*)'", PAGE.read_text())
COUNT = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "maxLength": 16},
    },
    "required": ["answer", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("max_spaces", [0, 1])
def test_a_model_that_knows_no_json_ends_an_object(max_spaces):
    """A small model fills the white space that JSON may have. The playground's example is one that it ends, too."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tom has 3 boxes."}]
    with LLM(str(TINY), device="cpu", json_whitespace=max_spaces, max_running=1, kv_cache_tokens=512) as llm:
        for schema in (COUNT, *map(json.loads, EXAMPLE)):
            grammar = Grammar("json_schema", json.dumps(schema))
            params = SamplingParams(temperature=0.0, max_tokens=256, grammar=grammar)
            (answer,) = llm.chat(messages, params)
            assert answer.finish_reason == "stop", answer.text
            value = json.loads(answer.text)
            jsonschema.validate(value, schema)
            compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            assert (answer.text == compact) == (max_spaces == 0)
            request = replace(llm.begin("untranslated", messages, params).request, params=params)
            assert [token for output in llm.stream([request]) for token in output.tokens] == answer.tokens
    assert len(EXAMPLE) == 1


def test_answers_come_in_the_order_of_the_prompts(plain, drafted):
    expected = [plain.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for llm in (plain, drafted):
        answers = llm.generate(PROMPTS, PARAMS)
        assert tokens_of(answers) == tokens_of(expected)
        for prompt, params, answer in zip(PROMPTS, PARAMS, answers, strict=True):
            assert answer.text == words(prompt + answer.tokens)[len(words(prompt)) :], "it goes on from its prompt"
            assert (answer.stats.prompt_tokens, answer.stats.completion_tokens) == (len(prompt), len(answer.tokens))
            ended = "stop" if answer.tokens[-1] == 2 else "length"
            assert answer.finish_reason == ended
            assert ended == "stop" or len(answer.tokens) == params.max_tokens
    assert tokens_of(plain.generate([words(prompt) for prompt in PROMPTS], PARAMS)) == tokens_of(expected)
    assert plain.generate([], PARAMS[0]) == []


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_stop_strings_cut_text_tokens_and_counts(stride, plain, drafted):
    """All along an answer, so that some of them lie inside a draft and one in the prompt's own pass."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    full = plain.generate([PROMPTS[1]], params)[0].tokens
    for token in [token for token in full if token > 2][::stride]:
        stop = f"w{token}"
        end = next(index for index, other in enumerate(full) if f"w{other}".startswith(stop)) + 1
        for llm in (plain, drafted):
            (answer,) = llm.generate([PROMPTS[1]], params, stop=("never", stop))
            assert (answer.tokens, answer.finish_reason) == (full[:end], "stop")
            assert answer.text.strip() == words(full[: end - 1])
            counts = answer.stats
            assert counts.completion_tokens == end
            assert end <= 1 + counts.rounds + counts.accepted_tokens <= end + 1, "the last step may be cut"
            assert (counts.rounds > 0) == (end > 1)
            assert counts.drafted_tokens == counts.rounds * (llm.engine.planner.limits.of_network - 1)
            assert not llm.engine.has_work
            check_scheduler(llm.engine.scheduler)
    for llm in (plain, drafted):
        (answer,) = llm.generate([PROMPTS[1]], params, stop=(words(full[10:13]) + " ",))
        text = f" {words(full[:10])} "
        assert (answer.text, answer.tokens) == (text, full[:14]), "the next token brings the space"


def test_logprobs_and_stop_strings(plain, drafted, folders):
    """As transformers has them, for each token of the answer and of the prompt but its first."""
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=0)
    prompt = PROMPTS[1]
    full = plain.generate([PROMPTS[1]], params)[0].tokens
    with torch.inference_mode():
        rows = model(torch.tensor([prompt + full])).logits[0, :-1].log_softmax(dim=-1)
    expected = rows.gather(1, torch.tensor(prompt + full)[1:, None])[:, 0].tolist()
    stop = next(f"w{token}" for token in full[12:] if token > 2)
    for llm in (plain, drafted):
        for answer in (llm.generate([prompt], params)[0], llm.generate([prompt], params, stop=stop)[0]):
            assert answer.logprobs is not None
            assert answer.prompt_logprobs.tokens == pytest.approx(expected[: len(prompt) - 1], abs=1e-4)
            expected_scores = expected[len(prompt) - 1 :][: len(answer.tokens)]
            assert answer.logprobs.tokens == pytest.approx(expected_scores, abs=1e-4)
            assert [len(top) for top in answer.logprobs.top] == [2] * len(answer.tokens)
        (alone,) = llm.generate([prompt], replace(params, max_tokens=0, logprobs=None))
        assert (alone.text, alone.tokens, alone.finish_reason, alone.logprobs) == ("", [], "length", None)
        assert alone.prompt_logprobs == answer.prompt_logprobs


def test_traces_and_figures_end_with_the_tokens(plain, drafted):
    """At a stop string, too."""
    full = plain.generate([PROMPTS[1]], PARAMS[4])[0]
    for stop in ("", f"w{full.tokens[9]} w{full.tokens[10]}"):
        for llm in (plain, drafted):
            params = replace(PARAMS[4], speculation={"trace": True})
            answer = llm.generate([PROMPTS[1]], params, stop=[stop] if stop else ())[0]
            assert answer.tokens == full.tokens[: len(answer.tokens)]
            assert answer.trace is not None
            assert len(answer.trace) == len(answer.tokens)
            figures = answer.metrics["speculative_decoding"]
            if llm is plain:
                assert figures is None
                assert {entry.source for entry in answer.trace} == {"target"}
                continue
            assert {entry.source for entry in answer.trace} == {"target", "eagle3"} or stop
            assert figures["num_accepted_draft_tokens"] == sum(entry.position > 0 for entry in answer.trace)
            assert figures["num_spec_steps"] == sum(figures["acceptance_histogram"]) == answer.trace[-1].round
            assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1 == 4
    off = drafted.generate([PROMPTS[1]], replace(PARAMS[4], speculation={"enabled": False}))[0]
    assert (off.tokens, off.trace, off.metrics) == (full.tokens, None, {"speculative_decoding": None})


def test_without_a_seed_every_prompt_draws_its_own(plain):
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    answers = plain.generate([PROMPTS[1]] * 8, params)
    assert len({tuple(answer.tokens) for answer in answers}) > 1
    assert len({answer.seed for answer in answers}) == 8
    for answer in answers:
        assert plain.generate([PROMPTS[1]], replace(params, seed=answer.seed))[0].tokens == answer.tokens
    again = plain.generate([PROMPTS[1]] * 8, [replace(params, seed=answer.seed) for answer in answers])
    assert tokens_of(again) == tokens_of(answers)


def test_a_seeded_call_repeats_and_its_equal_prompts_differ(plain, folders):
    """Offline and over HTTP alike; the first prompt is sampled as it is alone."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    answers = plain.generate([PROMPTS[1]] * 4, params)
    assert len({tuple(answer.tokens) for answer in answers}) > 1
    assert tokens_of(plain.generate([PROMPTS[1]] * 4, params)) == tokens_of(answers)
    assert plain.generate([PROMPTS[1]], params)[0] == replace(answers[0], stats=ANY)
    assert answers[0].seed == 5

    front = Frontend(ServeConfig(target=str(folders[0])), plain.engine.info)
    fields = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    body = CompletionBody(prompt=[PROMPTS[1]] * 4, n=2, **fields)
    served: Tokens = {request.id: [] for request in front.read(body, "r")[0]}
    for output in plain.stream(front.read(body, "r")[0]):
        served[output.request_id] += output.tokens
    assert list(served.values())[::2] == tokens_of(answers), "choice 0 of every prompt"


@each_case(
    *(([PROMPTS[0], prompt], (), "prompt") for prompt in ([], [5] * 300, [5, 500], "")),
    (["a\ud83d"], (), r"prompts\[0\] holds \\ud83d at character 1, half of a surrogate pair"),
)
def test_bad_prompts_and_stops_are_named_before_anything_runs(prompts, stop, message, plain):
    with user_error(message):
        plain.generate(prompts, PARAMS[0], stop=stop)
    assert not plain.engine.has_work


def test_bad_params_are_named_before_anything_runs(plain):
    bad_params: dict[str, Any] = {
        "params has 2 entries for 5 prompts; give one, or one per prompt": PARAMS[:2],
        "params is None; give SamplingParams, one for all or one per prompt": None,
        r"params\[0\] is {'max_tokens': 5}; give SamplingParams": [{"max_tokens": 5}] * 5,
    }
    for message, params in bad_params.items():
        with user_error(message):
            plain.generate(PROMPTS, params)
        assert not plain.engine.has_work


def test_options_of_the_engine_are_taken():
    options: dict[str, Any] = {"max_running": 2, "kv_cache_tokens": 256, "quantization": "fp8"}
    (answer,) = LLM(str(TINY), **options).generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0.0))
    same = run(build_engine(TINY, **options), [make_request("0", [5, 6, 7], max_tokens=8)])["0"]
    assert answer.tokens == same.tokens


def test_stream_draws_requests_as_there_is_room(plain):
    num_drawn = 0

    def requests():
        nonlocal num_drawn
        for index in range(40):
            num_drawn += 1
            yield make_request(str(index), [5 + index], max_tokens=3, ignore_eos=True)

    ended = 0
    for output in plain.stream(requests()):
        ended += output.finish_reason is not None
        assert num_drawn - ended <= 2 * 4 + 4, "at most two batches wait, and one has just ended"
    assert ended == num_drawn == 40


def test_an_open_stream_keeps_its_outputs(plain):
    requests = [make_request(str(index), [5 + index], max_tokens=9, ignore_eos=True) for index in range(2)]
    stream = plain.stream(requests)
    outputs = [next(stream)]
    with user_error("2 requests of another call are open; take all outputs"):
        plain.generate([[7]], PARAMS[0])
    with user_error("2 requests of another call are open"):
        next(plain.stream([make_request("other", [7])]))
    outputs += stream
    assert sum(len(output.tokens) for output in outputs) == 2 * 9


@pytest.mark.parametrize(
    ("place", "name", "last_call", "count"),
    [
        (lambda engine: engine, "add", 4, 1),
        (lambda engine: engine.scheduler, "on_release", 2, 1),
        (lambda engine: engine.scheduler.cache, "release", 2, 1),
        (lambda engine: engine, "step", 4, 2),
        (lambda engine: engine.host, "admit", 4, 2),
        (lambda _: InFlight, "read", 4, 2),
        (lambda engine: engine.runner.target.layers[1], "forward", 1, 2),  # of prompts
        (lambda engine: engine.runner.target.layers[1], "forward", 3, 2),
    ],
)
def test_generation_can_be_interrupted_and_started_again(place, name, last_call, count, plain, drafted, monkeypatch):
    """By `count` signals, of which a second breaks a step off. Nor is shared what a broken pass has not computed: the
    prompts are new."""
    engine = drafted.engine
    prompts = [[last_call, *prompt] for prompt in PROMPTS]
    call = getattr(place(engine), name)
    num_calls = 0

    def interrupted(*arguments):
        nonlocal num_calls
        num_calls += 1
        result = call(*arguments)
        if num_calls == last_call:
            for _ in range(count):
                signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(place(engine), name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafted.generate(prompts, PARAMS)
    assert not engine.has_work, "what was cut off does not run on"
    check_scheduler(engine.scheduler)
    plans: list[StepPlan] = []
    monkeypatch.setattr(engine, "trace", lambda event, plan: plans.append(plan) if event == "planned" else None)
    assert tokens_of(drafted.generate(prompts, PARAMS)) == tokens_of(plain.generate(prompts, PARAMS))
    for plan in plans:
        assert len({admission.slot for admission in plan.admissions}) == len(plan.admissions)


def test_progress_counts_answers(plain, capsys):
    plain.generate(PROMPTS, PARAMS)
    assert capsys.readouterr().err == ""
    plain.generate(PROMPTS, PARAMS, progress=True)
    assert "5/5" in capsys.readouterr().err


def test_one_stop_string_is_no_sequence_of_letters(plain):
    answers = [plain.generate(PROMPTS[:2], PARAMS[:2], stop=stop) for stop in ("w1 w", ("w1 w",))]
    assert tokens_of(answers[0]) == tokens_of(answers[1])


def test_what_ngrams_have_learned_is_written_at_the_end(folders, tmp_path):
    path = tmp_path / "trie"
    options = {"max_running": 4, "kv_cache_tokens": 1024}
    with LLM(str(folders[0]), "ngram", drafter={"save": str(path)}, **options) as llm:
        llm.generate(PROMPTS, PARAMS)
        assert not path.exists()
    assert NgramCore().load(path) is None
    with user_error(r"drafter.save .*nowhere/trie is in a folder that does not exist"):
        LLM(str(folders[0]), "ngram", drafter={"save": str(tmp_path / "nowhere" / "trie")}, **options)


@pytest.mark.parametrize("threads_spin", [False, True])
def test_torch_imported_too_early_is_said(folders, threads_spin, monkeypatch, caplog):
    monkeypatch.setattr(runtime, "THREADS_SPIN", threads_spin)
    with LLM(str(folders[0]), device="cpu", kv_cache_tokens=64):
        assert ("import slipstream first, or set GOMP_SPINCOUNT=1000" in caplog.text) == threads_spin
