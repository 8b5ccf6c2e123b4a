"""The block draft's config and its small parts. Its network: tests/naive_dflash.py, in tests/serve/test_dflash.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models.dflash import DFlash, DFlashConfig, default_block_feature_layers
from slipstream.models.target import load_config


@pytest.mark.parametrize(
    ("num_layers", "num_draft_layers", "expected"),
    [
        (28, 5, (1, 7, 13, 19, 25)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (48, 5, (1, 12, 23, 34, 45)),
        (36, 1, (18,)),
        (4, 2, (1, 2, 3)),
        (6, 5, (1, 3, 5)),
    ],
)
def test_default_layers_are_those_of_the_peers_on_deep_targets(
    num_layers: int, num_draft_layers: int, expected: tuple[int, ...]
) -> None:
    assert default_block_feature_layers(num_layers, num_draft_layers) == expected


def test_default_layers_are_distinct_outputs_for_every_depth() -> None:
    for num_layers in range(3, 100):
        for num_draft_layers in range(1, 9):
            layers = default_block_feature_layers(num_layers, num_draft_layers)
            assert len(set(layers)) == len(layers)
            assert 0 <= min(layers) <= max(layers) < num_layers
            assert max(layers) >= num_layers // 2


@pytest.fixture
def config(make_target: Callable[[str], Path]) -> Callable[..., DFlashConfig]:
    target = load_config(make_target("qwen3"))
    defaults: dict[str, Any] = {"num_layers": 2, "mask_token_id": 7, "feature_layers": (0, 2)}
    return lambda **fields: DFlashConfig.from_target(target, **defaults | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 65}, "block_size is 65; it must be between 2 and 64"),
        ({"mask_token_id": -1}, "mask_token_id is -1; the target has 120 tokens"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; the target has 120 tokens"),
        ({"feature_layers": ()}, r"feature_layers is \[\]; name distinct states"),
        ({"windowed_layers": (2,), "sliding_window": 4}, r"windowed_layers is \[2\]; the draft has 2 layers"),
        ({"windowed_layers": (1,)}, "sliding_window and windowed_layers go together"),
        ({"sliding_window": 4}, "sliding_window and windowed_layers go together"),
        ({"windowed_layers": (1,), "sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
    ],
)
def test_configs_are_checked(fields: dict[str, Any], message: str, config: Callable[..., DFlashConfig]) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_blocks_are_an_anchor_and_masks(config: Callable[..., DFlashConfig]) -> None:
    blocks = DFlash(config()).block_tokens(torch.tensor([[3], [4]]), 3)
    assert blocks.tolist() == [[[3, 7, 7]], [[4, 7, 7]]]


def test_a_vocabulary_may_leave_out_tokens(config: Callable[..., DFlashConfig]) -> None:
    assert DFlash(config()).target_ids is None
    assert not {"d2t", "t2d"} & DFlash(config()).state_dict().keys()
    module = DFlash(config(draft_vocab_size=3))
    module.set_vocabulary(torch.tensor([2, 5, 119]))
    assert module.target_ids is not None
    assert module.target_ids.tolist() == module.t2d.nonzero().flatten().tolist() == [2, 5, 119]
    for ids in ([2, 5], [5, 2, 7], [2, 2, 7], [-1, 2, 7]):
        with pytest.raises(ValueError, match="draft vocabulary: need 3 distinct ascending ids"):
            module.set_vocabulary(torch.tensor(ids))
    with pytest.raises(ValueError, match="id 120 is outside the target's 120 tokens"):
        module.set_vocabulary(torch.tensor([2, 5, 120]))
