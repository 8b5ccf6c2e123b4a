"""The interface between a drafter and `fit`, and metrics as sums."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import parametrize

from slipstream.models.drafts.adapters import write_adapter
from slipstream.models.drafts.base import DraftNetwork, write_draft
from slipstream.models.files.checkpoint import Values, resolve, weights_fingerprint
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.frozen import FrozenTarget
from slipstream.train.acceptance import category_metrics, depth_metrics, walk_answers, walk_metrics
from slipstream.train.batches import Batch
from slipstream.train.losses import TargetHead
from slipstream.train.low_rank import adapt_layers, factors_of, place_of
from slipstream.train.optim import default_lr
from slipstream.train.options import OptimOptions
from slipstream.train.row_ranks import RowGroup
from slipstream.train.samples import SampleAnswers
from slipstream.train.speed import StepTimes
from slipstream.train.target_files import TargetFiles
from slipstream.train.text_noise import noise_behind

Metrics = dict[str, Tensor]  # name -> (2,): a sum, and the count that divides it in the end


class DraftTraining(nn.Module, ABC):
    """The module that `fit` trains: its parameters are the draft's; a frozen target must not be a submodule.

    Everything goes through `forward`: there DDP, FSDP and ZeRO gather weights and reduce gradients.
    """

    Network: ClassVar[type[DraftNetwork]]
    rates: ClassVar[Mapping[str, float]]  # peak learning rates by optimizer, for `default_lr`
    tokens_power = 0.25  # by which the rate falls with the tokens of a step
    copies_layers = False  # whether `start` copies the target's last layers into those of a new draft
    reads_final_state = True  # whether the loss reads the target's state after its final norm
    samples: SampleAnswers | None = None  # collects some of the answers that an evaluation walks
    temperature = 0.0  # of the server that an evaluation simulates
    categories: Sequence[str] = ()  # by which evaluations log accept lengths, too
    step_times: StepTimes | None = None  # for the expected speed
    calibrator: Any = None  # of a head whose fields evaluations fit (calibration.py)
    row_group: RowGroup | None = None  # of processes that share the rows of a batch
    base = ""  # the draft that an adapter changes; empty: all weights are trained
    base_fingerprint = ""  # of its weights
    is_new = True  # False while an evaluated batch repeats one (evaluation_batches): nothing of it may be kept

    def __init__(
        self, draft: Any, target: FrozenTarget, rope: RotaryEmbedding, options: Any, depth: int, seed: int = 0
    ) -> None:
        """`options` of the draft, `depth` of the held-out walk; `seed` of what the loss draws."""
        super().__init__()
        self.draft = draft
        self.target = target
        self.rope = rope
        self.options = options
        self.depth = depth
        self.seed = seed
        ids = draft.target_ids
        self.vocab_size = len(target.head)
        # (Vd,) int64 on the host, where the labels of a batch are
        self.all_ids = torch.arange(self.vocab_size, device="cpu")
        self.target_ids = self.all_ids if ids is None else ids.cpu()

    @classmethod
    def of(cls, draft: Any, target: FrozenTarget, options: Any, device: torch.device) -> Self:
        """`options` of the run."""
        evaluation = options.evaluation
        num_positions = options.data.max_length + max(options.draft.reach, evaluation.depth)
        rope = RotaryEmbedding(draft.config.rope, draft.config.head_dim, num_positions).to(device)
        training = cls(draft, target, rope, options.draft, evaluation.depth, options.seed)
        training.temperature = evaluation.temperature
        training.reads_final_state = training.reads_final_state or training.temperature > 0
        return training

    @classmethod
    @abstractmethod
    def new_draft(cls, options: Any, files: TargetFiles) -> DraftNetwork:
        """A draft for the target, not trained yet; `options` of the draft."""

    def start(self, *, continues: bool = False) -> str:
        """Called once before a run's first step: may take weights over from the target; returns a sentence about those
        that it does not have. `continues`: those of another draft replace what they can."""
        return ""

    def peak_lr(self, optim: OptimOptions, tokens: float) -> float:
        """The learning rate of `optim`, or else the default for steps of `tokens` tokens."""
        if optim.lr is not None:
            return optim.lr
        return default_lr(self.rates, optim.name, self.draft.config.hidden_size, tokens, self.tokens_power)

    @property
    def device(self) -> torch.device:
        return self.rope.cos.device

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss is zero in evaluation mode."""
        with parametrize.cached():
            if self.training:
                return self.loss(batch)
            return torch.zeros(()), self.evaluate(batch)

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Sum over the supervised tokens of `batch`, which lies on the host, times their weights; and metrics."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> Metrics:
        """Metrics of held-out rows; `accept_length` is among them and chooses the best checkpoint."""

    def expected_speed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics that follow from the accept lengths of an evaluation and the times of steps, if these are known."""
        if self.step_times is None:
            return {}
        lengths = {depth: metrics[f"accept_length_at_depth_{depth}"] for depth in range(1, self.depth + 1)}
        return self.step_times.metrics(lengths)

    def adapt(self, rank: int, base: str) -> None:
        """Trains a LoRA adapter of the draft, which is `base`, in place of its weights."""
        adapt_layers(self.draft, rank, self.seed)
        self.base = place_of(base)
        self.base_fingerprint = weights_fingerprint(resolve(base))

    def walk(self, batch: Batch, asking: Tensor, accepted: Tensor) -> Metrics:
        """Metrics of the draft's leading agreements with the text (acceptance.walk_answers)."""
        walks = list(walk_answers(batch, asking, accepted))
        if self.samples is not None and self.is_new:
            self.samples.add(batch, walks)
        metrics = walk_metrics(walks, self.depth) | depth_metrics(batch, asking, accepted, self.depth)
        return metrics | category_metrics(batch, walks, self.categories)

    @torch.no_grad()
    def text_noise(self, batch: Batch, rows: Tensor, tokens: Tensor, final: Tensor) -> Tensor:
        """Noise (R, Vd) that a server adds to the draft's logits of the tokens after `rows` (R,) of the flattened
        batch, given that the target says `tokens` (R,) there: a token has the same noise in every chain that reaches
        it. `final` (B * S, Ht): the target's states after its final norm."""
        width = batch.tokens.shape[1]
        numbers = batch.numbers.to(rows.device)
        logits = TargetHead(self.target, self.all_ids).teach(final[rows]).float() / self.temperature
        ids = self.target_ids.to(rows.device)
        return self.temperature * noise_behind(tokens, logits, numbers[rows // width], rows % width, ids)

    def write(self, state: Mapping[str, Tensor], folder: Path, run: Values) -> None:
        """Writes a servable checkpoint of this module's full `state` into an existing folder; `run` is its run.json."""
        tensors = {name.removeprefix("draft."): tensor for name, tensor in state.items()}
        if self.base:
            factors = factors_of(self.draft, tensors)
            write_adapter(folder, self.base, factors, self.draft.config.to_json(), run, self.base_fingerprint)
        else:
            write_draft(self.draft, tensors, folder, run)


def add(totals: Metrics, metrics: Metrics, *, is_new: bool = True) -> None:
    """`is_new` False: only names, which all processes must hold, and no sums, which may not be finite."""
    for name, value in metrics.items():
        sums = value.detach().double()
        totals[name] = totals.get(name, 0) + (sums if is_new else torch.zeros_like(sums))


def reduce(accelerator: Accelerator, totals: Metrics) -> dict[str, tuple[float, float]]:
    """Sum and count over all processes, which hold the same names."""
    names = sorted(totals)
    stacked = torch.stack([totals[name].to(accelerator.device) for name in names])
    return dict(zip(names, map(tuple, accelerator.reduce(stacked, "sum").tolist()), strict=True))  # sync
