"""No false alarm: of the trained drafts in tests/assets (train.py there says how they were made) nothing is wrong."""

from pathlib import Path

import pytest

from slipstream.doctor.cli import DoctorConfig, examine
from slipstream.tests.test_packaging import ROOT

DRAFTS = sorted(path.parent for path in (ROOT / "tests" / "assets").glob("*/config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.name)
def test_healthy_drafts(draft: Path) -> None:
    config = DoctorConfig(draft=str(draft), target=str(ROOT / "assets" / "tiny-target"), limit=32)
    found = examine(config)
    assert not [finding for finding in found.findings if finding.kind in ("cause", "risk")]
    assert not found.is_wrong
    assert found.diagnosis.as_read is not None
    assert found.served == pytest.approx(found.diagnosis.as_read.accept_length, rel=0.03)
