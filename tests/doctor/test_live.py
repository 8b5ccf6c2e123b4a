"""`slipstream doctor --live`: figures and causes read from texts of /metrics, and a server that is asked."""

import re

import pytest
from aiohttp import web

from slipstream.doctor.cli import main
from slipstream.doctor.live import LiveReport, live_text, report_of
from slipstream.doctor.options import DoctorConfig
from slipstream.serve.engine.counts import AcceptanceView, CategoryState, EngineCounts, RecentAcceptance
from slipstream.serve.http.metrics import EngineView, Metrics
from slipstream.tests.serve.paced_server import PacedServer, paced
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

FACTS = {
    **{"draft": "d1", "target": "t1", "trained_target": "same", "trained_length": "4096"},
    **{"quantization": "none", "kv_cache": "auto", "changed": ""},
}
Rates = dict[str, float]  # of late, by category; 0.7 by the record


def view(rates: Rates, clients: str = "several", new_prompts: float = 0.0, **facts: str) -> AcceptanceView:
    """Categories below 0.6 are alarmed."""
    states = []
    for name, rate in rates.items():
        recent = RecentAcceptance(segments=100, rate=rate, length=1 + 2 * rate, record_rate=0.7, record_length=2.4)
        is_alarmed = rate < 0.6
        states.append(CategoryState(name, "day", clients if is_alarmed else "", 1.0 if is_alarmed else 0.1, recent))
    return AcceptanceView(tuple(states), new_prompts, FACTS | facts)


SOUND: Rates = {"all": 0.7, "chat": 0.7, "greedy": 0.7, "sampled": 0.69, "context <1k": 0.7, "context 1-4k": 0.7}
FELL: Rates = dict.fromkeys(SOUND, 0.1)


def metrics_of(acceptance: AcceptanceView) -> str:
    engine = EngineView({}, EngineCounts(acceptance=acceptance), num_open=0, is_up=True, is_ready=True)
    return Metrics().render(engine)[0].decode()


def report(acceptance: AcceptanceView) -> LiveReport:
    return report_of("http://there", "model", metrics_of(acceptance))


@each_case()
def test_causes(rates, facts, causes):
    acceptance = view(rates or FELL, **facts)
    examined = report(acceptance)
    assert [cause.name for cause in examined.causes] == causes
    assert examined.is_wrong == bool(causes)
    text = live_text(examined)
    assert ("No alarm" in text) == (not causes)
    assert re.findall(r"^(?:LIKELY|OR)  (.+)$", text, re.MULTILINE) == causes
    assert text.count("ALARM") == sum(bool(state.clients) for state in acceptance.states)
    assert len(text.splitlines()) < 60


def test_a_page_without_requests_and_other_servers():
    assert "No request has a record yet" in live_text(report(AcceptanceView()))
    part = 'slipstream_accept_new_prompts 0.0\nslipstream_accept_evidence{category="all",record="day"} 1.0\n'
    for text in ("vllm:num_requests_running 1.0\n", part):
        with user_error("live is http://there, whose /metrics have no acceptance alarm"):
            report_of("http://there", "model", text)


def test_a_server_with_keys_asks_for_one(monkeypatch, capsys):
    async def models(*_):
        raise web.HTTPUnauthorized

    monkeypatch.setattr(PacedServer, "models", models)
    with paced("plain") as server, pytest.raises(SystemExit):
        main(["--live", server.url])
    assert f"{server.url} asks for a key (status 401); name a file" in capsys.readouterr().err


@pytest.mark.parametrize(("rates", "status"), [(FELL, 1), (SOUND, 0)])
def test_a_server_is_asked(rates, status, capsys, monkeypatch):
    async def metrics(*_):
        return web.Response(text=metrics_of(view(rates)))

    monkeypatch.setattr(PacedServer, "metrics", metrics)
    with paced("plain") as server, pytest.raises(SystemExit) as ending:
        main(["--live", server.url])
    assert ending.value.code == status
    assert ("ALARM" in capsys.readouterr().out) == bool(status)


def test_options():
    with user_error("live is 'http://there', .* leave draft and endpoint out"):
        DoctorConfig(live="http://there", draft="mtp")
    DoctorConfig(live="http://there").check_inputs()
