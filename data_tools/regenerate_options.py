"""Options of `slipstream regenerate`."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from slipstream.data_tools.options import ConversationOptions
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import SamplingParams

# Options that change answers: a file is continued only under the same ones.
RENDERING = ("target", "revision", "chat_template", "template", "date", "model")
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateConfig(ConversationOptions):
    """Options of `slipstream regenerate`. Without `endpoint` the target runs in this process."""

    output: str = ""
    """JSONL file to write, or to continue."""
    overwrite: bool = False
    """Start anew if `output` exists, instead of continuing it; only for files that regenerate wrote."""
    endpoint: tuple[str, ...] = ()
    """OpenAI-compatible endpoints that serve the target, such as http://localhost:8000/v1. With `target`, prompts are
    rendered here and sent as token ids; without it, messages are sent and the endpoint's template renders them."""
    model: str | None = None
    """Name of the model at the endpoints. Default: the first that the first one lists."""
    api_key_file: str | None = None
    """File that holds the endpoints' key."""
    concurrency: int = 64
    """Requests open at the endpoints at once."""
    retries: int = 6
    """Times a request is sent again after status 429, 5xx or a broken connection."""
    retry_pause: float = 1.0
    """Seconds before the first retry; each further one waits twice as long."""
    max_failures: int = 100
    """Stop when this many rows have failed."""
    draft: str = "none"
    """Draft checkpoint for the target in this process; it changes the speed, not the answers."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further options of the engine in this process, such as --engine.max_running 128."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the most likely tokens of this total probability."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 for all."""
    max_tokens: int = 2048
    """Most tokens of an answer."""
    seed: int = 0
    """Each row has its own seed, made from this one and the row's id."""
    cut: Literal["keep", "drop"] = "keep"
    """What to do with rows whose answer max_tokens ended."""

    def __post_init__(self) -> None:
        ConversationOptions.__post_init__(self)
        if not self.output:
            raise ValueError("output is empty; name the JSONL file to write")
        if not self.endpoint and not self.target:
            raise ValueError("target and endpoint are empty; name a model to run here, or endpoints that serve it")
        if self.endpoint and (self.draft != "none" or self.engine):
            raise ValueError("draft and engine are for a target in this process; leave them out, or endpoint")
        self._check_urls()
        if self.retries < 0 or self.retry_pause < 0:
            raise ValueError(f"retries is {self.retries} and retry_pause {self.retry_pause}; neither may be negative")
        unknown = self.engine.keys() - {option.name for option in dataclasses.fields(EngineConfig)}
        if unknown:
            raise ValueError(f"engine has no option {', '.join(sorted(unknown))}; see `serve --help`")
        for name in ("concurrency", "max_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        self.sampling()

    def _check_urls(self) -> None:
        if self.endpoint and not self.urls:
            raise ValueError(f"endpoint is {self.endpoint[0]!r}; name a URL such as http://localhost:8000/v1")
        for url in self.urls:
            try:
                parts = httpx.URL(url)
            except httpx.InvalidURL as error:
                raise ValueError(f"endpoint {url!r} is no URL: {error}") from error
            if parts.scheme not in ("http", "https") or not parts.host:
                raise ValueError(f"endpoint is {url!r}; name a URL such as http://localhost:8000/v1")

    def inputs(self) -> dict[str, Sequence[str | None]]:
        given = ConversationOptions.inputs(self)
        return {**given, "draft": [self.draft], "api_key_file": [self.api_key_file]}

    @property
    def answer_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in RENDERING + SAMPLING}

    @property
    def urls(self) -> tuple[str, ...]:
        """The endpoints; one argument may hold several, separated by commas."""
        return tuple(url.strip().rstrip("/") for word in self.endpoint for url in word.split(",") if url.strip())

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )
