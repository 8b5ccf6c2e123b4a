"""The logits stage: the target's tokens and their log-probabilities from its logits, as the requests of a pass ask.

In mode "all" bias, penalties and masks (kernels/sampling/processors.py) act before temperature, filters and noise.
Drafts ignore them: that costs accepted tokens where they matter, and changes none.
Letters: H rows of logits, T rows of the pass, S segments, W nodes that a request slot stores, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.sampling.logprobs import token_logprobs
from slipstream.kernels.sampling.processors import count_tokens
from slipstream.kernels.sampling.sample import Sampling
from slipstream.models.targets.decoder import Target
from slipstream.serve.engine.plan import PromptChunk
from slipstream.serve.runner.request_state import RequestState

LOGITS_BYTES = 256 * 2**20  # fp32 logits of prompts that are held at a time


class NodeTokens(NamedTuple):
    """The nodes from which a row's path through its proposal is read."""

    nodes: Tensor  # (H,) int32 which node of its request a row is
    tokens: Tensor  # (T,) int64 of the pass, whose first rows are nodes in the order of the logits' rows
    ancestors: Tensor | None  # (T,) int64 bit masks; None: chains


def with_processors(sampling: Sampling, state: RequestState, requests: Tensor, path: NodeTokens) -> Sampling:
    """Adds what acts on logits (H, V) before they are sampled, the masks that `state` holds among it.

    requests (H,) int64: the slot of each row. A node counts the tokens of its path.
    """
    processors = state.processors._replace(
        row_nodes=path.nodes,
        nodes=path.tokens,
        ancestors=path.ancestors,
        masks=state.mask_bits,
        mask_rows=state.mask_rows[requests, path.nodes],
    )
    return replace(sampling, processors=processors)


def count_emitted(state: RequestState, requests: Tensor, tokens: Tensor) -> None:
    """Counts emitted tokens (S, W), -1 where there is none, for the penalties of `requests` (S,)."""
    count_tokens(state.processors.counts, state.processors.flags, requests, tokens)


def prompt_logprobs(target: Target, hidden: Tensor, following: Tensor, chunks: Sequence[PromptChunk]) -> Tensor | None:
    """Returns the `token_logprobs` (2 + 2 * K, N) int32 of the tokens after rows of chunks that ask for them, or None.

    hidden (C, H): the rows of all chunks; following (C,): the token after each.
    """
    starts = [sum(len(chunk.tokens) for chunk in chunks[:index]) for index in range(len(chunks))]
    rows = [start + index for start, chunk in zip(starts, chunks, strict=True) for index in range(chunk.num_scored)]
    if not rows:
        return None
    vocab_size = target.config.vocab_size
    k = min(max(chunk.logprobs or 0 for chunk in chunks), vocab_size)
    at_a_time = max(LOGITS_BYTES // (4 * vocab_size), 1)
    indices = torch.tensor(rows, device=hidden.device)  # sync
    parts = [token_logprobs(target.logits(hidden[part]), following[part], k) for part in indices.split(at_a_time)]
    return torch.cat(parts, dim=1)
