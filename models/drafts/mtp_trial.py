"""Tries which state an MTP head reads where servers of its family differ: after the target's final norm, or before.

RMS norms differ in their weights alone, so a wrong choice shows nowhere but in the tokens that the target accepts.
Letters: T tokens, H hidden size, V vocabulary.
"""

import logging
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from slipstream.models.drafts.mtp import MTP
from slipstream.models.targets.decoder import Target
from slipstream.models.targets.families import Hidden
from slipstream.models.targets.packed_attention import PackedAttention

MOST_TOKENS = 256
TEXT = """The harbour office keeps a list of every boat that comes in. On Monday there were 12 boats at the long pier
and 9 at the short one. On Tuesday 5 boats left the long pier and 3 came to the short one, so that 7 boats were at the
long pier and 12 at the short one. How many boats were there on Tuesday? There were 7 + 12 = 19 boats.

def count_boats(piers: dict[str, list[str]]) -> dict[str, int]:
    return {name: len(boats) for name, boats in piers.items()}

for name, count in count_boats({"long": ["Anna", "Berta"], "short": []}).items():
    print(f"{name}: {count}")

The program prints the name of each pier and the number of boats there. If a pier is empty, it prints 0. The office runs
it in the morning and in the evening, and writes both numbers down. At the end of the week the harbour master compares
them with the bills that have been paid. Most weeks they agree. When they do not, a boat has usually come in at night
and left before anybody was awake.
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
            ids = tokenizer(TEXT, verbose=False)["input_ids"][:MOST_TOKENS]
            hidden = better_hidden(module, target, torch.tensor(ids, device=target.device))
    module.config = replace(module.config, hidden=hidden)


@torch.inference_mode()
def better_hidden(module: MTP, target: Target, tokens: Tensor) -> Hidden:
    """Returns the reading with which the module agrees better with the target on a text (T,)."""
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
    for hidden in get_args(Hidden):
        module.config = replace(module.config, hidden=hidden)
        drafted = module(embeds, read_states[hidden], attention)
        probs = head(module.head_input(drafted)).float().softmax(-1)
        agreement[hidden] = torch.minimum(probs, expected).sum(-1).mean().item()
    best: Hidden = max(agreement, key=agreement.__getitem__)
    logger.info(
        "the MTP head reads the state %s the final norm, as --drafter.hidden %s does without a trial; it agrees with "
        "the target on %.0f %% of a short text after the norm, on %.0f %% before it",
        best.removesuffix("_norm"),
        best,
        100 * agreement["after_norm"],
        100 * agreement["before_norm"],
    )
    return best
