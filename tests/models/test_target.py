"""The serving target equals transformers: logits and every aux hidden state, for each family and variant."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    Mistral3ForConditionalGeneration,
    Phi3Config,
    PixtralVisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeTextConfig,
    Qwen3VLMoeVisionConfig,
    Qwen3VLTextConfig,
    Qwen3VLVisionConfig,
    SiglipVisionConfig,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.adapt import heads_apart
from slipstream.models.targets.config import (
    ARCHITECTURES,
    NEEDED,
    RopeConfig,
    TargetSpec,
    check_aux_layers,
    default_aux_layers,
)
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.models.targets.families import NOT_SERVED, TEXT_PARTS, UNSERVED
from slipstream.models.targets.packed_attention import PackedAttention
from slipstream.tests.models.saved_drafts import CPU
from slipstream.tests.pairwise import grouped, rotating
from slipstream.tests.random_targets import (
    CAPPED,
    FAMILIES,
    FIELDS,
    RELATIVES,
    SHAPE,
    assert_same_logits,
    change_json,
    load_model,
    roughen,
)
from slipstream.tests.sources import ROOT
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

NEW_FIELDS = ("rope_parameters", "layer_types")  # of configs that older transformers did not write


@pytest.mark.parametrize("family", FAMILIES | CAPPED | RELATIVES)
def test_logits_and_features_equal_transformers(family, make_target):
    path = make_target(family)
    config = load_config(path)
    target = load_target(path, config, torch.float32, CPU)
    reference = load_model(path, dtype=torch.float32)
    tokens = torch.randint(3, config.vocab_size, (90,), generator=torch.Generator().manual_seed(1))
    attention = PackedAttention()
    attention.plan(torch.arange(len(tokens))[None])
    layers = (0, 2, config.num_layers)
    with torch.no_grad():
        hidden, aux_states = target(tokens, attention, layers)
        expected = reference(tokens[None], output_hidden_states=True)
    tolerance = 1e-4 if config.recurrent else 2e-5  # their sums differ by CPU
    torch.testing.assert_close(target.logits(hidden), expected.logits[0], atol=tolerance, rtol=1e-4)
    final = expected.hidden_states[-1] / config.logit_divisor  # the final norm's weight holds it here
    states = [expected.hidden_states[layer + 1] for layer in layers[:-1]] + [final]
    torch.testing.assert_close(aux_states, torch.cat(states, -1)[0], atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize("layout", ["hub", "transformers", "modules"])
def test_the_text_part_of_a_multimodal_checkpoint_is_read(layout, tmp_path):
    """Fields as on the hub (Gemma 3 of 2025); names as transformers writes them and as it has them in memory."""
    text = copy.deepcopy(FAMILIES["gemma3"])
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    roughen(model)
    model.save_pretrained(tmp_path)
    if layout == "hub":
        older = {"rope_theta": 10000.0, "rope_local_base_freq": 1000.0}
        older |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "sliding_window_pattern": 2}
        values = json.loads((tmp_path / "config.json").read_text())
        inside = {key: value for key, value in values["text_config"].items() if key not in NEW_FIELDS}
        change_json(tmp_path / "config.json", text_config={**inside, **older})
    elif layout == "modules":
        tensors = {name: x.contiguous() for name, x in model.state_dict().items() if name != "lm_head.weight"}
        save_file(tensors, tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    assert [layer.mixer.window for layer in config.layers] == [9, None, 9, None]
    assert_same_logits(tmp_path, config, model)


VISION = {"hidden_size": 8, "intermediate_size": 8}
TOWER = {**VISION, "depth": 1, "num_heads": 1, "patch_size": 2, "out_hidden_size": SHAPE["hidden_size"]}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
WRAPPERS: dict[str, tuple[type[PreTrainedModel], PretrainedConfig, PretrainedConfig | None]] = {
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLTextConfig(**SHAPE, rope_parameters={**MROPE, "mrope_section": [2, 1, 1]}),
        Qwen2_5_VLVisionConfig(**TOWER, fullatt_block_indexes=[0]),
    ),
    "qwen3-vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLTextConfig(**SHAPE, head_dim=16, rope_parameters=dict(MROPE)),
        Qwen3VLVisionConfig(**TOWER, deepstack_visual_indexes=[0]),
    ),
    "qwen3-vl-moe": (
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeTextConfig(
            **SHAPE, **FIELDS["experts"], head_dim=16, rope_parameters=dict(MROPE), mlp_only_layers=[3]
        ),
        Qwen3VLMoeVisionConfig(**TOWER, deepstack_visual_indexes=[0]),
    ),
    "ministral3": (
        Mistral3ForConditionalGeneration,
        RELATIVES["ministral3"],
        PixtralVisionConfig(**VISION, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14),
    ),
    "mistral3": (
        Mistral3ForConditionalGeneration,
        FAMILIES["mistral"],
        PixtralVisionConfig(**VISION, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14),
    ),
}
for wrapper, name in (("Gemma4", "gemma4-shared"), ("Gemma4Unified", "gemma4-unified")):
    if name in RELATIVES:
        kind = getattr(transformers, f"{wrapper}ForConditionalGeneration")
        WRAPPERS[name] = (kind, RELATIVES[name], None)
for wrapper, name in (("Qwen3_5", "qwen3-5"), ("Qwen3_5Moe", "qwen3-5-moe")):
    if name in RELATIVES:
        kind = getattr(transformers, f"{wrapper}ForConditionalGeneration")
        WRAPPERS[name] = (kind, RELATIVES[name], getattr(transformers, f"{wrapper}VisionConfig")(**TOWER))


@each_case()
def test_queries_and_their_gates_are_taken_apart_with_their_scales(name, unit, axis):
    """Heads of 256: two blocks of 128 rows of queries, two of gates. Words of AWQ and of zeros have 8 rows."""
    rows = torch.arange(4 * 512).view(4, 2, 256)
    stored, q, gate = (part.reshape(-1, 1)[::unit].transpose(0, axis) for part in (rows, rows[:, 0], rows[:, 1]))
    key = f"layers.3.self_attn.q_proj.{name}"
    assert all(map(torch.equal, heads_apart(key, stored, 4, [256, 256]), (q, gate)))
    with user_error("taken apart by heads .*; use a checkpoint in 16 bits or FP8"):
        heads_apart(key, stored, 4, [260, 260])


def test_clipped_projections_are_refused(make_target, tmp_path):
    values = json.loads((make_target("olmoe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"clip_qkv": 8.0}))
    with user_error(r"clip_qkv is 8\.0, and clipped queries, keys and values are not supported"):
        load_config(tmp_path)


@pytest.mark.skipif("muse-glimmer" not in RELATIVES, reason="this transformers does not know it")
def test_rotary_bases_by_layer_are_refused(make_target, tmp_path):
    """transformers reads of them only whether they are 0."""
    values = json.loads((make_target("muse-glimmer") / "config.json").read_text())
    values["text_config"]["layer_rope_theta"] = [10000.0, 500.0, 10000.0, 0]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with user_error(r"layer_rope_theta is .* 500\.0.*; it must have 0 or rope_theta, 10000\.0"):
        load_config(tmp_path)


@pytest.mark.skipif("internlm3" not in RELATIVES, reason="this transformers does not know it")
def test_internlm3_is_read_without_its_code(make_target, tmp_path):
    """Its published files name code of their own, which nothing needs."""
    values = json.loads((make_target("internlm3-bias") / "config.json").read_text())
    values |= {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True}
    for name in ("attention_bias", "mlp_bias"):
        values.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected = load_config(make_target("internlm3-bias"))
    assert load_config(tmp_path) == replace(expected, architecture="InternLM3ForCausalLM")
    assert all(layer.mixer.qkv_bias and layer.mixer.output_bias for layer in expected.layers)


LATER = ("layers.4.eh_proj", "layers.4.input_layernorm")
MORE_TOKENS = {  # parts of names in published files
    "ernie-moe": ("mtp_block.0.input_layernorm", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"),
    "dots1": LATER,
    "minimax-m2": LATER,
    "solar-open": LATER,
}


@pytest.mark.parametrize("family", [family for family in MORE_TOKENS if family in RELATIVES])
def test_modules_that_predict_more_tokens_are_left_out(family, make_target, tmp_path):
    """Published files have them beside the layers or after the last one, and transformers leaves them out."""
    shutil.copytree(make_target(family), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    modules = {f"model.{name}.weight": torch.ones(8) for name in MORE_TOKENS[family]}
    save_file(load_file(file) | modules, file, {"format": "pt"})
    assert_same_logits(tmp_path, load_config(tmp_path), load_model(tmp_path))


def hub_name(name: str, wrapper: str) -> str:
    """The name of a tensor in the published files of a wrapper."""
    if wrapper == "qwen2.5-vl":
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    if wrapper in ("ministral3", "mistral3"):
        inner = name.replace("model.language_model.", "language_model.model.").replace(
            "lm_head", "language_model.lm_head"
        )
        return inner.removeprefix("model.")
    return name


@grouped("name")
@pytest.mark.parametrize(
    ("name", "tied", "layout"), rotating(WRAPPERS, [False, True], ["transformers", "modules", "hub"])
)
def test_the_text_part_of_a_wrapper_equals_transformers(name, tied, layout, tmp_path):
    kind, text, vision = copy.deepcopy(WRAPPERS[name])
    text.initializer_range = 0.1
    torch.manual_seed(0)
    model = kind(kind.config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied)).eval()
    roughen(model)
    model.save_pretrained(tmp_path)
    if layout != "transformers":
        tensors = {key: x for key, x in model.state_dict().items() if not (tied and key == "lm_head.weight")}
        if layout == "hub":
            tensors = {
                hub_name(key, name): x.mT if ".experts." in key and name == "qwen3-vl-moe" else x
                for key, x in tensors.items()
            }
        save_file({key: x.contiguous() for key, x in tensors.items()}, tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    assert config.tie_word_embeddings == tied
    assert_same_logits(tmp_path, config, model)


def test_gemmas_embedding_scale_is_rounded_and_drafts_read_rows_without_it(make_target):
    path = make_target("gemma3")
    tokens = torch.arange(9)
    config = replace(load_config(path), embedding_scale=3.0**0.5 * 8)
    target = load_target(path, config, torch.bfloat16, CPU)
    embedding = Gemma3TextScaledWordEmbedding(120, 32, 0, embed_scale=3.0**0.5 * 8).bfloat16()
    embedding.weight.data.copy_(target.embed_tokens.weight)
    assert torch.equal(target.embed(tokens), embedding(tokens))
    assert torch.equal(target.embed_tokens(tokens), embedding.weight[tokens])


def test_norms_of_an_offset_keep_the_bits_of_their_files(make_target):
    target = load_target(make_target("gemma3"), load_config(make_target("gemma3")), torch.bfloat16, CPU)
    x = torch.randn(4, 32).bfloat16()
    norm = Gemma3RMSNorm(32, target.norm.eps)
    norm.weight.data = target.norm.weight - 1
    assert target.norm.weight.dtype == torch.float32
    torch.testing.assert_close(target.norm(x), norm(x), atol=0, rtol=2**-8)  # the last bit may differ


def test_longrope_depends_on_the_context_that_is_served():
    hf_config = Phi3Config(**SHAPE, rope_parameters=FIELDS["longrope"], original_max_position_embeddings=64)
    hf_config.architectures = ["Phi3ForCausalLM"]
    config = TargetSpec.from_json(hf_config.to_dict())
    positions = torch.arange(64)[None]
    for context in (64, 65):
        reference = Phi3RotaryEmbedding(copy.deepcopy(hf_config))
        at = torch.cat((positions, positions + context - 64), dim=1)  # transformers looks at the last one
        cos, sin = reference(torch.zeros(1), at)
        rope = RotaryEmbedding(config.rope, config.head_dim, 80, context)
        torch.testing.assert_close(rope.cos[:64], cos[0, :64])
        torch.testing.assert_close(rope.sin[:64], sin[0, :64])
    assert config.rope.of_draft == RopeConfig(10000.0), "a draft sees the angles that it was trained with"


@grouped("name")
@pytest.mark.parametrize("removed", [None, *sorted(NEEDED), "head_dim", "rope_parameters", "sliding_window"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_configs_are_read_as_transformers_reads_them(name, removed, tmp_path):
    """From config.json alone where it says everything, else by transformers, which knows each family's defaults."""
    hf_config = getattr(transformers, f"{name}Config")(architectures=[f"{name}ForCausalLM"], use_sliding_window=False)
    newer = json.loads(hf_config.to_json_string(use_diff=False))
    older = {**newer, **newer["rope_parameters"], "rope_scaling": None}
    for key in ("rope_parameters", "rope_type", "layer_types"):
        older.pop(key, None)
    for values in (newer, older, {**newer, "use_sliding_window": True, "sliding_window": 64}):
        values = {key: value for key, value in values.items() if key != removed}
        (tmp_path / "config.json").write_text(json.dumps(values))
        expected = TargetSpec.from_json(AutoConfig.from_pretrained(tmp_path).to_dict())
        assert load_config(tmp_path) == expected


def test_foreign_architecture_is_refused_with_the_list():
    """In one order, with all that are read."""
    with user_error(r"GPT2LMHeadModel cannot be a target; supported: \w+(, \w+)*$") as error:
        TargetSpec.from_json(GPT2Config(architectures=["GPT2LMHeadModel"]).to_dict())
    architectures = str(error.value).partition("supported: ")[2].split(", ")
    assert architectures == sorted(architectures)
    assert set(architectures) == {*ARCHITECTURES, *TEXT_PARTS}


@each_case()
def test_what_is_not_served_by_design_is_refused_with_the_reason(config, fields, reason, tmp_path):
    getattr(transformers, config)(**fields).save_pretrained(tmp_path)
    with user_error(reason) as error:
        load_config(tmp_path)
    is_family = "hidden_activation" not in reason
    assert (NOT_SERVED in str(error.value)) == is_family


@each_case()
def test_a_field_of_another_type_is_named(name, value, make_target, tmp_path):
    values = json.loads((make_target("qwen3-moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {name: value}))
    with user_error(f"config.json: {name} is .*; it must be a "):
        load_config(tmp_path)


@each_case()
def test_a_config_is_refused_before_transformers_or_its_code_reads_it(values, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    for trust in (False, True):
        with user_error(f"^architecture {values['architectures'][0]} cannot be a target{reason}"):
            load_config(tmp_path, trust)


def table_of(title: str) -> dict[str, str]:
    """Class -> description, of a table of the page of families."""
    part = (ROOT / "docs/families.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    return {name.strip("`"): text for names, text in rows for name in names.split(", ")}


def test_a_page_lists_families_that_are_served_and_what_others_need():
    assert table_of("Served").keys() == ARCHITECTURES | TEXT_PARTS.keys()
    assert table_of("Refused") == UNSERVED
    assert not ARCHITECTURES & UNSERVED.keys()


@pytest.mark.parametrize("page", ["README.md", "docs/families.md"])
def test_pages_list_what_is_not_served(page):
    text = " ".join((ROOT / page).read_text().split())
    for name in (
        "hybrid",
        "gated delta nets",
        "Mamba",
        "RWKV",
        "MLA",
        "encoder-decoders",
        "image",
        "LoRA",
    ):
        assert name in NOT_SERVED
        assert name in text


@each_case()
def test_an_adapter_is_refused_with_its_base_model(values, message, make_target, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with user_error(message) as error:
        load_config(tmp_path)
    assert NOT_SERVED in str(error.value)
    (tmp_path / "config.json").write_text((make_target("qwen3") / "config.json").read_text())
    assert load_config(tmp_path) == load_config(make_target("qwen3")), "a merged model's folder may keep the file"


def test_feature_layer_rule():
    assert default_aux_layers(32) == (1, 15, 28)  # EAGLE-3: inputs of layers 2, 16, 29
    for num_layers in range(3, 40):
        check_aux_layers(default_aux_layers(num_layers), num_layers)
    for wrong in ((1, 1, 2), (0, 7), ()):
        with user_error("aux_layers"):
            check_aux_layers(wrong, 6)
