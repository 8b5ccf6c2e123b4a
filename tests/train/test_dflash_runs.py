"""Whole DFLASH runs, and what they leave."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.dflash import DFlash, default_mask_token
from slipstream.models.drafts.token_map import TokenMap
from slipstream.models.targets.decoder import load_config
from slipstream.tests.train.conftest import DRAFT_VOCAB_SIZE
from slipstream.tests.train.runs import records
from slipstream.train.dflash import main


@pytest.fixture(scope="module")
def flags(run_flags) -> Callable[..., list[str]]:
    sizes = {"draft__num_layers": 2, "draft__block_size": 5, "draft__mask_token_id": 7, "draft__anchors": 6}
    return partial(run_flags, draft__aux_layers="[2, 0, 4]", **sizes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, flags) -> Path:
    output = tmp_path_factory.mktemp("finished")
    main(flags(output, optim__name="muon"))
    return output


def test_a_run_leaves_servable_checkpoints(finished, target_path):
    config = load_draft(DFlash, finished / "best", load_config(target_path), None, torch.device("cpu")).config
    assert (config.block_size, config.num_layers, config.aux_layers) == (5, 2, (2, 0, 4))
    assert (config.draft_vocab_size, config.target) == (DRAFT_VOCAB_SIZE, str(target_path))
    lines = records(finished)
    assert [line["step"] for line in lines if "eval_accept_length" in line] == [3, 6]
    assert {f"eval_accept_rate_{i}" for i in range(4)} < lines[-1].keys()
    assert "eval_accept_rate_4" not in lines[-1]


def test_a_map_of_the_whole_vocabulary_is_left_out(tmp_path, target_path, flags):
    TokenMap.build(torch.ones(120, dtype=torch.int64), 120, [], {}).write(tmp_path / "map.safetensors")
    main(flags(tmp_path / "run", optim__steps=1, draft__vocabulary=tmp_path / "map.safetensors"))
    draft = load_draft(DFlash, tmp_path / "run" / "best", load_config(target_path), None, torch.device("cpu"))
    assert draft.target_ids is None


def test_a_mask_token_is_found(target_path):
    tokenizer = AutoTokenizer.from_pretrained(target_path)  # 120 words, nothing else
    assert default_mask_token(tokenizer, 128) == (120, "the first unused embedding")
    with pytest.raises(ValueError, match="name one by draft.mask_token_id"):
        default_mask_token(AutoTokenizer.from_pretrained(target_path, unk_token=None), 120)
    tokenizer.pad_token = "9"
    assert default_mask_token(tokenizer, 120) == (9, "the tokenizer's pad token")
    tokenizer.mask_token = "17"
    assert default_mask_token(tokenizer, 128) == (17, "the tokenizer's mask token")
