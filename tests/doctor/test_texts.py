"""Causes that lie in the texts: prompts of another kind, answers of another model, loops, other servers."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from slipstream.doctor.diagnosis import Diagnosis, Finding
from slipstream.doctor.endpoint import Endpoint
from slipstream.doctor.examine import DoctorConfig, examine
from slipstream.doctor.replay import Round, Score
from slipstream.doctor.text_causes import endpoint_findings, parity, repetition
from slipstream.doctor.texts import Answered, Conversation
from slipstream.tests.random_drafts import save_random_dflash
from slipstream.tests.serve.engine_runs import VOCAB, build_engine, make_request, random_prompt, run
from slipstream.tests.sources import ROOT
from slipstream.tests.tables import each_case

TEXTS = 16
TOKENS = 24
PROMPT = 6
TEMPLATE = (
    "{% if enable_thinking %}w90 w91 w92 {% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}w5 {% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}w4 {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}w5 {% endif %}"
)


@pytest.fixture(scope="module")
def worded(make_target, tmp_path_factory) -> Path:
    """A random target whose tokens are words, and whose prompts begin otherwise where it thinks."""
    folder = shutil.copytree(make_target("qwen3"), tmp_path_factory.mktemp("worded") / "target")
    words = {f"w{token}": token for token in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))  # noqa: S106  a word, not a password
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3", eos_token="w2", pad_token="w0")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


def prompts(*, thinking: bool) -> list[list[int]]:
    """The token ids that the template gives."""
    start = [90, 91, 92] if thinking else []
    return [[*start, 4, *random_prompt(PROMPT, i), 5] for i in range(TEXTS)]


def answers_of(target: Path, questions: list[list[int]]) -> list[list[int]]:
    engine = build_engine(target, max_running=TEXTS)
    results = run(engine, [make_request(str(i), prompt, max_tokens=TOKENS) for i, prompt in enumerate(questions)])
    engine.close()
    return [results[str(i)].tokens for i in range(len(questions))]


def fitted(target: Path, folder: Path, questions: list[list[int]], answers: list[list[int]]) -> Path:
    """A draft that knows these answers."""
    texts = [(len(prompt), prompt + answer) for prompt, answer in zip(questions, answers, strict=True)]
    save_random_dflash(target, folder, texts, aux_layers=(0, 1, 2))
    return folder


def write_data(path: Path, answers: list[list[int]] | None = None) -> Path:
    lines = []
    for number in range(TEXTS):
        messages = [{"role": "user", "content": as_words(random_prompt(PROMPT, number))}]
        if answers is not None:
            messages.append({"role": "assistant", "content": as_words(answers[number])})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def as_words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def config_of(target: Path, draft: Path, data: Path) -> DoctorConfig:
    return DoctorConfig(target=str(target), draft=str(draft), data=(str(data),), max_tokens=TOKENS)


def test_thinking_that_only_the_training_had(worded, tmp_path):
    questions = prompts(thinking=True)
    draft = fitted(worded, tmp_path / "draft", questions, answers_of(worded, questions))
    report = examine(config_of(worded, draft, write_data(tmp_path / "data.jsonl")))
    causes = [finding for finding in report.findings if finding.kind == "cause"]
    assert causes[0].stage == "prompt text"
    assert "enable_thinking true" in causes[0].name
    assert report.is_wrong


@pytest.mark.slow
def test_a_draft_of_these_prompts_is_healthy(worded, tmp_path):
    questions = prompts(thinking=False)
    draft = fitted(worded, tmp_path / "draft", questions, answers_of(worded, questions))
    report = examine(config_of(worded, draft, write_data(tmp_path / "data.jsonl")))
    assert not [finding for finding in report.findings if finding.stage == "prompt text"]
    assert report.served == pytest.approx(report.diagnosis.as_read and report.diagnosis.as_read.accept_length, rel=1e-6)


@pytest.mark.slow
def test_answers_that_the_target_did_not_write(worded, tmp_path):
    """The data's answers are those of a model that differs from the target in its last layer."""
    questions = prompts(thinking=False)
    other = AutoModelForCausalLM.from_pretrained(worded)
    torch.manual_seed(0)
    weight = other.model.layers[-1].mlp.down_proj.weight
    weight.data += 2 * weight.std() * torch.randn_like(weight)
    other.save_pretrained(tmp_path / "other")
    answers = answers_of(tmp_path / "other", questions)
    draft = fitted(tmp_path / "other", tmp_path / "draft", questions, answers)
    report = examine(config_of(worded, draft, write_data(tmp_path / "data.jsonl", answers)))
    assert "answers of another model" in [finding.name for finding in report.findings if finding.kind == "cause"]


def test_loops():
    looping = [1, 2, 3] * 20
    other = list(range(60))
    conversation = Conversation(())
    answered = [Answered([0], looping, conversation), Answered([0], other, conversation)]
    assert answered[0].repeats == pytest.approx(1 - 3 / 53)  # 53 pieces of 8 tokens, of which 3 differ
    assert answered[1].repeats == 0
    assert [finding.name for finding in repetition(answered)] == ["answers that repeat themselves"]
    assert not [*repetition([answered[1]])]


@pytest.mark.slow
def test_prompts_on_which_the_target_loops(tmp_path):
    """Digits, which the bundled target does not understand."""
    rng = random.Random(0)
    data = tmp_path / "data.jsonl"
    texts = [" ".join(str(rng.randrange(10)) for _ in range(20)) for _ in range(6)]
    data.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts))
    config = config_of(ROOT / "assets" / "tiny-target", ROOT / "tests" / "assets" / "eagle3-flags", data)
    report = examine(replace(config, max_tokens=96))
    assert [finding.name for finding in report.findings if finding.kind == "cause"] == [
        "answers that repeat themselves"
    ]
    assert report.is_wrong


RISK = Finding("risk", "positions", "64 positions", "", "write more", before=1.5, after=2.0)
SCORE = Score(emitted=(4, 4), rounds=tuple(Round(i // 2, i, 1) for i in range(4)), depth=2)
SERVER = Endpoint(
    url="http://host:1", server="vllm", num_prompts=10, accept_length=2.0, depth=None, other_prompts=0, other_answers=1
)


@each_case()
def test_where_a_servers_gap_is(changes, kind, stage):
    diagnosis = Diagnosis(findings=(RISK,), tried=(), as_read=SCORE, mended=SCORE)
    findings = [*endpoint_findings(diagnosis, replace(SERVER, **changes))]
    assert [(finding.kind, finding.stage) for finding in findings] == ([] if kind is None else [(kind, stage)])
    if stage == "files":
        assert RISK.name in findings[0].cause
        assert findings[0].remedy == RISK.remedy


@each_case()
def test_whether_the_engine_here_accepts_as_much(served, refusal, name):
    diagnosis = Diagnosis(findings=(), tried=(), as_read=SCORE, mended=SCORE)
    assert SCORE.accept_length == 2.0
    findings = [*parity(diagnosis, served, refusal)]
    assert [(finding.kind, finding.stage, finding.name) for finding in findings] == (
        [] if name is None else [("note", "files", name)]
    )
    if refusal:
        assert refusal in findings[0].cause
    assert not [*parity(replace(diagnosis, as_read=None), served, refusal)]
