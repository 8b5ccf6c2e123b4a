"""The accept length that a running server reports: ours, and, by what their documentation says, SGLang's and vLLM's."""

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass

TIMEOUT = 10.0  # seconds
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)$")


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    server: str  # slipstream, vllm or sglang
    accept_length: float | None  # None: no round yet
    is_tested: bool  # against a real server of this kind


def read_endpoint(url: str) -> Endpoint:
    """Raises ValueError for a server that cannot be reached or reports nothing of the kind."""
    url = url.rstrip("/").removesuffix("/v1")
    metrics = parse(_get(f"{url}/metrics"))
    if "vllm:spec_decode_num_drafts_total" in metrics or "vllm:spec_decode_num_drafts" in metrics:
        drafts = _first(metrics, "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_drafts")
        accepted = _first(metrics, "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens")
        return Endpoint(url, "vllm", 1 + accepted / drafts if drafts else None, False)
    if "sglang:spec_accept_length" in metrics:
        return Endpoint(url, "sglang", metrics["sglang:spec_accept_length"] or None, False)
    rounds = metrics.get("slipstream_rounds_total", metrics.get("slipstream_rounds"))
    if rounds is not None:
        accepted = _first(metrics, "slipstream_accepted_tokens_total", "slipstream_accepted_tokens")
        return Endpoint(url, "slipstream", 1 + accepted / rounds if rounds else None, True)
    raise ValueError(f"{url}/metrics reports no accept length in the form of Slipstream, vLLM or SGLang")


def parse(text: str) -> dict[str, float]:
    """Prometheus' text format: the sum over labels of each sample's name."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line.strip())
        if match and not line.startswith("#"):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def _first(metrics: dict[str, float], *names: str) -> float:
    return next((metrics[name] for name in names if name in metrics), 0.0)


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:  # noqa: S310  the user's own URL
            return str(reply.read().decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError, json.JSONDecodeError) as error:
        raise ValueError(f"endpoint {url} could not be read: {error}") from error
