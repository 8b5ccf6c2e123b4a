"""Linear layers, with a path for a few rows on the CPU."""

from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) @ weight (O, I).T + bias (O,) -> (..., O).

    A decode or verify pass has 1 to 8 rows and is bound by reading the weights. The CPU library reads row-major weights
    about twice as fast when they are the left operand with at least two columns on the right, so we compute the
    transposed product there (docs/benchmarks.md, "Linear layers on the CPU").
    """
    rows = x.numel() // x.shape[-1]
    if x.is_cuda or rows > FEW_ROWS or weight.requires_grad:
        return F.linear(x, weight, bias)
    flat = x if x.dim() == 2 else x.reshape(rows, x.shape[-1])
    out = (weight @ flat.repeat(2, 1).t())[:, :1] if rows == 1 else weight @ flat.t()
    out = out.t().contiguous()
    out = out if bias is None else out + bias
    return out if x.dim() == 2 else out.view(*x.shape[:-1], len(weight))
