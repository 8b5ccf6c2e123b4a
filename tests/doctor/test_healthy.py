"""No false alarm: of the trained drafts in tests/assets (train.py there says how they were made) nothing is wrong."""

from collections import Counter

import pytest

from slipstream.doctor.cli import DoctorConfig, examine
from slipstream.tests.test_packaging import ROOT

DRAFTS = sorted(path.parent.name for path in (ROOT / "tests" / "assets").glob("*/config.json"))
QUICK = ("dspark", "eagle3")


def check(draft: str, **options: int) -> None:
    folder = ROOT / "tests" / "assets" / draft
    found = examine(DoctorConfig(draft=str(folder), target=str(ROOT / "assets" / "tiny-target"), **options))
    assert not [finding for finding in found.findings if finding.kind in ("cause", "risk")]
    assert not found.is_wrong
    assert found.diagnosis.as_read is not None
    assert found.served == pytest.approx(found.diagnosis.as_read.accept_length, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_healthy_drafts(draft: str) -> None:
    check(draft, limit=32)


@pytest.mark.parametrize("draft", QUICK)
def test_healthy_drafts_on_a_few_short_answers(draft: str) -> None:
    check(draft, limit=8, max_tokens=32)


def test_there_are_three_healthy_drafts_of_each_kind() -> None:
    kinds = ("eagle3", "eagle", "dflash", "dspark")
    found = Counter(next(kind for kind in kinds if draft.split("-")[0] == kind) for draft in DRAFTS)
    assert found == dict.fromkeys(kinds, 3)
    sizes = [path.stat().st_size for path in (ROOT / "tests" / "assets").rglob("*") if path.is_file()]
    assert sum(sizes) <= 6_000_000
