"""The engine: loads a target and a drafter, sizes memory, and steps. Imports no HTTP library.

One step launches at most one batch of prompt chunks and one round for every request that is decoding. On a GPU their
tokens are read a round later (`overlap`): the scheduler plans with the tokens that it has, the device holds the rest.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from slipstream import runtime
from slipstream.models.files.checkpoint import read_json
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import ModelConfig
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.serve.attention.base import KVFormat, find_backends
from slipstream.serve.drafters.registry import load_drafter
from slipstream.serve.engine.kv_cache import PageCache
from slipstream.serve.engine.memory import Sizing, measure_workspace
from slipstream.serve.engine.scheduler import Scheduler, Sequence
from slipstream.serve.engine.widths import PATIENCE
from slipstream.serve.options import PREFILL_BLOCK, EngineConfig, find_target
from slipstream.serve.request import EngineInfo, Output, Request
from slipstream.serve.runner.batch import KVSpec
from slipstream.serve.runner.cuda_graphs import RoundGraphs
from slipstream.serve.runner.executor import Executor, PendingResult, Planned, Recipients
from slipstream.serve.runner.prompt_graphs import PromptGraphs, capture_all
from slipstream.serve.runner.request_state import RequestState
from slipstream.serve.runner.round import Runner
from slipstream.serve.runner.round_times import width_policy

MAX_ROUNDS_IN_FLIGHT = 2  # with overlap: one runs, the next one is queued
WAIT_DECAY = 0.95  # per round, of the mean time in which rounds wait for the host


@dataclass(frozen=True, slots=True)
class Pass:
    """A launched pass."""

    kind: Literal["prefill", "round"]
    sequences: list[Sequence | None]  # one per output; None: an output to discard
    read: Callable[[], PendingResult]  # waits
    commit: Callable[[PendingResult], list[Output]]  # passes the tokens to the scheduler


class Engine:
    """Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        _, path = find_target(config)
        model = load_config(path, config.trust_remote_code)
        self.device = torch.device(pick_device(config.device))
        dtype = pick_dtype(config.dtype, path, self.device)
        with runtime.stage("loading the weights"):
            self.target = load_target(path, model, dtype, self.device, config.trust_remote_code)
            self.drafter = load_drafter(config.draft, config.drafter, self.target)
        self.widths = pick_widths(config.width, self.drafter.widths)
        self.width = max(self.widths)
        self.reserve = self.width + self.drafter.scratch(self.width)
        self.specs = specs = [KVSpec(model.num_layers, model.num_kv_heads, model.head_dim, model.rope)]
        specs += [self.drafter.kv] if self.drafter.kv else []
        phases = dict(zip(("prefill", "verify", "draft"), (specs[0], *specs), strict=False))
        formats = {phase: KVFormat(self.device, dtype, spec.head_dim) for phase, spec in phases.items()}
        self.backends = find_backends(config.attention, formats)
        self.backends["prefill"].prepare(formats["prefill"])
        self.captures, self.overlap = self._pick_modes(phases)

        max_reserve = self.reserve * (MAX_ROUNDS_IN_FLIGHT if self.overlap else 1)
        with runtime.stage("sizing the KV cache"):
            sizing = Sizing(config, specs, dtype, self.device, max_reserve)
            longest = pick_max_model_len(config.max_model_len, model, self.drafter.longest_context)
            workspace = self._measure(specs, dtype, sizing.pages_for(longest)) if self.device.type == "cuda" else 0
            num_pages = sizing.num_pages(longest, workspace)
            max_model_len = sizing.fit_to_cache(longest, num_pages)
            runner = self._build_runner(specs, dtype, num_pages, sizing.pages_for(max_model_len))
        self.state = runner.state
        graphs, prompts = self._capture(runner) if self.captures else (None, None)
        self.executor = Executor(runner, graphs, self.width, prompts)
        with runtime.stage("timing rounds"):
            self.policy = width_policy(runner, graphs, config.max_running, self.widths)
        self.info = EngineInfo(max_model_len, model.vocab_size, kv_cache_tokens=(num_pages - 1) * config.page_size)
        self.scheduler = Scheduler(
            cache=PageCache(num_pages, config.page_size),
            max_running=config.max_running,
            max_model_len=max_model_len,
            prefill_budget=config.prefill_budget if prompts is None else config.captured_tokens,
            prefill_block=1 if prompts is None else PREFILL_BLOCK,
            max_chunks=None if prompts is None else prompts.num_requests,
            stop_ids=self.target.end_ids,
            lookahead=self.drafter.lookahead,
            max_reserve=max_reserve,
            on_admit=self._admit,
            on_release=lambda sequence: self.drafter.release(sequence.slot, sequence.tokens),
        )
        self._in_flight: deque[Pass] = deque()
        self._rounds_without_host = 0  # in a row, that verified nothing of the host's

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_open(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that can never be served."""
        if any(not 0 <= token < self.info.vocab_size for token in request.prompt):
            raise ValueError(f"prompt holds a token id outside 0..{self.info.vocab_size - 1}; check the tokenizer")
        self.drafter.check(request)
        self.scheduler.validate(request)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError for one that can never be served."""
        self.check(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Output | None:
        return self.scheduler.abort(request_id)

    def step(self) -> list[Output]:
        """Launches prefills and rounds, and returns new tokens.

        With overlap it waits for the oldest pass only, while newer ones run; otherwise for all that it launches.
        """
        if not self.overlap:
            return [*self._finish(self._prefill()), *self._finish(self._launch(self._plan_round()))]
        if self._waits_for_host and self._has_room():
            return self._step_between()
        while self._has_room():
            flights = [flight for flight in (self._prefill(), self._launch(self._plan_round())) if flight is not None]
            self._in_flight += flights
            if not flights:
                break
        return self._finish(self._in_flight.popleft() if self._in_flight else None)

    def _step_between(self) -> list[Output]:
        """A step for a drafter on the host: the device waits for its drafts and for nothing else. The next round gets
        its pages before the last one is read, and the scheduler gets the last one's tokens after the next is launched.
        """
        planned = self._plan_round()
        flights = [(flight, self.executor.recipients(flight.sequences)) for flight in self._in_flight]
        self._in_flight.clear()
        arrived = [flight.read() for flight, _ in flights]
        landed = time.perf_counter()
        for (_, recipients), results in zip(flights, arrived, strict=True):
            self._draft_on_host(recipients, results, is_last=True)  # before the next pass stores its proposals
        # The round first: a request whose prompt runs has no root to verify until its first token is read.
        launched = self._launch(planned)
        if launched is not None and self.policy is not None:
            self.policy.wait_ms += (1 - WAIT_DECAY) * (1e3 * (time.perf_counter() - landed) - self.policy.wait_ms)
        self._in_flight += [flight for flight in (launched, self._prefill()) if flight is not None]
        return [out for (flight, _), results in zip(flights, arrived, strict=True) for out in flight.commit(results)]

    def _finish(self, flight: Pass | None) -> list[Output]:
        if flight is None:
            return []
        arrived = flight.read()
        if self.drafter.on_host:
            self._draft_on_host(self.executor.recipients(flight.sequences), arrived, is_last=not self._in_flight)
        return flight.commit(arrived)

    @property
    def _waits_for_host(self) -> bool:
        """False once PATIENCE rounds in a row had no draft worth waiting for. Rounds then overlap as usual; a good
        lookup switches waiting back on."""
        return self.drafter.on_host and self._rounds_without_host < PATIENCE

    def _has_room(self) -> bool:
        """Whether another pass may be queued. One is kept queued, so that the device never waits for the host."""
        kinds = [flight.kind for flight in self._in_flight]
        return max(kinds.count("prefill"), kinds.count("round")) < MAX_ROUNDS_IN_FLIGHT

    def _prefill(self) -> Pass | None:
        chunks = self.scheduler.next_prefill()
        if not chunks:
            return None

        def commit(arrived: PendingResult) -> list[Output]:
            firsts = zip(chunks, arrived.tokens(), strict=True)
            tokens = [token if chunk.is_last else None for chunk, (token,) in firsts]
            return self.scheduler.commit_prefill(chunks, tokens)

        ending = [chunk.sequence if chunk.is_last else None for chunk in chunks]
        flight = self.executor.prefill(chunks)
        self.scheduler.launched(chunks)
        return Pass("prefill", ending, flight.read, commit)

    def _plan_round(self) -> Planned:
        return self.executor.plan(self.scheduler.next_round(self.reserve))

    def _launch(self, planned: Planned) -> Pass | None:
        if not planned.sequences:
            return None
        offers, least, width = self.executor.offers(planned.slots), self.drafter.device_width, self.width
        if self.policy is not None:
            width = self.policy.choose(offers, least, filtered=planned.mode == "full")
        is_without = self.policy is not None and width <= least
        self._rounds_without_host = self._rounds_without_host + 1 if is_without else 0
        flight = self.executor.round(planned, width)

        def commit(arrived: PendingResult) -> list[Output]:
            if self.policy is not None and width > 1:
                self.policy.record(offers, width, arrived.accepted())
            drafted = [min(nodes, width) - 1 for nodes, _ in offers]
            return self.scheduler.commit_round(planned.sequences, arrived.tokens(), drafted)

        return Pass("round", list(planned.sequences), flight.read, commit)

    def _draft_on_host(self, recipients: Recipients, arrived: PendingResult, *, is_last: bool) -> None:
        """Passes new tokens to a drafter on the host and stores its proposals. If the requests' next round is launched
        already, only checks whether waiting would have paid.

        A request may end within these tokens. `commit` finds that out later, and the drafter learns it by `release`.
        """
        if not recipients.slots:
            return
        proposal = self.drafter.draft(recipients.slots, recipients.part_of(arrived), self.width)
        if is_last:
            self.executor.store(recipients, proposal)
        elif self.policy is not None:
            least = self.drafter.device_width
            drafted = zip(proposal.counts, proposal.kinds, strict=True)
            offers = [(count, kind) if count else (least, 0) for count, kind in drafted]
            if self.policy.choose(offers, least) > least:
                self._rounds_without_host = 0

    def close(self) -> None:
        """Lets the drafter save what it keeps. The engine is not used afterwards."""
        self.drafter.close()

    def metrics(self) -> dict[str, int]:
        """Current gauges; a request's counts come with its last Output."""
        scheduler = self.scheduler
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "preemptions": scheduler.num_preemptions,
            **self.drafter.metrics(),
        }

    def _admit(self, sequence: Sequence) -> None:
        self.executor.admit(sequence)
        self.drafter.admit(sequence.slot, sequence.tokens, sequence.request.namespace)

    def _pick_modes(self, phases: Iterable[str]) -> tuple[bool, bool]:
        """Whether rounds are captured, and whether their tokens are read one round later (overlap)."""
        planned = [phase for phase in phases if phase != "prefill" and self.backends[phase].needs_host_lengths]
        on_gpu = self.device.type == "cuda"
        if on_gpu and self.config.cuda_graph and planned:
            raise ValueError(
                f"attention is {self.config.attention!r}: its backend for {planned[0]} plans on the host, which a CUDA "
                f"graph cannot; choose another for {' and '.join(planned)}, or add --no-cuda-graph"
            )
        overlap = on_gpu and self.config.overlap and not planned
        return on_gpu and self.config.cuda_graph, overlap

    def _build_runner(self, specs: list[KVSpec], dtype: torch.dtype, num_pages: int, pages_per_slot: int) -> Runner:
        config, device = self.config, self.device
        state = RequestState(config.max_running, pages_per_slot, config.page_size, self.width, device)
        groups = [spec.allocate(num_pages, config.page_size, dtype, device) for spec in specs]
        positions = pages_per_slot * config.page_size
        ropes: list[RotaryEmbedding] = []
        for spec in specs:  # a draft mostly has its target's
            equal = (rope for other, rope in zip(specs, ropes, strict=False) if other.has_positions_of(spec))
            ropes.append(next(equal, None) or RotaryEmbedding(spec.rope, spec.head_dim, positions).to(device))
        attention = {phase: self.backends[phase](groups[0], ropes[0]) for phase in ("prefill", "verify")}
        draft_attention = self.backends["draft"](groups[1], ropes[1]) if self.drafter.kv else None
        self.drafter.attach(self.target, state, draft_attention)
        caches = tuple(group.flatten(2, 3) for group in groups)
        host_alone = self.drafter.on_host and self.drafter.device_width == 1 and not self.overlap
        return Runner(self.target, attention, self.drafter, state, caches, config.simulate_accept_length, host_alone)

    def _measure(self, specs: list[KVSpec], dtype: torch.dtype, pages_per_slot: int) -> int:
        """Bytes that the largest passes and the graphs need; measured by running them over a cache of one dump page."""
        runner = self._build_runner(specs, dtype, 1, pages_per_slot)
        return measure_workspace(runner, self.config, self.width, self.widths if self.captures else [])

    def _capture(self, runner: Runner) -> tuple[RoundGraphs, PromptGraphs | None]:
        return capture_all(runner, self.config, self.widths)


def pick_max_model_len(asked: int | None, model: ModelConfig, of_draft: int | None) -> int:
    """The context length: at most the target's positions and its sliding window, since windows are not implemented.

    Raises ValueError if the drafter is not made for that many: `of_draft` (None: for any), its sliding window.
    """
    limit = min(model.max_position_embeddings, model.sliding_window or model.max_position_embeddings)
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len is {asked}; this target allows at most {limit}")
    longest = asked or limit
    if of_draft is not None and longest > of_draft:
        raise ValueError(
            f"contexts of {longest} tokens do not fit the draft's sliding_window of {of_draft}, which may never "
            f"bind here; serve with --max-model-len {of_draft} or less"
        )
    return longest


def pick_widths(asked: int | None, offered: tuple[int, ...]) -> tuple[int, ...]:
    if asked is None:
        return offered
    if asked not in offered:
        raise ValueError(f"width is {asked}; this drafter offers {', '.join(map(str, offered))}")
    return (asked,)


def pick_device(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU; choose cpu, or install a CUDA build of torch")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(name: str, path: Path, device: torch.device) -> torch.dtype:
    if name == "auto" and device.type == "cpu":
        return torch.float32
    if name == "auto":
        config = read_json(path / "config.json")
        name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return getattr(torch, name)
