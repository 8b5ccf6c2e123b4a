"""`slipstream doctor --live`: figures and causes read from texts of /metrics, and a server that is asked."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.doctor.cli import main
from slipstream.doctor.live import LiveReport, live_text, report_of
from slipstream.doctor.options import DoctorConfig
from slipstream.serve.engine.counts import AcceptanceView, EngineCounts
from slipstream.serve.http.metrics import EngineView, Metrics
from slipstream.serve.options import ServeConfig
from slipstream.tests.doctor.told_acceptance import FELL, FallenEngine, Rates, SoundEngine, view
from slipstream.tests.serve.fake_server import serving, write_target
from slipstream.tests.tables import each_case


def report(acceptance: AcceptanceView) -> LiveReport:
    engine = EngineView({}, EngineCounts(acceptance=acceptance), num_open=0, is_up=True, is_ready=True)
    return report_of("http://there", "model", Metrics().render(engine)[0].decode())


@each_case()
def test_causes(rates: Rates | None, facts: dict[str, Any], causes: list[str]) -> None:
    acceptance = view(rates or FELL, **facts)
    examined = report(acceptance)
    assert [cause.name for cause in examined.causes] == causes
    assert examined.is_wrong == bool(causes)
    text = live_text(examined)
    assert ("No alarm" in text) == (not causes)
    assert re.findall(r"^(?:LIKELY|OR)  (.+)$", text, re.MULTILINE) == causes
    assert text.count("ALARM") == sum(bool(state.clients) for state in acceptance.states)
    assert len(text.splitlines()) < 60


def test_a_page_without_requests_and_other_servers() -> None:
    assert "No request has a record yet" in live_text(report(AcceptanceView()))
    part = 'slipstream_accept_new_prompts 0.0\nslipstream_accept_evidence{category="all",record="day"} 1.0\n'
    for text in ("vllm:num_requests_running 1.0\n", part):
        with pytest.raises(ValueError, match="live is http://there, whose /metrics have no acceptance alarm"):
            report_of("http://there", "model", text)


@pytest.mark.parametrize(("make_engine", "status"), [(FallenEngine, 1), (SoundEngine, 0)])
def test_a_server_is_asked(
    make_engine: Callable[[ServeConfig], Any], status: int, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    config = ServeConfig(target=str(write_target(tmp_path)), draft="none", port=0)
    with serving(config, make_engine) as server, pytest.raises(SystemExit) as ending:
        main(["--live", server.url])
    assert ending.value.code == status
    assert ("ALARM" in capsys.readouterr().out) == bool(status)


def test_options() -> None:
    with pytest.raises(ValueError, match="live is 'http://there', .* leave draft and endpoint out"):
        DoctorConfig(live="http://there", draft="mtp")
    DoctorConfig(live="http://there").check_inputs()
