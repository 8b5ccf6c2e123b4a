"""EAGLE3: the network's formula and start; the public file exactly, other trainers' layouts, and refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.models.drafts.base import HEAD, OWN_FIELDS, load_draft, write_draft
from slipstream.models.drafts.eagle3 import FLAGS, UNSUPPORTED_FLAGS, Eagle3, Eagle3Config
from slipstream.models.drafts.speculators_layout import AUX_LAYERS
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import RopeConfig, TargetSpec, default_aux_layers
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.tests.models.saved_drafts import ORIGIN, CausalAttention, SavedDraft, Tensors, Values, fused
from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.tables import each_case, table_of
from slipstream.tests.user_errors import user_error

LENGTH = 23
FLAGGED: list[dict[str, bool]] = [
    *({flag: True} for flag in FLAGS),
    {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},  # the defaults of speculators
    {"fc_norm": True, "norm_output": True},  # of others' EAGLE-3.1 recipes
]
DEEP: dict[str, Any] = {"num_layers": 3, "norm_output": True}


def attention_of(config: Eagle3Config) -> CausalAttention:
    return CausalAttention(RotaryEmbedding(config.rope, config.head_dim, LENGTH), LENGTH)


def random_module(target: Path, **fields: Any) -> Eagle3:
    """Every weight random, norms included, and exact in bf16."""
    torch.manual_seed(5)
    config = load_config(target)
    fields = {"draft_vocab_size": 50, "aux_layers": (0, 2, 4)} | fields
    module = Eagle3(Eagle3Config.from_target(config, **fields))
    for parameter in module.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    module.set_vocabulary(torch.arange(50) * 2 + 1)
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    "fields", [{}, {"attention_bias": True}, {"num_kv_heads": 1}, {"intermediate_size": 20}, DEEP, *FLAGGED]
)
def test_the_module_equals_its_formula(fields, make_target, tmp_path):
    path = make_target("qwen3")
    module = random_module(path, **fields)
    write_draft(module, module.state_dict(), tmp_path, {})
    naive = NaiveEagle3(tmp_path, load_target(path, load_config(path), torch.float32, torch.device("cpu")).shared[HEAD])
    generator = torch.Generator().manual_seed(3)
    embeds, aux_states = (torch.randn(LENGTH, size, generator=generator) for size in (32, 96))
    hidden = module.fuse(aux_states)
    states = module(embeds, hidden, attention_of(module.config))
    expected = naive.states(embeds.double(), naive.fuse(aux_states))
    torch.testing.assert_close(states.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(module.logits(states).double(), naive.logits(expected), atol=1e-5, rtol=1e-4)


def test_it_starts_from_the_targets_weights(make_target):
    module = random_module(make_target("llama"))
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(120, 32, generator=generator)
    norm = torch.randn(32, generator=generator)
    module.init_from_target({HEAD: head, "norm.weight": norm})
    x = torch.randn(7, 32, generator=generator)
    torch.testing.assert_close(module.lm_head(x), x @ head[1:100:2].T)
    torch.testing.assert_close(module.norm.weight, norm)
    assert not module.midlayer.mlp(x).any()
    aux_states = torch.randn(7, 96, generator=generator)
    torch.testing.assert_close(module.fuse(aux_states), aux_states[:, -32:])


def test_upper_layers_pass_states_on_at_first(make_target):
    module = random_module(make_target("llama"), num_layers=3, intermediate_size=48)
    module.init_from_target({HEAD: torch.randn(120, 32), "norm.weight": torch.randn(32)})
    embeds = torch.randn(LENGTH, 32)
    hidden = torch.randn(LENGTH, 32)
    attention = attention_of(module.config)
    first, delta = module.midlayer(embeds, hidden, attention, "causal")
    torch.testing.assert_close(module(embeds, hidden, attention), first + delta)


def save_draft(target: TargetSpec, folder: Path, draft_vocab_size: int, **flags: Any) -> SavedDraft:
    torch.manual_seed(4)
    fields = {"draft_vocab_size": draft_vocab_size, "aux_layers": (1, 2, 4), **flags}
    return SavedDraft(Eagle3(Eagle3Config.from_target(target, **fields, **ORIGIN)), target, folder)


@pytest.fixture
def draft(make_target, tmp_path) -> SavedDraft:
    return save_draft(load_config(make_target("llama")), tmp_path, 50)


@pytest.fixture
def full_draft(make_target, tmp_path) -> SavedDraft:
    """Its vocabulary is the target's."""
    return save_draft(load_config(make_target("llama")), tmp_path, 120)


def test_a_round_trip_is_exact(draft):
    draft.check_round_trip()


@each_case()
def test_a_config_survives_json(rope, draft):
    config = replace(draft.module.config, rope=RopeConfig(*rope), attention_bias=True)
    assert Eagle3Config.from_json(json.loads(json.dumps(config.to_json())), draft.target) == config


def test_the_files_have_the_public_form(draft):
    """Layer ids in eagle_config, which SGLang reads, count outputs, and those at the top, which vLLM reads, inputs."""
    tensors = draft.check_public(**table_of(__file__, "public"))
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert (torch.arange(50) + tensors["d2t"]).tolist() == list(range(0, 100, 2)), "d2t are offsets"
    assert tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 100, 2))


@pytest.mark.parametrize("flags", FLAGGED)
@pytest.mark.parametrize("nested", [False, True])
def test_the_flags_of_eagle_3_1(flags, nested, make_target, tmp_path):
    """Only those that are set are written, with their norms; eagle_config may hold them too, as for vLLM."""
    draft = save_draft(load_config(make_target("llama")), tmp_path, 50, **flags)
    values = json.loads((tmp_path / "config.json").read_text())
    assert {flag: values[flag] for flag in FLAGS if flag in values} == flags
    shapes = {key: tuple(x.shape) for key, x in load_file(tmp_path / "model.safetensors").items()}
    assert shapes.get("input_norm.weight") == ((96,) if "norm_before_fc" in flags else None)
    norms = [shapes[key] for key in sorted(shapes) if key.startswith("fc_norm.")]
    assert norms == ([(32,)] * 3 if "fc_norm" in flags else [])
    if nested:
        draft.change(values={**dict.fromkeys(flags), "eagle_config": {**values["eagle_config"], **flags}})
    draft.check_round_trip()


def test_flags_that_contradict_are_refused(draft):
    draft.change(values={"norm_before_fc": True, "fc_norm": True})
    with user_error("norm_before_fc and fc_norm are both set"):
        draft.load()
    draft.change(values={"fc_norm": False, "eagle_config": {"norm_before_fc": False}})
    with user_error("norm_before_fc is True and, in eagle_config, False; delete the wrong one"):
        draft.load()
    draft.change(values={"eagle_config": None})
    with user_error(r"missing input_norm\.weight"):
        draft.load()


def test_what_specforge_once_meant_by_norm_output(draft):
    """The final norm shows if the head reads a normed state: if no step ever used it, it is as it was initialised."""
    draft.change(values={"norm_output": False})
    draft.assert_loads_equal()
    draft.change(values={"drafter": None})
    with user_error("norm_output is false and norm.weight all ones, as SpecForge"):
        draft.load()
    assert not draft.load(norm_output=False).config.norm_output
    draft.change(lambda tensors: tensors | {"norm.weight": tensors["norm.weight"] * 1.5})
    assert not draft.load().config.norm_output


EVIDENCE: dict[str, tuple[Callable[[Tensors], Tensors], Values]] = {  # that SpecForge did not write a file
    "AutoModel's names": (lambda tensors: {f"model.{key}": tensors[key] for key in tensors}, {}),
    "vLLM's names": (lambda tensors: {key.replace("midlayer.", "layers.0."): tensors[key] for key in tensors}, {}),
    "norm_before_fc": (lambda tensors: tensors | {"input_norm.weight": torch.ones(96)}, {"norm_before_fc": True}),
    "the tensor alone": (lambda tensors: tensors | {"input_norm.weight": torch.ones(96)}, {}),
    "nested": (dict, {"norm_output": None, "eagle_config": {AUX_LAYERS: [1, 2, 4], "norm_output": True}}),
    "NVIDIA's name": (
        dict,
        {"norm_output": None, "eagle_config": {AUX_LAYERS: [1, 2, 4], "return_hidden_post_norm": True}},
    ),
}


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_norm_output_of_others_is_decided_by_the_file(evidence, draft):
    tensors, values = EVIDENCE[evidence]
    draft.change(tensors, {"drafter": None, "norm_output": True} | values)
    config = draft.load().config
    assert config.norm_output
    assert config.norm_before_fc == (evidence in ("norm_before_fc", "the tensor alone"))


def test_norm_output_that_may_mean_two_things_is_the_users_to_decide(draft):
    draft.change(values={"drafter": None, "norm_output": True})
    with user_error("nothing in the file says which.* --drafter.norm-output, convert: --norm-out"):
        draft.load()
    for choice in (True, False):
        assert draft.load(norm_output=choice).config.norm_output is choice


def test_a_norm_in_the_file_shows_its_flag(draft):
    draft.change(lambda tensors: tensors | {f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)})
    assert draft.load().config.fc_norm
    draft.change(values={"fc_norm": False})
    with user_error(r"unexpected fc_norm\.0\.weight"):
        draft.load()


@each_case()
def test_ids_in_eagle_config_count_outputs_or_inputs(ids, sinks, expected, draft):
    (layer,) = draft.target.layers[:1]
    layer = replace(layer, mixer=replace(layer.mixer, sinks=sinks))
    draft.target = replace(draft.target, layers=(layer,) * 12)
    draft.change(
        values={"drafter": None, "target_num_layers": None, AUX_LAYERS: None, "eagle_config": {AUX_LAYERS: ids}}
    )
    if expected is not None:
        assert draft.load().config.aux_layers == tuple(expected)
        return
    with user_error(r"is \[3, 6, 9\], which .* so that the outputs are \[2, 5, 8\]; name those"):
        draft.load()
    for layers in ((3, 6, 9), (2, 5, 8)):
        assert draft.load(aux_layers=layers).config.aux_layers == layers
    with user_error(r"aux_layers is \[1, 5, 8\], but the config.json of"):
        draft.load(aux_layers=(1, 5, 8))


def test_a_draft_of_the_final_state_alone(make_target, tmp_path):
    """Short-context drafts of NVIDIA for gpt-oss: no fc."""
    path = make_target("llama")
    module = random_module(path, has_fc=False, aux_layers=(4,))
    draft = SavedDraft(module, load_config(path), tmp_path)
    assert "fc.weight" not in load_file(tmp_path / "model.safetensors")
    draft.change(values={"drafter": None})
    draft.check_round_trip()
    states = torch.randn(LENGTH, 32)
    assert module.fuse(states) is states
    draft.change(lambda tensors: tensors | {"fc.weight": torch.zeros(32, 32)})
    with user_error("use_aux_hidden_state is false, but the file has fc.weight; name the states"):
        draft.load()
    assert draft.load(aux_layers=(2,)).config.aux_layers == (2,)


def test_layers_above_the_first(make_target, tmp_path):
    draft = save_draft(load_config(make_target("llama")), tmp_path, 50, **DEEP)
    shapes = {key: tuple(x.shape) for key, x in load_file(tmp_path / "model.safetensors").items()}
    assert shapes["midlayer.self_attn.q_proj.weight"] == (32, 64)
    assert shapes["layers.1.self_attn.q_proj.weight"] == shapes["layers.2.self_attn.q_proj.weight"] == (32, 32)
    draft.check_round_trip()
    draft.change(LAYOUTS["both"], {"drafter": None})
    draft.assert_loads_equal()


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "layers.0": lambda tensors: {key.replace("midlayer.", "layers.0."): tensors[key] for key in tensors},
    "model prefix": lambda tensors: {f"model.{key}" if "head" not in key else key: tensors[key] for key in tensors},
    "both": lambda tensors: {f"model.{key}".replace("midlayer.", "layers.0."): tensors[key] for key in tensors},
    "embedding": lambda tensors: tensors | {"embed_tokens.weight": torch.zeros(120, 32)},
    "prefixed embedding": lambda tensors: tensors | {"model.embed_tokens.weight": torch.zeros(120, 32)},
    "fused": lambda tensors: fused(tensors),
    "fused, layers.0": lambda tensors: {key.replace("midlayer.", "layers.0."): x for key, x in fused(tensors).items()},
    "no t2d": lambda tensors: {key: tensors[key] for key in tensors if key != "t2d"},
    "t2d of bytes": lambda tensors: tensors | {"t2d": tensors["t2d"].to(torch.uint8)},
    "fp32": lambda tensors: {key: x.float() if x.is_floating_point() else x for key, x in tensors.items()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_foreign_layouts_load(layout, draft):
    draft.change(LAYOUTS[layout])
    draft.assert_loads_equal()


def test_a_full_vocabulary_needs_no_map(full_draft):
    full_draft.change(lambda tensors: {key: tensors[key] for key in tensors if key not in ("d2t", "t2d")})
    full_draft.assert_loads_equal()
    full_draft.change(values={"draft_vocab_size": None})
    full_draft.assert_loads_equal()


def test_a_foreign_config_loads(draft):
    """No target, no layer ids, no head_dim, rope as older trainers write it: rule and target fill the gaps."""
    absent = (*OWN_FIELDS, "target_num_layers", "drafter", "eagle_config", AUX_LAYERS, "head_dim")
    absent += ("target_hidden_size", "attention_bias")
    draft.change(values=dict.fromkeys(absent))
    draft.target = replace(draft.target, layers=draft.target.layers[:1] * 12)
    config = draft.load().config
    assert config.aux_layers == (1, 5, 8)
    assert (config.target, config.target_num_layers, config.target_hidden_size, config.head_dim) == ("", 12, 32, 8)


@pytest.mark.parametrize(("num_layers", "layers"), [(10, (1, 4, 6)), (12, (3, 11))])
def test_layers_that_no_rule_makes_certain_have_to_be_named(num_layers, layers, draft):
    """Too few layers for EAGLE-3's rule, or another number of states than its three."""
    count = len(layers)
    draft.target = replace(draft.target, layers=draft.target.layers[:1] * num_layers)
    draft.change(
        lambda tensors: tensors | {"fc.weight": tensors["fc.weight"][:, : 32 * count].clone()},
        {"target_num_layers": num_layers, "eagle_config": None, AUX_LAYERS: None},
    )
    message = f"lacks {AUX_LAYERS}, which {count} states of the target's {num_layers} layers .* --drafter.aux-layers"
    with user_error(message):
        draft.load()
    assert draft.load(aux_layers=list(layers)).config.aux_layers == layers
    with user_error(f"for {count} target states of 32, and the config means 1"):
        draft.load(aux_layers=[2])
    draft.change(values={AUX_LAYERS: [layer + 1 for layer in layers]})
    assert draft.load(aux_layers=layers).config.aux_layers == layers
    with user_error(r"aux_layers is \[0, 1\], but .* names the layer outputs .*; leave"):
        draft.load(aux_layers=[0, 1])


@each_case()
def test_rope_fields_old_and_new(values, rope, draft):
    draft.change(values=values)
    assert draft.load().config.rope == RopeConfig(*rope)


@pytest.mark.parametrize("flag", UNSUPPORTED_FLAGS)
@pytest.mark.parametrize("nested", [False, True])
def test_flags_that_change_the_network_are_refused_by_name(flag, nested, draft):
    draft.change(values={flag: False})
    draft.assert_loads_equal()
    draft.change(values={"eagle_config": {flag: True}} if nested else {flag: True})
    with user_error(f"draft config sets {flag}, which is not supported"):
        draft.load()


@each_case()
def test_misfits_name_field_and_values(values, message, draft):
    draft.change(values=values)
    with user_error(message):
        draft.load()


@each_case()
def test_a_sliding_window_is_read_where_it_is_used(values, expected, draft):
    draft.change(values={"sliding_window": 4096, **values})
    config = draft.load().config
    assert config.sliding_window == expected
    assert Eagle3Config.from_json(config.to_json(), draft.target) == config


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensors[key] for key in tensors if key not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("fc.weight", "norm.weight"), r"missing fc\.weight; missing norm\.weight"),
        (without("midlayer.self_attn.v_proj.weight"), r"missing midlayer\.self_attn\.v_proj\.weight$"),
        (without("d2t"), "missing d2t"),
        (lambda tensors: tensors | {"fc_norm.0.weight": torch.ones(32)}, r"missing fc_norm\.1\.weight"),
        (lambda tensors: tensors | {"layers.1.norm.weight": torch.ones(32)}, r"unexpected layers\.1\.norm\.weight"),
        (lambda tensors: tensors | {"d2t": tensors["d2t"] + 90}, "d2t maps outside the target's 120 tokens or twice"),
        (lambda tensors: without("t2d")(tensors | {"d2t": tensors["d2t"] - 1}), "d2t maps outside"),
        (lambda tensors: tensors | {"d2t": -torch.arange(50)}, "d2t maps outside .* or twice to one$"),
        (
            lambda tensors: without("t2d")(tensors | {"d2t": torch.arange(20, 120, 2)}),
            "d2t maps outside the target's 120 tokens or twice to one, since it holds target ids where differences",
        ),
        (lambda tensors: tensors | {"d2t": tensors["d2t"][:40]}, r"d2t is \[40\], the config says \[50\]"),
        (lambda tensors: tensors | {"d2t": tensors["d2t"][None]}, r"d2t is \[1, 50\], the config says \[50\]"),
        (lambda tensors: tensors | {"d2t": tensors["d2t"] + 0.5}, r"d2t holds fractions \(torch.float32\)"),
        (
            lambda tensors: tensors | {"d2t": torch.arange(50), "t2d": torch.arange(120) < 50},
            "name different tokens, since d2t holds target ids where differences belong; fetch the draft again",
        ),
        (
            lambda tensors: tensors | {"d2t": torch.zeros(50)},
            "d2t and t2d name different tokens; fetch the draft again",
        ),
        (lambda tensors: tensors | {"t2d": tensors["t2d"].roll(1)}, "d2t and t2d name different tokens; fetch"),
        (lambda tensors: tensors | {"t2d": torch.ones(121)}, r"t2d is \[121\], but the target has 120 tokens"),
    ],
)
def test_damaged_tensors_are_named(change, message, draft):
    draft.change(change)
    with user_error(message):
        draft.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_d2t_of_whole_numbers_is_read(dtype, draft):
    draft.change(lambda tensors: tensors | {"d2t": tensors["d2t"].to(dtype), "t2d": tensors["t2d"].float()})
    ids = draft.load().target_ids
    expected = draft.module.target_ids
    assert ids is not None
    assert expected is not None
    assert torch.equal(ids, expected)


def test_a_d2t_of_zeros_is_said_where_nothing_contradicts_it(draft, caplog):
    draft.change(lambda tensors: without("t2d")(tensors | {"d2t": torch.zeros(50)}))
    assert draft.load().target_ids.tolist() == list(range(50))
    assert "d2t is all zeros, so that the draft proposes the first 50 tokens" in caplog.text


def test_a_d2t_that_may_hold_ids_is_said_where_nothing_contradicts_it(draft, caplog):
    """Ids are all below the vocabulary's middle. Differences stay the same from a token to its neighbour."""
    for d2t, warns in ((torch.arange(1, 51), True), (torch.arange(50) // 2, False)):
        caplog.clear()
        draft.change(lambda tensors, d2t=d2t: without("t2d")(tensors | {"d2t": d2t}))
        assert torch.equal(draft.load().target_ids, torch.arange(50) + d2t)
        assert ("as a list of target ids does; if few are accepted" in caplog.text) == warns


def test_an_embedding_of_zeros_is_a_placeholder(draft, caplog):
    shared = {"embed_tokens.weight": torch.randn(120, 32)}
    draft.change(lambda tensors: tensors | {"embed_tokens.weight": torch.zeros(120, 32)})
    module = load_draft(Eagle3, draft.folder, draft.target, torch.float32, torch.device("cpu"), shared)
    assert module.embed_tokens is None
    assert "embed_tokens.weight is all zeros, a placeholder; the draft reads the target's" in caplog.text


@each_case((10, default_aux_layers(10), True))
def test_ids_that_every_reader_takes_by_itself_are_left_out(count, layers, is_written, draft):
    target = replace(draft.target, layers=draft.target.layers[:1] * count)
    config = replace(draft.module.config, target_num_layers=count, aux_layers=(*layers,))
    values = config.to_json()
    assert (AUX_LAYERS in values, "eagle_config" in values) == (is_written, is_written)
    assert Eagle3Config.from_json(values, target) == config


@each_case()
def test_layer_ids_stand_in_either_place(inputs, outputs, expected, draft):
    draft.change(values={"eagle_config": outputs and {AUX_LAYERS: outputs}, AUX_LAYERS: inputs})
    assert draft.load().config.aux_layers == tuple(expected)


def test_a_pickle_of_tensors_loads_and_other_objects_do_not(draft):
    """As SafeAILab publishes them."""
    file = draft.folder / "model.safetensors"
    pickled = draft.folder / "pytorch_model.bin"
    torch.save(load_file(file), pickled)
    file.unlink()
    draft.assert_loads_equal()
    torch.save({"fc.weight": Path("x")}, pickled)
    with user_error(r"pytorch_model\.bin is damaged or holds more than tensors"):
        draft.load()


def test_an_embedding_of_its_own_is_kept(draft):
    embedding = torch.randn(120, 32)
    draft.change(lambda tensors: tensors | {"embed_tokens.weight": embedding.bfloat16()})
    assert draft.load(None, {"embed_tokens.weight": embedding}).embed_tokens is None
    module = draft.load(None, {"embed_tokens.weight": embedding + 1})
    assert torch.equal(module.embed_tokens.weight, embedding.bfloat16())
    draft.change(lambda tensors: tensors | {"embed_tokens.weight": embedding[:119]})
    with user_error(r"embed_tokens.weight is \[119, 32\], the config says \[120, 32\]"):
        draft.load(None, {"embed_tokens.weight": embedding})
