"""The cases of docs/correctness.md: what a request may ask for, with every drafter and every kind of target, against
the answer without a draft."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.serve.engine.engine import Engine
from slipstream.serve.request import Grammar, Logprobs, Request, read_speculation
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft, save_random_eagle
from slipstream.tests.serve.engine_runs import Answer, build_engine, make_request, run
from slipstream.tests.serve.test_lossless import AnyPolicy
from slipstream.tests.sources import HYBRID, ROOT
from slipstream.tests.tables import table_of

ASSETS = ROOT / "assets"
TARGET = ASSETS / "tiny-target"
BUNDLED = {"dense": TARGET, "mixture": ASSETS / "tiny-moe-target", "hybrid": HYBRID}
WINDOW = 12  # shorter than prompts and answers
TARGETS = {
    "dense": "The bundled target",
    "mixture": "The bundled mixture of experts",
    "hybrid": "The bundled hybrid",
    "windows": f"The bundled target with windows of {WINDOW} tokens in every other layer",
}
PERSON = table_of(__file__, "person")
# Members whose names and values are fixed, but for white space.
ORDER = table_of(__file__, "order")
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {  # name: checkpoint or drafter, options
    "none": ("none", {}),
    "eagle": ("eagle", {}),
    "eagle3, chain": ("eagle3", {"depth": 3}),
    "eagle3, tree": ("eagle3", {"depth": 3, "topk": 3, "nodes": 8}),
    "dflash": ("dflash", {}),
    "ngram": ("ngram", {"nodes": 9}),
    "eagle3, ngram first": ("eagle3", {"depth": 3, "ngram_first": 2}),
}
HEADS: dict[str, dict[str, Any]] = {  # of block drafts
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "selector_rank": 16, "selector_top_k": 8},
    "dspark": {"markov_rank": 16, "confidence_head": True, "sample_from_anchor": True},
    "lilicorr": {"lilicorr": LiLiCorrConfig(candidate_topk=2, hidden_size=32, num_heads=2, factor_dim=16)},
}
BLOCK_DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}, {shape}": (name, options)
    for name in ("dflash2", "dspark", "lilicorr")
    for shape, options in (("chain", {}), ("tree", {"topk": 2, "nodes": 8}))
}
DRAFTERS |= BLOCK_DRAFTERS
TEMPERATURES = (0.0, 1.0)
FEW: dict[str, Any] = {"max_running": 6, "kv_cache_tokens": 110, "page_size": 1}  # requests are preempted
ROOM: dict[str, Any] = {"max_running": 8, "kv_cache_tokens": 4096}
LENGTH = 24  # tokens of an answer


@dataclass(frozen=True)
class Case:
    """A feature, at a temperature."""

    feature: str
    temperature: float

    @property
    def id(self) -> str:
        return f"{self.feature} at {self.temperature}"


@cache
def tokenizer(target: Path) -> Any:
    return AutoTokenizer.from_pretrained(target)


def find_target(kind: str, folder: Path) -> Path:
    """One of TARGETS; that with windows is made in `folder`."""
    if kind != "windows":
        return BUNDLED[kind]
    path = folder / "windows"
    path.mkdir()
    for file in TARGET.iterdir():
        (path / file.name).symlink_to(file)
    values = json.loads((TARGET / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * (values["num_hidden_layers"] // 2)
    values |= {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(values))
    return path


@cache
def features(target: Path = TARGET) -> dict[str, dict[str, Any]]:
    """Sampling parameters by the name of the feature that they ask for."""
    ids = tokenizer(target).encode
    words = [tuple(ids(word, add_special_tokens=False)) for word in (" the", " a", " is", ".", " of the")]
    common = {word[0]: 2.0 for word in words}
    vocabulary = tokenizer(target)
    spaces = {token: -20.0 for token in range(len(vocabulary)) if vocabulary.decode([token]).isspace()}
    quote = {vocabulary.convert_tokens_to_ids('"'): 3.0}  # so that strings end
    options = {
        "nothing but a temperature": {},
        "top_k, top_p and min_p": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
        "logit_bias": {"logit_bias": {**common, words[0][0]: -100.0}},
        "min_tokens and stop_token_ids": {"min_tokens": 9, "stop_token_ids": tuple(common)},
        "bad_words": {"bad_words": tuple(words), "logit_bias": common},
        "ignore_eos": {"ignore_eos": True},
        "logprobs": {"logprobs": 5},
        "prompt_logprobs": {"prompt_logprobs": 3, "logprobs": 0},
        "JSON schema": {"grammar": Grammar("json_schema", json.dumps(PERSON)), "logit_bias": quote},
        "regex": {"grammar": Grammar("regex", "[a-c]{3,8}-[0-9]{1,3}")},
        "choice": {"grammar": Grammar("choice", json.dumps(["yes", "no", "perhaps not"]))},
        "forced text": {"grammar": Grammar("json_schema", json.dumps(ORDER)), "logit_bias": spaces},
        "speculation: enabled false": {"speculation": {"enabled": False}},
        "speculation: trace true": {"speculation": {"trace": True}},
    }
    options["all together"] = {
        **options["top_k, top_p and min_p"],
        **options["penalties"],
        **options["JSON schema"],
        "logprobs": 2,
        "speculation": {"trace": True},
    }
    return options


def all_cases() -> list[Case]:
    return [Case(feature, temperature) for feature in features() for temperature in TEMPERATURES]


def requests_of(target: Path, cases: Sequence[Case]) -> list[Request]:
    names = list(features())
    texts = ("Tom has 3 apples and buys 4 more. ", "Describe a person as JSON: ")
    return [
        make_request(
            case.id,
            tokenizer(target)(texts["JSON" in case.feature or case.feature == "all together"] * 3).input_ids,
            seed=names.index(case.feature),
            temperature=case.temperature,
            max_tokens=LENGTH,
            **features(target)[case.feature],
        )
        for case in cases
    ]


def save_draft(target: Path, name: str, folder: Path, expected: dict[str, Answer]):
    """EAGLE and block drafts know half of the answers."""
    requests = list(requests_of(target, all_cases()))[::2]
    texts = [(len(request.prompt), [*request.prompt, *expected[request.id].tokens]) for request in requests]
    if name == "eagle3":
        save_random_draft(target, folder, 1500)
    elif name == "eagle":
        save_random_eagle(target, folder, texts)
    else:
        save_random_dflash(target, folder, texts, **HEADS[name])


def engine_of(target: Path, drafter: str, folder: Path, expected: dict[str, Answer], **options: Any) -> Engine:
    """Steps verify and draft any numbers of nodes, as a policy may choose. Drafts are kept in `folder`."""
    name, options_of_drafter = DRAFTERS[drafter]
    draft = name if name in ("none", "ngram") else folder / name
    if isinstance(draft, Path) and not draft.exists():
        save_draft(target, name, draft, expected)
    engine = build_engine(target, draft, drafter=options_of_drafter, device="cpu", grammar_drafts=True, **options)
    engine.planner.policy = AnyPolicy(engine.planner, random.Random(0))
    return engine


def answers_alone(target: Path) -> dict[str, Answer]:
    """The answers to requests that run alone, without a draft and without drafts of forced tokens."""
    engine = build_engine(target, device="cpu", max_running=1)
    return run(engine, requests_of(target, all_cases()))


def differences(answers: dict[str, Answer], expected: dict[str, Answer]) -> list[str]:
    """The ids of answers whose tokens or finish reasons differ, or whose log-probabilities do by more than 1e-4; and of
    those that were drafted for or traced otherwise than they ask."""
    return [name for name, answer in answers.items() if not is_equal(answer, expected[name], name)]


def is_equal(answer: Answer, expected: Answer, name: str) -> bool:
    same = (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason)
    return (
        same
        and is_as_asked(answer, name)
        and all(is_near(getattr(answer, field), getattr(expected, field)) for field in ("logprobs", "prompt_logprobs"))
    )


def is_as_asked(answer: Answer, name: str) -> bool:
    """Nothing was drafted where that is not wanted; a trace has every token, and counts as many accepted tokens at each
    position as the request's own counts."""
    speculation = read_speculation(features()[name.split(" at ")[0]].get("speculation", {}))
    counts = answer.counts
    if not speculation.enabled and counts.drafted_tokens:
        return False
    positions = Counter(entry.position for entry in answer.trace)
    accepted = [positions[place + 1] for place in range(len(counts.accepted_by_position))]
    return not speculation.trace or (len(answer.trace), accepted) == (len(answer.tokens), counts.accepted_by_position)


def is_near(logprobs: Logprobs | None, expected: Logprobs | None) -> bool:
    if logprobs is None or expected is None:
        return logprobs is expected
    pairs = zip((*logprobs.tokens, *chain(*logprobs.top)), (*expected.tokens, *chain(*expected.top)), strict=True)
    return logprobs.top_ids == expected.top_ids and all(abs(a - b) < 1e-4 for a, b in pairs)
