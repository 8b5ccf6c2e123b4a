"""Tries which state an MTP head reads where servers of its family differ: after the target's final norm, or before.

RMS norms differ in their weights alone, so a wrong choice shows nowhere but in the tokens that the target accepts.
Letters: T tokens, H hidden size, V vocabulary.
"""

import logging
from typing import get_args

import torch
from torch import Tensor

from slipstream.models.drafts.mtp import MTP
from slipstream.models.targets.decoder import Target
from slipstream.models.targets.families import Hidden
from slipstream.models.targets.packed_attention import PackedAttention

MOST_TOKENS = 256
MARGIN = 1.1  # how much better the state before the norm must be: most servers read the one after it
TEXT = """Question: Anna has 12 apples. She buys 9 more and gives 5 to her brother. How many apples does she have?
Answer: Anna has 12 + 9 = 21 apples after she buys 9 more. She gives 5 to her brother, so she has 21 - 5 = 16 apples.

Question: A book costs $8 and a pen costs $2. Tom buys 3 books and 4 pens. How much does he pay in total?
Answer: The books cost 3 * 8 = $24. The pens cost 4 * 2 = $8. In total Tom pays 24 + 8 = $32.

Question: A farmer has 20 cows. Each cow gives 15 liters of milk a day. He sells half of the milk. How many liters of
milk does he sell in a week?
Answer: The cows give 20 * 15 = 300 liters of milk a day. The farmer sells 300 / 2 = 150 liters a day. In a week he
sells 150 * 7 = 1050 liters of milk.

Question: Maria reads 30 pages every day. Her book has 240 pages. How many days does she need to read the book?
Answer: Maria needs 240 / 30 = 8 days to read the book.
"""

logger = logging.getLogger(__name__)


def choose_hidden(module: MTP, target: Target, hidden: Hidden | None) -> None:
    """Makes the module read this state; None: the one with which it agrees better with the target on a short text."""
    if hidden is None:
        tokenizer = target.tokenizer
        if tokenizer is None:
            hidden = "after_norm"
            logger.info("the MTP head reads the state after the final norm; without a tokenizer no other is tried")
        else:
            hidden = better_hidden(module, target, text_tokens(target))
    module.read_states(hidden)


def text_tokens(target: Target) -> Tensor:
    """The tokens (T,) of a short text, of a target with a tokenizer."""
    assert target.tokenizer is not None
    ids = target.tokenizer(TEXT, verbose=False)["input_ids"][:MOST_TOKENS]
    return torch.tensor(ids, device=target.device)


@torch.inference_mode()
def agreements(module: MTP, target: Target, tokens: Tensor) -> dict[Hidden, float]:
    """Returns the mean overlap of the (first) module's distributions and the target's on a text (T,), with each state
    that the module may read."""
    attention = PackedAttention()
    positions = torch.arange(len(tokens), device=tokens.device)[None]
    attention.plan(positions)
    last = target.config.num_layers
    final, states = target(tokens, attention, (last - 1, last))
    assert states is not None
    read_states = dict(zip(("before_norm", "after_norm"), states[:-2].chunk(2, dim=-1), strict=True))
    expected = target.logits(final[1:-1]).float().softmax(-1)
    embeds = (module.embed_tokens or target.embed_tokens)(tokens[1:-1])
    attention.plan(positions[:, :-2])
    head = module.lm_head or target.lm_head
    agreement: dict[Hidden, float] = {}
    former = module.config.hidden
    for hidden in get_args(Hidden):
        module.read_states(hidden)
        drafted = module(embeds, read_states[hidden], attention)
        probs = head(module.head_input(drafted)).float().softmax(-1)
        agreement[hidden] = torch.minimum(probs, expected).sum(-1).mean().item()
    module.read_states(former)
    return agreement


def better_hidden(module: MTP, target: Target, tokens: Tensor) -> Hidden:
    """Returns the state with which the module agrees better with the target on a text (T,)."""
    agreement = agreements(module, target, tokens)
    is_before = agreement["before_norm"] > MARGIN * agreement["after_norm"]
    best: Hidden = "before_norm" if is_before else "after_norm"
    logger.info(
        "the MTP head reads the state %s the final norm, as --drafter.hidden %s does without a trial; it agrees with "
        "the target on %.0f %% of a short text after the norm, on %.0f %% before it",
        best.removesuffix("_norm"),
        best,
        100 * agreement["after_norm"],
        100 * agreement["before_norm"],
    )
    return best
