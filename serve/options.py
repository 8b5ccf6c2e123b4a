"""Options of the engine and of the server, and how the target is found.

Imports neither torch nor an HTTP package, so that `serve --help` is instant.
"""

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from slipstream.models.chat.messages import DEFAULT_DATE, check_date
from slipstream.models.files.names import KEY_FILE, check_checkpoint, check_file, is_checkpoint
from slipstream.serve.chat.forms import check_parsers

PROMPT_TOKENS = 1024  # of a step, where neither options nor the target ask for more
MOST_RUNNING = 1024  # with 64 nodes each, the most rows that kernels count programs for (kernels/grid_sync.py)
MOST_WHITESPACE = 64  # characters in a row; the grammar of more takes longer to compile


KV_CACHE_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """For drafters without options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of the engine; each is also a field of `LLM(...)`."""

    target: str = ""
    """Target model: a local folder or a hub id. Default: the one that the draft checkpoint names."""
    draft: str = "none"
    """Draft checkpoint (folder or hub id), or the name of a drafter that needs none."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the drafter, by name."""
    revision: str | None = None
    """Hub revision of the target."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the target computes in. auto: float32 on the CPU, the checkpoint's own elsewhere."""
    quantization: Literal["fp8"] | None = None
    """fp8: quantise 16-bit weights when they are loaded, per output, and inputs of layers per row; head and embedding
    stay as they are. Quantised checkpoints need no option."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the target runs. auto: on a GPU if there is one."""
    width: int | None = None
    """Nodes verified of each request in a step (drafted tokens + 1). Default: the likeliest, as many as pay."""
    objective: str = "throughput"
    """throughput, or itl=20ms: keep 95 % of the times between a request's tokens under that where it is possible."""
    max_chunk_ms: float | None = None
    """Longest step, in milliseconds, that prompts may cause while others decode. Default: twice the step without them,
    at least 30."""
    attention: str = "auto"
    """Attention backend NAME[:VARIANT] (a file in serve/attention), or one per phase: prefill=NAME,verify=NAME,
    draft=NAME. auto: sdpa on the CPU; on a GPU flashinfer for prefill and triton for the rest."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens. Default: the target's."""
    page_size: Literal[1, 16, 32, 64] = 16
    """Tokens per page of the KV cache."""
    max_running: int = 64
    """Most requests decoded at once."""
    prefill_budget: int | None = None
    """Most prompt tokens computed per step; captured passes may lower it to prefill_graph_tokens. Default: 1024; on a
    GPU more for a mixture of experts, of which each should get many, and at least 2048 with --fast. Several prompts
    then share half as many."""
    exact: bool | None = None
    """On a GPU, give a row of a pass the same bits whatever rows are beside it: answers are then the same with and
    without a draft, alone and among others. Default: where it is possible; --fast does without."""
    cuda_graph: bool = True
    """On a GPU, replay passes captured at start-up. Off: launch their kernels one by one."""
    prefill_graph_tokens: int | None = None
    """On a GPU, also capture passes with prompts of up to so many tokens, with the attention of verify. 0: none.
    Default: prefill_budget."""
    overlap: bool = True
    """On a GPU, read a step's tokens while the next one runs; needs captured passes."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens. Default: from mem_fraction; on the CPU from free memory."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of the target's KV cache: auto, as the target computes; fp8: e4m3 with a scale for the keys and for the values of
    each head, from the checkpoint or calibrated at start-up. Twice the tokens; answers differ a little."""
    kv_cache_calibration: str | None = None
    """File of text whose first 2,048 tokens show how large keys and values become, for kv_cache_dtype fp8 where the
    checkpoint has no scales. Default: bundled text."""
    mem_fraction: float = 0.9
    """Share of the GPU's memory to use for weights, working memory, graphs and, with the rest, the KV cache. (On the
    CPU the KV cache takes a quarter of free memory.)"""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Log-probabilities that requests get: raw, the target's own; or processed, of the distribution that is sampled
    from, after bias, penalties, masks, temperature and filters. Those of prompts are always raw."""
    simulate_accept_length: float | None = None
    """Benchmarks only: pretend that steps emit so many tokens of a request on average. The output is wrong."""
    grammar_drafts: bool = True
    """Draft the tokens that a request's grammar leaves no choice about."""
    json_whitespace: int = 1
    """Most white-space characters in a row between the parts of JSON answers, up to 64; 0: none. Small models fill all
    that they may."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target's config or tokenizer."""
    tool_parser: str = "auto"
    """Form in which the target calls tools; auto: what its chat template tells; none: it calls none."""
    reasoning_parser: str = "auto"
    """Form in which the target reasons; auto: what its chat template tells; none: reasoning stays content."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("max_model_len", "max_running", "prefill_budget", "kv_cache_tokens", "width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.json_whitespace <= MOST_WHITESPACE:
            raise ValueError(f"json_whitespace is {self.json_whitespace}; it must be between 0 and {MOST_WHITESPACE}")
        if self.max_running > MOST_RUNNING:
            raise ValueError(f"max_running is {self.max_running}; it must be at most {MOST_RUNNING}")
        if self.simulate_accept_length is not None and not 1 <= self.simulate_accept_length < math.inf:
            raise ValueError(
                f"simulate_accept_length is {self.simulate_accept_length}; it must be a number of tokens, at least 1"
            )
        if self.prefill_graph_tokens is not None and self.prefill_graph_tokens < 0:
            raise ValueError(f"prefill_graph_tokens is {self.prefill_graph_tokens}; it must be at least 0 (none)")
        if self.max_chunk_ms is not None and not 0 < self.max_chunk_ms < math.inf:
            raise ValueError(f"max_chunk_ms is {self.max_chunk_ms}; it must be a number of milliseconds above 0")
        parse_objective(self.objective)
        check_parsers(self.tool_parser, self.reasoning_parser)
        if not 0.05 <= self.mem_fraction <= 0.98:
            raise ValueError(f"mem_fraction is {self.mem_fraction}; it must be between 0.05 and 0.98")

    @property
    def prompt_tokens(self) -> int:
        """Most prompt tokens of a step."""
        return self.prefill_budget or PROMPT_TOKENS

    @property
    def captured_tokens(self) -> int:
        """Most prompt tokens of a captured pass; 0: no pass with prompts is captured."""
        captured = self.prefill_graph_tokens
        return self.prompt_tokens if captured is None else min(captured, self.prompt_tokens)

    @property
    def itl_ms(self) -> float | None:
        """Most milliseconds between a request's tokens that the objective allows; None: any."""
        return parse_objective(self.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Options of `serve`."""

    ALIASES = {"--fast": "--no-exact"}

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""
    served_model_name: str | None = None
    """Model name that clients use. Default: the target's."""
    max_waiting: int = 256
    """Requests that may wait in addition to the running ones; further ones get status 429."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's, as in `prepare` and `regenerate`."""
    date: str = DEFAULT_DATE
    """Date (year-month-day, or today) that chat templates get as today's, as in `prepare` and `regenerate`."""
    api_key: str | None = field(default=None, repr=False)
    """Key that clients must send. Other users of this machine can read it in the list of processes: rather use
    api_key_file or the variable SLIPSTREAM_API_KEY."""
    api_key_file: str | None = None
    """File of keys that clients may send, one on each line."""
    metrics_open: bool = False
    """Serve /metrics without a key."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins whose pages may call this server from a browser, such as https://example.org; * allows all."""
    max_body_mb: float | None = None
    """Longest body in MiB. Default: 16 bytes per token of max_model_len, at least 4 MiB."""
    request_timeout: float | None = None
    """Seconds after which a request whose answer has not ended is given up with an error. Default: none."""
    grammar_timeout: float = 20.0
    """Seconds of CPU time that compiling a request's grammar may take, in a process that is killed then; the request is
    refused."""
    ignore_unknown_fields: bool = False
    """Accept fields that this server does not know, without effect, instead of refusing them."""
    control_tokens_as_text: bool = False
    """Encode control tokens in messages and prompts as plain text."""
    drain_timeout: float = 30.0
    """After SIGTERM, seconds to let open requests finish while new ones are refused."""
    health_timeout: float = 120.0
    """Seconds without an answer of the engine after which /health is 503; must exceed its longest step."""
    log_format: Literal["text", "json"] = "text"
    """text, or json: one object a line, with a line for every request, on stderr."""
    playground: bool = True
    """Serve a page at / that chats with the model and shows where each token comes from."""
    dry_run: bool = False
    """Print what the server would need and which GPUs it would fit, without loading weights, and exit."""
    unsafe_simulate: bool = False
    """Allow simulate_accept_length, which makes every answer wrong."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be between 0 (any free port) and 65535")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting is {self.max_waiting}; it must be at least 0")
        check_date(self.date)
        if not 0 <= self.drain_timeout < math.inf:
            raise ValueError(f"drain_timeout is {self.drain_timeout}; it must be a number of seconds, at least 0")
        if not 0 < self.health_timeout < math.inf:
            raise ValueError(f"health_timeout is {self.health_timeout}; it must be a number of seconds above 0")
        for name in ("max_body_mb", "request_timeout", "grammar_timeout"):
            check_positive(name, getattr(self, name))
        if self.simulate_accept_length is not None and not self.unsafe_simulate:
            raise ValueError(
                f"simulate_accept_length is {self.simulate_accept_length}: every answer would be wrong; if a benchmark "
                "needs that, add --unsafe-simulate"
            )

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist, and if none names the target."""
        check_checkpoints(self.target, self.draft)
        check_file("chat_template", self.chat_template, "a text file")
        check_file("api_key_file", self.api_key_file, KEY_FILE)
        check_file("kv_cache_calibration", self.kv_cache_calibration, "a file of text")


def check_choices(config: Any) -> None:
    """Raises ValueError for a value that the Literal of its field does not list, also where this is optional."""
    for option in fields(config):
        kinds = (option.type, *get_args(option.type))
        choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), None)
        value = getattr(config, option.name)
        if choices is None or value in choices or (value is None and type(None) in kinds):
            continue
        names = ", ".join(map(str, choices))
        remedy = f"choose {names}, or leave it out" if type(None) in kinds else f"choose one of {names}"
        raise ValueError(f"{option.name} is {value!r}; {remedy}")


def check_draft_cache(dtype: str) -> None:
    if dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"drafter.kv_cache_dtype is {dtype!r}; choose one of {', '.join(KV_CACHE_DTYPES)}")


def check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be a number above 0")


def parse_objective(objective: str) -> float | None:
    """The milliseconds of itl=...ms; None for throughput. Raises ValueError for anything else."""
    if objective == "throughput":
        return None
    match = re.fullmatch(r"itl=(\d+(?:\.\d+)?)ms", objective)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"objective is {objective!r}; choose throughput, or itl=20ms with a time of your own")
    return float(match[1])


def check_target_named(config: EngineConfig) -> None:
    """Raises ValueError if neither the options nor a draft checkpoint can name the target."""
    if not config.target and not is_checkpoint(config.draft):
        raise ValueError(f"target is empty and draft {config.draft!r} is not a checkpoint that names one; add --target")


def check_checkpoints(target: str, draft: str) -> None:
    """Raises ValueError for a checkpoint that does not exist, and if none can name the target."""
    check_target_named(EngineConfig(target=target, draft=draft))
    check_checkpoint("target", target)
    if is_checkpoint(draft):
        check_checkpoint("draft", draft)


def find_target(config: EngineConfig, *, weights: bool = True) -> tuple[str, Path]:
    """Name and folder of the target: `config.target`, else the target and revision that the draft names. `weights`:
    fetch them from the hub, too."""
    from slipstream.models.files.checkpoint import named_target, read_json, resolve

    how: dict[str, bool] = {"trust_remote_code": config.trust_remote_code, "weights": weights}
    if config.target:
        return config.target, resolve(config.target, config.revision, **how)
    check_target_named(config)
    draft = resolve(config.draft, weights=weights)
    try:
        name = named_target(draft)
        revision = config.revision or read_json(draft / "config.json").get("target_revision")
        if name:
            return name, resolve(name, revision, **how)
    except ValueError as error:
        raise ValueError(
            f"the target that draft {config.draft} names cannot be read ({error}); add --target"
        ) from error
    raise ValueError(f"draft {config.draft} names no target; add --target")
