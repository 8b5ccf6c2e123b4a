"""`slipstream convert`: every layout and back, bit by bit; layer ids in each reader's convention; refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from slipstream.data_tools.convert import main, read_target
from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.drafts.eagle import Eagle
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.drafts.source import source_of
from slipstream.models.drafts.speculators_layout import AUX_LAYERS
from slipstream.models.targets.decoder import load_config
from slipstream.serve.drafters.registry import find_drafter
from slipstream.tests.data_tools.conversion import Runs, assert_equal_checkpoints, save_eagle3_draft
from slipstream.tests.models.saved_drafts import fused
from slipstream.tests.models.test_config_keys import WRAPPER, base_values
from slipstream.tests.random_drafts import save_random_dflash, save_random_eagle
from slipstream.tests.random_targets import FIELDS, SHAPE, change_json, save_random_target
from slipstream.tests.tables import each_case

VARIANTS: dict[str, dict[str, Any]] = {
    "whole vocabulary, in the target's dtype": {"dtype": torch.float32},
    "few tokens": {"draft_vocab_size": 50},
    "windows and biases": {"sliding_window": 6, "windowed_layers": (1,), "attention_bias": True},
}


@pytest.fixture(params=["qwen3", "qwen3-tied"])
def runs(request, make_target, tmp_path, capsys) -> Runs:
    return Runs(make_target(request.param), tmp_path, capsys)


def save(runs: Runs, dtype: torch.dtype | None = None, **fields: Any) -> Path:
    folder = runs.root / "draft"
    save_random_dflash(runs.target, folder, **runs.target_fields() | {"aux_layers": (0, 1)} | fields)
    if dtype is not None:
        tensors = load_file(folder / "model.safetensors")
        save_file({key: x.to(dtype) for key, x in tensors.items()}, folder / "model.safetensors")
        values = values_of(folder) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_trip_through_every_layout_is_bit_identical(variant, runs):
    draft = save(runs, **VARIANTS[variant])
    runs.assert_round_trips(draft)


def test_the_layout_of_speculators_holds_the_targets_embedding_and_head(runs):
    draft = save(runs, draft_vocab_size=50)
    folder, _ = runs.convert(draft, "speculators")
    tensors = load_file(folder / "model.safetensors")
    target = load_file(runs.target / "model.safetensors")
    embedding = target["model.embed_tokens.weight"].bfloat16()
    head = target.get("lm_head.weight", target["model.embed_tokens.weight"]).bfloat16()
    assert torch.equal(tensors["embed_tokens.weight"], embedding)
    assert torch.equal(tensors["lm_head.weight"], head[torch.arange(50) + tensors["d2t"]])
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(runs.target),
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert config["draft_vocab_size"] == 50
    assert config["aux_hidden_state_layer_ids"] == [1, 2]
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert find_drafter(source_of(str(folder))) is find_drafter(source_of(str(draft))), "it can be served as it is"
    module = load_draft(DFlash, folder, load_config(runs.target), None, torch.device("cpu"))
    assert torch.equal(module.fc.weight, load_file(draft / "model.safetensors")["fc.weight"])


def test_a_foreign_checkpoint_gets_its_target_and_public_names(runs):
    draft = save(runs)
    change_json(draft / "config.json", drafter=None, target=None, bos_token_id=1, block_size=None)
    change_json(draft / "config.json", dflash_config={"mask_token_id": 0, "target_layer_ids": [0, 1], "block_size": 4})
    tensors = load_file(draft / "model.safetensors")
    names = {"fc.weight": "encoder.fc.weight", "norm.weight": "model.norm.weight"}
    save_file({names.get(key, key): x.float() for key, x in tensors.items()}, draft / "model.safetensors")
    assert "the draft names no target; add --target" in runs.refused(draft, "sglang")
    folder, printed = runs.convert(draft, "sglang", "--target", str(runs.target))
    num = len(tensors)
    assert f"  tensors  {num}: {num - 2} of the {num} that were read, 2 under new names\n" in printed
    output = load_file(folder / "model.safetensors")
    assert output.keys() == tensors.keys()
    assert {tensor.dtype for tensor in output.values()} == {torch.float32}, "as in the file"
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_tensors_and_fields_are_counted(runs):
    draft = save(runs)
    folder, printed = runs.convert(draft, "speculators")
    old, new = (json.loads((path / "config.json").read_text()).keys() for path in (draft, folder))
    num = len(load_file(draft / "model.safetensors"))
    assert printed.splitlines() == [
        f"{folder}: layout speculators",
        "  slots 1, 2, ... predict their own token: its config.json has sample_from_anchor false",
        f"  tensors  {num + 2}: {num} of the {num} that were read, 2 under new names",
        f"  fields   {len(new)}: {len(old & new)} of the {len(old)} that were read, {len(new - old)} under new names",
    ]


def test_the_last_layers_output_is_pointed_out(runs):
    _, printed = runs.convert(save(runs, aux_layers=(0, 3)), "speculators")
    assert "note: it reads the last layer's output" in printed


def test_what_cannot_be_converted_is_refused(runs, tmp_path):
    draft = save(runs, sample_from_anchor=True)
    assert "sample_from_anchor" in runs.refused(draft, "sglang")
    folder, _ = runs.convert(draft, "speculators")
    assert json.loads((folder / "config.json").read_text())["sample_from_anchor"] is True
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, folder / "model.safetensors")
    assert "lm_head.weight is not the target's" in runs.refused(folder, "speculators")
    change_json(draft / "config.json", drafter="medusa")
    assert "is a draft of the kind medusa; convert knows dflash, eagle3, eagle" in runs.refused(draft, "sglang")
    with pytest.raises(SystemExit):
        main(["--input", str(draft), "--output", str(tmp_path / "x"), "--layout", "gguf"])
    with pytest.raises(SystemExit):
        main(["--input", str(draft)])


def test_an_existing_output_is_kept(runs, tmp_path):
    draft = save(runs)
    output = tmp_path / "kept"
    arguments = ["--input", str(draft), "--output", str(output)]
    main(arguments)
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "model.safetensors", "run.json"]
    main([*arguments, "--overwrite"])
    assert json.loads((output / "run.json").read_text())["target_path"] == str(runs.target)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes").touch()
    for words, message in (
        (arguments, f"output {output} exists; name another folder or add --overwrite"),
        ([*arguments, f"--input={output}", "--overwrite"], f"output {output} is input {output}"),
        ([*arguments, f"--target={runs.target}", f"--output={runs.target}/new"], f"new lies in target {runs.target}"),
        ([*arguments, f"--output={foreign}", "--overwrite"], "foreign is not a draft checkpoint"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert message in runs.capsys.readouterr().err


@each_case()
def test_a_broken_config_is_refused_by_field(fields, message, runs):
    draft = save(runs)
    values = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(values | fields))
    assert message in runs.refused(draft, "sglang")
    (draft / "config.json").write_text(json.dumps([values]))
    assert "config.json holds a list, not a JSON object" in runs.refused(draft, "sglang")


@pytest.mark.parametrize("source", ["sglang", "speculators"])
@pytest.mark.parametrize("place", [None, "dflash_config", "transformer_layer_config"])
def test_a_field_without_a_place_in_any_layout_is_refused(source, place, runs):
    """Neither written where no reader looks nor lost; what is off says nothing, and bookkeeping is left out."""
    folder, _ = runs.convert(save(runs), source)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    if place is not None and place not in values:
        place = None
    inner = values if place is None else values[place]
    inner |= {"logits_temperature": 0.5, "score_head": {}, "initializer_range": 0.02}
    file.write_text(json.dumps(values))
    for layout in ("sglang", "speculators"):
        message = "config.json has logits_temperature, which no layout here has a place for"
        assert message in runs.refused(folder, layout)
    del inner["logits_temperature"]
    file.write_text(json.dumps(values))
    assert_equal_checkpoints(runs.root / "draft", runs.convert(folder, "sglang")[0])


@pytest.fixture
def llama(make_target, tmp_path, capsys) -> Runs:
    return Runs(make_target("llama"), tmp_path, capsys)


@pytest.fixture
def deep_runs(tmp_path, capsys) -> Runs:
    """With a target of 12 layers and scaled rotary embedding."""
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": 12}, rope_parameters=FIELDS["llama3_rope"])
    save_random_target(config, tmp_path / "target")
    return Runs(tmp_path / "target", tmp_path, capsys)


def save_eagle_draft(llama: Runs, **fields: Any) -> Path:
    save_random_eagle(llama.target, llama.root / "draft", **llama.target_fields() | fields)
    return llama.root / "draft"


def values_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@each_case()
def test_a_round_trip_is_bit_identical(layers, draft_vocab_size, fields, deep_runs):
    deep_runs.assert_round_trips(save_eagle3_draft(deep_runs, layers, draft_vocab_size, **fields))


@pytest.mark.parametrize(("layers", "outputs", "inputs"), [((1, 5, 8), None, None), ((0, 5, 9), [0, 5, 9], [1, 6, 10])])
def test_ids_stand_in_each_readers_convention_or_are_left_out(layers, outputs, inputs, deep_runs):
    """Servers take the outputs of layers 1, N/2 - 1 and N - 4 by themselves."""
    draft = save_eagle3_draft(deep_runs, layers)
    assert values_of(draft).get("eagle_config", {}).get(AUX_LAYERS) == outputs
    assert values_of(draft).get(AUX_LAYERS) == inputs
    folder, _ = deep_runs.convert(draft, "speculators")
    assert values_of(folder).get(AUX_LAYERS) == inputs
    assert "eagle_config" not in values_of(folder)
    assert (
        load_draft(Eagle3, folder, load_config(deep_runs.target), None, torch.device("cpu")).config.aux_layers == layers
    )


def test_the_layout_of_speculators(llama):
    draft = save_eagle3_draft(llama, (0, 1, 2))
    folder, _ = llama.convert(draft, "speculators")
    tensors = load_file(folder / "model.safetensors")
    before = load_file(draft / "model.safetensors")
    embedding = load_file(llama.target / "model.safetensors")["model.embed_tokens.weight"]
    assert tensors.keys() == {key.replace("midlayer", "layers.0") for key in before} | {"embed_tokens.weight"}
    assert torch.equal(tensors["embed_tokens.weight"], embedding.bfloat16())
    values = values_of(folder)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
    assert [values[flag] for flag in flags] == [False] * 5, "vLLM takes a missing norm_before_residual as true"
    assert not set(flags) & values["transformer_layer_config"].keys()
    assert values["transformer_layer_config"]["model_type"] == "llama"
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": str(llama.target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert find_drafter(source_of(str(folder))) is find_drafter(source_of(str(draft))), "it can be served as it is"


def test_ids_that_the_converter_of_speculators_lost_have_to_be_named(llama):
    """`speculators convert` writes null for the ids of a public draft."""
    folder, _ = llama.convert(save_eagle3_draft(llama, (0, 1, 2)), "speculators")
    values = values_of(folder) | {AUX_LAYERS: None}
    (folder / "config.json").write_text(json.dumps(values))
    assert "3 states of the target's 4 layers fc reads" in llama.refused(folder, "sglang")
    back, _ = llama.convert(folder, "sglang", "--aux-layers", "[0, 1, 2]")
    assert_equal_checkpoints(llama.root / "draft", back)


def test_only_eagle3_drafts_have_layers_to_name(llama):
    refused = llama.refused(save_eagle_draft(llama), "sglang", "--aux-layers", "[0, 1]")
    assert "aux_layers is (0, 1); it is not for EAGLE drafts, so leave it out" in refused


def test_a_full_vocabulary_has_no_map_there(llama):
    folder, _ = llama.convert(save_eagle3_draft(llama, (0, 1, 2), 120), "speculators")
    assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()


def test_a_checkpoint_as_safeailab_publishes_it(llama):
    """A pickle in fp32, fused here, and a config that names neither a target nor a draft's architecture."""
    draft = save_eagle3_draft(llama, (1, 2, 3))
    file = draft / "model.safetensors"
    tensors = {key: x.float() if x.is_floating_point() else x for key, x in fused(load_file(file)).items()}
    embedding = load_file(llama.target / "model.safetensors")["model.embed_tokens.weight"]
    torch.save(tensors | {"embed_tokens.weight": embedding}, draft / "pytorch_model.bin")
    file.unlink()
    absent = [
        "drafter",
        "target",
        "target_fingerprint",
        "target_num_layers",
        "torch_dtype",
        "tokenizer_hash",
        "eagle_config",
        AUX_LAYERS,
    ]
    change_json(
        draft / "config.json",
        **dict.fromkeys(absent),
        architectures=["LlamaForCausalLM"],
    )
    assert "the draft names no target; add --target" in llama.refused(draft, "slipstream")
    assert f"draft config lacks {AUX_LAYERS}" in llama.refused(draft, "slipstream", "--target", str(llama.target))
    folder, _ = llama.convert(draft, "slipstream", "--target", str(llama.target), "--aux-layers", "[1, 2, 3]")
    output = load_file(folder / "model.safetensors")
    assert torch.equal(
        fused(output)["midlayer.self_attn.qkv_proj.weight"], tensors["midlayer.self_attn.qkv_proj.weight"]
    )
    assert {x.dtype for x in output.values() if x.is_floating_point()} == {torch.float32}, "as in the file"
    assert values_of(folder)["eagle_config"][AUX_LAYERS] == [1, 2, 3]


@each_case()
def test_what_the_layout_of_speculators_cannot_hold_is_refused(layers, fields, message, llama):
    assert message in llama.refused(save_eagle3_draft(llama, layers, **fields), "speculators")


@each_case()
def test_other_networks_of_speculators_are_refused_by_name(values, message, llama):
    folder, _ = llama.convert(save_eagle3_draft(llama, (0, 1, 2)), "speculators")
    change_json(folder / "config.json", **values)
    assert message in llama.refused(folder, "sglang")


def test_an_embedding_of_its_own_is_kept_in_every_layout(llama):
    folder, _ = llama.convert(save_eagle3_draft(llama, (0, 1, 2)), "speculators")
    tensors = load_file(folder / "model.safetensors")
    trained = tensors["embed_tokens.weight"] + 1
    save_file(tensors | {"embed_tokens.weight": trained}, folder / "model.safetensors")
    change_json(folder / "config.json", embed_requires_grad=True)
    for layout in ("sglang", "speculators"):
        folder, _ = llama.convert(folder, layout)
        assert torch.equal(load_file(folder / "model.safetensors")["embed_tokens.weight"], trained)


@pytest.mark.parametrize("fields", [{}, {"fc_bias": False}, {"qkv_bias": True}, {"draft_vocab_size": 40}])
def test_eagle_drafts_come_back_bit_by_bit(fields, llama):
    """From a file as EAGLE's authors publish it: a pickle with the target's embedding, prefixed names."""
    draft = save_eagle_draft(llama, **fields)
    foreign = llama.root / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text((draft / "config.json").read_text())
    tensors = {
        f"model.{key}" if "layers" in key else key: x for key, x in load_file(draft / "model.safetensors").items()
    }
    embedding = load_file(llama.target / "model.safetensors")["model.embed_tokens.weight"]
    torch.save(tensors | {"embed_tokens.weight": embedding.bfloat16()}, foreign / "pytorch_model.bin")
    folder, printed = llama.convert(foreign, "slipstream")
    assert_equal_checkpoints(draft, folder)
    assert "note:" not in printed
    if fields == {"fc_bias": False}:
        folder, _ = llama.convert(foreign, "sglang")
        bias = load_draft(Eagle, folder, load_config(llama.target), None, torch.device("cpu")).fc.bias
        assert not bias.any(), "SGLang's fc has a bias, random where the file has none"
        assert "bias" not in values_of(folder), "by which SGLang means biases of attention"
    torch.save(tensors | {"embed_tokens.weight": embedding + 1}, foreign / "pytorch_model.bin")
    output = load_file(llama.convert(foreign, "slipstream")[0] / "model.safetensors")
    assert torch.equal(output["embed_tokens.weight"], embedding + 1)
    torch.save(tensors | {"lm_head.weight": embedding + 1}, foreign / "pytorch_model.bin")
    assert "lm_head.weight is not the target's" in llama.refused(foreign, "slipstream")


def test_speculators_cannot_hold_eagle(llama):
    assert "layout speculators cannot hold drafts such as" in llama.refused(save_eagle_draft(llama), "speculators")


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("tied", [False, True])
def test_a_targets_tensors_are_found_by_each_naming(prefix, tied, tmp_path):
    """As transformers writes a text model, and multimodal ones on the hub and of today."""
    values = base_values("gemma3" if prefix == "model." else WRAPPER) | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(values))
    embedding = torch.randn(120, 32)
    head = torch.randn(120, 32)
    outer = "language_model." if prefix == "language_model.model." else ""
    tensors = {f"{prefix}embed_tokens.weight": embedding} | ({} if tied else {f"{outer}lm_head.weight": head})
    save_file(tensors, tmp_path / "model.safetensors")
    shared = read_target(str(tmp_path)).shared
    assert torch.equal(shared["embed_tokens.weight"], embedding)
    assert torch.equal(shared["lm_head.weight"], embedding if tied else head)
