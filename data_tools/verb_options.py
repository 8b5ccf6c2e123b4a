"""Options of the data programs. Imports nothing that takes long, so that wrong ones are refused at once."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from slipstream.data_tools.options import ConversationOptions, TokenizeOptions, check_source
from slipstream.models.drafts.source import source_of
from slipstream.models.files.names import KEY_FILE, check_checkpoint, check_file, check_folder
from slipstream.models.states.address import Address
from slipstream.serve.options import EngineConfig, check_at_least
from slipstream.serve.request import SamplingParams

ACCEPT_RATES = (0.75, 0.56, 0.42, 0.32, 0.24)  # three of four draft tokens right at any position
FREE_CAPTURE_OPTIONS = ("shards", "verify", "yes", "endpoint", "answers", "api_key_file", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig(TokenizeOptions):
    """Turns conversations into tokens and loss masks."""

    REQUIRED = {
        "data": "files, folders or hub datasets",
        "target": "a model, as a folder or a hub id",
        "output": "the folder to write",
    }

    output: str = ""
    """Folder to write."""
    overwrite: bool = False
    """Replace `output` if it is a prepared dataset and nothing else."""
    heldout: float = 0.02
    """Share of the rows in the held-out split."""
    heldout_data: tuple[str, ...] = ()
    """Files of conversations for the held-out split, in their order, instead of a share of `data`."""
    seed: int = 0
    """Seed of the shuffle."""
    category_column: str | None = None
    """Column with a row's category, by which evaluations in training also log the accept length. Default: category,
    where rows have one."""

    def __post_init__(self) -> None:
        TokenizeOptions.__post_init__(self)
        if not 0.0 <= self.heldout < 1.0:
            raise ValueError(f"heldout is {self.heldout}; it must be at least 0 and below 1")
        check_at_least(self, 0, "seed")

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        TokenizeOptions.check_inputs(self)
        for name in self.heldout_data:
            check_source("heldout_data", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateConfig(ConversationOptions):
    """Replaces the answers of conversations by the target's own."""

    REQUIRED = {"data": "files, folders or hub datasets", "output": "the JSONL file to write"}

    output: str = ""
    """JSONL file to write, or to continue."""
    overwrite: bool = False
    """Replace `output` instead of continuing it; only if regenerate wrote it."""
    endpoint: tuple[str, ...] = ()
    """OpenAI-compatible endpoints that serve the target, such as http://localhost:8000/v1. With `target`, prompts are
    rendered here and sent as token ids; without it, messages are sent and the endpoint's template renders them."""
    model: str | None = None
    """Name of the model at the endpoints, which all must list. Default: the first that the first endpoint lists."""
    api_key_file: str | None = None
    """File with the endpoints' API key."""
    concurrency: int = 64
    """Concurrent requests over all endpoints."""
    retries: int = 8
    """Retries of a request after status 408, 429, 5xx or a broken connection; 8 outlast a restart of three minutes."""
    retry_pause: float = 1.0
    """Seconds before the first retry; doubles with each further one."""
    timeout: float = 600.0
    """Seconds without a new piece of an answer, after which the request fails; a whole answer may take longer."""
    max_failures: int = 100
    """Rows without an answer, one after the other, that end the run."""
    states: str | None = None
    """Folder for the target's states of the rows, which the engine in this process keeps while it answers; then
    `capture-states --answers` need not run the target again."""
    drafters: tuple[Literal["eagle", "eagle3", "dflash", "mtp"], ...] = ("eagle3",)
    """Drafts that will be trained from `states`, as in capture-states."""
    layers: tuple[int, ...] = ()
    """States to keep instead, as in capture-states."""
    states_dtype: Literal["bf16", "fp8", "fp32"] = "bf16"
    """Numbers of `states`, as --dtype of capture-states."""
    draft: str = "none"
    """Draft checkpoint for the target in this process; changes speed, not answers."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further engine options, such as --engine.max_running 128."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the most likely tokens of this total probability."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 for all."""
    max_tokens: int = 2048
    """Maximum tokens of an answer."""
    seed: int = 0
    """Each row gets its own seed, derived from this one and the row's id."""
    cut: Literal["keep", "drop"] = "keep"
    """Keep or drop rows whose answer max_tokens ended."""
    samples: int = 1
    """Answers to each prompt, with seeds of their own; above 1 needs a temperature above 0."""

    def __post_init__(self) -> None:
        ConversationOptions.__post_init__(self)
        if not self.endpoint and not self.target:
            raise ValueError("target and endpoint are empty; name a model to run here, or endpoints that serve it")
        if self.endpoint and (self.draft != "none" or self.engine):
            raise ValueError("draft and engine are for a target in this process; leave them out, or endpoint")
        if self.states is not None and self.endpoint:
            raise ValueError("states is for a target in this process; leave it out, or endpoint")
        for url in self.urls or self.endpoint:
            if not is_url(url):
                raise ValueError(f"endpoint is {url!r}; name a URL such as http://localhost:8000/v1")
        check_at_least(self, 0, "retries", "retry_pause")
        check_at_least(self, 1, "concurrency", "max_failures", "samples")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples is {self.samples}, but at temperature 0 all answers to a prompt are the same; add "
                "--temperature 0.8, or leave samples out"
            )
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; give a number of seconds above 0")
        unknown = self.engine.keys() - {option.name for option in fields(EngineConfig)}
        if unknown:
            raise ValueError(f"engine has no option {', '.join(sorted(unknown))}; see `serve --help`")
        self.sampling()

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        ConversationOptions.check_inputs(self)
        if not self.endpoint:
            source_of(self.draft, self.target).check()
        check_file("api_key_file", self.api_key_file, KEY_FILE)

    def inputs(self) -> dict[str, Sequence[str | None]]:
        inputs = ConversationOptions.inputs(self)
        return {**inputs, "draft": [self.draft], "api_key_file": [self.api_key_file]}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptConfig:
    """Goes on training a draft with logged answers, mixed with old data."""

    REQUIRED = {
        "from_log": "files or folders of answers (serve --answer-log)",
        "old": "prepared datasets that the draft was trained on",
        "draft": "a folder or a hub id",
        "output": "the folder to write",
    }

    from_log: tuple[str, ...] = ()
    """Files or folders of answers as `serve --answer-log` writes them, or in another form that `prepare` reads."""
    old: tuple[str, ...] = ()
    """Prepared datasets that the draft was trained on: half of what it learns from."""
    draft: str = ""
    """Draft checkpoint to go on from: a folder or a hub id."""
    output: str = ""
    """Folder to write."""
    overwrite: bool = False
    """Replace `output` if it is a checkpoint that was written here, and nothing else."""
    target: str = ""
    """The draft's target (folder or hub id). Default: the one that the draft names."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target."""
    category_column: str | None = None
    """Column with a row's category. Default: category where rows have one, else the file's name."""
    skip_bad: bool = False
    """Count malformed rows, such as a line that was cut short, instead of stopping at the first."""
    epochs: int = 3
    """Passes over the logged answers."""
    lora_rank: int = 0
    """Rank of a LoRA adapter (peft's files) to train and write in place of all weights; 0: none."""
    device: str | None = None
    """cpu, or a GPU such as cuda:1. Default: the first GPU, if there is one."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "epochs")
        check_at_least(self, 0, "lora_rank")

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        for name in self.from_log:
            check_source("from_log", name)
        for name in self.old:
            check_folder("old", name, "a prepared dataset (slipstream prepare)")
        check_checkpoint("draft", self.draft)
        check_checkpoint("target", self.target)

    def prepare_options(self, max_length: int) -> PrepareConfig:
        return PrepareConfig(
            data=self.from_log,
            target=self.target,
            trust_remote_code=self.trust_remote_code,
            category_column=self.category_column,
            skip_bad=self.skip_bad,
            max_length=max_length,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyMapConfig(TokenizeOptions):
    """Counts answer tokens and chooses a draft vocabulary. `data` may also name prepared datasets, of which `split` is
    counted."""

    REQUIRED = {"output": "the safetensors file to write"}

    output: str = ""
    """Safetensors file to write."""
    overwrite: bool = False
    """Replace existing files, but only token maps and coverage curves."""
    size: int | None = None
    """Tokens in the draft vocabulary. Default: a quarter of the target's."""
    merge: tuple[str, ...] = ()
    """Token maps of one tokenizer whose counts are added up, instead of `data`."""
    from_responses: tuple[str, ...] = ()
    """Files of answers that the target served (OpenAI responses, texts, token ids), instead of `data`."""
    sglang_pt: str | None = None
    """Also write SGLang's token map (.pt) here."""
    fr_spec: str | None = None
    """Also write FR-Spec's frequency list (.pt) here."""
    plot: str | None = None
    """Also draw the coverage curve here (.png)."""
    accept_rates: tuple[float, ...] = ACCEPT_RATES
    """Share of rounds that accept draft position 1, 2, ... with the whole vocabulary; used to estimate the loss."""

    def __post_init__(self) -> None:
        TokenizeOptions.__post_init__(self)
        if bool(self.data) + bool(self.merge) + bool(self.from_responses) != 1:
            raise ValueError(
                "give either data (datasets or conversations), from_responses (served answers) or merge (token maps)"
            )
        if self.from_responses and not self.target:
            raise ValueError("target is empty; name the model that gave from_responses, as a folder or a hub id")
        check_accept_rates(self.accept_rates)

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        TokenizeOptions.check_inputs(self)
        for name in self.merge:
            check_file("merge", name, "a token map")
        for name in self.from_responses:
            if not Path(name).exists():
                raise ValueError(f"from_responses {name} does not exist; name files or folders of answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """Runs the target over a prepared dataset and keeps its states for training."""

    REQUIRED = {"data": "a folder", "target": "a folder or a hub id", "output": "a folder"}

    data: str = ""
    """Prepared dataset (slipstream prepare)."""
    target: str = ""
    """Target model: folder or hub id."""
    output: str = ""
    """Folder for the index and the shards."""
    revision: str | None = None
    """Hub revision of the target."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target."""
    endpoint: tuple[str, ...] = ()
    """Engines that run the target (serve --states), HOST:PORT or the path of a socket. Default: it runs here."""
    answers: str | None = None
    """Folder of states that `regenerate --states` has written: copies them, and runs the target for other documents."""
    api_key_file: str | None = None
    """File with the engines' API key."""
    timeout: float = 300.0
    """Seconds without any engine, after which the capture ends."""
    drafters: tuple[Literal["eagle", "eagle3", "dflash", "mtp"], ...] = ("eagle3",)
    """Drafts that will be trained from the states; decides which are kept. Several share what they can."""
    layout: Literal["slipstream", "speculators"] = "slipstream"
    """speculators: the folder that this library's trainer reads offline. Keeps whole documents."""
    layers: tuple[int, ...] = ()
    """States to keep instead: 0..n-1 is the output of that layer, n the state after the final norm. Default: what
    the drafters read; for dflash, drafts of 5 layers."""
    last_hidden: bool = False
    """Keep the state after the final norm of supervised tokens even if no named draft reads it."""
    dtype: Literal["bf16", "fp8", "fp32"] = "bf16"
    """fp8: half the size, a scale per token and layer. fp32: for tests."""
    max_length: int = 4096
    """Longer documents are cut; training may use this data.max_length or a smaller one."""
    train_documents: int | None = None
    """Documents to take from the beginning of the training split. Default: all."""
    heldout_documents: int | None = 400
    """Documents to take from the beginning of the held-out split; training evaluates evaluation.documents (400)."""
    batch_tokens: int = 16384
    """Tokens in a pass of the target, padding included."""
    shard_gb: float = 2.0
    """Size of a file; a killed process loses at most one. Memory holds two."""
    shards: tuple[int, ...] = ()
    """Capture only these shards, again, by their numbers."""
    verify: bool = False
    """Read all shards, compare their checksums, and write nothing."""
    yes: bool = False
    """Do not ask before writing."""

    def __post_init__(self) -> None:
        check_at_least(self, 2, "max_length")
        check_at_least(self, 1, "batch_tokens", "train_documents", "heldout_documents")
        if self.endpoint and self.answers is not None:
            raise ValueError("endpoint and answers are given; leave one of them out")
        for text in self.endpoint:
            Address.parse("endpoint", text)
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; give a number of seconds above 0")
        if self.shard_gb <= 0:
            raise ValueError(f"shard_gb is {self.shard_gb}; give a positive number such as 2")
        if self.layout == "speculators" and (self.dtype == "fp8" or self.last_hidden or len(self.drafters) > 1):
            raise ValueError(
                "layout speculators holds the states of one draft in bf16 or fp32 and the last one before the final "
                "norm; name one of --drafters, and leave out --dtype fp8 and --last-hidden"
            )

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        check_folder("data", self.data, "a prepared dataset (slipstream prepare)")
        check_checkpoint("target", self.target)
        check_file("api_key_file", self.api_key_file, KEY_FILE)
        check_folder("answers", self.answers, "states of answers (slipstream regenerate --states)")

    def command(self) -> str:
        """The command line of this capture, without the options that may change when it is continued."""
        words = []
        for option in fields(self):
            value = getattr(self, option.name)
            if value == option.default or option.name in FREE_CAPTURE_OPTIONS:
                continue
            words += [f"--{option.name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
        return shlex.join(["slipstream", "capture-states", *words])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """Writes a draft checkpoint in the layout that another server or trainer reads."""

    REQUIRED = {"input": "a draft checkpoint to read", "output": "the folder to write"}

    input: str = ""
    """Draft checkpoint to read, or a target whose MTP head becomes one: a folder or a hub id."""
    output: str = ""
    """Folder to write."""
    overwrite: bool = False
    """Replace `output` if it is a checkpoint that was written here, and nothing else."""
    layout: Literal["sglang", "speculators", "deepspec", "modelopt", "slipstream", "target"] = "sglang"
    """sglang: the public layout, of drafts that SGLang loads. speculators: what vLLM and that library load. deepspec:
    DeepSpec and vLLM. modelopt: ModelOpt and TensorRT-LLM. slipstream: ours, which holds every draft. target: a copy of
    the target with an MTP head, which all servers load"""
    target: str = ""
    """The draft's target (folder or hub id). Default: the one that the draft names."""
    aux_layers: tuple[int, ...] | None = None
    """Target states that an EAGLE3 draft reads, as layer outputs, e.g. [1, 3, 5]; for files that do not name them."""
    norm_output: bool | None = None
    """Whether the next step of an EAGLE3 draft reads the state after the final norm; for unclear files."""
    sample_from_anchor: bool | None = None
    """Whether slot 0 of a block draft, the anchor, predicts the token after it; for files that do not say it."""

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        check_checkpoint("input", self.input)
        check_checkpoint("target", self.target)


def check_accept_rates(accept_rates: Sequence[float]) -> None:
    """Raises ValueError unless they are shares that never rise: a position is accepted only after the one before it."""
    falling = [1.0, *accept_rates, 0.0]
    if not accept_rates or any(not later <= earlier for earlier, later in zip(falling, falling[1:], strict=False)):
        raise ValueError(
            f"accept_rates is {list(accept_rates)}; give the share of rounds that accept each draft position, as "
            "eval_accept_rate_i or /metrics show them: falling, from 0 to 1"
        )


def is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address, a port that is no number
        return False
