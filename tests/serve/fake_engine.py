"""An engine without a model, for tests of what stands before it.

Answers are the prompt's tokens again and again: one by the first step, then `ROUND` per step, as if two drafts were
accepted. A request's namespace makes it misbehave: see `FakeEngine`.
"""

import socket
import time
from collections.abc import Callable
from hashlib import blake2b

from slipstream.serve.engine.counts import DraftState, EngineCounts
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import (
    EngineInfo,
    Logprobs,
    Output,
    Request,
    RequestStats,
    SamplingParams,
    TokenTrace,
)

ROUND = 3
CONTEXT = 256
VOCABULARY = 260  # 4 special tokens, 256 bytes
MANNERS = ("refuse", "confuse", "crash", "fail", "fault", "slow")
SALTED = {blake2b(name.encode(), digest_size=16).hexdigest(): name for name in MANNERS}  # as the server sends salts


def info(max_model_len: int = CONTEXT, vocab_size: int = VOCABULARY) -> EngineInfo:
    return EngineInfo(
        max_model_len, vocab_size, kv_cache_tokens=max_model_len, fingerprint="fp_fake", num_spec_tokens=2
    )


def logprobs_of(tokens: list[int], k: int) -> Logprobs:
    """Returns log-probabilities: the token's own in quarters below 0, and those of the ids after it, each less likely
    than the one before."""
    return Logprobs(
        [-1 - token % 7 / 4 for token in tokens],
        [k + 1 + token % 3 for token in tokens],
        [[-0.5 - index / 2 for index in range(k)] for _ in tokens],
        [[(token + 1 + index) % VOCABULARY for index in range(k)] for token in tokens],
    )


def trace_of(tokens: list[int], number: int) -> list[TokenTrace]:
    """Returns a round's trace: two drafted tokens, and the target's own after two refused drafts, the second
    withheld."""
    if number == 0:
        return [TokenTrace("target", 0, 0, rows=len(tokens)) for _ in tokens]
    origins = [("fake", place, number, ()) for place in range(1, ROUND)]
    refused = [((token + 1) % 256, None) for token in tokens[ROUND - 1 :]]
    origins += [("target", 0, number, token) for token in refused]
    return [TokenTrace(*origin, drafted=ROUND - 1, rows=ROUND) for origin in origins[: len(tokens)]]


def manner(request: Request) -> str:
    return SALTED.get(request.namespace, request.namespace)


class FakeEngine:
    """An engine that follows the namespace of a request, or the salt of a call: "refuse" is refused, "confuse" cannot
    be queued, "crash" fails in the step, "fail" ends with an error after its first token, "fault" with one that the
    request is to blame for, "slow" takes 10 ms per step, all others 1 ms: text that comes faster than it is sent would
    be joined."""

    def __init__(self, config: EngineConfig):
        self.info = info(config.max_model_len or CONTEXT)
        self.running: dict[str, Request] = {}
        self.stats: dict[str, RequestStats] = {}
        self.num_aborted = 0
        self.clients = set()
        self.tenants = set()
        self.largest_batch = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request):
        if manner(request) == "refuse":
            raise ValueError("prompt is refused; ask for less")
        if manner(request) == "confuse":
            raise TypeError("a number is no text")
        self.running[request.id] = request
        self.clients.add(request.client)
        self.tenants.add(request.tenant)
        self.stats[request.id] = RequestStats(prompt_tokens=len(request.prompt), prefills=1, cached_tokens=1)

    def abort(self, request_id: str, *, is_whole: bool = False) -> Output | None:
        if self.running.pop(request_id, None) is None:
            return None
        self.num_aborted += 1
        reason = "stop" if is_whole else "abort"
        return Output(request_id=request_id, tokens=[], finish_reason=reason, stats=self.stats.pop(request_id))

    def step(self) -> list[Output]:
        self.largest_batch = max(self.largest_batch, len(self.running))
        is_slow = any(manner(request) == "slow" for request in self.running.values())
        time.sleep(0.01 if is_slow else 0.001)
        return [self.advance(request) for request in list(self.running.values())]

    def work_idle(self) -> bool:
        return False

    def advance(self, request: Request) -> Output:
        if manner(request) == "crash":
            raise RuntimeError("the device is on fire")
        stats = self.stats[request.id]
        params = request.params
        if manner(request) == "fault":
            del self.running[request.id]
            final = self.stats.pop(request.id)
            error = "regex takes too long to compile; simplify it"
            return Output(
                request_id=request.id, tokens=[], finish_reason="error", stats=final, error=error, is_refusal=True
            )
        if manner(request) == "fail" and stats.completion_tokens:
            del self.running[request.id]
            final = self.stats.pop(request.id)
            return Output(request_id=request.id, tokens=[], finish_reason="error", stats=final, error="no memory")
        num_done = stats.completion_tokens
        num_new = min(ROUND if num_done and params.wants_drafts else 1, params.max_tokens - num_done)
        tokens = [request.prompt[(num_done + i) % len(request.prompt)] for i in range(num_new)]
        stops = {*params.stop_token_ids, *([] if params.ignore_eos else [0])}
        ends = [index for index, token in enumerate(tokens) if token in stops]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        self.count(stats, len(tokens), drafted=params.wants_drafts)
        reason = "stop" if ends else "length" if stats.completion_tokens == params.max_tokens else None
        if reason is not None:
            del self.running[request.id]
        final = self.stats.pop(request.id) if reason else None
        of_prompt = None
        if params.prompt_logprobs is not None and not num_done:
            of_prompt = logprobs_of(request.prompt[1:], params.prompt_logprobs)
        return Output(
            request_id=request.id,
            tokens=tokens,
            finish_reason=reason,
            stats=final,
            logprobs=None if params.logprobs is None else logprobs_of(tokens, params.logprobs),
            prompt_logprobs=of_prompt,
            trace=self.trace_of(params, tokens, num_done) if params.wants_trace else None,
        )

    def trace_of(self, params: SamplingParams, tokens: list[int], num_done: int) -> list[TokenTrace]:
        if not params.wants_drafts:
            return [TokenTrace("target", 0, num_done, rows=1)]
        return trace_of(tokens, -(-num_done // ROUND))

    def count(self, stats: RequestStats, num_tokens: int, *, drafted: bool):
        if stats.completion_tokens and drafted:
            stats.rounds += 1
            stats.drafted_tokens += ROUND - 1
            stats.accepted_by_position += [0] * (ROUND - 1 - len(stats.accepted_by_position))
            for position in range(min(num_tokens, ROUND - 1)):
                stats.accepted_by_position[position] += 1
        stats.completion_tokens += num_tokens

    def stage_draft(self, name: str) -> str:
        if not name.endswith("other"):
            raise ValueError("draft is not of the network that is served; start an engine with it")
        return name

    def swap_draft(self, staged: str, trial_rounds: int) -> DraftState:
        trial = "open" if trial_rounds else ""
        return DraftState(fingerprint=f"{len(staged):064}", has_network=True, num_swaps=1, trial=trial)

    def metrics(self) -> dict[str, int]:
        return {
            "running": len(self.running),
            "aborted": self.num_aborted,
            "largest_batch": self.largest_batch,
            "clients": len(self.clients),
            "tenants": len(self.tenants),
        }

    def counts(self) -> EngineCounts:
        return EngineCounts(kv_pages={("0", "used"): len(self.running), ("0", "free"): 64 - len(self.running)})

    def open_states(self, config: EngineConfig, post: Callable[[Callable[[], None]], None], listener: socket.socket):
        raise AssertionError("there are no states")

    def watch(self, report: Callable[[str], None]):
        pass

    def close(self):
        pass


class ForgetfulEngine(FakeEngine):
    """Cannot save what its drafter has learned."""

    def close(self):
        raise OSError(28, "No space left on device", "learned.trie")


def refuse_to_start(config: EngineConfig) -> FakeEngine:
    raise ValueError(f"checkpoint {config.target} is cut short; fetch it again")


def break_at_start(_: EngineConfig) -> FakeEngine:
    raise RuntimeError("no driver")


def never_start(_: EngineConfig) -> FakeEngine:
    time.sleep(600)
    raise AssertionError
