"""Options of the engine and of the server, and how the target is found.

Imports neither torch nor an HTTP package, so that `serve --help` is instant.
"""

import math
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from slipstream.models.chat.messages import DEFAULT_DATE, check_date
from slipstream.models.drafts.source import DraftSource, source_of
from slipstream.models.files.atomic import FolderLock
from slipstream.models.files.checkpoint import read_json
from slipstream.models.files.names import KEY_FILE, check_checkpoint, check_file
from slipstream.models.files.outputs import CHECKPOINT, begins_with, check_output_file, check_output_folder
from slipstream.models.states.address import Address
from slipstream.serve.chat.forms import check_parsers

PROMPT_TOKENS = 1024  # prompt tokens of a step, unless options or the target ask for more
MOST_RUNNING = 1024  # with 64 nodes each, the most rows that kernels count programs for (kernels/grid_sync.py)
TRIAL_ROUNDS = 2000  # of other weights of the draft, unless something else is asked for
MOST_WHITESPACE = 64  # characters in a row; the grammar of more takes longer to compile


ANSWER_LOG = b'{"served_at": "'  # its beginning
KV_CACHE_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """For drafters without options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of the engine; each is also a field of `LLM(...)`."""

    target: str = ""
    """Target model: a local folder or a hub id. Default: the target that the draft checkpoint names."""
    draft: str = "none"
    """Draft checkpoint (folder or hub id), or a drafter without a checkpoint: none, ngram, or mtp, which reads the
    target's own files."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the drafter, by name."""
    revision: str | None = None
    """Hub revision of the target."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype of the target. auto: float32 on a CPU, the checkpoint's dtype on a GPU."""
    quantization: Literal["fp8"] | None = None
    """fp8: quantise 16-bit weights at load time, with a scale per output channel and per token; embeddings and head
    stay as they are. Quantised checkpoints need no option."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the target. auto: a GPU if there is one."""
    tp: int = 1
    """Number of devices that share the target (tensor parallelism), with one process each."""
    tp_exact: bool = False
    """Add sums in an order that any number of devices keeps, so that answers of one device are those of several; fail
    at the start if that is not possible. With several devices it is the order where it is possible. Devices of a
    mixture then have whole experts."""
    ep: bool = False
    """Give each device of a mixture some whole experts (expert parallelism). Default: a slice of every expert, so that
    none waits for the one whose experts are chosen most."""
    width: int | None = None
    """Nodes to verify per request and step (drafted tokens + 1). Default: chosen in each step for the most expected
    tokens per millisecond."""
    objective: str = "throughput"
    """throughput, or itl=20ms: keep 95 % of the latencies between tokens below that where possible."""
    attention: str = "auto"
    """Attention backend NAME[:VARIANT] (a file in serve/attention), or one per phase: prefill=NAME,verify=NAME,
    draft=NAME. auto: sdpa on the CPU; on a GPU flashinfer for prefill and triton for the rest."""
    max_model_len: int | None = None
    """Maximum length of prompt plus answer in tokens. Default: the target's."""
    page_size: Literal[1, 16, 32, 64] = 16
    """Tokens per page of the KV cache."""
    max_running: int = 64
    """Maximum number of requests decoded at once."""
    prefill_budget: int | None = None
    """Maximum number of prompt tokens per step; captured passes may lower it. Default: 1024; on
    a GPU more for a mixture of experts, and at least 2048 with --fast. Several prompts in a step share half of it."""
    exact: bool | None = None
    """On a GPU, compute each row with the same bits whatever else is in the batch, so that answers depend neither on
    the draft nor on other requests. Default: on where supported; --fast turns it off."""
    cuda_graph: bool = True
    """On a GPU, replay CUDA graphs captured at start-up. Off, and where a backend plans on the host: launch kernels one
    by one."""
    prefill_graph_tokens: int | None = None
    """On a GPU, also capture passes with up to this many prompt tokens, with the attention backend of verify. 0: none.
    Default: prefill_budget."""
    overlap: bool = True
    """On a GPU, read a step's tokens while the next step runs. Needs CUDA graphs."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens. Default: from mem_fraction on a GPU, from free memory on a CPU."""
    kv_cache_dtype: str = "auto"
    """KV cache dtype of the target: auto (the compute dtype) or fp8 (e4m3 with scales per head for keys and values,
    from the checkpoint or calibrated at start-up). fp8 holds twice the tokens; answers change slightly. fp8:FILE
    calibrates on the first 2,048 tokens of your text instead of bundled text."""
    mem_fraction: float = 0.9
    """Fraction of GPU memory for weights, working memory, CUDA graphs and the KV cache, which gets the rest. On a CPU
    the KV cache takes a quarter of free memory."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Log-probabilities to return: raw (the target's) or processed (after bias, penalties, masks, temperature and
    filters). Those of prompts are always raw."""
    simulate_accept_length: float | None = None
    """Benchmarks only: pretend that each step emits this many tokens per request on average. The output is wrong."""
    idle_prompts: bool = True
    """While no request is open, compute ended conversations of a target with recurrent layers as prompts, so that next
    turns find answers in the prefix cache. A server does; `LLM` does not."""
    grammar_drafts: bool = True
    """Draft the tokens that a request's grammar forces."""
    json_whitespace: int = 1
    """Maximum number of white-space characters in a row between the parts of JSON answers, 0 to 64. Small models tend
    to write as many as they may."""
    keep_states: tuple[int, ...] = ()
    """States of the target to keep beside its KV, for `Engine.on_states`: 0..n-1 is a layer's output, n the state after
    the final norm."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target's config or tokenizer."""
    tool_parser: str = "auto"
    """Tool-call format of the target. auto: read it from the chat template; none: no tool calls."""
    reasoning_parser: str = "auto"
    """Reasoning format of the target. auto: read it from the chat template; none: reasoning stays in the content."""

    def __post_init__(self) -> None:
        check_kinds(self)
        check_at_least(self, 1, "max_model_len", "max_running", "prefill_budget", "kv_cache_tokens", "width", "tp")
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
        if self.ep and self.tp == 1:
            raise ValueError("ep is true, but tp is 1, and one device has all experts; give tp, or leave ep out")
        parse_objective(self.objective)
        check_cache_dtype(self.kv_cache_dtype)
        check_parsers(self.tool_parser, self.reasoning_parser)
        if not 0.05 <= self.mem_fraction <= 0.98:
            raise ValueError(f"mem_fraction is {self.mem_fraction}; it must be between 0.05 and 0.98")

    @property
    def source(self) -> DraftSource:
        """The source that `draft` names."""
        return source_of(self.draft, self.target)

    @property
    def whole_experts(self) -> bool:
        """Whether a rank has whole experts, not slices: their sums have an order that any number of ranks keeps."""
        return self.ep or self.tp_exact

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
    def has_fp8_cache(self) -> bool:
        """Whether the KV cache of the target is in FP8."""
        return self.kv_cache_dtype != "auto"

    @property
    def calibration_file(self) -> str | None:
        """The text that calibrates the scales of an FP8 KV cache; None: bundled text."""
        return self.kv_cache_dtype.partition(":")[2] or None

    @property
    def itl_ms(self) -> float | None:
        """Most milliseconds between a request's tokens that the objective allows; None: any."""
        return parse_objective(self.objective)


@dataclass(frozen=True, kw_only=True)  # without slots: the parser reads the defaults by vars()
class LearnOptions:
    """Training of the draft on what is served."""

    device: str = ""
    """Device of a process that trains the draft on what is served: cpu, or a GPU, such as cuda:1. Default: none does.
    --learn is short for --learn.device cpu."""
    share: float | None = None
    """Most of the time that it trains while requests run; else it does freely. Default: 0.1 on a GPU that the engine
    uses, otherwise 1."""
    memory_gb: float = 1.0
    """Memory of that process for served texts and their states, in GB."""
    data: str | None = None
    """Prepared dataset that the draft was trained on, as an example of past traffic, which it must not forget."""
    output: str | None = None
    """Checkpoint that new weights become when they have passed their trial; a server that starts goes on from it.
    Default: they are gone with the server."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"learn.device is {self.device!r}; give cpu, or a GPU such as cuda:1")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"learn.share is {self.share}; it must be above 0 and at most 1")
        if not 0 < self.memory_gb < math.inf:
            raise ValueError(f"learn.memory_gb is {self.memory_gb}; it must be a number above 0")
        if not self.device and (self.data or self.output):
            name = "data" if self.data else "output"
            raise ValueError(f"learn.{name} is {self.data or self.output}, but nothing learns; add --learn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Options of `serve`."""

    ALIASES = {"--fast": "--no-exact", "--learn": "--learn.device=cpu"}
    # Programs set these: tests, benchmarks (bench/server.py) and `LLM`.
    HIDDEN = frozenset(
        ("api_key", "cuda_graph", "device", "ep", "grammar_drafts", "health_timeout", "idle_prompts", "json_whitespace")
        + ("keep_states", "logprobs_mode", "max_body_mb", "overlap", "page_size", "prefill_graph_tokens")
        + ("simulate_accept_length", "width")
    )

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""
    served_model_name: str | None = None
    """Model name that clients use. Default: the target's."""
    max_waiting: int = 256
    """Maximum number of requests that wait while max_running others run; further ones get status 429."""
    chat_template: str | None = None
    """File with a Jinja chat template to use instead of the tokenizer's, as in `prepare` and `regenerate`."""
    date: str = DEFAULT_DATE
    """Current date for chat templates: year-month-day, or today, as in `prepare` and `regenerate`."""
    api_key: str | None = field(default=None, repr=False)
    """API key that clients must send. Programs set it; users have api_key_file or the variable SLIPSTREAM_API_KEY."""
    api_key_file: str | None = None
    """File of accepted API keys, one per line."""
    draft_folder: str | None = None
    """Folder of draft checkpoints that POST /v1/drafts may load while the server runs. Default: no such endpoint."""
    learn: LearnOptions = field(default_factory=LearnOptions)
    """Training of the draft on what is served."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins whose pages may call this server from a browser, such as https://example.org; * allows all."""
    max_body_mb: float | None = None
    """Maximum size of a request body in MiB. Default: 16 bytes per token of max_model_len, at least 4 MiB."""
    ignore_unknown_fields: bool = False
    """Ignore unknown request fields instead of refusing them."""
    control_tokens_as_text: bool = False
    """Encode control tokens in messages and prompts as plain text."""
    drain_timeout: float = 30.0
    """Seconds to let open requests finish after SIGTERM, while the server refuses new ones."""
    health_timeout: float = 120.0
    """Seconds without an answer from the engine after which /health returns 503; must exceed the longest step."""
    answer_log: str | None = None
    """File to which token ids of prompts and answers are appended, for `slipstream adapt`: they are your users' text.
    Default: none are written."""
    log_format: Literal["text", "json"] = "text"
    """text, or json: one object per line on stderr, with a line for every request."""
    states: str | None = None
    """Give trainers states of the target at this address: HOST:PORT, or the path of a socket (docs/training.md). They
    need one of the API keys, if there are any. Default: nobody gets states."""
    dry_run: bool = False
    """Print the memory that the server needs and the GPUs that it fits, without loading weights, and exit."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be between 0 (any free port) and 65535")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting is {self.max_waiting}; it must be at least 0")
        check_date(self.date)
        if self.states is not None:
            Address.parse("states", self.states)
        if self.learn.device and self.draft_folder is not None:
            raise ValueError(
                f"learn.device is {self.learn.device} and draft_folder {self.draft_folder}: clients would change "
                "weights that are being trained; leave one of them out"
            )
        if not 0 <= self.drain_timeout < math.inf:
            raise ValueError(f"drain_timeout is {self.drain_timeout}; it must be a number of seconds, at least 0")
        if not 0 < self.health_timeout < math.inf:
            raise ValueError(f"health_timeout is {self.health_timeout}; it must be a number of seconds above 0")
        if self.max_body_mb is not None and not 0 < self.max_body_mb < math.inf:
            raise ValueError(f"max_body_mb is {self.max_body_mb}; it must be a number above 0")

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist, and if none names the target."""
        check_checkpoints(self.target, self.draft)
        check_file("chat_template", self.chat_template, "a text file")
        check_file("api_key_file", self.api_key_file, KEY_FILE)
        report = self.learn.data and f"{self.learn.data}/report.json"
        check_file("learn.data", report, "a prepared dataset (slipstream prepare)")
        if self.learn.output is not None:
            inputs = {"target": (self.target,), "draft": (self.draft,), "learn.data": (self.learn.data,)}
            check_output_folder(self.learn.output, CHECKPOINT, inputs, overwrite=True, option="learn.output")
        if self.answer_log is not None:
            is_ours = begins_with(ANSWER_LOG)
            check_output_file(self.answer_log, is_ours, "an answer log", {}, overwrite=True, option="answer_log")
        if self.draft_folder is not None and not Path(self.draft_folder).is_dir():
            raise ValueError(f"draft_folder {self.draft_folder} is no folder; name one that holds draft checkpoints")
        check_file("kv_cache_dtype", self.calibration_file, "a file of text after fp8:")

    def go_on(self) -> "ServeConfig":
        """Returns options with the draft that an earlier server has learnt, if there is one. Raises ValueError where
        that began with another draft."""
        folder = Path(self.learn.output or "")
        if self.learn.output is None or not (folder / "config.json").is_file():
            return self
        origin = read_json(folder / "run.json").get("learned_from")
        if origin is None or Path(origin).resolve() != Path(self.draft).resolve():
            raise ValueError(
                f"learn.output {folder} was learnt from draft {origin}, and draft is {self.draft}; name another folder"
            )
        return replace(self, draft=str(folder))

    def lock_output(self) -> AbstractContextManager[object]:
        """Keeps other servers from learning into the same folder. Raises InUseError where one does."""
        folder = self.learn.output
        return FolderLock(Path(folder), "learn.output", replaced=True) if folder else nullcontext()


def check_kinds(config: Any) -> None:
    """Raises ValueError for a value that the Literal of its field does not list, or that is not the number that its
    field wants, also where this is optional. Programs give values that no parser has seen."""
    for option in fields(config):
        is_several = get_origin(option.type) in (tuple, list, dict)
        kinds = (option.type, *(() if is_several else get_args(option.type)))
        choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), None)
        value = getattr(config, option.name)
        number = Real if float in kinds else Integral if int in kinds else object
        is_unset = value is None and type(None) in kinds
        if number is not object and not is_unset and (isinstance(value, bool) or not isinstance(value, number)):
            raise ValueError(f"{option.name} is {value!r}; give a {'whole ' if number is Integral else ''}number")
        if choices is None or value in choices or (value is None and type(None) in kinds):
            continue
        names = ", ".join(map(str, choices))
        remedy = f"choose {names}, or leave it out" if type(None) in kinds else f"choose one of {names}"
        raise ValueError(f"{option.name} is {value!r}; {remedy}")


def check_cache_dtype(dtype: str) -> None:
    """Raises ValueError for anything but auto, fp8 and fp8:FILE."""
    if not re.fullmatch("auto|fp8(:.+)?", dtype):
        raise ValueError(f"kv_cache_dtype is {dtype!r}; choose one of auto, fp8, or fp8:FILE with a file of text")


def check_draft_cache(dtype: str) -> None:
    if dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"drafter.kv_cache_dtype is {dtype!r}; choose one of {', '.join(KV_CACHE_DTYPES)}")


def check_at_least(config: object, minimum: float, *names: str) -> None:
    """Raises ValueError if one of the options `names` is set and below `minimum`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise ValueError(f"{name} is {value}; give at least {minimum}")


def parse_objective(objective: str) -> float | None:
    """Returns the milliseconds of itl=...ms; None for throughput. Raises ValueError for anything else."""
    if objective == "throughput":
        return None
    match = re.fullmatch(r"itl=(\d+(?:\.\d+)?)ms", objective)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"objective is {objective!r}; choose throughput, or itl=20ms with a time of your own")
    return float(match[1])


def check_checkpoints(target: str, draft: str) -> None:
    """Raises ValueError for a checkpoint that does not exist, and if none can name the target."""
    check_checkpoint("target", target)
    source_of(draft, target).check()


def find_target(config: EngineConfig, *, weights: bool = True) -> tuple[str, Path]:
    """Returns the name and folder of the target: `config.target`, else the target and revision that the draft names.
    `weights`: fetch them from the hub, too."""
    return config.source.find_target(config.revision, trust_remote_code=config.trust_remote_code, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine that a program runs in its process."""

    draft: str = "none"
    """Draft checkpoint, or the name of a drafter that needs none."""
    target: str = ""
    """Target checkpoint. Default: the target of the draft."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine by name, such as attention or width."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the drafter by name, such as depth."""

    @property
    def target_name(self) -> str:
        """Raises ValueError if neither the options nor the draft name a target."""
        return self.target or find_target(EngineConfig(draft=self.draft))[0]
