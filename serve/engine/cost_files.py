"""Keeps times of steps on disk, so that an engine with the same options need not measure them. Imports no torch."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.models.files.atomic import atomic_file
from slipstream.models.files.cost_tables import FORMAT

FOLDER_VARIABLE = "SLIPSTREAM_CACHE"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CostKey:
    """Everything that the time of a step depends on: tables are reused where every field is equal."""

    gpu: str
    torch: str
    triton: str
    slipstream: str
    model: str  # `text_hash` of its config.json
    draft: str  # `text_hash` of its config.json, or of its name if it has none
    options: Mapping[str, Any] = field(default_factory=dict)  # dtype, attention, page size, most requests, widths...

    def name(self) -> str:
        """Returns the tables' file name."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, default=str)
        return f"{text_hash(text)}.json"


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def cache_folder() -> Path:
    """Returns $SLIPSTREAM_CACHE/step_costs, or ~/.cache/slipstream/step_costs."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return (Path(folder) if folder else Path.home() / ".cache" / "slipstream") / "step_costs"


def load(key: CostKey) -> dict[str, Any] | None:
    """Returns the tables saved for `key`, or None. A damaged file counts as none; the next `save` replaces it."""
    path: Path | None = None
    try:
        path = cache_folder() / key.name()
        data = json.loads(path.read_text())
        if data["format"] != FORMAT or not isinstance(data["tables"], dict):
            raise ValueError("it holds something else")
        logger.info("step times are read from %s", path)
        return data["tables"]
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:  # RuntimeError: no home folder
        logger.warning("step times are measured again: %s cannot be read: %s", path or "their file", error)
        return None


def save(key: CostKey, tables: Mapping[str, Any]) -> None:
    """Writes the tables, whole or not at all. Logs a warning if they cannot be written."""
    try:
        path = cache_folder() / key.name()
        with atomic_file(path) as new:
            new.write_text(json.dumps({"format": FORMAT, "key": asdict(key), "tables": tables}, indent=1, default=str))
        logger.info("step times are kept in %s", path)
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning("step times are not kept for the next start: %s", error)
