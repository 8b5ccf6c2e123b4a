"""The accept length that a running server reports: ours, and, by what their documentation says, SGLang's and vLLM's."""

import urllib.error
import urllib.request
from dataclasses import dataclass

from slipstream.serve.measure.server_counts import kind_of, read_counts

TIMEOUT = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    server: str  # slipstream, vllm or sglang
    accept_length: float | None  # None: no round yet
    is_tested: bool  # against a real server of this kind


def read_endpoint(url: str) -> Endpoint:
    """Raises ValueError for a server that cannot be reached or reports nothing of the kind."""
    url = url.rstrip("/").removesuffix("/v1")
    text = _get(f"{url}/metrics")
    kind, counts = kind_of(text), read_counts(text)
    if counts is None:
        raise ValueError(f"{url}/metrics reports no accept length in the form of Slipstream, vLLM or SGLang")
    length = counts.decoded_tokens / counts.rounds if counts.rounds else None
    return Endpoint(url, kind, length, kind == "slipstream")


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:  # noqa: S310  the user's own URL
            return str(reply.read().decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ValueError(f"endpoint {url} could not be read: {error}") from error
