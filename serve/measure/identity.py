"""Says which target and draft a measurement is of, so that the figures of one draft never continue those of another.

A server is known by what it lists at /v1/models and by the start of its process, which /metrics tells. Ours lists
fingerprints of its weights instead, so that a measurement goes on after a restart with the same checkpoints.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from slipstream.models.drafts.source import source_of
from slipstream.models.files.checkpoint import checkpoint_fingerprint, resolve
from slipstream.serve.load import Client

Identity = dict[str, Any]
PROCESS_START = re.compile(r"^process_start_time_seconds ([\d.e+]+)$", re.MULTILINE)


async def server_identities(urls: Sequence[str], *, model: str | None, api_key: str | None) -> Identity | None:
    """Returns the identities of all servers, names with their URLs; None if one of them does not tell it."""
    identities: Identity = {}
    for url in urls:
        async with Client(url, connections=1, model=model, api_key=api_key) as client:
            identity = read_identity(await client.read("/v1/models"), await client.read("/metrics"), client.model)
        if identity is None:
            return None
        identities |= {f"{name} of {url}": value for name, value in identity.items()}
    return identities


def read_identity(models: str | None, metrics: str | None, name: str | None) -> Identity | None:
    """Reads the texts of /v1/models and /metrics of a server that serves the model `name`. Gateways may list nothing,
    or answer with a page."""
    try:
        entries = {entry["id"]: entry for entry in json.loads(models or "")["data"]}
    except (ValueError, LookupError, TypeError):
        entries = {}
    entry = entries.get(name, {})
    if "draft_fingerprint" in entry:
        fingerprints = {key: entry[key] for key in ("system_fingerprint", "draft_fingerprint")}
        return {"model": name, **fingerprints}
    start = PROCESS_START.search(metrics or "")
    return {"model": name, "process_start": float(start[1])} if start is not None else None


def checkpoint_identity(target: str, draft: str) -> Identity:
    """Returns fingerprints of the checkpoints, paths or names on the hub; of a draft without a checkpoint its name."""
    return {"target": checkpoint_fingerprint(resolve(target)), "draft": source_of(draft).fingerprint}
