"""Reads a draft's acceptance from files: in its training, and in its days on earlier servers. Imports no torch.

A server keeps the record of its last day in $SLIPSTREAM_CACHE/acceptance, where that is set: one file for each draft
and target, by name, so that a new target, template or draft under an old name is compared with the old one.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from slipstream.models.drafts.source import DraftSource
from slipstream.models.files.atomic import write_json
from slipstream.serve.engine.acceptance_alarm import AcceptanceAlarm, Baseline
from slipstream.serve.engine.cost_files import FOLDER_VARIABLE, text_hash

FORMAT = 1
DIGITS = 12  # of a fingerprint

logger = logging.getLogger(__name__)


def trained_record(source: DraftSource) -> Baseline | None:
    """Returns what the training of a draft measured on held-out answers; None if its files do not say."""
    metrics = source.read_run().get("metrics")
    if not isinstance(metrics, dict):
        return None
    rate = metrics.get("accept_rate_0")
    length = metrics.get("accept_length")
    if not isinstance(rate, int | float) or not isinstance(length, int | float) or not 0 < rate <= 1:
        return None
    return Baseline(float(rate), float(length))


def draft_facts(source: DraftSource, of_target: Mapping[str, str]) -> dict[str, str]:
    """Returns facts of draft and target that may explain its acceptance. `of_target`: the beginning of the target's
    fingerprint (`target`), its `quantization` and `kv_cache`. `trained_target`: whether the target is the one that the
    draft was trained for (same, other, unknown)."""
    trained_for = source.read_config().get("target_fingerprint")
    trained_target = "unknown"
    if trained_for:
        trained_target = "same" if trained_for[:DIGITS] == of_target["target"] else "other"
    return {
        "draft": source.fingerprint[:DIGITS],
        "target": of_target["target"],
        "trained_target": trained_target,
        "trained_length": str(source.read_run().get("max_length") or ""),
        "quantization": of_target["quantization"],
        "kv_cache": of_target["kv_cache"],
        "changed": "",
    }


def record_path(draft: str, target: str) -> Path | None:
    """Returns the file of a draft and a target, by their names; None where $SLIPSTREAM_CACHE is not set."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) / "acceptance" / f"{text_hash(f'{draft} {target}')}.json" if folder else None


def load_record(path: Path, alarm: AcceptanceAlarm) -> None:
    """Gives the alarm the record in a file, if there is one, and notes in its facts which of them have changed since. A
    damaged file counts as none."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ValueError("it holds something else")
        alarm.load(data)
        changed = [name for name, value in data["facts"].items() if alarm.facts.get(name, value) != value]
        alarm.facts["changed"] = " ".join(changed)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the record of acceptance begins anew: %s cannot be read: %s", path, error)


def save_record(path: Path, alarm: AcceptanceAlarm) -> None:
    """Writes the alarm's record, whole or not at all. Logs a warning if it cannot be written."""
    facts = {name: value for name, value in alarm.facts.items() if name != "changed"}
    try:
        write_json(path, {"format": FORMAT, "facts": facts, **alarm.to_json()})
    except (OSError, ValueError) as error:
        logger.warning("the record of acceptance is not kept for the next start: %s", error)
