"""The doctor finds nothing wrong in trained drafts (made by tests/assets/train.py), and names one of another target."""

import json
from collections import Counter

import pytest

from slipstream.doctor.diagnosis import Diagnosis
from slipstream.doctor.examination import Examination
from slipstream.doctor.examine import DoctorConfig, examine, little_training
from slipstream.doctor.replay import Round, Score
from slipstream.doctor.report import print_report, verdict
from slipstream.tests.sources import HYBRID, ROOT
from slipstream.tests.tables import each_case

DRAFTS = sorted(path.parent.name for path in (ROOT / "tests" / "assets").glob("*/config.json"))


def check(draft: str, **options: int):
    folder = ROOT / "tests" / "assets" / draft
    report = examine(DoctorConfig(draft=str(folder), target=str(ROOT / "assets" / "tiny-target"), **options))
    assert not [finding for finding in report.findings if finding.kind in ("cause", "risk")]
    assert not report.is_wrong
    assert report.served == pytest.approx(report.diagnosis.as_read.accept_length, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_healthy_drafts(draft):
    check(draft, limit=32)


def test_a_healthy_draft_on_a_few_short_answers():
    check("eagle3", limit=4, max_tokens=24)


@each_case()
def test_a_draft_that_was_hardly_trained_is_not_called_sound(run, cause, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(run))

    def examination(accepted):
        rounds = tuple(Round(answer=0, position=place, accepted=accepted) for place in range(2))
        score = Score(emitted=(2 + 2 * accepted,), rounds=rounds, depth=5)
        diagnosis = Diagnosis(findings=(), tried=(), as_read=score, mended=score)
        notes = tuple(little_training(tmp_path, diagnosis))
        return Examination(draft="d", target="t", family="eagle3", diagnosis=diagnosis, answered=(), notes=notes)

    undertrained = examination(accepted=0)
    assert verdict(undertrained).endswith("but the draft is seldom right: accept length 1.00.")
    [finding] = undertrained.findings
    assert cause in finding.cause
    sound = examination(accepted=1)
    assert (verdict(sound), sound.findings) == ("Nothing is wrong: accept length 2.00.", ())


def test_there_are_three_healthy_drafts_of_each_kind():
    kinds = ("eagle3", "eagle", "dflash", "dspark")
    counts = Counter(next(kind for kind in kinds if draft.split("-")[0] == kind) for draft in DRAFTS)
    assert counts == dict.fromkeys(kinds, 3)
    sizes = [path.stat().st_size for path in (ROOT / "tests" / "assets").rglob("*") if path.is_file()]
    assert sum(sizes) <= 6_000_000


def test_a_draft_of_a_target_of_another_width(capsys):
    draft = str(ROOT / "tests" / "assets" / "eagle3")
    examination = examine(DoctorConfig(draft=draft, target=str(HYBRID), limit=2, max_tokens=8, device="cpu"))
    print_report(examination)
    text = capsys.readouterr().out
    assert "The draft cannot be read: draft does not fit the target: target_num_layers is 6" in text
    assert "Accept length" not in text
