"""Compares greedy answers of the engine with those of transformers, both in fp32 on the same device.

    python -m slipstream.tests.serve.transformers_answers --target runs/smollm2/target --draft runs/smollm2/draft/best

The engine answers all questions at once. transformers then reads each prompt and answer in one pass: the answer is its
own if every token is its likeliest one at that place, and if it ends with an end token or at the longest length.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.config import run
from slipstream.serve.llm import LLM, Generation
from slipstream.serve.measure.questions import read_questions
from slipstream.serve.options import EngineConfig, check_checkpoints, find_target
from slipstream.serve.request import SamplingParams

CACHE_TOKENS = 65_536  # leaves room for transformers' copy of the target


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersConfig:
    """Compares greedy answers of the engine with those of transformers, both in fp32."""

    target: str = ""
    """Target checkpoint. Default: the target of the draft."""
    draft: str = "none"
    """Draft checkpoint, or the name of a drafter that needs none."""
    questions: list[str] = field(default_factory=lambda: ["mt_bench"])
    """gsm8k, mt_bench, or files of questions; of several turns the first is asked."""
    num_questions: int = 60
    """Questions, from the beginning."""
    max_tokens: int = 256
    """Longest answer in tokens."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine by name."""

    def check_inputs(self):
        """Raises ValueError for a checkpoint that does not exist, and if none names the target."""
        check_checkpoints(self.target, self.draft)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that is not transformers' likeliest, and by how much its logit is lower."""

    place: int
    gap: float


def compare(config: AnswersConfig) -> list[Difference | None]:
    """Returns the difference of each answer, None where it is equal; prints them."""
    questions = read_questions(config.questions)[: config.num_questions]
    options = {"dtype": "float32", "kv_cache_tokens": CACHE_TOKENS} | config.engine
    llm = LLM(config.target, config.draft, **options)
    chats = [question.first for question in questions]
    prompts = [
        llm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        for chat in chats
    ]
    params = SamplingParams(max_tokens=config.max_tokens, temperature=0.0)
    answers = llm.generate(prompts, params, progress=True)
    path = find_target(EngineConfig(target=config.target, draft=config.draft))[1]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = model.to(llm.engine.runner.state.device)
    pairs = zip(prompts, answers, strict=True)
    differences = [
        first_difference(model, prompt, answer, config.max_tokens)
        for prompt, answer in tqdm(pairs, total=len(prompts), desc="transformers", unit="answer")
    ]
    report(answers, differences)
    return differences


@torch.inference_mode()
def first_difference(
    model: PreTrainedModel, prompt: Sequence[int], answer: Generation, max_tokens: int
) -> Difference | None:
    tokens = torch.tensor(answer.tokens, device=model.device)
    ids = torch.tensor([*prompt, *answer.tokens], device=model.device)
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]  # (len(answer), V)
    gaps = logits.amax(1) - logits.gather(1, tokens[:, None])[:, 0]
    wrong = gaps.nonzero()
    if len(wrong):
        place = int(wrong[0])
        return Difference(place, float(gaps[place]))
    end_ids = model.generation_config.eos_token_id
    ends = answer.tokens[-1] in (end_ids if isinstance(end_ids, list) else [end_ids])
    return None if ends or len(answer.tokens) == max_tokens else Difference(len(answer.tokens), float("inf"))


def report(answers: Sequence[Generation], differences: Sequence[Difference | None]):
    for index, difference in enumerate(differences):
        if difference is not None:
            print(f"answer {index}: token {difference.place}, whose logit is {difference.gap:.2e} below the highest")
    equal = sum(difference is None for difference in differences)
    num_tokens = sum(len(answer.tokens) for answer in answers)
    rounds = sum(answer.stats.rounds for answer in answers)
    print(f"{equal} of {len(answers)} answers are those of transformers: {num_tokens:,} tokens in {rounds:,} rounds")


def compare_and_exit(config: AnswersConfig):
    differing = sum(difference is not None for difference in compare(config))
    if differing:
        raise ValueError(f"{differing} answers differ")


def main(argv: Sequence[str] | None = None):
    run(compare_and_exit, AnswersConfig, "transformers_answers", argv)


if __name__ == "__main__":
    main()
