"""Heads and convolutions of block drafts against loops and torch's own modules; lattices and how chains walk them; what
files hold of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.kernels.sampling.sample import gumbel
from slipstream.models.drafts.convolution import BlockConvolution
from slipstream.models.drafts.dflash import DFlash, DFlashConfig
from slipstream.models.drafts.heads.confidence import ConfidenceHead
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.models.drafts.heads.lilicorr import LiLiCorr
from slipstream.models.drafts.heads.markov import MarkovHead
from slipstream.models.drafts.heads.selector import CandidateSelector
from slipstream.models.targets.decoder import load_config
from slipstream.tests.models.saved_drafts import ORIGIN, SavedDraft
from slipstream.tests.tables import each_case, table_of

SCORER = LiLiCorrConfig(candidate_topk=4, hidden_size=16, num_heads=2, factor_dim=8)
HEADS: dict[str, dict[str, Any]] = {
    "conv": {"conv_kernel_size": 2, "conv_group_size": 8},
    "selector": {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2, "draft_vocab_size": 50},
    "vanilla": {"markov_rank": 6, "sample_from_anchor": True, "draft_vocab_size": 50, "confidence_head": True},
    "gated": {"markov_rank": 6, "markov_head_type": "gated", "confidence_head": True, "sample_from_anchor": True},
    "scorer": {"lilicorr": SCORER, "conv_kernel_size": 2},
    "as wide": {"lilicorr": LiLiCorrConfig(candidate_topk=2, hidden_size=0, num_heads=4)},
    "confidence": {
        "confidence_head": True,
        "confidence_temperatures": (1.5,) * 7,
        "confidence_biases": (0.5, -0.25) + (0.0,) * 5,
    },
    "scaled": {"output_multiplier": 0.5, "final_logit_softcapping": 20.0, "input_embedding_scale": 3.0},
}
SHAPES = table_of(__file__, "shapes")  # of some tensors


@pytest.fixture
def make_draft(make_target) -> Callable[..., DFlash]:
    target = load_config(make_target("qwen3"))

    def make(**fields):
        torch.manual_seed(4)
        sizes = {"num_layers": 2, "mask_token_id": 7, "block_size": 8, "aux_layers": (0, 2)}
        module = DFlash(DFlashConfig.from_target(target, **sizes | ORIGIN | fields))
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        if module.config.draft_vocab_size is not None:
            module.set_vocabulary(torch.arange(0, 120, 2)[: module.config.draft_vocab_size])
        return module.requires_grad_(False)

    return make


@pytest.mark.parametrize("name", HEADS)
def test_a_round_trip_is_exact(name, make_draft, make_target, tmp_path):
    saved = SavedDraft(make_draft(**HEADS[name]), load_config(make_target("qwen3")), tmp_path)
    saved.check_round_trip()
    assert saved.load().config == saved.module.config


@pytest.mark.parametrize("name", SHAPES)
def test_files_hold_the_public_names(name, make_draft):
    state = make_draft(**HEADS[name]).state_dict()
    assert {key: list(state[key].shape) for key in SHAPES[name]} == SHAPES[name]


@each_case(
    ({"lilicorr": SCORER, "sample_from_anchor": True}, "which LiLiCorr drafts are not trained with"),
)
def test_configs_are_checked(fields, message, make_draft):
    with pytest.raises(ValueError, match=message):
        make_draft(**fields)


def test_convolution_equals_the_loop():
    torch.manual_seed(0)
    module = BlockConvolution(12, 2, 4).double().requires_grad_(False)
    x = torch.randn(9, 12, dtype=torch.float64)
    S = 3
    assert torch.equal(module.prepare(x, S)[0], x), "starts as the identity"
    for parameter in module.parameters():
        parameter += torch.randn_like(parameter)
    delta = (x @ module.kernel_projection.weight.T).view(9, 2, 2, 3)
    for side, output in enumerate((module.prepare(x, S)[0], module.finish(x, module.prepare(x, S)[1], S))):
        for row in range(9):
            for channel in range(12):
                taps = [module.base_kernel[side, t, channel] + delta[row, side, t, channel // 4] for t in range(2)]
                before = x[row - 1, channel] if row % S else 0.0
                expected = taps[0] * x[row, channel] + taps[1] * before
                assert float(output[row, channel]) == pytest.approx(float(expected))


def naive_scores(draft: DFlash, h: Tensor, before: int, rows: list[int], logits: Tensor) -> list[float]:
    """Scores of the draft ids `rows` at one slot after the target id `before`, by the formulas."""
    scores = []
    for row in rows:
        score = logits[row]
        if (selector := draft.head(CandidateSelector)) is not None:
            query = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ h)
            score = score + query @ selector.successor_codebook[row]
        if (markov := draft.head(MarkovHead)) is not None:
            embedded = markov.markov_w1.weight[before]
            if (gate := markov.gate_proj) is not None:
                embedded = embedded * torch.sigmoid(gate.weight @ torch.cat((h, embedded)) + gate.bias)
            score = score + markov.markov_w2.weight[row] @ embedded
        scores.append(float(score))
    return scores


@pytest.mark.parametrize("name", ["selector", "vanilla", "gated", "scaled"])
def test_scores_equal_the_loops(name, make_draft):
    """Request 0 is greedy; candidates of the others are the best with their noise."""
    draft = make_draft(**HEADS[name])
    ids = draft.target_ids if draft.target_ids is not None else torch.arange(120)
    hidden = torch.randn(3, 4, 32)
    anchors = torch.tensor([5, 0, 119])
    logits = torch.randn(3, 4, len(ids))
    temperature = torch.tensor([0.0, 0.7, 1.5])
    keys = torch.tensor([1, 2, 3])
    positions = torch.tensor([10, 20, 30])
    noise = torch.stack([gumbel(keys, positions + s, ids) for s in range(4)], dim=1) * temperature[:, None, None]
    candidates, scores = draft.lattice(hidden, anchors, logits, num_candidates=5, noise=noise)
    greedy = draft.lattice(hidden, anchors, logits, num_candidates=5)
    assert torch.equal(candidates.tokens[0], greedy[0].tokens[0])
    torch.testing.assert_close(scores[0], greedy[1][0])
    for b in range(3):
        before = int(anchors[b])
        place = 0
        for s in range(4):
            slot_logits = logits[b, s]
            if name == "scaled":
                slot_logits = 20 * torch.tanh(slot_logits * 0.5 / 20)
            slot_logits = slot_logits + temperature[b] * gumbel(keys[b : b + 1], positions[b : b + 1] + s, ids)[0]
            rows = slot_logits.argsort(descending=True)[:5].tolist()
            assert candidates.tokens[b, s].tolist() == ids[rows].tolist()
            expected = torch.tensor(naive_scores(draft, hidden[b, s], before, rows, slot_logits))
            torch.testing.assert_close(scores[b, s, place], expected, rtol=1e-4, atol=1e-4)
            place = int(expected.argmax())
            before = int(ids[rows[place]])


def test_the_scorer_equals_torchs_attention(make_draft):
    scorer = make_draft(**HEADS["scorer"]).head(LiLiCorr)
    assert scorer is not None
    B = 2
    K = 3
    k = 4
    embedded = torch.randn(B, K, k, 32)
    hidden = torch.randn(B, K, 32)
    context = torch.randn(B, 32)
    log_probs = torch.randn(B, K, 9).log_softmax(-1).sort(descending=True).values[..., :k]
    start, edges = scorer(embedded, log_probs, hidden, context)

    def norm(x, name):
        return nn.functional.rms_norm(x, x.shape[-1:], scorer.get_parameter(f"{name}.weight"), 1e-6)

    def mlp(x, name):
        module = scorer.get_submodule(name)
        return module.down_proj(nn.functional.silu(module.up_proj(x)))

    for b in range(B):
        nodes = []
        for s in range(K):
            for c in range(k):
                lp = log_probs[b, s, c]
                features = torch.tensor([lp, lp.exp(), lp - log_probs[b, s, 0], c / (k - 1), float(c == 0)])
                node = scorer.token_proj(embedded[b, s, c]) + scorer.pass_hidden_proj(hidden[b, s])
                node = node + mlp(scorer.feature_norm(features), "feature_mlp")
                nodes.append(node + scorer.slot_embedding[0, 0, s, 0] + scorer.rank_embedding[0, 0, 0, c])
        x = torch.stack(nodes)
        slot = torch.arange(K).repeat_interleave(k)
        bias = torch.stack(
            [
                torch.stack(
                    [
                        scorer.relative_slot_bias[:, slot[i] - slot[j] + 7]
                        + (slot[i] == slot[j]) * scorer.same_slot_bias
                        for j in range(K * k)
                    ]
                )
                for i in range(K * k)
            ]
        ).permute(2, 0, 1)
        for index, layer in enumerate(scorer.layers):
            attention = nn.MultiheadAttention(16, 2, batch_first=True)
            attention.load_state_dict(layer.attn.state_dict())
            normed = norm(x, f"layers.{index}.attn_norm").unsqueeze(0)
            x = x + attention(normed, normed, normed, attn_mask=bias, need_weights=False)[0][0]
            x = x + mlp(norm(x, f"layers.{index}.mlp_norm"), f"layers.{index}.mlp")
        x = norm(x, "output_norm")
        anchor = norm(scorer.context_proj(context[b]), "anchor_norm")
        factors = nn.functional.silu(scorer.factor_input_proj(torch.cat((x, anchor.expand_as(x), x * anchor), dim=1)))
        out = scorer.out_head(factors)
        into = scorer.in_head(factors)
        first = scorer.anchor_out_head(anchor)
        for j in range(k):
            expected = 8 * torch.cosine_similarity(first, into[j], dim=0)
            torch.testing.assert_close(start[b, j], expected, rtol=1e-4, atol=1e-4)
            for s in range(1, K):
                expected = 8 * torch.cosine_similarity(out[(s - 1) * k : s * k], into[s * k + j].unsqueeze(0))
                torch.testing.assert_close(edges[b, s - 1, :, j], expected, rtol=1e-4, atol=1e-4)


def calibrated_logits(draft: DFlash, hidden: Tensor, before: Tensor) -> Tensor:
    head = draft.head(ConfidenceHead)
    logits = head(hidden, before)
    temperatures, biases = (torch.tensor(numbers)[: logits.shape[1]] for numbers in head.calibration)
    return logits / temperatures + biases


def test_confidence_reads_the_state_and_the_token_before(make_draft):
    draft = make_draft(**HEADS["vanilla"])
    hidden = torch.randn(2, 3, 32)
    before = torch.tensor([[5, 9, 1], [0, 2, 4]])
    weight = draft.get_parameter("confidence_head.proj.weight")[0]
    bias = draft.get_parameter("confidence_head.proj.bias")
    rows = draft.get_parameter("markov_head.markov_w1.weight")[before]
    expected = hidden @ weight[:32] + rows @ weight[32:] + bias
    torch.testing.assert_close(calibrated_logits(draft, hidden, before), expected)
    calibrated = make_draft(**HEADS["confidence"] | {"confidence_temperatures": tuple(range(1, 8))})
    raw = make_draft(**HEADS["confidence"] | {"confidence_temperatures": (), "confidence_biases": ()})
    expected = calibrated_logits(raw, hidden, before) / torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([0.5, -0.25, 0.0])
    torch.testing.assert_close(calibrated_logits(calibrated, hidden, before), expected)
