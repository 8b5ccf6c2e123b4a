"""Accept lengths of running servers, by the texts of /metrics that their documentation shows."""

import pytest

from slipstream.doctor import endpoint

VLLM = "# TYPE x counter\nvllm:spec_decode_num_drafts_total 10.0\nvllm:spec_decode_num_accepted_tokens_total 15.0\n"
OURS = "slipstream_rounds_total 10\nslipstream_completion_tokens_total 27\nslipstream_requests_total 2\n"


@pytest.mark.parametrize(("text", "server", "length"), [(VLLM, "vllm", 2.5), (OURS, "slipstream", 2.5)])
def test_it_is_read(text: str, server: str, length: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_get", lambda _: text)
    found = endpoint.read_endpoint("http://host:1/v1/")
    assert (found.url, found.server, found.accept_length) == ("http://host:1", server, length)


def test_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_get", lambda _: "http_requests_total 3\n")
    with pytest.raises(ValueError, match="reports no accept length"):
        endpoint.read_endpoint("http://host:1")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="could not be read"):
        endpoint.read_endpoint("http://127.0.0.1:9")
