"""What the tests of bench/inflate.py share: the small target, questions, and what a pair answers."""

import gzip
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from slipstream.serve.llm import LLM, Generation
from slipstream.serve.request import SamplingParams

ROOT = Path(__file__).parents[2]
TINY = ROOT / "assets" / "tiny-target"
SMALL_VOCAB = 4096
CPU = torch.device("cpu")


def read_questions() -> list[str]:
    with gzip.open(ROOT / "assets" / "gsm8k.jsonl.gz", "rt") as lines:
        rows = [json.loads(next(lines)) for _ in range(4)]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    chats = [row["messages"][:1] for row in rows]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


def transformer(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def answers(target: Path, draft: Path | str, prompts: list[str], dtype: str = "float32") -> list[Generation]:
    """The first half of the prompts is answered greedily, the other one at temperature 1."""
    llm = LLM(str(target), str(draft), kv_cache_tokens=4096, max_model_len=512, dtype=dtype)
    half = len(prompts) // 2
    params = [SamplingParams(max_tokens=20, temperature=float(i >= half), seed=i) for i in range(len(prompts))]
    return llm.generate(prompts, params)


def check_same_but_for_ties(prompts: list[str], small: list[Generation], big: list[Generation]) -> None:
    """In bf16: greedy answers part only where the small target's best tokens are near, and one does not at all."""
    model, tokenizer = transformer(TINY, torch.bfloat16), AutoTokenizer.from_pretrained(TINY)
    for prompt, one, other in zip(prompts, small, big, strict=True):
        if one.tokens != other.tokens:
            same = next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b)
            known = tokenizer(prompt)["input_ids"] + one.tokens[:same]
            best = model(torch.tensor([known])).logits[0, -1].float().topk(2).values
            assert best[0] - best[1] <= 0.25
    assert sum(one.tokens == other.tokens for one, other in zip(small, big, strict=True)) >= 1
