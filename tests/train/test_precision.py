"""Drafts train and predict without autocast: in fp32 on a target in bf16 (`precision fp32` on a GPU), in bf16 as
sharded drafts do."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from accelerate import DistributedType
from transformers import PreTrainedModel

from slipstream.tests.train import block_cases, test_eagle
from slipstream.tests.train.conftest import make_eagle3
from slipstream.train.loop import dtype_of_weights
from slipstream.train.training import DraftTraining

Make = Callable[[PreTrainedModel], DraftTraining]
MAKERS: list[Make] = [  # of a random draft of each kind, without noise
    block_cases.make_training,
    test_eagle.make_training,
    partial(make_eagle3, ids=torch.arange(5, 85, 2)),
]


@pytest.mark.parametrize("make", MAKERS)
def test_losses_are_those_of_a_target_in_fp32_but_for_rounding(make, target_model):
    rounded = make(copy.deepcopy(target_model).bfloat16())
    exact = make(target_model)
    rounded.target.read_as = torch.float32
    losses = check_like(rounded, exact)
    assert losses.dtype == torch.float32
    assert all(
        parameter.grad.dtype == torch.float32 for parameter in rounded.parameters() if parameter.grad is not None
    )


@pytest.mark.parametrize("make", MAKERS)
def test_the_target_is_neither_trained_nor_saved(make, target_model):
    training = make(target_model)
    assert {name.split(".")[0] for name in training.state_dict()} == {"draft"}
    training.loss(block_cases.packed(0)[0])[0].backward()
    assert all(parameter.grad is None for parameter in target_model.parameters())
    assert all(parameter.grad is not None for parameter in training.parameters())


@pytest.mark.parametrize("target_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [MAKERS[0], partial(test_eagle.make_training, noise_spread=0.2), MAKERS[2]])
def test_weights_in_bf16_read_any_target(make, target_dtype, target_model):
    """Under FSDP and DeepSpeed, which cast no inputs."""
    rounded = make(copy.deepcopy(target_model).to(target_dtype))
    exact = make(target_model)
    rounded.bfloat16()
    rounded.target.read_as = torch.bfloat16
    check_like(rounded, exact)


def check_like(rounded: DraftTraining, exact: DraftTraining) -> torch.Tensor:
    """Loss and evaluation up to rounding, and finite gradients. Returns the loss."""
    batch, _ = block_cases.packed(2)
    losses = [training.train()(batch)[0] for training in (rounded, exact)]
    torch.testing.assert_close(losses[0].float(), losses[1], rtol=2e-2, atol=0)
    losses[0].backward()
    gradients = [parameter.grad for parameter in rounded.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert rounded.eval()(batch)[1]["accept_length"][0] == exact.eval()(batch)[1]["accept_length"][0]
    return losses[0]


@pytest.mark.parametrize(
    ("precision", "kind", "dtype"),
    [
        ("no", DistributedType.NO, torch.float32),
        ("no", DistributedType.DEEPSPEED, torch.float32),
        ("bf16", DistributedType.MULTI_GPU, None),
        ("bf16", DistributedType.FSDP, torch.bfloat16),
        ("bf16", DistributedType.DEEPSPEED, torch.bfloat16),
    ],
)
def test_a_draft_reads_what_its_weights_take(precision, kind, dtype):
    class Accelerator:
        mixed_precision = precision
        distributed_type = kind

    assert dtype_of_weights(Accelerator()) == dtype
