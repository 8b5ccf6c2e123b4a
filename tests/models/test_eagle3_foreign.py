"""EAGLE3 drafts in the conventions of other programs: layer ids, pickles, copies of the target's tensors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.models.config import default_feature_layers
from slipstream.models.eagle3 import config_from_json, config_to_json, load_eagle3
from slipstream.models.speculators_layout import AUX_LAYERS
from slipstream.tests.models.test_eagle3_checkpoint import CPU, Draft


@pytest.fixture
def draft(make_target: Callable[[str], Path], tmp_path: Path) -> Draft:
    return Draft(make_target("llama"), tmp_path)


@pytest.mark.parametrize(("layers", "is_written"), [((1, 7, 12), False), ((1, 7, 13), True), ((7, 1, 12), True)])
def test_ids_that_every_reader_takes_by_itself_are_left_out(
    layers: tuple[int, ...], is_written: bool, draft: Draft
) -> None:
    target = replace(draft.target, num_layers=16)
    config = replace(draft.module.config, target_num_layers=16, feature_layers=layers)
    values = config_to_json(config)
    assert (AUX_LAYERS in values, "eagle_config" in values) == (is_written, is_written)
    assert config_from_json(values, target) == config


def test_below_eleven_layers_ids_are_always_written(draft: Draft) -> None:
    """There the rule of others is not ours: outputs of layers 1, 4 and 6 of 10."""
    for layers in ((1, 4, 6), default_feature_layers(10)):
        config = replace(draft.module.config, target_num_layers=10, feature_layers=layers)
        assert config_to_json(config)[AUX_LAYERS] == [layer + 1 for layer in layers]


def test_a_list_with_the_last_layer_appended_is_understood(draft: Draft) -> None:
    """speculators records that layer's state for the teacher; fc does not read it."""
    draft.change(values={"eagle_config": None, AUX_LAYERS: [1, 2, 3, 4]})
    assert draft.load().config.feature_layers == (0, 1, 2)


def test_layer_ids_of_eagle_config_count(draft: Draft) -> None:
    draft.change(values={"eagle_config": {AUX_LAYERS: [0, 1, 3]}, AUX_LAYERS: None})
    assert draft.load().config.feature_layers == (0, 1, 3)


def test_a_pickle_of_tensors_loads_and_other_objects_do_not(draft: Draft) -> None:
    """As SafeAILab publishes them."""
    file, pickled = draft.folder / "model.safetensors", draft.folder / "pytorch_model.bin"
    torch.save(load_file(file), pickled)
    file.unlink()
    draft.assert_loads_equal()
    torch.save({"fc.weight": Path("x")}, pickled)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged or holds more than tensors"):
        draft.load()


def test_an_embedding_of_its_own_is_kept(draft: Draft) -> None:
    embedding = torch.randn(120, 32)
    draft.change(lambda tensors: tensors | {"embed_tokens.weight": embedding.bfloat16()})
    assert load_eagle3(draft.folder, draft.target, None, CPU, {"embed_tokens.weight": embedding}).embed_tokens is None
    module = load_eagle3(draft.folder, draft.target, None, CPU, {"embed_tokens.weight": embedding + 1})
    assert module.embed_tokens is not None
    assert torch.equal(module.embed_tokens.weight, embedding.bfloat16())
    draft.change(lambda tensors: tensors | {"embed_tokens.weight": embedding[:119]})
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[119, 32\], the config says \[120, 32\]"):
        load_eagle3(draft.folder, draft.target, None, CPU, {"embed_tokens.weight": embedding})
