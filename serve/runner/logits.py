"""The logits stage: the target's tokens from its logits, as the requests of a pass ask.

In mode "all" bias, penalties and masks (kernels/sampling/processors.py) act before temperature, filters and noise.
Drafts ignore them: that costs accepted tokens where they matter, and changes none.
Letters: H rows of logits, T rows of the pass, S segments, W nodes that a request slot stores, V target vocabulary.
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from slipstream.kernels.sampling.processors import count_tokens
from slipstream.kernels.sampling.sample import sample
from slipstream.serve.engine.plan import SamplingMode
from slipstream.serve.runner.request_state import RequestState


class NodeTokens(NamedTuple):
    """What a row's path through its proposal is read from."""

    nodes: Tensor  # (H,) int32 which node of its request a row is
    tokens: Tensor  # (T,) int64 of the pass, whose first rows are nodes in the order of the logits' rows
    ancestors: Tensor | None  # (T,) int64 bit masks; None: chains


def sample_target(
    state: RequestState, requests: Tensor, mode: SamplingMode, logits: Tensor, positions: Tensor, path: NodeTokens
) -> Tensor:
    """Samples the target's token after each row of logits (H, V), at positions (H,).

    requests (H,) int64: the slot of each row. A node counts the tokens of its path. Mode "all" also heeds the masks
    that `state` holds. Returns (H,) int64, -1 where nothing can be sampled: NaN, or no token allowed.
    """
    sampling = state.sampling(requests, mode)
    if mode == "all":
        processors = state.processors._replace(
            row_nodes=path.nodes,
            nodes=path.tokens,
            ancestors=path.ancestors,
            masks=state.mask_bits,
            mask_rows=state.mask_rows[requests, path.nodes],
        )
        sampling = replace(sampling, processors=processors)
    return sample(logits, positions, sampling)


def count_emitted(state: RequestState, requests: Tensor, mode: SamplingMode, tokens: Tensor) -> None:
    """Counts emitted tokens (S, W), -1 where there is none, for the penalties of `requests` (S,)."""
    if mode == "all":
        count_tokens(state.processors.counts, state.processors.flags, requests, tokens)
