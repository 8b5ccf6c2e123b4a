"""DFlash 2's convolutions inside a block: each sublayer's input and output mix a row with the row before.

They are the identity at first. Letters: H hidden; ...: any leading dims.
"""

import torch
from torch import Tensor, nn

from slipstream.kernels.block_conv import block_conv
from slipstream.models.layers.attention import Attention, Mask
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.linear import Linear
from slipstream.models.targets.config import LayerSpec


class BlockConvolution(nn.Module):
    """A causal convolution along the rows of a block, whose kernel depends on the row (DFlash 2):

        y[i, c] = sum over t < taps of (base[t, c] + delta[i, t, c // group]) * x[i - t, c]

    with rows before the block's first taken as zero. The sublayer's normed input gives the deltas of two convolutions:
    side 0 is that of the input itself, side 1 that of the sublayer's output.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps = taps
        self.groups = hidden_size // group_size
        identity = torch.zeros(2, taps, hidden_size)
        identity[:, 0] = 1.0
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = Linear(hidden_size, 2 * taps * self.groups)
        nn.init.zeros_(self.kernel_projection.get_parameter("weight"))

    def prepare(self, x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Normed input (..., H), whole blocks of `block_size` rows one after another -> the convolved input (..., H),
        and the deltas (..., taps, H / group) for `finish`."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))
        return block_conv(x, delta[..., 0, :, :], self.base_kernel[0], block_size), delta[..., 1, :, :]

    def finish(self, y: Tensor, delta: Tensor, block_size: int) -> Tensor:
        """The sublayer's output (..., H), convolved."""
        return block_conv(y, delta, self.base_kernel[1], block_size)


class ConvolvedLayer(DecoderLayer):
    """A pre-norm layer whose attention and MLP each stand between two convolutions along the block."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float, taps: int, group_size: int) -> None:
        super().__init__(spec, index, hidden_size, eps)
        self.attention_conv = BlockConvolution(hidden_size, taps, group_size)
        self.mlp_conv = BlockConvolution(hidden_size, taps, group_size)

    def forward_block(
        self, residual: Tensor, delta: Tensor | None, attention: Attention, mask: Mask, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, of blocks of `block_size` rows, one after another."""
        normed, residual = self.norm_input(residual, delta, None)
        normed, kernel = self.attention_conv.prepare(normed, block_size)
        attended = self.attention_conv.finish(self.mixer(normed, attention, mask), kernel, block_size)
        normed, residual = self.post_attention_layernorm.add(residual, attended)
        normed, kernel = self.mlp_conv.prepare(normed, block_size)
        return residual, self.mlp_conv.finish(self.mlp(normed), kernel, block_size)
