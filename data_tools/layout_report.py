"""What changed between two layouts of one draft: tensors and fields of config.json, by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slipstream.models.checkpoint import FUSED
from slipstream.models.speculators_layout import RENAMED


def changes(
    names: Sequence[str],
    written: Sequence[str],
    rename: Callable[[str], str],
    old: Mapping[str, Any],
    new: Mapping[str, Any],
) -> Iterator[str]:
    """A line for every tensor and every field that was renamed, added, left out or has another value.

    names, written: of the tensors before and after; `rename` gives the name that one is looked for afterwards.
    old, new: config.json before and after.
    """
    yield from tensor_changes(names, set(written), rename)
    yield from field_changes(dict(_flatten(old)), dict(_flatten(new)))


def tensor_changes(names: Sequence[str], written: set[str], rename: Callable[[str], str]) -> Iterator[str]:
    places = {name: [place for place in _split(rename(name)) if place in written] for name in names}
    for name, found in places.items():
        if not found:
            yield f"tensor {name} left out"
        elif found != [name]:
            yield f"tensor {name} -> {', '.join(found)}"
    for name in sorted(written - {place for found in places.values() for place in found}):
        yield f"tensor {name} added"


def _split(name: str) -> list[str]:
    """Itself and, for projections in one tensor, the names of its parts."""
    return [name] + [name.replace(joined, part) for joined in FUSED if f".{joined}." in name for part in FUSED[joined]]


def field_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """old, new: values by dotted path."""
    places = {path: path if path in new else _moved_to(path, new.keys() - old.keys()) for path in sorted(old)}
    for path, place in places.items():
        if place is None:
            yield f"field {path} left out"
        elif new[place] != old[path]:
            yield f"field {path} -> {place}: {old[path]} -> {new[place]}"
        elif place != path:
            yield f"field {path} -> {place}"
    for path in sorted(new.keys() - set(places.values())):
        yield f"field {path} added: {new[path]}"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _moved_to(path: str, added: set[str]) -> str | None:
    """The new place of the same field, which may have another name there."""
    name = path.rpartition(".")[2]
    names = {name, *(pair[1 - index] for pair in RENAMED for index in (0, 1) if pair[index] == name)}
    return min((place for place in added if place.rpartition(".")[2] in names), default=None)
