"""The library speculators as the oracle of block drafts with heads: those that we wrote for it compute the same states
and scores there. Skipped where it is not installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.tests.data_tools.conversion import Runs
from slipstream.tests.data_tools.test_convert_blocks import WINDOWED, load, save
from slipstream.train.batches import collate
from slipstream.train.blocks import SDPABlockAttention, find_blocks

pytest.importorskip("speculators.models.dflash2", reason="the package speculators is not installed")
LENGTH = 24
ANCHORS = [5, 11, 16]
CANDIDATES = 4
# It counts a window from the anchor, as no server does; so here windows are wider than the text.
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash2": ("dflash2", {"sliding_window": 40}),
    "dflash2, all of the context": (
        "dflash2",
        {"sliding_window_non_causal": False, "sliding_window": None, "windowed_layers": ()},
    ),
    "dspark": ("dspark", {}),
    "dspark, fill-in": ("dspark", {"sample_from_anchor": False, "confidence_head": False}),
    "dspark, causal windows": ("dspark", WINDOWED | {"sliding_window": 40}),
    "gated": ("gated", {}),
}


def load_theirs(folder: Path, kind: str) -> Any:
    import speculators.models.dflash2
    import speculators.models.dspark

    module = speculators.models.dflash2 if kind == "dflash2" else speculators.models.dspark
    names = {"dflash2": "DFlash2", "dspark": "DSpark"}[kind]
    config = getattr(module, f"{names}SpeculatorConfig").from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = getattr(module, f"{names}DraftModel").from_pretrained(str(folder), config=config, dtype=torch.float32)
    model.load_verifier_weights()
    return model.float().eval()


@pytest.mark.parametrize("name", DRAFTS)
@torch.no_grad()
def test_states_and_scores_equal_those_of_the_library(name, make_target, tmp_path, capsys):
    heads, fields = DRAFTS[name]
    runs = Runs(make_target("qwen3"), tmp_path, capsys)
    fields = {key: value for key, value in fields.items() if value is not None}
    if "windowed_layers" in fields and not fields["windowed_layers"]:
        fields |= {"sliding_window": None, "sliding_window_non_causal": False}
    draft = load(runs, save(runs, heads, **fields)).float()
    kind = "dflash2" if heads == "dflash2" else "dspark"
    model = load_theirs(runs.convert(runs.root / "draft", "speculators")[0], kind)
    target = AutoModelForCausalLM.from_pretrained(runs.target, dtype=torch.float32)
    tokens = torch.randint(0, 120, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    states = target.model(tokens, output_hidden_states=True).hidden_states
    aux_states = torch.cat([states[layer + 1] for layer in draft.config.aux_layers], dim=-1)  # (1, S, K * H)
    anchored = torch.zeros(1, LENGTH).index_fill(1, torch.tensor(ANCHORS), 1)
    hidden, logits, *_ = model._backbone_forward(
        aux_states, tokens, anchored, states[-1], torch.zeros_like(tokens), max_anchors=len(ANCHORS)
    )
    ours = our_states(draft, target, tokens[0].tolist(), aux_states[0])
    size = draft.config.block_size
    first = 0 if draft.config.sample_from_anchor else 1
    hidden, logits = (x.view(len(ANCHORS), size, -1)[:, first:] for x in (hidden, logits))
    torch.testing.assert_close(ours[:, first:], hidden, rtol=1e-4, atol=1e-4)
    anchors = tokens[0, ANCHORS]
    ours = ours[:, first:]
    candidates, scores = draft.lattice(ours, anchors, target.lm_head(ours), num_candidates=CANDIDATES)
    assert_equal_scores(candidates.tokens, scores, model, hidden, logits, anchors)


def our_states(draft: Any, target: Any, tokens: list[int], aux_states: Tensor) -> Tensor:
    """States (N, S, H) of the blocks at ANCHORS."""
    batch = collate([[(tokens, [False] + [True] * (LENGTH - 1))]], LENGTH)
    rope = RotaryEmbedding(draft.config.rope, draft.config.head_dim, LENGTH + 8)
    attention = SDPABlockAttention(batch.positions.flatten(), rope)
    blocks = find_blocks(batch, torch.tensor(ANCHORS), draft.config.block_size)
    draft.write_context(draft.fuse(aux_states), attention)
    attention.ask(blocks)
    inputs = draft.block_tokens(torch.tensor(tokens)[blocks.anchors], blocks.size)
    embeds = target.get_input_embeddings()(inputs).flatten(0, 1)
    return draft(embeds, attention).view(*inputs.shape, -1)


def assert_equal_scores(tokens: Tensor, scores: Tensor, model: Any, hidden: Tensor, logits: Tensor, anchors: Tensor):
    """Compares scores (N, K, k, k) of tokens (N, K, k) with the library's own functions, predecessor by predecessor."""

    def expected(slot, previous):
        """previous (N,) target ids -> (N, k) of the slot's candidates."""
        candidates = tokens[:, slot]
        if hasattr(model, "candidate_selector"):
            return model.candidate_selector.score_candidates(logits[:, slot], hidden[:, slot], previous, candidates)
        block = {"prev_token_ids": previous[:, None], "hidden_states": hidden[:, slot : slot + 1]}
        return (logits[:, slot] + model.markov_head.block_bias(**block)[:, 0]).gather(1, candidates)

    best = logits.topk(CANDIDATES, dim=-1).indices
    assert torch.equal(tokens, best)
    torch.testing.assert_close(scores[:, 0, 0], expected(0, anchors), rtol=1e-4, atol=1e-4)
    for slot in range(1, best.shape[1]):
        for i in range(CANDIDATES):
            after = expected(slot, best[:, slot - 1, i])
            torch.testing.assert_close(scores[:, slot, i], after, rtol=1e-4, atol=1e-4)
