"""Training of MTP heads against plain loops over documents, tokens and steps, and against transformers' modules."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.kernels.loss_kinds import Kind
from slipstream.models.drafts.mtp import MTP, MTPConfig, load_mtp
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.frozen import DecoderTarget, load_frozen_target
from slipstream.tests.mtp_targets import NaiveModules, NaiveMTP, PlainMTP, save_mtp_target
from slipstream.tests.pairwise import gate_of
from slipstream.tests.random_targets import shared_weights
from slipstream.tests.train.conftest import documents, random_parts
from slipstream.tests.train.naive_terms import check_chain_loss
from slipstream.tests.train.naive_walk import check_walk
from slipstream.tests.train.runs import assert_same_gradients
from slipstream.tests.train.weighted_cases import check_weights
from slipstream.tests.user_errors import user_error
from slipstream.train import losses
from slipstream.train.batches import collate
from slipstream.train.mtp import DraftOptions, MTPTraining, check_layer, copy_weights

DEPTH = 3
STEPS = 3
MAX_LENGTH = 64
FAMILIES = ("ernie", "glm4-moe", "hy-v3", "mellum", "exaone-moe", "qwen3-next", "qwen3-5")


def make_training(target: PreTrainedModel, ids: Tensor | None = None, loss: Kind = "soft_ce") -> MTPTraining:
    """Training of a new head."""
    options = DraftOptions(ttt_steps=STEPS, loss=loss)
    return MTPTraining(*random_parts(MTP, target, ids), options, DEPTH, seed=5)


def family_training(folder: Path, **options: Any) -> MTPTraining:
    """Training of the head in a target's files."""
    target = load_frozen_target(folder, (4,), torch.device("cpu"))
    assert isinstance(target, DecoderTarget)
    draft = MTP(MTPConfig.from_target(target.model.config))
    copy_weights(load_mtp(target.model), draft)
    rope = RotaryEmbedding(draft.config.rope, draft.config.head_dim, 128)
    training = MTPTraining(draft, target, rope, DraftOptions(ttt_steps=STEPS, **options), DEPTH)
    training.start()
    return training


@pytest.mark.parametrize(
    ("kind", "reduced", "logits_at_once"), [("soft_ce", False, 500), ("tv", True, 10**6), ("lk_lambda", False, 10**6)]
)
def test_loss_gradient_and_metrics_equal_the_loops(target_model, token_map, kind, reduced, logits_at_once, monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", logits_at_once)
    training = make_training(target_model, token_map.ids if reduced else None, kind)
    naive = PlainMTP(training.draft, *shared_weights(target_model))
    loss, expected = check_chain_loss(training, target_model, naive, documents(1), kind=kind, state_weight=1.0)
    assert_same_gradients(loss, expected, training.draft)


@pytest.mark.parametrize(
    ("kind", "count"),
    [*gate_of(product(FAMILIES, [1]), [*product(FAMILIES[::2], [1])]), ("ernie", 2), ("glm4-moe", 2), ("hy-v3", 3)],
)
@torch.no_grad()
def test_the_loss_of_a_familys_modules_equals_that_of_transformers(kind, count, tmp_path):
    target = save_mtp_target(kind, tmp_path / kind, count=count)
    naive = NaiveMTP(target) if count == 1 else NaiveModules(target)
    loss, expected = check_chain_loss(family_training(target.folder), target.model, naive, documents(1))
    torch.testing.assert_close(loss, expected.float(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_walk_of_several_modules_equals_a_server_that_runs_them(tmp_path):
    target = save_mtp_target("glm4-moe", tmp_path / "target", count=2)
    check_walk(family_training(target.folder), NaiveModules(target), target.model, 0, DEPTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_of_a_layer_with_experts_learns_but_the_router(dtype, tmp_path):
    """In bf16 as on a GPU."""
    training = family_training(save_mtp_target("glm4-moe", tmp_path / "target").folder)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss, _ = training.loss(collate(documents(1), MAX_LENGTH))
    loss.backward()
    still = {name for name, parameter in training.draft.named_parameters() if parameter.grad is None}
    assert still == {f"layers.4.mlp.gate.{name}" for name in ("weight", "correction")}
    gradients = [parameter.grad for parameter in training.draft.parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_tokens_have_weights(target_model, token_map):
    check_weights(make_training(target_model, token_map.ids), MAX_LENGTH)


def test_the_walk_equals_a_server_that_runs_the_chain(target_model):
    training = make_training(target_model)
    check_walk(training, PlainMTP(training.draft, *shared_weights(target_model)), target_model, 0, DEPTH)


def test_layers_that_training_lacks_are_refused(tmp_path):
    config = family_training(save_mtp_target("glm4-moe", tmp_path / "target").folder).draft.config
    attention = replace(config.layer_spec.attention, sinks=True)
    sunk = replace(config, layer_spec=replace(config.layer_spec, mixer=attention))
    with user_error("the MTP layer of Glm4MoeForCausalLM has sinks, which training lacks"):
        check_layer(sunk, DraftOptions())
    with user_error("draft.intermediate_size is 8, but the MTP layer of Glm4MoeForCausalLM has"):
        check_layer(config, DraftOptions(intermediate_size=8))
    with user_error("draft.ttt_steps is 2, but the target has 3 MTP modules, which draft in turn"):
        check_layer(replace(config, num_modules=3), DraftOptions(ttt_steps=2))
    with user_error("draft.init_from_target is false, but the MTP layer of .* has experts"):
        check_layer(config, DraftOptions(init_from_target=False))
