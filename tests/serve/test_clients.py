"""Clients that others wrote, against a server of the bundled target that speculates; transformers is the oracle."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.serve.engine.build import build_engine
from slipstream.serve.http.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.chat_targets import write_target
from slipstream.tests.serve.fake_server import MODEL, serving
from slipstream.tests.serve.test_tools import FLAT, SCHEMAS, TOOLS

SLOW = pytest.mark.slow
QUESTION = "Tom has 3 boxes of 12 eggs. How many eggs does he have?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
LOGPROBS: Any = ["message.output_text.logprobs"]
CLIENTS = Path(__file__).parent / "clients"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target("hermes", tmp_path_factory.mktemp("clients") / "target")


@pytest.fixture(scope="module")
def server(target) -> Iterator[Server]:
    config = ServeConfig(target=str(target), draft="ngram", port=0, served_model_name=MODEL, kv_cache_tokens=8192)
    with serving(config, build_engine) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as connected:
        yield connected


class Oracle:
    def __init__(self, target: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.prompt = self.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)

    def answer(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": count}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    def scores(self, tokens: list[int]) -> list[float]:
        """The log-probability of each token but the first."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1]
        return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].tolist()

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def oracle(target) -> Oracle:
    return Oracle(target)


@pytest.mark.parametrize("count", [20, 150])
def test_answers_of_all_endpoints_are_transformers(client, oracle, count):
    """Whole and streamed, with the log-probabilities of what is said: the shorter one is cut, the longer one ends."""
    tokens = oracle.answer(oracle.prompt, count)
    scores = oracle.scores([*oracle.prompt, *tokens])[-len(tokens) :]
    text = oracle.text(tokens)
    is_ended = len(tokens) < count
    assert is_ended == (count == 150)

    common = {"model": MODEL, "temperature": 0}
    chat = {**common, "messages": MESSAGES, "max_tokens": count, "logprobs": True}
    [choice] = client.chat.completions.create(**chat).choices
    assert (choice.message.content, choice.finish_reason) == (text, "stop" if is_ended else "length")
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(scores, abs=1e-4)
    pieces = [event.choices[0] for event in client.chat.completions.create(**chat, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == text
    streamed = [entry.logprob for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
    assert streamed == pytest.approx(scores, abs=1e-4)

    plain = {**common, "prompt": oracle.prompt, "max_tokens": count, "logprobs": 1}
    [choice] = client.completions.create(**plain).choices
    assert choice.text == text
    assert choice.logprobs.token_logprobs == pytest.approx(scores, abs=1e-4)
    pieces = [event.choices[0] for event in client.completions.create(**plain, stream=True)]
    assert "".join(piece.text for piece in pieces) == text

    response = {**common, "input": QUESTION, "max_output_tokens": count, "include": LOGPROBS}
    answer = client.responses.create(**response)
    assert (answer.output_text, answer.status) == (text, "completed" if is_ended else "incomplete")
    [entries] = [part.logprobs for item in answer.output for part in item.content]
    assert [entry.logprob for entry in entries] == pytest.approx(scores[: len(tokens) - is_ended], abs=1e-4)
    events = list(client.responses.create(**response, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_texts_are_scored_as_transformers_does(client, oracle, max_tokens):
    """By lists of token ids, as lm-eval sends them."""
    texts = ["Tom has 12 eggs.", "A", "Ünïcode 你好 👍\n\n  and so on"]
    prompts = [oracle.tokenizer(text).input_ids for text in texts]
    common = {
        "model": MODEL,
        "echo": True,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "temperature": 0,
        "seed": 1234,
    }
    choices = client.completions.create(prompt=prompts, stop=None, **common).choices
    for text, tokens, choice in zip(texts, prompts, choices, strict=True):
        answer = oracle.answer(tokens, 1)[:max_tokens]
        assert choice.text == text + oracle.text(answer)
        first, *scores = choice.logprobs.token_logprobs
        assert first is None
        assert scores == pytest.approx(oracle.scores([*tokens, *answer]), abs=1e-4)


class Verdict(BaseModel):
    is_right: bool
    unit: Literal["eggs", "boxes"]


@pytest.fixture(scope="module")
def brief(oracle) -> dict[str, Any]:
    """Keeps the model, which knows neither, from reasoning and from white space without an end."""
    texts = map(oracle.tokenizer.decode, range(len(oracle.tokenizer)))
    return {"logit_bias": {index: -100 for index, text in enumerate(texts) if text.isspace() or text == "<think>"}}


def test_parse_gives_objects(client, brief):
    settings = {"model": MODEL, "temperature": 0, "extra_body": brief}
    answer = client.responses.parse(input=QUESTION, text_format=Verdict, max_output_tokens=400, **settings)
    assert isinstance(answer.output_parsed, Verdict)
    with client.responses.stream(input=QUESTION, text_format=Verdict, max_output_tokens=400, **settings) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    [choice] = client.chat.completions.parse(
        messages=MESSAGES, response_format=Verdict, max_tokens=400, **settings
    ).choices
    assert choice.message.parsed == answer.output_parsed


def test_tools_are_called(client, brief):
    common = {
        "model": MODEL,
        "temperature": 0,
        "extra_body": brief,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    chat = {**common, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}
    [choice] = client.chat.completions.create(**chat).choices
    [call] = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    response = {**common, "input": QUESTION, "tools": FLAT, "max_output_tokens": 200}
    with client.responses.stream(**response) as stream:
        [item] = stream.get_final_response().output
    assert (item.name, item.arguments) == (call.function.name, call.function.arguments)
    more = [{"role": "user", "content": QUESTION}, item]
    more.append({"type": "function_call_output", "call_id": item.call_id, "output": "36"})
    turns = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "36"}]
    text = client.responses.create(model=MODEL, input=more, temperature=0, max_output_tokens=12).output_text
    again = client.chat.completions.create(model=MODEL, messages=turns, temperature=0, max_tokens=12)
    assert text == again.choices[0].message.content


@pytest.fixture(scope="module")
def run_program(server, tmp_path_factory) -> Callable[..., Any]:
    """Installs a client into an environment of its own, above this one, and gives what its program in clients/ says."""

    def run(package, program, *arguments):
        home = tmp_path_factory.mktemp(program)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        python = str(home / "bin" / "python")
        purelib = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        (Path(purelib.decode().strip()) / "base.pth").write_text(sysconfig.get_path("purelib"))
        install = [python, "-m", "pip", "install", "--quiet", "--retries", "1", package]
        installed = subprocess.run(install, capture_output=True, text=True)
        if f"No matching distribution found for {package.split('[')[0]}" in installed.stderr:
            pytest.skip(f"{package} cannot be installed: no package index that has it can be reached")
        assert installed.returncode == 0, installed.stderr
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "hub"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [python, str(CLIENTS / f"{program}.py"), server.url, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=home, env={**os.environ, **offline})
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    return run


QUESTIONS = [
    {"question": "What is 2 + 3?", "choices": ["5", "six", "eleven apples"], "answer": 0},
    {"question": QUESTION, "choices": ["36", "15 eggs", "4"], "answer": 0},
    {"question": "Ünïcode 你好?", "choices": ["你", "ja 👍", "no"], "answer": 1},
]
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
CONTINUATIONS = """
task: continuations
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "<|im_start|>user\\n{{question}}<|im_end|>\\n<|im_start|>assistant\\n"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@SLOW
def test_lm_eval_scores_as_it_does_by_transformers(target, run_program, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, task in (("choices", CHOICES), ("continuations", CONTINUATIONS)):
        (tmp_path / f"{name}.yaml").write_text(task.replace("FILE", str(file)))
    answers = run_program("lm-eval[api]", "lm_eval_program", str(target), str(tmp_path))
    expected = answers.pop("hf")
    assert len(answers) == 3
    for way, results in answers.items():
        for samples, references in zip(results["choices"], expected["choices"], strict=True):
            for [(score, is_greedy)], [(other, is_others)] in zip(samples, references, strict=True):
                assert float(score) == pytest.approx(float(other), abs=1e-4), way
                assert str(is_greedy) == str(is_others), way
        assert results["continuations"] == expected["continuations"], way
        assert all(text for [[text]] in results["continuations"])


@SLOW
@pytest.mark.parametrize(
    ("package", "program"), [("litellm", "litellm_program"), ("langchain-openai", "langchain_program")]
)
def test_other_clients_say_what_transformers_does(package, program, oracle, brief, run_program):
    tokens = oracle.answer(oracle.prompt, 20)
    scores = oracle.scores([*oracle.prompt, *tokens])[-len(tokens) :]
    text = oracle.text(tokens)
    plain = oracle.tokenizer(QUESTION[:20]).input_ids
    report = run_program(package, program, QUESTION, json.dumps(brief["logit_bias"]))
    assert report.pop("logprobs") == pytest.approx(scores, abs=1e-4)
    assert report.pop("text") == oracle.text(oracle.answer(plain, 20))
    if program == "litellm_program":
        assert report.pop("call") == ["now", "tool_calls"]
    else:
        assert report.pop("batch") == [text, text]
        calls = report.pop("calls")
        parsed = report.pop("parsed")
        assert calls["chat"] == calls["response"]
        assert calls["chat"][0] == "now"
        assert parsed["chat"] == parsed["response"] == Verdict(**parsed["chat"]).model_dump()
    assert set(report.values()) == {text}, report
    assert len(report) >= 4
