"""Whole runs: kills do not change them, their outputs, and refusals."""

import json
import re
import shutil
import signal
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from safetensors.torch import load_file
from transformers import AutoConfig

from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.drafts.token_map import TokenMap
from slipstream.models.targets.config import TargetSpec
from slipstream.tests.tables import each_case
from slipstream.tests.train import recorded_run
from slipstream.tests.train.conftest import DRAFT_VOCAB_SIZE
from slipstream.tests.train.runs import (
    assert_same_run,
    records,
    refusal,
    run_interrupted,
    weights,
)
from slipstream.train import loop, target_files
from slipstream.train.batches import PackedRows
from slipstream.train.checkpoints import clean
from slipstream.train.eagle3 import Eagle3Training, main
from slipstream.train.loop import Loop


def test_a_run_leaves_servable_checkpoints_and_a_log(finished, target_path):
    assert sorted(path.name for path in finished.iterdir()) == ["best", "metrics.jsonl", "step-4", "step-6"]
    target = TargetSpec.from_json(AutoConfig.from_pretrained(target_path).to_dict())
    for name in ("best", "step-6"):
        draft = load_draft(Eagle3, finished / name, target, torch.float32, torch.device("cpu"))
        assert draft.config.draft_vocab_size == DRAFT_VOCAB_SIZE
        assert draft.config.aux_layers == (2, 0, 4)
        assert draft.config.target == str(target_path)
    torch.testing.assert_close(draft.fc.weight, weights(finished)["draft.fc.weight"], rtol=1e-2, atol=1e-2)  # bf16
    lines = records(finished)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval_accept_length" in line] == [3, 6]
    assert all(line["eval_accept_length"] >= 1 for line in lines if "eval_accept_length" in line)
    run = json.loads((finished / "best" / "run.json").read_text())
    assert run["data_hash"] == "0123"
    assert run["versions"]["torch"] == torch.__version__
    assert run["best_accept_length"] == max(line.get("eval_accept_length", 0) for line in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_run_saves_and_continues_bit_for_bit(tmp_path, arguments, finished, number, capsys):
    run_interrupted(arguments(tmp_path), number)
    assert "stopped; step 4 of 6 is saved" in capsys.readouterr().out
    main(arguments(tmp_path))
    assert_same_run(tmp_path, finished)


def play(monkeypatch: pytest.MonkeyPatch, accept_lengths: Sequence[float]):
    """Lets evaluations find these accept lengths, one after the other."""
    lengths = iter(accept_lengths)
    script = {"value": 0.0}

    def evaluate(_training, _batch):
        return {"accept_length": torch.tensor([script["value"], 1.0])}

    evaluate_all = Loop.evaluate

    def next_length(loop):
        script["value"] = next(lengths)
        return evaluate_all(loop)

    monkeypatch.setattr(Eagle3Training, "evaluate", evaluate)
    monkeypatch.setattr(Loop, "evaluate", next_length)
    monkeypatch.setattr(PackedRows, "__len__", lambda rows: min(2, len(rows.rows)))  # one held-out batch


def test_best_follows_accept_length_and_survives_resume(tmp_path, arguments, monkeypatch):
    play(monkeypatch, [2.0, 5.0, 3.0, 4.0])
    main(arguments(tmp_path, evaluation__every=2, data__batch_size=2))
    assert json.loads((tmp_path / "best" / "run.json").read_text())["step"] == 4
    shutil.rmtree(tmp_path / "step-6")
    main(arguments(tmp_path, evaluation__every=2, data__batch_size=2))  # its length of 4 is below the best of 5
    assert json.loads((tmp_path / "best" / "run.json").read_text())["step"] == 4


def test_a_run_ends_where_it_no_longer_improves(tmp_path, arguments, monkeypatch, capsys):
    """The count of evaluations survives a stop; with more patience the run goes on."""
    play(monkeypatch, [2.0, 3.0, 3.0, 2.5, 2.9, 4.0, 3.5])
    flags = {"optim__steps": 7, "evaluation__every": 1, "checkpoint__every": 7}
    run_interrupted(arguments(tmp_path, **flags, evaluation__patience=3), signal.SIGTERM)
    assert "stopped; step 4 of 7 is saved" in capsys.readouterr().out
    for _ in range(2):  # the second finds it finished
        main(arguments(tmp_path, **flags, evaluation__patience=3))
        printed = capsys.readouterr().out
        assert "no new best in 3 evaluations (evaluation.patience 3): the run ends at step 5 of 7\n" in printed
        assert "best accept length 3.000 at step 2: " in printed
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "metrics.jsonl", "step-4", "step-5"]
    main(arguments(tmp_path, **flags))
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert "best accept length 4.000 at step 6: " in capsys.readouterr().out


def test_unfinished_writes_are_cleaned_up(tmp_path):
    """Under the names that a run gives; a best that was about to be replaced, where names cannot be exchanged, is."""
    unrelated = [".step-4-good.tmp", ".best.old", ".cache.tmp", ".notes.tmp", "step-4"]
    leftovers = [".best.tmp/new", ".best.tmp/old", ".step-4.tmp/new", ".step-2.tmp/old", ".report.html.tmp"]
    for name in leftovers + unrelated:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "was").write_text(name)
    (tmp_path / ".report.html.tmp" / "was").rename(tmp_path / ".report.html.tmp" / "new")
    clean(tmp_path)
    assert {path.name: (path / "was").read_text() for path in tmp_path.iterdir()} == {
        "best": ".best.tmp/new",
        **{name: name for name in unrelated},
    }


@each_case()
def test_another_run_is_not_continued(finished, arguments, changes, message):
    assert re.search(message, refusal(arguments(finished, **changes)))


def test_a_finished_run_goes_on_as_if_planned_longer(tmp_path, arguments, capsys):
    """Its constant rate decays at last."""
    decay = {"optim__schedule": "wsd", "evaluation__every": 2}
    main(arguments(tmp_path / "whole", **decay))
    main(arguments(tmp_path / "run", **decay | {"optim__schedule": "constant"}, optim__steps=4))
    capsys.readouterr()
    for _ in range(2):  # the second finds it finished
        main(arguments(tmp_path / "run", **decay))
    changes = "optim.schedule wsd, before constant; optim.steps 6, before 4"
    assert capsys.readouterr().out.count(f"continues at step 4 with {changes}: the learning rate stays 0.01\n") == 1
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert [line["lr"] for line in records(tmp_path / "run")] == [0.01] * 5 + [0.005]


def test_further_epochs_take_the_rows_of_a_run_planned_longer(tmp_path, arguments, capsys):
    """The last step of the first epoch took 3 rows of 31. A linear decay's rate jumps back up, and the run says so."""
    sizes = {
        "optim__steps": "null",
        "optim__lr": 1e-4,
        "data__batch_size": 4,
        "evaluation__every": 9,
        "checkpoint__every": 9,
    }
    expected = recorded_run.train(arguments(tmp_path / "whole", **sizes, optim__epochs=3), None)
    documents = recorded_run.train(arguments(tmp_path / "run", **sizes, optim__epochs=1), None)
    capsys.readouterr()
    documents += recorded_run.train(arguments(tmp_path / "run", **sizes, optim__epochs=3), None)
    assert documents == expected
    lines = [records(tmp_path / name) for name in ("run", "whole")]
    assert [line["step"] for line in lines[0]] == list(range(1, 25))
    assert lines[0][-1]["tokens"] == lines[1][-1]["tokens"]
    printed = capsys.readouterr().out
    jump = re.search(
        r"continues at step 8 with optim.epochs 3, before 1: the learning rate jumps from (\S+) to (\S+)\n", printed
    )
    assert float(jump[1]) < 1e-4
    assert float(jump[2]) == pytest.approx(lines[1][7]["lr"], rel=0.05)


def test_what_does_not_change_the_run_may_change(tmp_path, finished, arguments):
    run = shutil.copytree(finished, tmp_path / "run")
    main(arguments(run, checkpoint__keep=1, tracker__wandb="none", data__batch_size=1, optim__accumulation=2))
    assert records(run) == records(finished)


@each_case()
def test_bad_options_end_in_a_sentence(tmp_path, arguments, changes, message):
    assert message in refusal(arguments(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__batch_size": 500}, "data.batch_size x 1 processes needs 500"),
        ({"optim__name": "muon"}, "optim.name is 'muon', which needs whole matrices, and FSDP shards them"),
    ],
)
def test_what_cannot_run_is_refused_before_the_target_is_read(tmp_path, arguments, monkeypatch, changes, message):
    monkeypatch.setattr(target_files, "load_frozen_target", None)
    if "optim__name" in changes:
        sharded = SimpleNamespace(distributed_type=DistributedType.FSDP, num_processes=2)
        monkeypatch.setattr(loop, "Accelerator", lambda **_options: sharded)
    assert message in refusal(arguments(tmp_path, **changes))


def test_an_interrupt_before_the_first_step_ends_in_a_word(tmp_path, arguments, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(target_files, "load_frozen_target", interrupt)
    assert refusal(arguments(tmp_path)) == "130"
    assert capsys.readouterr().err.endswith("train/eagle3.py: interrupted\n")


def test_a_draft_has_an_mlp_of_its_own_width(tmp_path, arguments):
    main(arguments(tmp_path, draft__intermediate_size=64, draft__head="trained", optim__steps=1))
    assert weights(tmp_path, 1)["draft.midlayer.mlp.down_proj.weight"].shape == (32, 64)


def test_a_frozen_head_stays_the_targets(tmp_path, arguments, target_path):
    main(arguments(tmp_path, draft__head="frozen", optim__name="muon"))
    state = weights(tmp_path)
    target = load_file(target_path / "model.safetensors")
    ids = state["draft.d2t"] + torch.arange(DRAFT_VOCAB_SIZE)
    head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
    torch.testing.assert_close(state["draft.lm_head.weight"], head[ids].float(), rtol=0, atol=0)
    fresh = torch.eye(state["draft.fc.weight"].shape[0])
    assert not torch.equal(state["draft.fc.weight"][:, -len(fresh) :], fresh)  # the rest has moved


def test_a_map_of_another_target_is_refused(tmp_path, arguments):
    path = tmp_path / "map.safetensors"
    TokenMap.build(torch.ones(120, dtype=torch.int64), 20, [], {"tokenizer_hash": "another"}).write(path)
    assert "was counted with another tokenizer" in refusal(arguments(tmp_path / "output", draft__vocabulary=path))
