"""When the Triton kernels run. Each kernel `name` has `name_reference` in plain torch beside it."""

import torch
from torch import Tensor


def use_triton(x: Tensor) -> bool:
    """On a GPU and outside autograd; elsewhere the reference runs."""
    return x.is_cuda and not torch.is_grad_enabled()
