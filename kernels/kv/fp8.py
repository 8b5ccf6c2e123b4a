"""Keys and values in FP8 (e4m3): a code is x / scale, with one scale for all keys of a head in a layer and one for its
values. A code depends on its own number and the head's scale alone, so a token has the same codes in any pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in fp32, rounded to the nearest e4m3 (ties to even); beyond +-448 it saturates, NaN stays NaN.

    x: any float dtype; scale fp32, broadcast against x."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes * scale in fp32, rounded to `dtype`."""
    return (codes.float() * scale).to(dtype)


@triton.jit
def encode_triton(x, scale):
    """`encode` of a tile; the scale is broadcast. An exact division: the default one may be off by two bits."""
    x = x.to(tl.float32)
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
