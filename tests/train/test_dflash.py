"""DFLASH's training against the draft run one block at a time, and the inputs that its loss must not depend on."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.models.targets.families import OutputGate
from slipstream.models.targets.frozen import TransformersTarget
from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.random_targets import shared_weights, target_aux_states
from slipstream.tests.train.block_cases import BLOCK_SIZE, MAX_LENGTH, flat_documents, make_training, packed
from slipstream.tests.train.conftest import AUX_STATE_LAYERS, Document
from slipstream.tests.train.naive_walk import check_walk
from slipstream.tests.train.runs import assert_same_gradients
from slipstream.tests.train.weighted_cases import check_weights
from slipstream.train import dflash
from slipstream.train.batches import Batch
from slipstream.train.blocks import Blocks, draw_anchors, find_blocks, possible_roots
from slipstream.train.dflash import DFlashTraining, DraftOptions

EVERYTHING = 10**6
DEPTH = BLOCK_SIZE - 1
VARIANTS = {
    "plain": {},
    "windowed": {"sliding_window": 3, "windowed_layers": (0, 1)},
    "mixed": {"sliding_window": 4, "windowed_layers": (1,)},
    "deep": {"num_layers": 3, "block_size": 8},
    "gated": {"tap_norms": True, "context_norms": True, "gate": OutputGate(activation="softplus", by_head=True)},
}


def all_states(training: DFlashTraining, batch: Batch) -> tuple[Blocks, Tensor]:
    blocks = find_blocks(batch, possible_roots(batch), training.draft.config.block_size)
    with torch.no_grad():
        return blocks, training.states(blocks, training.read(batch))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_state_is_the_one_of_the_block_alone(target_model, variant):
    training = make_training(target_model, **VARIANTS[variant])
    naive = NaiveDFlash(training.draft, *shared_weights(target_model))
    batch, rows = packed(1)
    blocks, states = all_states(training, batch)
    number = {anchor: n for n, anchor in enumerate(blocks.anchors.tolist())}
    compared = 0
    for start, (tokens, _) in flat_documents(rows, batch.tokens.shape[1]):
        aux_states = target_aux_states(target_model, tokens, training.draft.config.aux_layers)
        for a in range(len(tokens)):
            if start + a in number:
                expected = naive.block(aux_states[:a], tokens[a], blocks.size).states.float()
                torch.testing.assert_close(states[number[start + a]], expected, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared == len(blocks) > 20


def naive_loss(
    training: DFlashTraining, model: PreTrainedModel, batch: Batch, rows: list[list[Document]]
) -> tuple[Tensor, dict[str, list[int]]]:
    """The loss over the drawn anchors, one slot after the other, and the metrics."""
    naive = NaiveDFlash(training.draft, *shared_weights(model))
    options = training.options
    ids = training.target_ids.tolist()
    width = batch.tokens.shape[1]
    anchors, _ = draw_anchors(batch, options.anchors, training.seed)
    possible = (possible_roots(batch) // width).tolist()
    anchor_rows = (anchors // width).tolist()
    gamma = 2.5  # of blocks of 5
    total = sum(torch.exp(torch.tensor(-k / gamma)) for k in range(DEPTH))
    loss = torch.zeros(())
    rates = {f"accept_rate_{i}": [0, 0] for i in range(DEPTH)}
    for start, (tokens, mask) in flat_documents(rows, width):
        aux_states = target_aux_states(model, tokens, AUX_STATE_LAYERS)
        for a in (row - start for row in anchors.tolist() if start <= row < start + len(tokens)):
            row = (start + a) // width
            logits = naive.logits(naive.block(aux_states[:a], tokens[a], BLOCK_SIZE).states)
            for k in range(1, BLOCK_SIZE):
                if a + k >= len(tokens) or not all(mask[a : a + k + 1]):
                    break
                rates[f"accept_rate_{k - 1}"][1] += 1
                if tokens[a + k] in ids:
                    index = ids.index(tokens[a + k])
                    rates[f"accept_rate_{k - 1}"][0] += int(logits[k].argmax()) == index
                    weight = (
                        torch.exp(torch.tensor(-(k - 1) / gamma)) / total * possible.count(row) / anchor_rows.count(row)
                    )
                    loss = loss - weight * logits[k].log_softmax(dim=0)[index]
    return loss, rates


@pytest.mark.parametrize(("limit", "reduced"), [(2, False), (5, True)])
def test_loss_gradient_and_metrics_equal_the_loops(target_model, token_map, limit, reduced):
    training = make_training(
        target_model, token_map.ids if reduced else None, DraftOptions(anchors=limit, loss="decay")
    )
    batch, rows = packed(0)
    expected, rates = naive_loss(training, target_model, batch, rows)
    loss, metrics = training.loss(batch)
    assert_same_gradients(loss, expected, training.draft)
    assert {name: value.tolist() for name, value in metrics.items()} == rates


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_only_counting_slots_get_a_gradient(target_model, token_map, loss):
    """Slot 0 never does, nor one after the answer's end, nor one whose token the draft cannot propose."""
    training = make_training(target_model, token_map.ids, DraftOptions(anchors=EVERYTHING, loss=loss))
    states = []
    training.draft.register_forward_hook(lambda _module, _inputs, output: states.append(output))
    batch, _ = packed(0)
    total, _ = training.loss(batch)
    (gradient,) = torch.autograd.grad(total, states)
    blocks = find_blocks(batch, possible_roots(batch), BLOCK_SIZE)
    counting = blocks.counts & torch.isin(blocks.labels, token_map.ids)
    has_gradient = gradient.view(len(blocks), BLOCK_SIZE, -1).abs().sum(dim=-1) > 0
    assert not has_gradient[:, 0].any()
    assert torch.equal(has_gradient[:, 1:], counting)
    assert counting.any()
    assert not counting.all()


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_tokens_have_weights(target_model, token_map, loss):
    check_weights(make_training(target_model, token_map.ids, DraftOptions(anchors=EVERYTHING, loss=loss)), MAX_LENGTH)


def test_the_draft_starts_as_the_targets_last_layers(target_model):
    """With the last layer's input as the last state, that layer's context keys and values are the target's own."""
    draft = make_training(target_model, aux_layers=(0, 2), conv_kernel_size=2).draft
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items() if "_conv." in name}
    dflash.start_from_target(draft, TransformersTarget(target_model, (0, 2)))
    assert len(before) == 8
    assert all(torch.equal(draft.state_dict()[name], tensor) for name, tensor in before.items()), "convolutions stay"
    stored = {}

    class Recorder:
        def write(self, k, v, layer):
            stored[layer.id] = k, v

    aux_states = target_aux_states(target_model, torch.arange(20, 30), (0, 2))
    layer = target_model.model.layers[3]
    with torch.no_grad():
        draft.write_context(draft.fuse(aux_states), Recorder())
        normed = layer.input_layernorm(aux_states[:, 32:])
        k, v = (project(normed).unflatten(-1, (2, 16)) for project in (layer.self_attn.k_proj, layer.self_attn.v_proj))
        k = layer.self_attn.k_norm(k)
    torch.testing.assert_close(stored[1], (k, v))
    assert torch.equal(draft.norm.weight, target_model.model.norm.weight)
    for layer_copy, original in zip(draft.layers, target_model.model.layers[2:], strict=True):
        assert torch.equal(layer_copy.mlp.down_proj.weight, original.mlp.down_proj.weight)
        assert torch.equal(layer_copy.self_attn.o_proj.weight, original.self_attn.o_proj.weight)


@pytest.mark.parametrize("fields", [{"intermediate_size": 64}, {"num_layers": 5}, {"num_kv_heads": 1}])
def test_a_draft_of_other_shapes_does_not_start_from_the_target(target_model, fields):
    draft = make_training(target_model, **fields).draft
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    sentence = dflash.start_from_target(draft, TransformersTarget(target_model, AUX_STATE_LAYERS))
    assert sentence.startswith("the layers start at random: the target's last ")
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())


@pytest.mark.parametrize(("reduced", "depth"), [(False, DEPTH), (True, 2)])
def test_the_walk_equals_a_server_that_drafts_blocks(target_model, token_map, reduced, depth, monkeypatch):
    training = make_training(target_model, token_map.ids if reduced else None)
    training.depth = depth
    monkeypatch.setattr(dflash, "EVALUATED_AT_ONCE", 7)
    naive = NaiveDFlash(training.draft, *shared_weights(target_model))
    check_walk(training, naive, target_model, 4, depth)
