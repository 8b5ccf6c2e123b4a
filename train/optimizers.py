"""The optimizers of a run: AdamW for everything, or Muon for the hidden matrices and AdamW for the rest.

Muon (Jordan et al. 2024; torch.optim.Muon) moves a matrix along the orthogonalised momentum. Its step is scaled to the
root mean square of AdamW's, so both share one learning rate.
"""

import torch
from torch import nn

from slipstream.train.options import OptimOptions

OUTPUT_LAYERS = ("lm_head",)  # one row per token: rare tokens' rows need AdamW's step per entry


def build_optimizers(model: nn.Module, options: OptimOptions) -> list[torch.optim.Optimizer]:
    """One optimizer, or with `muon` two that split the trainable parameters."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [p for name, p in named if options.name == "muon" and p.ndim == 2 and not _is_output(name)]
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for _, parameter in named if id(parameter) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay)
    ]
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=options.lr, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def _is_output(name: str) -> bool:
    return any(part in OUTPUT_LAYERS for part in name.split("."))
