"""The bundled targets and questions: their files, tokenizer, chat template, and the text that they answer with."""

import gzip
import hashlib
import json
import re
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.tests.sources import ROOT
from slipstream.tests.tables import each_case

ASSETS = ROOT / "assets"
NAMES = ("tiny-target", "tiny-moe-target", "tiny-hybrid-target")
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", *(f"<|spare_{i}|>" for i in range(16))]
TEXTS = ["12 + 345 = 357", "\n\n  indented\n", "naïve 日本 🙂\t|", " ", "", "a\r\nb\x00c", "<|spare_3|> x <|mask|>"]


def is_held_out(conversation_id: str) -> bool:
    """The rule of assets/tiny-target/README.md."""
    return int.from_bytes(hashlib.sha256(conversation_id.encode()).digest()[:8], "big") < 0.05 * 2**64


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer(name):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / name)
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(20))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    digits = [token for token in tokenizer.get_vocab() if re.search(r"\d", token) and token not in SPECIAL_TOKENS]
    assert sorted(digits) == list("0123456789")


@pytest.mark.parametrize("name", NAMES)
def test_chat_template_marks_the_assistant(name):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / name)
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, TEXTS, strict=True)]
    rendering = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids = rendering["input_ids"]
    mask = rendering["assistant_masks"]
    rendered = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, TEXTS, strict=True))
    assert tokenizer.decode(ids) == rendered
    supervised = [token for token, marked in zip(ids, mask, strict=True) if marked]
    assert tokenizer.decode(supervised) == "".join(f"{TEXTS[index]}<|im_end|>" for index in (2, 4, 6))
    for turn in (2, 4, 6):
        prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=True)
        prompt_ids = prompt["input_ids"]
        assert ids[: len(prompt_ids)] == prompt_ids
        assert (mask[len(prompt_ids) - 1], mask[len(prompt_ids)]) == (0, 1)


def test_questions():
    with gzip.open(ASSETS / "gsm8k.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert [row["split"] for row in rows] == ["heldout"] * 381 + ["train"] * 3000
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert is_held_out(row["id"]) == (row["split"] == "heldout")
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_prompts():
    """The rule of assets/README.md."""
    with gzip.open(ASSETS / "gpteacher.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    ids = [row["id"] for row in rows]
    assert ids == sorted(set(ids), key=lambda name: hashlib.sha256(name.encode()).digest())
    kinds = Counter(name.rsplit("-", 1)[0] for name in ids)
    assert kinds == {"codegen": 4535, "roleplay": 1923, "toolformer": 1919}
    assert {int(name.rsplit("-", 1)[1]) % 4 for name in ids if name.startswith("toolformer")} == {0}
    for row in rows:
        assert is_held_out(row["id"]) == (row["split"] == "heldout")
        assert [message["role"] for message in row["messages"]] == ["user"]


def test_mt_bench():
    rows = [json.loads(line) for line in (ASSETS / "mt_bench.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(81, 161))
    assert all(len(row["turns"]) == 2 for row in rows)
    assert set(Counter(row["category"] for row in rows).values()) == {10}


@each_case()
def test_model_files(name, architecture, sizes, size):
    folder = ASSETS / name
    assert sum(path.stat().st_size for path in folder.iterdir()) <= size
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert [config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")] == sizes
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118


@pytest.mark.parametrize("name", NAMES)
def test_model_answers_like_gsm8k(name):
    folder = ASSETS / name
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with gzip.open(ASSETS / "gsm8k.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file]
    questions = [row[:1] for row in sorted(rows, key=lambda row: len(row[1]["content"]))[:5]]
    inputs = tokenizer.apply_chat_template(
        questions, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    outputs = model.generate(**inputs, max_new_tokens=90, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    answers = [text.replace("<|endoftext|>", "") for text in tokenizer.batch_decode(outputs)]
    finished = [answer for answer in answers if re.search(r"\n#### -?[\d,.]+<\|im_end\|>$", answer)]
    assert len(finished) >= 4, answers
