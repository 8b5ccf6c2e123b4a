"""Every key of a config.json changes the text as it does in transformers, or is refused by name.

Each family gets each key that any family's config class has, with another legal value: keys of other families are what
people leave behind in a file.
"""

import copy
import json
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3Config, PreTrainedModel, SiglipVisionConfig

from slipstream.models.targets.decoder import load_config, load_target
from slipstream.models.targets.frozen import load_frozen_target
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.tests.models.saved_drafts import CPU
from slipstream.tests.pairwise import gate_of, grouped
from slipstream.tests.random_targets import CAPPED, FAMILIES, RELATIVES, assert_same_logits, auto_class, logits, roughen
from slipstream.tests.sources import TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

Changes = dict[str, Any]
WRAPPER = "gemma3-wrapper"
ORIGINAL = "original_max_position_embeddings"
TABLE = yaml.safe_load(Path(__file__).with_name("config_keys.yaml").read_text())


def changes_of(alone: dict[str, list[Any]], together: list[Changes]) -> list[Changes]:
    """Each value of each key by itself, and keys changed together."""
    return [*({key: value} for key, values in alone.items() for value in values), *together]


CHANGES = {  # key -> what is changed, the key among it
    key: changes_of({key: TABLE["alone"].get(key, [])}, TABLE["together"].get(key, []))
    for key in sorted(TABLE["alone"].keys() | TABLE["together"].keys())
}
LATER = {
    family: changes_of(changes.get("alone", {}), changes.get("together", []))
    for family, changes in TABLE["later"].items()
}
NO_EFFECT = {
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"), "training alone"),
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), "a training loss"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "where a text begins and ends"),
    "initializer_range": "weights are read",
    "pretraining_tp": "how the products were cut, which transformers no longer does",
    "use_cache": "the same logits either way",
}
# Fields that a refusal may name instead, because the key makes them wrong.
ALSO_NAMED = {
    "hidden_size": ("head_dim", "short_factor"),
    "num_attention_heads": ("num_key_value_heads", "head_dim", "short_factor", "hidden_size"),
    "layer_types": ("sliding_window",),
    "max_position_embeddings": ("rope_scaling",),
    "partial_rotary_factor": ("rope_parameters",),
    "rope_theta": ("rope_parameters",),
    "rope_parameters": ("rope_type", "factor"),
    "rope_scaling": ("rope_type", "rope_parameters"),
    ORIGINAL: ("rope_parameters",),
    "num_hidden_layers": ("mlp_only_layers",),
}
# One of each config class.
BASES = [
    *("llama", "mistral-window", "qwen2-windows", "qwen3-windows", "gemma2", "gemma3", "olmo2", "phi3-window"),
    *("qwen3-moe-windows", "qwen2-moe", "mixtral", "gpt-oss", WRAPPER),
]
TRAPS = (
    *("attn_logit_softcapping", "hidden_act", "layer_types", ORIGINAL, "partial_rotary_factor", "rope_scaling"),
    *("sliding_window", "tie_word_embeddings", "use_sliding_window"),
)
CASES = [
    (family, key, number)
    for family in (*FAMILIES, *CAPPED, WRAPPER)
    for key in CHANGES
    for number in range(len(CHANGES[key]))
]
GATE = [case for case in CASES if case[0] in BASES and case[1] in TRAPS and case[2] == 0]
LATER_ALSO_NAMED = {"layer_types", "per_layer_config", "partial_rotary_factor", "llama_4_scaling_beta", ORIGINAL}
LATER_ALSO_NAMED |= {"num_experts", "num_key_value_heads", "rope_parameters"}
LATER_CASES = [(family, changes) for family in LATER if family in RELATIVES for changes in LATER[family]]


def base_values(family: str) -> dict[str, Any]:
    """config.json of a model of two layers, or of a later family."""
    config = copy.deepcopy((FAMILIES | CAPPED | RELATIVES)["gemma3" if family == WRAPPER else family])
    architecture = auto_class(config)._model_mapping[type(config)].__name__
    values = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    if family in LATER:
        return values
    values["num_hidden_layers"] = 2
    for key in ("layer_types", "mlp_only_layers"):
        if values.get(key):
            values[key] = [entry for entry in values[key][:2] if entry not in (2, 3)]
    if family != WRAPPER:
        return values
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
    )
    outer = json.loads(Gemma3Config(vision_config=vision, mm_tokens_per_image=4).to_json_string(use_diff=False))
    return outer | {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": values}


def changed_values(family: str, changes: Changes) -> dict[str, Any]:
    values = base_values(family)
    if "text_config" not in values:
        return values | changes
    tied = {key: changes[key] for key in ("tie_word_embeddings",) if key in changes}
    return values | tied | {"text_config": values["text_config"] | changes}


def reference_model(path: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    config.get_text_config().initializer_range = 0.1
    # The class of the config, which is not always the one that config.json names: a Mistral may be a Ministral.
    model = auto_class(config)._model_mapping[type(config)](config).float().eval()
    model.set_attn_implementation("eager")
    roughen(model)
    return model


@grouped("family")
@pytest.mark.parametrize(("family", "key", "number"), gate_of(CASES, GATE))
def test_a_key_does_what_it_does_in_transformers(family, key, number, tmp_path):
    check_changes(family, CHANGES[key][number], (key, *ALSO_NAMED.get(key, ())), tmp_path)


@grouped("family")
@pytest.mark.parametrize(("family", "changes"), gate_of(LATER_CASES, LATER_CASES[::4]))
def test_keys_of_later_families_do_what_they_do_in_transformers(family, changes, tmp_path):
    check_changes(family, changes, changes.keys() | LATER_ALSO_NAMED, tmp_path)


def check_changes(family: str, changes: Changes, names: Collection[str], tmp_path: Path):
    """Compares logits, or asks for a refusal that has one of the `names`."""
    text = json.dumps(changed_values(family, changes))
    (tmp_path / "config.json").write_text(text)
    tokens = torch.randint(3, 90, (60,), generator=torch.Generator().manual_seed(1))
    try:
        model = reference_model(tmp_path)
        with torch.no_grad():
            expected = model(input_ids=tokens[None]).logits[0]
        model.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(text)
    except Exception:  # of any kind: transformers does not run it
        expected = None
    try:
        config = load_config(tmp_path)
        target = None if expected is None else load_target(tmp_path, config, torch.float32, CPU)
    except ValueError as error:
        if not any(name in str(error) for name in names):
            raise
        return
    if target is None:
        return  # nothing to compare with
    torch.testing.assert_close(logits(target, tokens), expected, atol=5e-5, rtol=1e-4)


def test_every_key_of_every_family_is_tried():
    keys = {key for family in BASES if family != WRAPPER for key in (FAMILIES | CAPPED)[family].__dataclass_fields__}
    inherited = set(transformers.PretrainedConfig.__dataclass_fields__)
    assert keys - inherited - CHANGES.keys() - NO_EFFECT.keys() == set()
    assert not CHANGES.keys() & NO_EFFECT.keys()


@pytest.mark.parametrize("family", BASES)
def test_transformers_runs_each_family_as_it_is(family, tmp_path):
    """Else the test above would compare nothing."""
    (tmp_path / "config.json").write_text(json.dumps(base_values(family)))
    assert reference_model(tmp_path)(input_ids=torch.arange(3, 63)[None]).logits.isfinite().all()


@each_case()
def test_a_config_that_cannot_be_is_refused_with_its_key(family, changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed_values(family, changes)))
    with user_error(message):
        load_config(tmp_path)


def test_a_config_at_fault_is_not_told_as_a_tokenizer(tmp_path):
    """transformers reads it first, to know the tokenizer's class."""
    (tmp_path / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    values = changed_values("phi3-window", {"rope_parameters": None, "rope_scaling": {"type": "su"}})
    (tmp_path / "config.json").write_text(json.dumps(values))
    with user_error(r"config\.json cannot be read by transformers .*rope_parameters"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("outer", "inner"), [(True, True), (False, False), (False, True), (True, False)])
def test_a_wrappers_top_level_says_whether_the_head_is_tied(outer, inner, tmp_path):
    values = changed_values(WRAPPER, {"tie_word_embeddings": inner}) | {"tie_word_embeddings": outer}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = reference_model(tmp_path)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert_same_logits(tmp_path, load_config(tmp_path), model)


@pytest.mark.parametrize("reader", ["served", "trained"])
@pytest.mark.parametrize("family", ["llama-tied-bias", "gemma2", WRAPPER])
def test_a_head_that_contradicts_the_config_is_refused(reader, family, tmp_path):
    """transformers unties it, with a warning; a copy of the embedding is none."""
    values = changed_values(family, {"tie_word_embeddings": True})
    (tmp_path / "config.json").write_text(json.dumps(values))
    reference_model(tmp_path).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    for head, is_copy in ((embedding.clone(), True), (embedding.roll(1, 0), False)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with nullcontext() if is_copy else user_error(r"tie_word_embeddings .* \(lm_head.weight\)"):
            if reader == "trained":
                load_frozen_target(tmp_path, (0,), CPU)
            else:
                load_target(tmp_path, load_config(tmp_path), torch.float32, CPU)
