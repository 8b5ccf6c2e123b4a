"""Tensors of a draft that are copies of the target's, and weights that no draft can have."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.models.drafts import base
from slipstream.models.drafts.base import (
    UNCHOSEN,
    DraftFiles,
    DraftNetwork,
    drop_copy,
    is_copy,
    load_draft,
    settle_files,
)
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.drafts.eagle import Eagle
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.drafts.source import drafter_of
from slipstream.models.files.checkpoint import read_draft_tensors, read_json
from slipstream.models.targets.decoder import load_config
from slipstream.tests.pairwise import grouped
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft, save_random_eagle
from slipstream.tests.random_targets import MakeTarget
from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.user_errors import user_error

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(base, "ROWS", 7)


@grouped()
@pytest.mark.parametrize("served", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("rounded", FLOATS)
def test_a_copy_may_have_been_rounded(rounded, stored, served):
    """A target in one dtype, served in another; a draft's file in a third. One changed value is no rounding."""
    target = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).to(stored)
    copy = target.to(rounded, copy=True)
    exact = torch.float16 not in {rounded, served} or torch.bfloat16 not in {rounded, served}
    if exact or stored != torch.float32:
        assert is_copy(copy, target.to(served))
    copy[19, 3] += 0.1
    assert not is_copy(copy, target.to(served))


@pytest.mark.parametrize("mask", [torch.bool, torch.uint8])
def test_a_head_is_compared_at_the_drafts_tokens(mask):
    head = torch.randn(40, 8)
    vocabulary = torch.arange(40) % 2 == 0
    for rows, key, expected in ((head[vocabulary], "lm_head.weight", True), (head[:20], "lm_head.weight", False)):
        tensors = {"t2d": vocabulary.to(mask), key: rows}
        assert drop_copy(tensors, key, {key: head}) is not expected
        assert (key in tensors) is not expected


DRAFTS: dict[str, tuple[Callable[..., None], type[DraftNetwork]]] = {
    "eagle": (save_random_eagle, Eagle),
    "eagle3": (save_random_draft, Eagle3),
    "dflash": (save_random_dflash, DFlash),
}


NO_NUMBER = r"draft: fc\.weight holds NaN or infinite values; fetch the draft again"
OTHER_WIDTH = r"fc\.weight has 100 columns, not a multiple of .* hidden size 32; serve the"


def saved_draft(kind: str, make_target: MakeTarget, folder: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """The target, the file of a random draft for it, and its tensors."""
    target = make_target("qwen3")
    draft = folder / "draft"
    DRAFTS[kind][0](target, draft)
    file = draft / "model.safetensors"
    return target, file, load_file(file)


@pytest.mark.parametrize("source", ["eagle3-flags", "eagle-whole-vocabulary", "dflash-window", "dspark-gated"])
def test_a_field_of_the_wrong_type_is_no_programming_error(source):
    """Each field of config.json, in each section, with values of other types: refused in a sentence, or without effect;
    also in the layout of speculators."""
    folder = ROOT / "tests" / "assets" / source
    target = load_config(TINY)
    ours = read_json(folder / "config.json")
    kind = drafter_of(ours, source)
    network = DRAFTS[kind][1]
    tensors = read_draft_tensors(folder)
    kind_there = "eagle3" if kind == "eagle3" else "dspark"
    inside = {"speculators_model_type": kind_there, "transformer_layer_config": ours, "norm_before_residual": True}
    faults = 0
    for values in (ours, {**inside, "aux_hidden_state_layer_ids": [4]}):
        sections = {name: value for name, value in values.items() if isinstance(value, dict)}
        for section, fields in (("", values), *sections.items()):
            for field, wrong in product(fields, ("x", 1.5, [], {}, ["x"], {"x": 1}, 10**30)):
                changed = {**fields, field: wrong}
                files = DraftFiles({**values, section: changed} if section else changed, tensors)
                try:
                    drafter_of(files.values, source)
                    settle_files(network, files, folder, target, UNCHOSEN)
                except ValueError:
                    faults += 1
    assert faults > 100


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize(
    ("ending", "dtype", "beside"),
    [
        ("weight", torch.float8_e4m3fn, {"weight_scale": torch.ones(1)}),
        ("weight", torch.int8, {"weight_scale": torch.ones(1)}),
        ("weight_packed", torch.int32, {"weight_scale": torch.ones(1), "weight_shape": torch.ones(2)}),
        ("qweight", torch.int32, {"scales": torch.ones(1), "qzeros": torch.ones(1)}),
    ],
)
def test_a_quantised_draft_is_refused_with_the_remedy(ending, dtype, beside, kind, make_target, tmp_path):
    target, file, tensors = saved_draft(kind, make_target, tmp_path)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    stem = name.removesuffix("weight")
    tensors[stem + ending] = tensors.pop(name).to(dtype)
    save_file(tensors | {stem + key: tensor for key, tensor in beside.items()}, file)
    dtype_name = str(dtype).removeprefix("torch.")
    message = (
        rf"draft is quantised \(\S*down_proj.{ending} is {dtype_name}\), but drafts are loaded in 16 bits .* dequan"
    )
    with user_error(message):
        load_draft(DRAFTS[kind][1], file.parent, load_config(target), torch.float32, CPU)


@pytest.mark.parametrize(
    ("kind", "weight", "message"),
    [
        *((kind, lambda matrix: matrix.index_fill(0, torch.tensor(3), torch.nan), NO_NUMBER) for kind in DRAFTS),
        ("eagle", lambda matrix: matrix.index_fill(1, torch.tensor(5), -torch.inf), NO_NUMBER),
        *((kind, lambda _: torch.zeros(32, 100), OTHER_WIDTH) for kind in ("eagle3", "dflash")),
    ],
)
def test_weights_that_are_not_finite_or_of_another_width_are_said_plainly(kind, weight, message, make_target, tmp_path):
    target, file, tensors = saved_draft(kind, make_target, tmp_path)
    save_file(tensors | {"fc.weight": weight(tensors["fc.weight"])}, file)
    with user_error(message):
        load_draft(DRAFTS[kind][1], file.parent, load_config(target), torch.float32, CPU)
