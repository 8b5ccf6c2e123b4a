"""The logits stage: the target's tokens from its logits, as the requests of a pass ask.

In mode "all" bias, penalties and masks (kernels/sampling/processors.py) act before temperature, filters and noise.
Drafts ignore them: that costs accepted tokens where they matter, and changes none.
Letters: B requests, N nodes per request, V target vocabulary.
"""

from dataclasses import replace

from torch import Tensor

from slipstream.kernels.sampling.processors import count_tokens
from slipstream.kernels.sampling.sample import sample
from slipstream.serve.engine.plan import SamplingMode
from slipstream.serve.runner.request_state import RequestState


def sample_target(
    state: RequestState,
    requests: Tensor,
    mode: SamplingMode,
    logits: Tensor,
    positions: Tensor,
    nodes: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Samples the target's token after each row of logits (B * N, V), at positions (B * N,).

    requests (B,) int64 slots of `state`. In a round nodes (B, N) int32 are the proposals' tokens and ancestors (B, N)
    their bit masks, None for chains: a node counts its path. Mode "all" also heeds the masks that `state` holds.
    Returns (B * N,) int64, -1 where nothing can be sampled: NaN, or no token allowed.
    """
    sampling = state.sampling(requests, mode)
    if nodes is not None:
        sampling = sampling.repeat(nodes.shape[1])
    if mode == "all":
        masks, rows = state.mask_bits, state.mask_rows[: len(logits)]
        processors = state.processors._replace(nodes=nodes, ancestors=ancestors, masks=masks, mask_rows=rows)
        sampling = replace(sampling, processors=processors)
    return sample(logits, positions, sampling)


def count_emitted(state: RequestState, requests: Tensor, mode: SamplingMode, tokens: Tensor) -> None:
    """Counts emitted tokens (B, N), -1 where there is none, for the penalties of `requests` (B,)."""
    if mode == "all":
        count_tokens(state.processors.counts, state.processors.flags, requests, tokens)
