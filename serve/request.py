"""What travels between a client and the engine: requests, sampling parameters and outputs. Imports no torch."""

import hashlib
import secrets
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
INTEGERS = ("max_tokens", "top_k", "seed")
NUMBERS = ("temperature", "top_p", "min_p")
SEED_BITS = 53  # of seeds that we draw: readers of JSON that know no integers, only doubles, keep these exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off. `stop_token_ids` are added to
    the model's own end-of-text ids, which `ignore_eos` switches off. Without a `seed` each request draws its own. Stop
    strings are the front end's business (serve/detokenize.py): the engine knows tokens only.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for names, kind, called in ((INTEGERS, Integral, "an integer"), (NUMBERS, Real, "a number")):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) and not (name == "seed" and value is None):
                    raise ValueError(f"{name} is {value!r}; it must be {called}")
        for name, valid, remedy in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or a positive number below 2**31"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
        ):
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {remedy}")


def draw_seed() -> int:
    return secrets.randbits(SEED_BITS)


def prompt_seed(seed: int, index: int) -> int:
    """The seed of prompt `index` of a call: the call's own for the first, so that a prompt alone samples alike."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"prompt {seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. `n` choices of one prompt are n requests that differ in `id` and `choice`. `params`
    always holds a seed: one is drawn where none is given."""

    id: str
    prompt: list[int]
    params: SamplingParams
    choice: int = 0  # index among `n`; hashed into the noise key
    namespace: str = ""  # requests share cached prefixes only within a namespace

    def __post_init__(self) -> None:
        if self.params.seed is None:
            object.__setattr__(self, "params", replace(self.params, seed=draw_seed()))

    @property
    def seed(self) -> int:
        assert self.params.seed is not None
        return self.params.seed


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Counts of one request, final once its last Output is out.

    Accept length, as everywhere in Slipstream: (completion_tokens - 1) / rounds, since the first token comes from the
    prompt's own pass. A request that is preempted makes that pass again when it resumes, over all its tokens, and gets
    its next token from it: in general (completion_tokens - prefills) / rounds. `cached_tokens` are those of the prompt
    found in the prefix cache when the request first ran. `accepted_by_position[j]` counts the rounds in which draft
    token j was accepted and emitted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefills: int = 0  # passes over the prompt that ran to its end: 1, and 1 per resumption
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """New tokens of one request. `finish_reason` and `stats` are set on its last Output only."""

    request_id: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end needs to know of a running engine."""

    target: str
    draft: str
    width: int  # nodes verified per round, root included
    max_model_len: int
    vocab_size: int
    stop_ids: frozenset[int]
    kv_cache_tokens: int
