"""`slipstream convert` for DFLASH: every layout and back, bit by bit; what it reports and refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.data_tools.convert import main
from slipstream.models.dflash import load_dflash
from slipstream.models.target import load_config
from slipstream.serve.drafters.base import find_drafter
from slipstream.tests.data_tools.conversion import Runs, change
from slipstream.tests.random_drafts import save_random_dflash

VARIANTS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "few tokens": {"draft_vocab_size": 50},
    "windows and biases": {"sliding_window": 6, "windowed_layers": (1,), "attention_bias": True},
}


@pytest.fixture(params=["qwen3", "qwen3-tied"])
def runs(
    request: pytest.FixtureRequest,
    make_target: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Runs:
    return Runs(make_target(request.param), tmp_path, capsys)


def save(runs: Runs, **fields: Any) -> Path:
    save_random_dflash(runs.target, runs.root / "draft", **runs.own_fields() | {"feature_layers": (0, 1)} | fields)
    return runs.root / "draft"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_trip_through_every_layout_is_bit_identical(variant: str, runs: Runs) -> None:
    draft = save(runs, **VARIANTS[variant])
    runs.assert_round_trips(draft)


def test_the_layout_of_speculators_holds_the_targets_embedding_and_head(runs: Runs) -> None:
    draft = save(runs, draft_vocab_size=50)
    folder, _ = runs.convert(draft, "speculators")
    tensors, target = load_file(folder / "model.safetensors"), load_file(runs.target / "model.safetensors")
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
    assert find_drafter(str(folder)) is find_drafter(str(draft)), "it can be served as it is"
    module = load_dflash(folder, load_config(runs.target), None, torch.device("cpu"))
    assert torch.equal(module.fc.weight, load_file(draft / "model.safetensors")["fc.weight"])


def test_a_foreign_checkpoint_gets_its_target_and_public_names(runs: Runs) -> None:
    draft = save(runs)
    change(draft, drafter=None, target=None, bos_token_id=1, block_size=None)
    change(draft, dflash_config={"mask_token_id": 0, "target_layer_ids": [0, 1], "block_size": 4})
    tensors = load_file(draft / "model.safetensors")
    names = {"fc.weight": "encoder.fc.weight", "norm.weight": "model.norm.weight"}
    save_file({names.get(key, key): x.float() for key, x in tensors.items()}, draft / "model.safetensors")
    assert "the draft names no target; add --target" in runs.refused(draft, "sglang")
    folder, printed = runs.convert(draft, "sglang", "--target", str(runs.target))
    num = len(tensors)
    assert f"  tensors  {num}: {num - 2} of the {num} that were read, 2 under new names\n" in printed
    written = load_file(folder / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}, "as in the file"
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_tensors_and_fields_are_counted(runs: Runs) -> None:
    draft = save(runs)
    folder, printed = runs.convert(draft, "speculators")
    old, new = (json.loads((path / "config.json").read_text()).keys() for path in (draft, folder))
    num = len(load_file(draft / "model.safetensors"))
    assert printed.splitlines() == [
        f"{folder}: layout speculators",
        f"  tensors  {num + 2}: {num} of the {num} that were read, 2 under new names",
        f"  fields   {len(new)}: {len(old & new)} of the {len(old)} that were read, {len(new - old)} under new names",
    ]


def test_the_last_layers_output_is_pointed_out(runs: Runs) -> None:
    _, printed = runs.convert(save(runs, feature_layers=(0, 3)), "speculators")
    assert "note: it reads the last layer's output" in printed


def test_what_cannot_be_converted_is_refused(runs: Runs, tmp_path: Path) -> None:
    draft = save(runs, sample_from_anchor=True)
    assert "sample_from_anchor" in runs.refused(draft, "sglang")
    folder, _ = runs.convert(draft, "speculators")
    assert json.loads((folder / "config.json").read_text())["sample_from_anchor"] is True
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, folder / "model.safetensors")
    assert "lm_head.weight is not the target's" in runs.refused(folder, "speculators")
    change(draft, drafter="medusa")
    assert "is a draft of the kind medusa; kinds that convert: dflash, eagle3, eagle" in runs.refused(draft, "sglang")
    with pytest.raises(SystemExit):
        main(["--input", str(draft), "--output", str(tmp_path / "x"), "--layout", "gguf"])
    with pytest.raises(SystemExit):
        main(["--input", str(draft)])


def test_an_existing_output_is_kept(runs: Runs, tmp_path: Path) -> None:
    draft, output = save(runs), tmp_path / "kept"
    arguments = ["--input", str(draft), "--output", str(output)]
    main(arguments)
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "model.safetensors", "run.json"]
    (output / "run.json").write_text("{}")
    for words, message in (
        (arguments, f"output {output} exists; name another folder or add --overwrite"),
        (["--input", str(output), "--output", str(output), "--overwrite"], f"output {output} is input {output}"),
        (
            [*arguments, "--target", str(runs.target), f"--output={runs.target}/new"],
            f"new lies in target {runs.target}",
        ),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert message in runs.capsys.readouterr().err
        assert json.loads((output / "run.json").read_text()) == {}
    main([*arguments, "--overwrite"])
    assert json.loads((output / "run.json").read_text())["target_path"] == str(runs.target)
    (output / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main([*arguments, "--overwrite"])
    assert "kept holds notes.txt beside a draft checkpoint and is not replaced" in runs.capsys.readouterr().err
    assert (output / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "draft config lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a number"),
        ({"vocab_size": [120]}, "vocab_size is [120]; it must be a number"),
    ],
)
def test_a_broken_config_is_refused_by_field(fields: dict[str, Any], message: str, runs: Runs) -> None:
    draft = save(runs)
    values = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(values | fields))
    assert message in runs.refused(draft, "sglang")
    (draft / "config.json").write_text(json.dumps([values]))
    assert "config.json holds a list, not a JSON object" in runs.refused(draft, "sglang")
