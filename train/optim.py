"""The optimizers of a run, how many steps it has, the rows that each takes, and its learning rate.

A run goes through the rows of its data in one order, epoch after epoch, whatever the number of processes. A step takes
the next rows_per_step of them, the last step of `optim.epochs` those that are left. So a run that continues on another
number of processes goes on at the row where it stopped: epochs end at the same row, in more steps or fewer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import _muon

from slipstream.train.checkpoints import Progress
from slipstream.train.options import OptimOptions, RunOptions

WARMUP = 0.03  # share of the steps in which the rate rises
DECAY = 0.2  # share of the steps in which `wsd` decays
BETAS = (0.9, 0.95)  # AdamW's decay of the two moments
CLIP = 0.5  # largest gradient norm
RATE_WIDTH = 576  # hidden size and tokens in a step at which `DraftTraining.rates` were found
RATE_TOKENS = 16_384
WIDTH_POWER = {"muon": 0.5, "adamw": 1.0}  # of the width that divides the rate


@dataclass(frozen=True, slots=True)
class Schedule:
    optim: OptimOptions
    num_rows: int  # of the train split
    rows_per_step: int  # of all processes

    @classmethod
    def of(cls, options: RunOptions, num_rows: int, num_processes: int) -> "Schedule":
        """Raises ValueError where a pass would take a row twice."""
        num_processes //= options.data.row_ranks
        needed = options.data.batch_size * num_processes
        if num_rows < needed:
            raise ValueError(
                f"the train split packs into {num_rows} rows, data.batch_size x {num_processes} processes needs "
                f"{needed}; lower data.batch_size or data.max_length"
            )
        return cls(options.optim, num_rows, needed * options.optim.accumulation)

    @property
    def last_row(self) -> int | None:
        """Where epochs end the run, counted as `Progress.rows`; None if `optim.steps` does."""
        return None if self.optim.steps else self.optim.epochs * self.num_rows

    def next_rows(self, progress: Progress) -> int:
        """Rows of the next step."""
        return min(self.rows_per_step, self._rows_left(progress))

    def num_steps(self, progress: Progress) -> int:
        """Optimizer steps of the run: those done and those to come."""
        return self.optim.steps or progress.step + math.ceil(self._rows_left(progress) / self.rows_per_step)

    def lr(self, progress: Progress) -> float:
        """Learning rate of the next step. Epochs set it by the rows done, so that it goes on where it was if the size
        of steps changes.

        A run that has become longer keeps the warm-up of its first plan.
        """
        length = self.optim.steps or self.optim.epochs
        done = float(progress.step) if self.optim.steps else progress.rows / self.rows_per_step
        warmup = math.ceil(WARMUP * self._steps_of(progress.first_length or length))
        assert self.optim.lr is not None, "the loop sets it"
        return self.optim.lr * lr_factor(done, self._steps_of(length), warmup, self.optim)

    def extension(self, progress: Progress, before: Mapping[str, Any]) -> str:
        """A sentence about a run that continues with other options than `before` and so, perhaps, another rate."""
        earlier = replace(self, optim=replace(self.optim, **before))
        changes = [f"optim.{name} {getattr(self.optim, name)}, before {value}" for name, value in before.items()]
        old_rate = earlier.lr(progress)
        rate = self.lr(progress)
        is_same = math.isclose(rate, old_rate, rel_tol=1e-6)
        effect = f"stays {rate:.4g}" if is_same else f"jumps from {old_rate:.4g} to {rate:.4g}"
        return f"continues at step {progress.step} with {'; '.join(changes)}: the learning rate {effect}"

    def _steps_of(self, length: int) -> int:
        """Steps of a run of `length` steps, or else epochs."""
        return length if self.optim.steps else math.ceil(length * self.num_rows / self.rows_per_step)

    def _rows_left(self, progress: Progress) -> int:
        return self.rows_per_step if self.last_row is None else self.last_row - progress.rows


def default_lr(rates: Mapping[str, float], optimizer: str, width: int, tokens: float, power: float) -> float:
    """Peak learning rate of a draft with hidden size `width` whose steps take `tokens` tokens, from the `rates` of
    the optimizers at RATE_WIDTH and RATE_TOKENS.

    A step of Muon has one size in all directions; its scale, which is AdamW's, makes that size grow with the root of
    the width, and the weights' own size does not grow. Steps of fewer tokens have noisier gradients: the rate falls
    with this `power` of the tokens.
    """
    return rates[optimizer] * (RATE_WIDTH / width) ** WIDTH_POWER[optimizer] * min(1.0, tokens / RATE_TOKENS) ** power


def lr_factor(step: float, num_steps: int, warmup: int, optim: OptimOptions) -> float:
    """Share of the peak learning rate in step 0..num_steps-1: linear up, then a decay, if any, that ends just above
    zero.

    `step` is no whole number where steps were of another size before.
    """
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    match optim.schedule:
        case "constant":
            return 1.0
        case "wsd":
            return min(1.0, (num_steps - step) / math.ceil(DECAY * num_steps))
    done = (step - warmup) / max(1, num_steps - warmup)
    return 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


BY_TOKEN = {"lm_head", "markov_w1", "markov_w2", "predecessor_codebook", "successor_codebook"}


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Not a matrix of one row or column, whose gradient orthogonalisation would merely scale to length 1; nor one with
    a row per token, a head or a codebook: rare tokens' rows need AdamW's step per entry."""
    return parameter.ndim == 2 and min(parameter.shape) > 1 and not BY_TOKEN & set(name.split("."))


class FullPrecisionMuon(torch.optim.Muon):
    """torch's Muon, which computes in bf16, with fp32 instead: on CPUs that have no instructions for bf16 its matrix
    products take eight times as long."""

    def step(self, closure: Any = None) -> Any:
        original = _muon._zeropower_via_newtonschulz
        _muon._zeropower_via_newtonschulz = orthogonalise
        try:
            return super().step(closure)
        finally:
            _muon._zeropower_via_newtonschulz = original


def orthogonalise(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: X' = a X + (b A + c A^2) X with A = X X^T, from the
    matrix scaled to norm 1 (Jordan et al. 2024). The parameters are called as torch calls them."""
    a, b, c = ns_coefficients
    is_tall = grad.shape[0] > grad.shape[1]
    x = grad.float().T if is_tall else grad.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def build_optimizers(model: nn.Module, options: OptimOptions) -> list[torch.optim.Optimizer]:
    """AdamW for all trainable parameters, or with `muon` Muon for the hidden matrices and AdamW for the rest.

    Muon (Jordan et al. 2024; torch.optim.Muon) moves a matrix along the orthogonalised momentum. Its step is scaled to
    the root mean square of AdamW's, so both share one learning rate, which the loop sets in every step.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [p for name, p in trainable if options.name == "muon" and is_hidden_matrix(name, p)]
    matrix_ids = {id(parameter) for parameter in matrices}
    rest = [parameter for _, parameter in trainable if id(parameter) not in matrix_ids]
    optimizers: list[torch.optim.Optimizer] = []
    if rest:  # an adapter's factors are all matrices
        optimizers.append(torch.optim.AdamW(rest, lr=0.0, betas=BETAS, weight_decay=0.0))
    if matrices:
        on_slow_cpu = matrices[0].device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        muon = FullPrecisionMuon if on_slow_cpu else torch.optim.Muon
        optimizers.append(
            muon(
                matrices,
                lr=0.0,
                weight_decay=0.0,
                momentum=options.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers
