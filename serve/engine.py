"""The engine: loads a target and a drafter, sizes memory, and steps. Imports no HTTP library.

One step computes at most one batch of prompt chunks and one round for every request that is decoding.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from slipstream.models.checkpoint import is_checkpoint, read_json, resolve, tokenizer_hash, weights_fingerprint
from slipstream.models.config import ModelConfig
from slipstream.models.layers import RotaryEmbedding
from slipstream.models.target import Target, load_config, load_target
from slipstream.serve.attention.base import Hybrid, find_backends
from slipstream.serve.batch import Batch, KVSpec, Rows, SamplingMode
from slipstream.serve.cache import PageCache
from slipstream.serve.drafters.base import build_options, find_drafter
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.pool import KVPool, bytes_per_token, free_bytes
from slipstream.serve.request import EngineInfo, Output, Request
from slipstream.serve.round import Runner
from slipstream.serve.scheduler import Chunk, Scheduler, Sequence

logger = logging.getLogger(__name__)


class Engine:
    """Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        target_name, path = find_target(config)
        model = load_config(path, config.trust_remote_code)
        self.device = torch.device(_pick_device(config.device))
        dtype = _pick_dtype(config.dtype, path, self.device)
        target = load_target(path, model, dtype, self.device)
        drafter_class = find_drafter(config.draft)
        self.drafter = drafter_class.load(config.draft, build_options(drafter_class, config.drafter), target)
        _warn_if_changed(config.draft, path, config.trust_remote_code)
        self.width = max(self.drafter.widths)
        self.reserve = self.width + self.drafter.scratch(self.width)

        specs = [KVSpec(model.num_layers, model.num_kv_heads, model.head_dim, model.rope)]
        specs += [self.drafter.kv] if self.drafter.kv else []
        longest = pick_max_model_len(config.max_model_len, model)
        num_pages = self._num_pages(specs, dtype, longest)
        max_model_len = self._fit_to_cache(longest, num_pages)
        self.state = Rows(config.max_running, self._pages_for(max_model_len), config.page_size, self.width, self.device)
        self.runner = self._build_runner(target, specs, KVPool(specs, num_pages, config.page_size, dtype, self.device))
        self.info = EngineInfo(
            target=target_name,
            draft=config.draft,
            width=self.width,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            stop_ids=stop_ids(path),
            kv_cache_tokens=(num_pages - 1) * config.page_size,
        )
        self.scheduler = Scheduler(
            cache=PageCache(num_pages, config.page_size),
            max_running=config.max_running,
            max_waiting=2**31,  # the front end limits what waits
            max_model_len=max_model_len,
            prefill_budget=config.prefill_budget,
            stop_ids=self.info.stop_ids,
            lookahead=self.drafter.lookahead,
            max_reserve=self.reserve,
            on_admit=self._admit,
            on_release=lambda sequence: self.drafter.release(sequence.row, sequence.tokens),
        )
        self._num_uploaded = [0] * config.max_running  # pages of each row that the device knows

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
        self.scheduler.validate(request)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError for one that can never be served."""
        self.check(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Output | None:
        return self.scheduler.abort(request_id)

    def step(self) -> list[Output]:
        outputs: list[Output] = []
        chunks = self.scheduler.next_prefill()
        if chunks:
            outputs += self.scheduler.commit_prefill(chunks, self._prefill(chunks))
        sequences = self.scheduler.next_round(self.reserve)
        if sequences:
            outputs += self.scheduler.commit_round(sequences, self._round(sequences), self.width - 1)
        return outputs

    def metrics(self) -> dict[str, int]:
        """Gauges of this moment; counts of requests come with their Outputs."""
        scheduler = self.scheduler
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "preemptions": scheduler.num_preemptions,
        }

    def _prefill(self, chunks: list[Chunk]) -> list[int | None]:
        tokens: list[int] = []
        next_tokens: list[int] = []
        positions: list[int] = []
        for chunk in chunks:
            known = chunk.sequence.tokens
            tokens += known[chunk.start : chunk.end]
            next_tokens += (known + [0])[chunk.start + 1 : chunk.end + 1]  # 0: replaced by the sampled token
            positions += range(chunk.start, chunk.end)
        sequences = [chunk.sequence for chunk in chunks]
        self._upload_pages(sequences)
        rows = self._tensor([sequence.row for sequence in sequences])
        query_lens = tuple(chunk.end - chunk.start for chunk in chunks)
        depth = self._tensor(positions)
        batch = Batch(
            state=self.state,
            rows=rows,
            lengths=self._tensor([chunk.start for chunk in chunks]),
            positions=depth,
            slots=self.state.slots(rows.repeat_interleave(self._tensor(query_lens)), depth),
            query_lens=query_lens,
            kv_bounds=tuple(chunk.end for chunk in chunks),
            mode=_sampling_mode(sequences),
            next_tokens=self._tensor(next_tokens),
        )
        is_last = tuple(chunk.is_last for chunk in chunks)
        sampled = self.runner.prefill(batch, self._tensor(tokens), is_last, self.width).tolist()  # sync
        return [token if last else None for token, last in zip(sampled, is_last, strict=True)]

    def _round(self, sequences: list[Sequence]) -> list[list[int]]:
        self._upload_pages(sequences)
        rows = self._tensor([sequence.row for sequence in sequences])
        bounds = tuple(sequence.num_computed for sequence in sequences)
        verdict = self.runner.round(rows, bounds, _sampling_mode(sequences), self.width, self.width)
        lengths, tokens = verdict.lengths.tolist(), verdict.tokens.tolist()  # sync
        return [row[:length] for row, length in zip(tokens, lengths, strict=True)]

    def _admit(self, sequence: Sequence) -> None:
        self.state.admit(sequence.row, sequence.request)
        self._num_uploaded[sequence.row] = 0
        self.drafter.admit(sequence.row, sequence.tokens, sequence.request.namespace)

    def _upload_pages(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self._num_uploaded[sequence.row] != len(sequence.pages):
                self.state.set_pages(sequence.row, sequence.pages)
                self._num_uploaded[sequence.row] = len(sequence.pages)

    def _build_runner(self, target: Target, specs: list[KVSpec], pool: KVPool) -> Runner:
        backends = find_backends(self.config.attention)
        positions = self.state.pages.shape[1] * self.config.page_size
        ropes = [RotaryEmbedding(spec.rope, spec.head_dim, positions).to(self.device) for spec in specs]
        attention = Hybrid(*(backends[phase](pool.groups[0], ropes[0]) for phase in ("prefill", "verify")))
        draft_attention = backends["draft"](pool.groups[1], ropes[1]) if self.drafter.kv else None
        self.drafter.attach(target, self.state, draft_attention)
        caches = tuple(group.flatten(2, 3) for group in pool.groups)
        return Runner(target, attention, self.drafter, self.state, caches)

    def _pages_for(self, num_tokens: int) -> int:
        """Pages of a request of that many tokens, with the rows that drafting and verifying write behind them."""
        return -(-(num_tokens + self.reserve) // self.config.page_size)

    def _num_pages(self, specs: list[KVSpec], dtype: torch.dtype, max_model_len: int) -> int:
        """Pages of the pool, the dump page included: as asked for, else what memory allows and rows can use."""
        page_size = self.config.page_size
        if self.config.kv_cache_tokens is not None:
            return 1 + -(-self.config.kv_cache_tokens // page_size)
        page_bytes = bytes_per_token(specs, dtype) * page_size
        affordable = free_bytes(self.device, self.config.mem_fraction) // page_bytes
        return 1 + min(affordable, self.config.max_running * self._pages_for(max_model_len))

    def _fit_to_cache(self, max_model_len: int, num_pages: int) -> int:
        """The longest request that the cache can hold, at most `max_model_len`."""
        fitting = (num_pages - 1) * self.config.page_size - self.reserve
        if fitting >= max_model_len:
            return max_model_len
        if self.config.max_model_len is not None or fitting < 2:
            raise ValueError(
                f"the KV cache holds {max(fitting, 0)} tokens of one request and max_model_len is {max_model_len}; "
                "lower max_model_len, or raise kv_cache_tokens or mem_fraction"
            )
        logger.warning("max_model_len is %d instead of %d: the KV cache holds no more", fitting, max_model_len)
        return fitting

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def stop_ids(path: Path) -> frozenset[int]:
    """Every end-of-text id: of generation_config.json, else of config.json."""
    if (path / "generation_config.json").exists():
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    else:
        ids = AutoConfig.from_pretrained(path).eos_token_id
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


def pick_max_model_len(asked: int | None, model: ModelConfig) -> int:
    """The context length: at most the target's positions, and its sliding window, which is not implemented."""
    limit = min(model.max_position_embeddings, model.sliding_window or model.max_position_embeddings)
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len is {asked}; this target allows at most {limit}")
    return asked or limit


def _sampling_mode(sequences: list[Sequence]) -> SamplingMode:
    params = [sequence.request.params for sequence in sequences]
    if all(p.temperature == 0 for p in params):
        return "greedy"
    return "full" if any(p.top_k or p.top_p < 1 or p.min_p for p in params) else "plain"


def _pick_device(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' and torch finds none; choose cpu, or install a CUDA build of torch")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _pick_dtype(name: str, path: Path, device: torch.device) -> torch.dtype:
    if name == "auto" and device.type == "cpu":
        return torch.float32
    if name == "auto":
        config = read_json(path / "config.json")
        name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return getattr(torch, name)


def _warn_if_changed(draft: str, target: Path, trust_remote_code: bool) -> None:
    """A draft for another target still gives right output, only fewer accepted tokens: worth a warning, not an end."""
    if not is_checkpoint(draft):
        return
    config = read_json(resolve(draft) / "config.json")
    message = "draft %s was trained for other %s than %s holds: expect fewer accepted tokens"
    expected = config.get("target_fingerprint")
    if expected and expected != weights_fingerprint(target):
        logger.warning(message, draft, "weights", target)
    expected = config.get("tokenizer_hash")
    if expected and expected != tokenizer_hash(
        AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    ):
        logger.warning(message, draft, "tokenizer rules", target)
