"""Options that every training program shares; a program's own dataclass adds its target and draft to `RunOptions`.
Those of `report`, too. Imports nothing that takes long, so that wrong options are refused at once."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from slipstream.models.files.names import check_folder
from slipstream.models.states.address import Address

AT_LEAST_ONE = (
    *(
        "data.max_length",
        "data.batch_size",
        "data.row_ranks",
        "optim.epochs",
        "optim.steps",
        "optim.accumulation",
        "evaluation.every",
    ),
    *("evaluation.depth", "evaluation.documents", "evaluation.patience", "evaluation.requests", "checkpoint.every"),
    "checkpoint.keep",
)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data to train on."""

    path: dict[str, float] | str
    """prepared dataset (slipstream prepare): splits train and heldout; or several with weights, such as
    {data/chat: 1, data/code: 0.5}: how often an epoch has their rows"""
    max_length: int = 4096
    """tokens in a packed row"""
    long_documents: Literal["split", "cut"] | None = None
    """documents longer than a row: split into windows, or cut; default: split, but cut with `aux_states`"""
    batch_size: int = 1
    """packed rows in a forward pass of one process"""
    row_ranks: int = 1
    """processes that share each row, for rows too long for one GPU"""
    aux_states: tuple[str, ...] | str | None = None
    """folder of captured target states (slipstream capture-states), read instead of running the target; of several
    folders in `path`: one for each, such as [states/chat, states/code]"""
    aux_states_missing: Literal["error", "online"] = "error"
    """for documents missing there: stop, or run the target"""

    def __post_init__(self) -> None:
        example = "give a folder, or folders with weights above 0, such as {data/chat: 1, data/code: 0.5}"
        if isinstance(self.path, str) and self.path.startswith(("{", "[")):
            raise ValueError(f"data.path is {self.path!r}; {example}")
        for folder, weight in self.folders.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"data.path gives {folder} the weight {weight}; {example}, or leave it out")
        if isinstance(self.path, dict) and not self.path:
            raise ValueError(f"data.path is {{}}; {example}")
        if len({Path(folder).resolve() for folder in self.folders}) < len(self.folders):
            raise ValueError(f"data.path names a folder twice ({', '.join(self.folders)}); give it a larger weight")
        if self.aux_states == ():
            raise ValueError("data.aux_states is []; name a folder of captured states, or leave it out")
        if self.aux_states is not None and self.long_documents == "split":
            raise ValueError(
                f"data.long_documents is split, but data.aux_states {', '.join(self.captures)} holds the states of "
                "each document's beginning alone; set data.long_documents to cut, or leave data.aux_states out"
            )

    @property
    def splits_documents(self) -> bool:
        if self.long_documents is None:
            return self.aux_states is None
        return self.long_documents == "split"

    @property
    def captures(self) -> tuple[str, ...]:
        """Folders of captured states."""
        if self.aux_states is None:
            return ()
        return (self.aux_states,) if isinstance(self.aux_states, str) else self.aux_states

    @property
    def folders(self) -> dict[str, float]:
        """Prepared datasets with their weights."""
        return {self.path: 1.0} if isinstance(self.path, str) else self.path


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """Target states from engines, instead of a target in this process."""

    endpoint: tuple[str, ...] = ()
    """engines that give states (serve --states): HOST:PORT or the path of a socket"""
    engine: dict[str, Any] = field(default_factory=dict)
    """options of an engine that the run starts on each machine instead, such as --states.engine.tp 2"""
    devices: tuple[int, ...] = ()
    """GPUs of the engine that the run starts, such as 2,3; default: those of the trainer"""
    dtype: Literal["auto", "fp8"] = "auto"
    """of states on their way: auto, the target's; fp8, with a scale per token and layer: half the bytes"""
    prefetch: int = 3
    """batches that a process asks for ahead"""
    timeout: float = 300.0
    """seconds without any engine, after which the run ends"""
    api_key_file: str | None = None
    """file with the engines' API key"""

    def __post_init__(self) -> None:
        if self.endpoint and (self.engine or self.devices):
            raise ValueError(
                "states.endpoint names engines that run already, and states.engine or states.devices one to start; "
                "give either"
            )
        if self.prefetch < 1:
            raise ValueError(f"states.prefetch is {self.prefetch}; give at least 1")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"states.timeout is {self.timeout}; give a number of seconds above 0")
        if not self.is_used and self.dtype != "auto":
            raise ValueError(f"states.dtype is {self.dtype}, which needs an engine; name one in states.endpoint")
        self.addresses()

    @property
    def is_used(self) -> bool:
        return bool(self.endpoint or self.engine or self.devices)

    @property
    def name(self) -> str:
        """The option that says where states come from."""
        return "states.endpoint" if self.endpoint else "states.engine"

    def addresses(self) -> list[Address]:
        """Raises ValueError for an endpoint that is no address."""
        return [Address.parse("states.endpoint", text) for text in self.endpoint]


@dataclass(frozen=True, kw_only=True)
class OptimOptions:
    """Optimizer and length of the run."""

    name: Literal["muon", "adamw"] = "muon"
    """muon: Muon for hidden matrices, AdamW for the rest; adamw for everything, as FSDP and ZeRO need"""
    lr: float | None = None
    """peak learning rate; default: by optimizer, width of the draft and tokens in a step (docs/training.md)"""
    epochs: int = 3
    """passes over the training split; `steps` overrides it"""
    steps: int | None = None
    """optimizer steps"""
    accumulation: int = 1
    """forward passes per optimizer step"""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "linear"
    """decay to zero after the warm-up: cosine, linear, none (constant), or linear over the last fifth alone (wsd)"""
    momentum: float = 0.85
    """momentum of Muon"""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Evaluation on held-out documents."""

    every: int = 500
    """steps between evaluations; the last step is always evaluated"""
    depth: int = 3
    """tokens drafted in a round of the simulated accept length, which chooses `best`; fewer are logged, too"""
    documents: int = 400
    """held-out documents used"""
    patience: int | None = None
    """evaluations in a row without a new best that end the run; default: the run goes to its last step"""
    costs: str | None = None
    """file of step times that `serve` keeps: the expected speed by these times chooses `best`, instead of the accept
    length (docs/training.md)"""
    requests: int = 1
    """requests that decode at once on that server"""
    temperature: float = 0.0
    """temperature of the simulated server; above 0 the held-out answers must be the target's samples at it"""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"evaluation.temperature is {self.temperature}; give 0 (greedy) or more")
        if self.costs is None and self.requests != 1:
            raise ValueError(
                f"evaluation.requests is {self.requests}, which needs evaluation.costs; name a file of step times of "
                "`serve`"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints to write and to keep."""

    every: int = 500
    """steps between checkpoints; the last step is always saved"""
    keep: int = 2
    """newest step checkpoints to keep, besides `best`"""


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """Trackers, besides metrics.jsonl in the output folder."""

    wandb: Literal["none", "metrics", "best", "all"] = "none"
    """log to Weights & Biases, offline without a key: metrics; also each new best checkpoint; or every checkpoint.
    Continued training continues its W&B run. WANDB_PROJECT, WANDB_NAME and the like name it"""
    tensorboard: bool = False
    """write TensorBoard event files to the output folder"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    output: str
    """folder for checkpoints, metrics.jsonl and trackers; a run in it continues from its newest checkpoint"""
    data: DataOptions
    states: StateOptions = field(default_factory=StateOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    tracker: TrackerOptions = field(default_factory=TrackerOptions)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 autocast on a GPU and fp32 on the CPU; weights and optimizer stay fp32"""
    seed: int = 0
    """seed of the weights and of the order of the data"""
    dry_run: bool = False
    """print parameters, memory per GPU, size of captured states, steps and tokens, and exit; reads no weights"""

    def __post_init__(self) -> None:
        for name in AT_LEAST_ONE:
            value = attrgetter(name)(self)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if self.optim.lr is not None and not 0 < self.optim.lr < math.inf:
            raise ValueError(f"optim.lr is {self.optim.lr}; give a positive number")
        if not 0 <= self.optim.momentum < 1:
            raise ValueError(f"optim.momentum is {self.optim.momentum}; give at least 0 and below 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; give 0 or more, below 2**63")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Draws a training run as an HTML page."""

    REQUIRED = {"run": "the output folder of a training run"}
    FIRST = "run"

    run: str = ""
    """Output folder of a training run; also accepted as the first argument, without a flag."""
    output: str | None = None
    """HTML file to write. Default: report.html in that folder."""

    def check_inputs(self) -> None:
        """Raises ValueError for a run that does not exist."""
        check_folder("run", self.run, self.REQUIRED["run"])
