"""How far answers lie below the best, against transformers read directly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.bench.regret import main, read_answers
from slipstream.bench.serving import main as serve_answers

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("served") / "answers.jsonl"
    sizes = ["--input-len", "0", "--output-len", "24", "--requests", "3", "--concurrency", "1,2"]
    engine = ["--target", str(TINY), "--engine.kv_cache_tokens", "2048", "--engine.max_model_len", "512"]
    serve_answers([*sizes, *engine, "--prompts", "gsm8k", "--answers", str(path)])
    return [json.loads(line) for line in path.read_text().splitlines()]


def regrets(rows: list[dict[str, Any]], folder: Path, *options: str) -> list[dict[str, Any]]:
    path, output = folder / "answers.jsonl", folder / "regret.jsonl"
    output.unlink(missing_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["--answers", str(path), "--target", str(TINY), "--output", str(output), "--device", "cpu", *options])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_the_engines_answers_have_none(served: list[dict[str, Any]], tmp_path: Path) -> None:
    lines = regrets(served, tmp_path, "--dtype", "float32")
    assert [(line["draft"], line["concurrency"], line["answers"]) for line in lines] == [("none", 1, 3), ("none", 2, 3)]
    assert [line["tokens"] for line in lines] == [72, 72]
    for line in lines:
        assert line["largest_regret"] < 1e-3
        assert (line["reference_not_best"], line["reference_largest_regret"]) == (0, 0.0)


def test_a_wrong_token_shows(served: list[dict[str, Any]], tmp_path: Path) -> None:
    wrong = served[1]["answer"][:]
    wrong[7] = 300
    line = regrets([served[0], served[1] | {"answer": wrong}], tmp_path)[0]
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([served[1]["prompt"] + wrong[:7]])).logits[0, -1]
    # The tokens behind a wrong one are those of another text, so they may be further off than it.
    assert line["largest_regret"] >= float(logits.max() - logits[300]) - 1e-3 > 1
    assert line["not_best"] >= 1


def test_the_scale_is_what_transformers_takes_in_bf16(served: list[dict[str, Any]], tmp_path: Path) -> None:
    line = regrets(served, tmp_path, "--dtype", "bfloat16")[0]
    models = [
        AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype).eval() for dtype in (torch.bfloat16, torch.float32)
    ]
    worst, count = 0.0, 0
    for row in served[:3]:
        ids = torch.tensor([row["prompt"] + row["answer"]])
        with torch.no_grad():
            coarse, exact = (model(ids).logits[0, len(row["prompt"]) - 1 : -1].float() for model in models)
        for place, token in enumerate(coarse.argmax(-1).tolist()):
            regret = float(exact[place].max() - exact[place, token])
            worst, count = max(worst, regret), count + (regret > 0)
    assert line["reference_largest_regret"] == pytest.approx(worst, abs=1e-3)
    assert line["reference_not_best"] == count


def test_sampled_answers_have_no_best(served: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(served[0] | {"temperature": 0.7}))
    with pytest.raises(ValueError, match=r"answers.jsonl:1: temperature is 0.7; only greedy answers can be measured"):
        read_answers(str(path))
