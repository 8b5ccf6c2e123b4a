"""Which engines are exact, and the program that checks it. The bits themselves are checked on a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

from slipstream.serve import exact_check
from slipstream.serve.drafters.options import NgramOptions
from slipstream.serve.engine import engine_plan
from slipstream.serve.engine.engine_plan import read_plan
from slipstream.serve.exact_check import ExactCheckConfig, check, main
from slipstream.serve.options import EngineConfig
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import build_engine
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error


def test_what_is_not_exact_says_so_and_is_refused_where_it_is_asked_for(target):
    assert build_engine(target).info.inexact == "libraries for a CPU add in another order for another number of rows"
    assert build_engine(target, exact=False).info.inexact == "exact is false (--fast)"
    with user_error("exact is true, but libraries for a CPU .*; change that, or leave exact out"):
        build_engine(target, exact=True)
    with user_error("tp_exact is true, but libraries for a CPU .*, or leave tp_exact out"):
        build_engine(target, tp_exact=True)


@each_case()
def test_reasons(options, reason, target, draft, monkeypatch):
    """As on a GPU that adds in a fixed order."""
    monkeypatch.setattr(engine_plan.FixedOrder, "fault", lambda *_: "")
    monkeypatch.setattr(engine_plan, "INPUTS", 1)
    options = {"attention": "prefill=sdpa,verify=triton,draft=triton", "device": "cpu"} | options
    options["draft"] = str(draft) if options["draft"] == "DRAFT" else options["draft"]
    reasons = read_plan(EngineConfig(target=str(target), **options)).inexact
    assert (reason in reasons) if reason else not reasons, reasons


def test_layers_of_odd_sizes_are_not_exact(target, monkeypatch):
    monkeypatch.setattr(engine_plan.FixedOrder, "fault", lambda *_: "")
    config = EngineConfig(target=str(target), attention="prefill=sdpa,verify=triton,draft=triton", device="cpu")
    assert "a layer has 32 inputs, no multiple of 64" in read_plan(config).inexact


def test_n_grams_of_one_child_are_chains():
    assert NgramOptions().branches
    assert not NgramOptions(breadth=1).branches


def test_fingerprints_tell_what_answers_depend_on(target):
    first = build_engine(target).info.fingerprint
    again = build_engine(target).info.fingerprint
    assert first == again
    assert first.startswith("fp_")
    assert build_engine(target, page_size=1).info.fingerprint != first


def test_the_check_compares_every_answer(target, tmp_path, capsys):
    save_random_draft(target, tmp_path / "draft", 80)
    names = {"target": str(target), "draft": str(tmp_path / "draft"), "requests": 3, "output_len": 6}
    options = {"exact": None, "device": "cpu"}
    config = ExactCheckConfig(**names, longest_prompt=20, engine=options)
    assert check(config) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 + 3 + 1 + 1
    assert all("3 of 3" in row for row in rows[1:])


def test_the_check_fails_where_exact_arithmetic_is_impossible(target, exits):
    with exits("exact is true, but libraries for a CPU", 1):
        main(["--target", str(target), "--requests", "2", "--longest-prompt", "9", "--engine.device", "cpu"])


def test_the_check_tells_the_first_difference(monkeypatch, capsys):
    expected = {"0": [1, 2, 3], "1": [4, 4, 4]}
    answers = iter([expected, expected | {"0": [1, 5, 3], "1": [4, 4]}])
    engine = SimpleNamespace(info=SimpleNamespace(vocab_size=9))
    monkeypatch.setattr(exact_check, "running", lambda _: nullcontext(engine))
    monkeypatch.setattr(exact_check, "answer", lambda *_: next(answers, expected))
    assert check(ExactCheckConfig(target="target", requests=2, longest_prompt=9, output_len=3)) == 2
    places = [line.split(" | ")[-1].strip(" |") for line in capsys.readouterr().out.splitlines()[2:]]
    assert places == ["", "token 1", "", ""]
