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
from slipstream.tests.doctor.told_acceptance import FELL, SOUND, FallenEngine, Rates, SoundEngine, view
from slipstream.tests.serve.fake_server import serving, write_target


def report(acceptance: AcceptanceView) -> LiveReport:
    engine = EngineView({}, EngineCounts(acceptance=acceptance), num_open=0, is_up=True, is_ready=True)
    return report_of("http://there", "model", Metrics().render(engine)[0].decode())


LONG: Rates = {"all": 0.5, "chat": 0.5, "greedy": 0.5, "context <1k": 0.7, "context 4-16k": 0.3}


@pytest.mark.parametrize(
    ("acceptance", "causes"),
    [
        (view(SOUND), []),
        (view(SOUND, new_prompts=1.0, changed="target"), []),
        (view(FELL), ["the draft"]),
        (view(FELL, trained_target="other"), ["target changed"]),
        (view(FELL, changed="target"), ["target changed"]),
        (view(FELL, changed="draft"), ["draft changed"]),
        (view(FELL, new_prompts=0.8), ["template changed"]),
        (view(FELL, quantization="fp8"), ["quantised target"]),
        (view(FELL, kv_cache="fp8", changed="kv_cache"), ["quantised target"]),
        (view(LONG), ["context longer than trained"]),
        (view({"all": 0.3, "context 4-16k": 0.3}), ["context longer than trained"]),
        (view({"all": 0.3, "context 4-16k": 0.3}, trained_length=""), ["the draft"]),
        (view({"all": 0.3, "context 4-16k": 0.3}, trained_length="8192"), ["the draft"]),
        (view({"all": 0.5, "context <1k": 0.5, "greedy": 0.7, "sampled": 0.3}), ["temperature"]),
        (view({"all": 0.65, "chat": 0.66, "greedy": 0.7, "tools": 0.2}), ["a category of its own"]),
        (view(FELL, clients="one"), ["one client"]),
    ],
    ids=str,
)
def test_causes(acceptance: AcceptanceView, causes: list[str]) -> None:
    examined = report(acceptance)
    assert [cause.name for cause in examined.causes] == causes
    assert examined.is_wrong == bool(causes)
    text = live_text(examined)
    assert ("No alarm" in text) == (not causes)
    assert re.findall(r"^(?:LIKELY|OR)  (.+)$", text, re.MULTILINE) == causes
    assert text.count("ALARM") == sum(bool(state.clients) for state in acceptance.states)
    assert len(text.splitlines()) < 60


def test_a_page_without_requests_and_another_server() -> None:
    assert "No request has a record yet" in live_text(report(AcceptanceView()))
    with pytest.raises(ValueError, match="live is http://there, whose /metrics have no acceptance alarm"):
        report_of("http://there", "model", "vllm:num_requests_running 1.0\n")


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
