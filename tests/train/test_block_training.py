"""Training of block drafts with heads: losses and gradients against plain formulas, evaluation against a server, warm
starts, calibration, options."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from slipstream.models.drafts.base import load_draft, write_draft
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.drafts.heads.confidence import ConfidenceConfig, ConfidenceHead
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.models.drafts.heads.lilicorr import LiLiCorr
from slipstream.models.drafts.heads.markov import MarkovHead
from slipstream.models.drafts.heads.selector import CandidateSelector
from slipstream.models.drafts.token_map import TokenMap
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.families import OutputGate
from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.pairwise import rotating
from slipstream.tests.random_targets import shared_weights
from slipstream.tests.train.block_cases import BLOCK_SIZE, MAX_LENGTH, make_training, packed
from slipstream.tests.train.conftest import documents
from slipstream.tests.train.naive_walk import check_walk
from slipstream.tests.train.runs import assert_same_gradients, assert_same_run, records
from slipstream.tests.train.weighted_cases import check_weights
from slipstream.train.batches import Batch, collate
from slipstream.train.calibration import Calibration, Confidences, calibration_error, chain_error, fit_calibration
from slipstream.train.dflash import DFlashTraining, DraftOptions, Slots, main
from slipstream.train.warm_start import warm_start

SCORER = LiLiCorrConfig(candidate_topk=16, hidden_size=16, num_heads=2, factor_dim=8)
CONV = {"conv_kernel_size": 2, "conv_group_size": 8}
DRAFTS: dict[str, dict[str, Any]] = {
    "dflash2": {"selector_rank": 6, "selector_top_k": 4, **CONV},
    "dspark": {"markov_rank": 6, "sample_from_anchor": True, "confidence_head": True},
    "gated": {"markov_rank": 6, "markov_head_type": "gated", "final_logit_softcapping": 3.0, "output_multiplier": 0.5},
    "lilicorr": {"lilicorr": SCORER},
    "trusted": {"selector_rank": 6, "selector_top_k": 4, "confidence_head": True, "final_logit_softcapping": 3.0},
    "plain": {"confidence_head": True},
}


def rough_training(target: PreTrainedModel, name: str, ids: Tensor | None = None, **options: Any) -> DFlashTraining:
    anchors = 100 if name == "lilicorr" else 6  # few blocks have the text among their candidates
    options = {"anchors": anchors, "loss": "decay", **options}
    training = make_training(target, ids, DraftOptions(**options), **DRAFTS[name])
    generator = torch.Generator().manual_seed(1)
    for parameter in training.draft.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return training


def plain_losses(training: DFlashTraining, slots: Slots) -> dict[str, Tensor]:
    """Losses of the M slots (the scorer's: of the B blocks' slots), from whole rows of logits."""
    draft = training.draft
    head = training.head.rows
    unary = draft.unary(slots.states @ head.T)
    teacher = slots.read.final[slots.taught_by] @ head.T
    logits = unary
    if (markov := draft.head(MarkovHead)) is not None:
        logits = unary + markov.markov_w2(markov.features(slots.states, slots.previous))
    log_q = logits.log_softmax(-1)
    p = teacher.softmax(-1)
    distance = (log_q.exp() - p).abs().sum(-1)
    losses = {"ce": F.nll_loss(log_q, slots.labels, reduction="none")}
    overlaps = 1 - distance / 2
    if (selector := draft.head(CandidateSelector)) is not None:
        rows = logits.topk(4).indices
        for m, label in enumerate(slots.labels.tolist()):
            if label not in rows[m].tolist():
                rows[m, -1] = label
        query = selector.predecessor_codebook[slots.previous] * selector.hidden_projection(slots.states)
        scores = unary.gather(1, rows) + (selector.successor_codebook[rows] @ query.unsqueeze(2)).squeeze(2)
        place = (rows == slots.labels.unsqueeze(1)).long().argmax(1)
        probs = scores.softmax(-1)
        teacher_probs = teacher.gather(1, rows).softmax(-1)
        losses["selector_ce"] = -probs.gather(1, place.unsqueeze(1)).squeeze(1).log()
        losses["selector_tv"] = (probs - teacher_probs).abs().sum(-1) / 2
        overlaps = torch.minimum(probs, p.gather(1, rows)).sum(-1)
    if (confidence := draft.head(ConfidenceHead)) is not None:
        x = slots.states if markov is None else torch.cat((slots.states, markov.markov_w1(slots.previous)), dim=1)
        c = torch.sigmoid(confidence.proj(x)).squeeze(1)
        truth = overlaps.detach() * slots.gather(slots.is_known)
        losses["confidence"] = -(truth * c.log() + (1 - truth) * (1 - c).log())
    if draft.head(LiLiCorr) is not None:
        losses |= plain_scorer_losses(training, slots, unary, teacher)
    return losses


def plain_scorer_losses(training: DFlashTraining, slots: Slots, unary: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    scorer = training.draft.head(LiLiCorr)
    assert scorer is not None
    K = slots.is_known.shape[1]
    names = ("scorer_ce", "scorer_regret")
    losses = {name: torch.zeros(len(slots.whole_blocks), K) for name in names}
    places = slots.places.tolist()
    for b, block in enumerate(slots.whole_blocks.tolist()):
        slot_rows = [places.index(block * K + k) for k in range(K)]
        rows = unary[slot_rows].topk(16).indices
        log_probs = unary[slot_rows].log_softmax(-1).gather(1, rows)
        embedded = training.target.embed(training.head.ids[rows])
        context = slots.read.context[slots.anchors[block] - 1]
        start, edges = scorer(embedded[None], log_probs[None], slots.hidden[block][None], context[None])
        before = 0
        for k in range(K):
            label = int(slots.labels[slot_rows[k]])
            if label not in rows[k].tolist():
                break
            scores = start[0] if k == 0 else edges[0, k - 1, before]
            place = before = rows[k].tolist().index(label)
            losses["scorer_ce"][b, k] = -scores.log_softmax(0)[place]
            z = teacher[slot_rows[k]][rows[k]]
            losses["scorer_regret"][b, k] = (scores.softmax(0) * (z[place] - z).clamp(min=0)).sum()
    return losses


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_have_weights_in_every_head(target_model, name):
    training = rough_training(target_model, name)
    training.options = replace(training.options, anchors=100)
    check_weights(training, MAX_LENGTH)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_losses_and_gradients_are_those_of_whole_rows(target_model, token_map, name, reduced):
    training = rough_training(target_model, name, token_map.ids if reduced else None)
    batch, _ = packed(5)
    total, _ = training.loss(batch)
    slots = training.backbone(batch)
    count = slots.is_known.shape[1]
    gamma = {4: 2.5, 5: 3.0}[count]
    decay = torch.exp(-torch.arange(count) / gamma)
    fixed = decay / decay.sum() * slots.stands_for
    expected = torch.stack([0 * parameter.sum() for parameter in training.draft.parameters()]).sum()
    losses = plain_losses(training, slots)
    for loss, weight in training.losses.items():
        if loss == "confidence":
            weights = slots.gather(fixed * slots.counts)
        elif loss.startswith("scorer"):
            weights = fixed[slots.whole_blocks]
            assert losses[loss].any() != reduced, "no block is whole where every other token is missing"
        else:
            weights = slots.gather(fixed * slots.is_known)
        expected = expected + weight * (weights * losses[loss]).sum()
    assert_same_gradients(total, expected, training.draft)


def test_dpace_weighs_mixtures_too(target_model):
    """The weights are those that the losses alone would give."""
    training = rough_training(target_model, "dspark", loss="dpace")
    batch, _ = packed(0)
    total, metrics = training.loss(batch)
    slots = training.backbone(batch)
    entropies = plain_losses(training, slots)["ce"].detach()
    weights = training.weights(slots, lambda: entropies)
    torch.testing.assert_close(training.token_losses(slots).weights, weights, rtol=1e-4, atol=1e-5)
    assert total.isfinite()
    assert metrics["confidence"][1] == slots.counts.sum()


@pytest.mark.parametrize(("name", "depth"), rotating(["dflash2", "dspark", "gated", "lilicorr"], [4, 2]))
def test_the_walk_equals_a_server_that_drafts_blocks(target_model, name, depth):
    training = rough_training(target_model, name)
    training.depth = depth
    naive = NaiveDFlash(training.draft, *shared_weights(target_model))
    slots = depth + training.draft.config.first_slot
    naive.greedy = lambda aux_states, tokens, count: naive.chain(aux_states, tokens, count + 1, slots, 0, 0.0)[0]
    check_walk(training, naive, target_model, 4, depth)


def test_identity_heads_give_the_drafts_own_tokens(target_model):
    """A draft that gets a convolution, a selector or a Markov head is what it was, bit for bit."""
    plain = make_training(target_model)
    batch, _ = packed(2)
    expected = plain.eval()(batch)[1]
    for fields in (CONV, {"selector_rank": 6, "selector_top_k": 4}, {"markov_rank": 6}, CONV | {"markov_rank": 6}):
        training = make_training(target_model, **fields)
        training.draft.load_state_dict(DFlash(training.draft.config).state_dict())
        report = warm_start(training.draft, plain.draft)
        assert report.is_exact
        assert report.new
        metrics = training.eval()(batch)[1]
        assert {name: metrics[name].tolist() for name in expected} == {n: x.tolist() for n, x in expected.items()}


def test_what_a_warm_start_changes_is_reported(target_model, token_map):
    source = make_training(target_model, token_map.ids, markov_rank=6).draft
    source_rows = source.get_parameter("markov_head.markov_w2.weight")
    fields = {"mask_token_id": 9, "aux_layers": (0, 1, 2), "sample_from_anchor": True, "num_layers": 1}
    draft = make_training(target_model, markov_rank=6, lilicorr=None, **fields).draft
    rows = draft.get_parameter("markov_head.markov_w2.weight")
    before = rows.clone()
    source_rows.data.normal_()
    report = warm_start(draft, source)
    assert not report.is_exact
    assert {"fc.weight", "markov_head.markov_w2.weight"} == set(report.partial)
    assert any(name.startswith("layers.1.") for name in report.ignored)
    text = "\n".join(report.lines("runs/x"))
    for words in ("mask_token_id is 7 there, 9 here", "sample_from_anchor is False there, True here"):
        assert words in text
    assert "token map has" in text
    assert "a warm start: its first tokens are not" in text
    assert torch.equal(rows[token_map.ids], source_rows)
    missing = torch.ones(len(rows), dtype=torch.bool).index_fill(0, token_map.ids, False)
    assert torch.equal(rows[missing], before[missing])
    size = draft.config.hidden_size
    assert torch.equal(draft.fc.weight[:, :size], source.fc.weight[:, size : 2 * size]), "layer 0's columns"
    assert torch.equal(draft.fc.weight[:, 2 * size :], source.fc.weight[:, :size]), "layer 2's"


def test_calibration_finds_what_the_head_should_have_said():
    """Logits that are twice too large and too low, in slots that depend on nothing else."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(20000, 3, generator=generator) + 0.5
    hits = torch.rand(truth.shape, generator=generator) < torch.sigmoid(truth)
    confidences = Confidences(
        2 * (truth - 0.4), hits.long().cumprod(1).sum(1), torch.ones(truth.shape, dtype=torch.bool)
    )
    fitted = fit_calibration(confidences)
    torch.testing.assert_close(fitted.temperatures, torch.full((3,), 2.0), atol=0.15, rtol=0)
    torch.testing.assert_close(fitted.biases, torch.full((3,), 0.4), atol=0.1, rtol=0)
    assert chain_error(confidences, fitted) < 0.01 < chain_error(confidences, Calibration.none(3))
    few = confidences.of(slice(0, 2))
    assert all(
        (abs(values - expected) < 0.2).all()
        for values, expected in zip(fit_calibration(few), Calibration.none(3), strict=True)
    )
    assert [len(numbers) for numbers in fitted.padded(5)] == [5, 5]
    halves = torch.tensor([0.5] * 4 + [0.95] * 2)
    assert calibration_error(halves, torch.tensor([1, 0, 0, 0, 1, 1])) == pytest.approx((4 * 0.25 + 2 * 0.05) / 6)


@torch.no_grad()
def test_calibration_takes_every_row_once_and_in_order(target_model):
    """For any share of the rows among processes, of which one that runs out of rows repeats the first."""
    training = rough_training(target_model, "dspark").eval()
    rows = [[document] for row in documents(4) for document in row]
    batches = [collate([row], 32, number) for number, row in enumerate(rows)]

    def fitted(*order):
        for number, is_new in order:
            training.is_new = is_new
            training.evaluate(batches[number])
        metrics = training.calibrator.end(lambda parts: parts)
        return training.draft.config, metrics

    expected = fitted((0, True), (1, True), (2, True))
    assert fitted((0, True), (2, True), (1, True), (0, False)) == expected
    assert fitted((0, True), (2, True), (1, True), (0, True)) != expected


def test_lilicorr_has_no_confidence_head(target_model):
    with pytest.raises(ValueError, match="draft.confidence_head is true together with"):
        make_training(target_model, lilicorr=SCORER, confidence_head=True)


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({}, {"ce": 1.0}),
        ({"selector_rank": 4}, {"ce": 0.1, "selector_ce": 0.1, "selector_tv": 0.9}),
        ({"markov_rank": 4, "confidence_head": True}, {"ce": 1.0, "confidence": 0.1}),
        ({"lilicorr": SCORER}, {"ce": 1.0, "scorer_ce": 0.25, "scorer_regret": 0.25}),
    ],
)
def test_losses_follow_from_the_heads(target_model, fields, weights):
    assert make_training(target_model, **fields).losses == weights


def test_a_run_continues_a_draft(tmp_path, target_path, target_model, run_flags, capsys):
    """With a confidence head, whose calibration the checkpoint holds; gates and norms, which no option names, come
    along."""
    parts = {"tap_norms": True, "context_norms": True, "gate": OutputGate(activation="sigmoid")}
    source = make_training(target_model, sample_from_anchor=True, **parts).draft
    (tmp_path / "draft").mkdir()
    write_draft(source, source.state_dict(), tmp_path / "draft", {})
    sizes = {"draft__num_layers": 2, "draft__block_size": BLOCK_SIZE, "draft__anchors": 6, "optim__steps": 2}
    heads = {"draft__markov_rank": 4, "draft__confidence_head": "true", "draft__sample_from_anchor": "true"}
    vocabulary = tmp_path / "map.safetensors"
    TokenMap.build(torch.ones(120, dtype=torch.int64), 120, [], {}).write(vocabulary)
    start = {"init_from": tmp_path / "draft", "draft__vocabulary": vocabulary, "checkpoint__every": 1}
    flags = run_flags(tmp_path / "run", **start, **sizes, **heads)
    main(flags)
    reference = shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "draft")
    shutil.rmtree(tmp_path / "run" / "step-2")
    main(flags)
    assert_same_run(tmp_path / "run", reference, last_step=2)
    output = capsys.readouterr().out
    assert output.count("exact: its first tokens are those of that draft") == 1
    config = load_draft(DFlash, tmp_path / "run" / "best", load_config(target_path), None, torch.device("cpu")).config
    for name in ("mask_token_id", "aux_layers", *parts):
        assert getattr(config, name) == getattr(source.config, name)
    head = config.head(ConfidenceConfig)
    assert len(head.confidence_temperatures) == len(head.confidence_biases) == BLOCK_SIZE
    last = records(tmp_path / "run")[-1]
    assert 0 <= last["eval_confidence_error"] <= 1
    assert {"eval_candidate_recall", "eval_path_accept_rate", "eval_block_accept_length"} < last.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash2", "dspark", "lilicorr"])
def test_an_overfitted_draft_is_accepted_whole(target_model, name):
    """Texts of the target's own, seen again and again: then every block of them is right."""
    training = rough_training(target_model, name)
    training.options = replace(training.options, anchors=100)
    batch = own_texts(target_model)
    optimizer = torch.optim.AdamW(training.draft.parameters(), lr=1e-2)
    num_steps = 200 if name == "lilicorr" else 400
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / num_steps)
        optimizer.zero_grad()
        loss, _ = training.train().loss(batch)
        (loss / batch.num_supervised).backward()
        torch.nn.utils.clip_grad_norm_(training.draft.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        metrics = training.eval()(batch)[1]
    rates = {key: float(total / count) for key, (total, count) in metrics.items()}
    assert rates["path_accept_rate"] > 0.95, rates
    assert rates["accept_length"] > 0.9 * training.draft.config.num_proposals, rates


def own_texts(target: PreTrainedModel) -> Batch:
    """Greedy continuations, whose distribution the target's states say."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 110, (3, 4), generator=generator)
    texts = target.generate(prompts, max_new_tokens=26, do_sample=False, eos_token_id=None, pad_token_id=0)
    return collate([[(text, [False] * 4 + [True] * 26)] for text in texts.tolist()], 32)
