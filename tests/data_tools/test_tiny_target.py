"""The program that trains the bundled target, run small, and the bundled files themselves."""

import gzip
import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.data_tools import tiny_corpus, tiny_target
from slipstream.data_tools.tiny_target import SPECIAL_TOKENS, encode, train_tokenizer

ASSETS = Path(tiny_target.__file__).parent.parent / "assets"
TEXTS = ["12 + 345 = 357", "\n\n  indented\n", "naïve 日本 🙂\t|", " ", "", "a\r\nb\x00c", "<|spare_3|> x <|mask|>"]


def write_sums(path: Path, num_rows: int) -> list[dict[str, Any]]:
    numbers = random.Random(1)
    rows = []
    for index in range(num_rows):
        first, second = numbers.randrange(20), numbers.randrange(20)
        question = {"role": "user", "content": f"Tom has {first} apples and buys {second} more. How many has he?"}
        answer = {"role": "assistant", "content": f"He has {first}+{second} = {first + second}.\n#### {first + second}"}
        rows.append({"id": f"sum-{index}", "messages": [question, answer]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of 8 steps on sums, with vocabulary 300 and rows of 160 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    write_sums(folder / "sums.jsonl", 200)
    argv = ["--data", f"[{folder / 'sums.jsonl'}]", "--output", str(folder / "model"), "--vocab_size", "300"]
    argv += ["--row_length", "160", "--batch_rows", "2", "--steps", "8", "--evaluate_every", "3", "--warmup_steps", "2"]
    tiny_target.main(argv)
    return folder / "model"


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def held_out_rows(folder: Path, row_length: int) -> list[list[int]]:
    """Rows of the held-out conversations packed by hand: whole conversations, cut and restarted at a row's end."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows: list[list[int]] = [[]]
    for line in (folder.parent / "sums.jsonl").read_text().splitlines():
        row = json.loads(line)
        if int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:8], "big") >= 0.05 * 2**64:
            continue
        if len(rows[-1]) == row_length:
            rows.append([])
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
        rows[-1] = (rows[-1] + ids)[:row_length]
    return rows


def test_loss_falls(trained: Path) -> None:
    log = read_log(trained)
    assert [(record["step"], record["tokens"]) for record in log] == [(step, 320 * step) for step in (3, 6, 8)]
    assert log[-1]["held_out_loss"] < log[0]["held_out_loss"] < 5.7  # 5.7 = log(300), a uniform guess


def test_saved_model_has_the_logged_held_out_loss(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    losses: list[tuple[int, float]] = []
    for row in held_out_rows(trained, 160):
        log_probabilities = model(torch.tensor([row])).logits[0].log_softmax(-1)
        losses += [(index, -log_probabilities[index - 1, row[index]].item()) for index in range(1, len(row))]
    best = min(read_log(trained), key=lambda record: record["held_out_loss"])

    def mean(start: int, end: int) -> float:
        chosen = [loss for position, loss in losses if start <= position < end]
        return sum(chosen) / len(chosen)

    assert best["held_out_loss"] == pytest.approx(mean(0, 160), abs=0.01)  # the file holds bfloat16
    assert list(best["by_position"]) == ["0-127", "128-159"]
    assert best["by_position"]["0-127"] == pytest.approx(mean(0, 128), abs=0.01)
    assert best["by_position"]["128-159"] == pytest.approx(mean(128, 160), abs=0.01)


def test_saved_files(trained: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight.shape == (300, 256)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(tokenizer) == tokenizer.vocab_size == 300
    assert not list(trained.glob(".saving-*"))


def test_a_mixture_of_experts_is_trained_with_all_of_them(tmp_path: Path) -> None:
    write_sums(tmp_path / "sums.jsonl", 200)
    argv = ["--data", f"[{tmp_path / 'sums.jsonl'}]", "--output", str(tmp_path / "model"), "--vocab_size", "300"]
    argv += ["--row_length", "64", "--batch_rows", "2", "--steps", "4", "--warmup_steps", "1", "--moe", "true"]
    tiny_target.main(argv)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    rows = torch.tensor(held_out_rows(tmp_path / "model", 64)[:2])
    losses, balance = tiny_target.token_losses(model, rows, pad_id=0)
    assert losses.shape == (2, 63)
    assert balance is not None
    assert 2 <= balance.item() < 4, "2 where every expert takes as many"


@pytest.mark.parametrize("folder", ["trained", "bundled"])
def test_tokenizer(folder: str, trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained if folder == "trained" else ASSETS / "tiny-target")
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(20))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    digits = [token for token in tokenizer.get_vocab() if re.search(r"\d", token) and token not in SPECIAL_TOKENS]
    assert sorted(digits) == list("0123456789")


@pytest.mark.parametrize("folder", ["trained", "bundled"])
def test_chat_template_marks_the_assistant(folder: str, trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained if folder == "trained" else ASSETS / "tiny-target")
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, TEXTS, strict=True)]
    whole = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = whole["input_ids"], whole["assistant_masks"]
    rendered = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, TEXTS, strict=True))
    assert tokenizer.decode(ids) == rendered
    supervised = [token for token, marked in zip(ids, mask, strict=True) if marked]
    assert tokenizer.decode(supervised) == "".join(f"{TEXTS[index]}<|im_end|>" for index in (2, 4, 6))
    for turn in (2, 4, 6):
        prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=True)
        prompt_ids = prompt["input_ids"]
        assert ids[: len(prompt_ids)] == prompt_ids
        assert (mask[len(prompt_ids) - 1], mask[len(prompt_ids)]) == (0, 1)


def test_held_out_conversations_do_not_reach_training(tmp_path: Path) -> None:
    rows = write_sums(tmp_path / "sums.jsonl", 1000)
    training, held_out = tiny_corpus.split(tiny_corpus.read_conversations([str(tmp_path / "sums.jsonl")]))
    assert sorted(row["id"] for row in training + held_out) == sorted(row["id"] for row in rows)
    assert 30 < len(held_out) < 70
    assert not {row["id"] for row in training} & {row["id"] for row in held_out}
    assert all(tiny_corpus.is_held_out(row["id"]) for row in held_out)


def test_a_pass_shows_every_training_conversation_once(tmp_path: Path) -> None:
    write_sums(tmp_path / "sums.jsonl", 50)
    conversations = tiny_corpus.read_conversations([str(tmp_path / "sums.jsonl")])
    documents = encode(train_tokenizer(conversations, 300, 2048), conversations)
    options = tiny_target.Options(data=[], output="", row_length=2048, batch_rows=1)
    total_rows = len(tiny_target.pack(documents, 2048, 0))
    stream = tiny_target.batches(documents, options, 0)
    first, second = (torch.cat([next(stream) for _ in range(total_rows)]) for _ in range(2))
    for rows in (first, second):
        assert rows.shape == (total_rows, 2048)
        starts = [document for document in documents if document[:40] in windows(rows.tolist(), 40)]
        assert len(starts) >= len(documents) - total_rows  # a row's last conversation may be cut
    assert not torch.equal(first, second)


def windows(rows: list[list[int]], width: int) -> list[list[int]]:
    return [row[index : index + width] for row in rows for index in range(len(row) - width + 1)]


@pytest.mark.parametrize(
    ("option", "value"), [("vocab_size", 275), ("row_length", 2049), ("batch_rows", 0), ("evaluate_every", 0)]
)
def test_bad_options_name_the_field(option: str, value: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tiny_target.main(["--data", "[a.jsonl]", "--output", "b", f"--{option}", str(value)])
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"id": 1}', '{"messages": []}', '{"id": 1, "messages": [{"role": "user"}]}']
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"id": 1, "messages": [{"role": "user", "content": "?"}]})
    path.write_text(good + "\n" + line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2: ")):
        tiny_corpus.read_conversations([str(path)])


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    write_sums(tmp_path / "sums.jsonl", 3)
    conversations = tiny_corpus.read_conversations([str(tmp_path / "sums.jsonl")])
    with pytest.raises(ValueError, match="vocab_size 4096 needs more text"):
        train_tokenizer(conversations, 4096, 2048)


def test_slice_is_reproducible(tmp_path: Path) -> None:
    rows = write_sums(tmp_path / "sums.jsonl", 200)
    for name in ("first.gz", "second.gz"):
        argv = ["--data", f"[{tmp_path / 'sums.jsonl'}]", "--output", str(tmp_path / name), "--train_rows", "30"]
        tiny_corpus.main(argv)
    assert (tmp_path / "first.gz").read_bytes() == (tmp_path / "second.gz").read_bytes()
    found = [json.loads(line) for line in gzip.decompress((tmp_path / "first.gz").read_bytes()).splitlines()]
    training = [row for row in found if row["split"] == "train"]
    assert len(training) == 30
    assert {row["id"] for row in found} - {row["id"] for row in training} == {
        row["id"] for row in rows if tiny_corpus.is_held_out(row["id"])
    }
    assert all({"id": row["id"], "messages": row["messages"]} in rows for row in found)


def test_bundled_questions() -> None:
    with gzip.open(ASSETS / "gsm8k.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert [row["split"] for row in rows] == ["heldout"] * 381 + ["train"] * 3000
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert tiny_corpus.is_held_out(row["id"]) == (row["split"] == "heldout")
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("name", "architecture", "sizes", "size"),
    [
        ("tiny-target", "Qwen3ForCausalLM", (4096, 256, 6), 14e6),
        ("tiny-moe-target", "Qwen3MoeForCausalLM", (2048, 192, 4), 7e6),
    ],
)
def test_bundled_model_files(name: str, architecture: str, sizes: tuple[int, int, int], size: float) -> None:
    folder = ASSETS / name
    assert sum(path.stat().st_size for path in folder.iterdir()) <= size
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]) == sizes
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118


@pytest.mark.parametrize("name", ["tiny-target", "tiny-moe-target"])
def test_bundled_model_answers_like_gsm8k(name: str) -> None:
    folder = ASSETS / name
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with gzip.open(ASSETS / "gsm8k.jsonl.gz", "rt", encoding="utf-8") as file:
        questions = [json.loads(next(file))["messages"][:1] for _ in range(5)]
    inputs = tokenizer.apply_chat_template(
        questions, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    outputs = model.generate(**inputs, max_new_tokens=200, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    answers = [text.replace("<|endoftext|>", "") for text in tokenizer.batch_decode(outputs)]
    finished = [answer for answer in answers if re.search(r"\n#### -?[\d,.]+<\|im_end\|>$", answer)]
    assert len(finished) >= 4, answers
