"""Options that the programs of several drafts share. Imports nothing that takes long, so that wrong ones are refused at
once."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from slipstream.models.drafts.interchange import check_options, nearest_values
from slipstream.models.files.checkpoint import Values
from slipstream.models.files.names import KEY_FILE, check_checkpoint, check_file, check_folder
from slipstream.models.files.outputs import step_folders
from slipstream.train.options import RunOptions

WIDEST = 2**20  # of MLPs, some 20 times wider than any target's


@dataclass(frozen=True, kw_only=True)
class BaseDraftOptions:
    """Options of every draft. A program's also have `reach`: how many positions beyond a row training asks for."""

    vocabulary: str | None = None
    """token map (slipstream frequency-map) of the tokens that the draft can propose; default: all of the target's"""
    intermediate_size: int | None = None
    """width of the draft's MLPs; default: the target's"""
    lora_rank: int = 0
    """rank of a LoRA adapter, which is trained in place of all weights of the draft at init_from; 0: none"""
    interchange: Literal["own", "sglang", "vllm"] = "own"
    """sglang, vllm: other options of `draft` default to what this server loads, too, and values that it does not load
    are refused (docs/convert.md); own: all are allowed"""

    def __post_init__(self) -> None:
        size = self.intermediate_size
        if size is not None and not 1 <= size <= WIDEST:
            raise ValueError(f"draft.intermediate_size is {size}; give 1 to {WIDEST}, or leave it out for the target's")
        if self.lora_rank < 0:
            raise ValueError(f"draft.lora_rank is {self.lora_rank}; give a rank such as 16, or 0 to train all weights")
        if getattr(self, "aux_layers", None) == ():
            raise ValueError("draft.aux_layers is []; name at least one state, or leave it out for the default")


@dataclass(frozen=True, kw_only=True)
class ChainDraftOptions(BaseDraftOptions):
    """Options of drafts that read their own states."""

    ttt_steps: int = 5
    """steps of training-time test"""
    ttt_decay: float = 0.6
    """weight of a step's loss relative to the step before"""

    @property
    def reach(self) -> int:
        return self.ttt_steps

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.ttt_steps
        decay = self.ttt_decay
        if steps < 1 or not 0 < decay < math.inf:
            raise ValueError(f"draft.ttt_steps is {steps} and draft.ttt_decay {decay}; give at least 1 and above 0")


@dataclass(frozen=True, kw_only=True)
class DraftRunOptions(RunOptions):
    DRAFTER: ClassVar[str]  # its kind, as files name it

    draft: BaseDraftOptions
    target: str
    """target model: folder or hub id"""
    revision: str | None = None
    """hub revision of the target"""
    trust_remote_code: bool = False
    """run Python code that comes with the target"""
    init_from: str | None = None
    """draft of the same kind whose tensors the new one takes over: folder or hub id (docs/training.md)"""
    target_sharding: Literal["none", "machine", "all"] = "none"
    """shard the target's layers over the processes of a machine, or over all; none: each process holds all of them"""
    target_compile: bool = False
    """compile the target's layers at the first step, which makes later ones faster; for dense targets that transformers
    runs, sharded ones among them, on a GPU"""

    @classmethod
    def choose_defaults(cls, values: Values) -> dict[str, Any]:
        """Defaults of `draft` that `draft.interchange` chooses, given all options as they are without it."""
        draft = values["draft"]
        server = draft["interchange"]
        if server == "own":
            return {}
        nearest = nearest_values(server, cls.DRAFTER, draft)
        return {f"draft.{name}": value for name, value in nearest.items() if name != "interchange"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self.draft.interchange, self.DRAFTER, vars(self.draft))
        if self.draft.lora_rank and self.init_from is None:
            raise ValueError(f"draft.lora_rank is {self.draft.lora_rank}; add init_from, the draft to adapt")
        if self.target_sharding != "none" and self.data.aux_states is not None:
            reason = "processes would run the target unequally often"
            if self.data.aux_states_missing == "error":
                reason = "the target's layers are not run at all"
            raise ValueError(
                f"target_sharding is {self.target_sharding!r} together with data.aux_states, but {reason}; set "
                "target_sharding to none, or leave data.aux_states out"
            )

        if self.states.is_used:
            self._check_states()

    def _check_states(self) -> None:
        """Raises ValueError for options of a target that would run in this process."""
        present = {
            "data.aux_states": self.data.aux_states is not None,
            "target_sharding": self.target_sharding != "none",
            "target_compile": self.target_compile,
        }
        for name in (name for name, is_given in present.items() if is_given):
            raise ValueError(
                f"{name} is given together with {self.states.name}, but engines compute all states; leave one out"
            )

    @property
    def newest_step(self) -> Path | None:
        """Checkpoint that the run continues from; None if it begins."""
        steps = step_folders(Path(self.output))
        return steps[-1] if steps else None

    def check_inputs(self) -> None:
        """Raises ValueError for an empty required option and an input that does not exist."""
        for name, value in {"target": self.target, "output": self.output, "data.path": self.data.path}.items():
            if not value:
                raise ValueError(f"{name} is empty; name a folder{' or a hub id' * (name == 'target')}")
        check_checkpoint("target", self.target)
        if self.newest_step is None:
            check_checkpoint("init_from", self.init_from)
        for folder in self.data.folders:
            check_folder("data.path", folder, "a prepared dataset (slipstream prepare)")
        for capture in self.data.captures:
            check_folder("data.aux_states", capture, "a folder of captured states (slipstream capture-states)")
        check_file("states.api_key_file", self.states.api_key_file, KEY_FILE)
        check_file("evaluation.costs", self.evaluation.costs, "step times that `serve` keeps")
        check_file("draft.vocabulary", self.draft.vocabulary, "a token map (slipstream frequency-map)")
