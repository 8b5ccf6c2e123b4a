"""What is trained, and drafts without autocast: in fp32 on a target in bf16 (`precision fp32` on a GPU), in bf16
as sharded ones are."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from accelerate import DistributedType
from transformers import PreTrainedModel

from slipstream.tests.train import block_cases, test_eagle
from slipstream.tests.train.conftest import FEATURE_LAYERS
from slipstream.train.eagle3 import Eagle3Training
from slipstream.train.loop import dtype_of_weights
from slipstream.train.training import DraftTraining


@pytest.mark.parametrize("make", [block_cases.make_training, test_eagle.make_training, None])
def test_losses_are_those_of_a_target_in_fp32_but_for_rounding(
    make: Callable[[PreTrainedModel], DraftTraining] | None, training: Eagle3Training, target_model: PreTrainedModel
) -> None:
    half = copy.deepcopy(target_model).bfloat16()
    if make is None:
        exact: DraftTraining = training
        rounded = copy.deepcopy(training)
        rounded.target = type(training.target)(half, FEATURE_LAYERS)
    else:
        exact, rounded = make(target_model), make(half)
    rounded.target.read_as = torch.float32
    batch, _ = block_cases.packed(2)
    losses = [one.train()(batch)[0] for one in (rounded, exact)]
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)
    losses[0].backward()
    gradients = [parameter.grad for parameter in rounded.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in gradients)
    rounded.eval()(batch)


@pytest.mark.parametrize("make", [block_cases.make_training, partial(test_eagle.make_training, noise=0.2), None])
def test_the_target_is_neither_trained_nor_saved(
    make: Callable[[PreTrainedModel], DraftTraining] | None, training: Eagle3Training, target_model: PreTrainedModel
) -> None:
    chosen: DraftTraining = training if make is None else make(target_model)
    assert {name.split(".")[0] for name in chosen.state_dict()} == {"draft"}
    chosen.loss(block_cases.packed(0)[0])[0].backward()
    assert all(parameter.grad is None for parameter in target_model.parameters())
    assert all(parameter.grad is not None for parameter in chosen.parameters())


@pytest.mark.parametrize("target_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [block_cases.make_training, partial(test_eagle.make_training, noise=0.2), None])
def test_weights_in_bf16_read_any_target(
    make: Callable[[PreTrainedModel], DraftTraining] | None,
    target_dtype: torch.dtype,
    training: Eagle3Training,
    target_model: PreTrainedModel,
) -> None:
    """Under FSDP and DeepSpeed, which cast no inputs."""
    target = copy.deepcopy(target_model).to(target_dtype)
    exact = training if make is None else make(target_model)
    rounded = copy.deepcopy(training) if make is None else make(target)
    if make is None:
        rounded.target = type(training.target)(target, FEATURE_LAYERS)
    rounded.bfloat16()
    rounded.target.read_as = torch.bfloat16
    batch, _ = block_cases.packed(2)
    losses = [one.train()(batch)[0].float() for one in (rounded, exact)]
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)
    losses[0].backward()
    gradients = [parameter.grad for parameter in rounded.parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert rounded.eval()(batch)[1]["accept_length"][0] == exact.eval()(batch)[1]["accept_length"][0]


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
def test_a_draft_reads_what_its_weights_take(precision: str, kind: DistributedType, dtype: torch.dtype | None) -> None:
    class Accelerator:
        mixed_precision, distributed_type = precision, kind

    assert dtype_of_weights(Accelerator()) == dtype  # type: ignore[arg-type]
