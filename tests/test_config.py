"""Values of the wrong type and empty sections of a file, through the parser as programs call it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from slipstream.config import parse


@dataclass(frozen=True, kw_only=True)
class Section:
    """Options of a part."""

    rate: float = 0.5
    """A number."""
    kind: Literal["fast", "exact", "none"] = "fast"
    """One of three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a test."""

    size: int = 3
    """A whole number."""
    most: int | None = None
    """A whole number or nothing."""
    layers: tuple[int, ...] | None = None
    """A list."""
    quick: bool = True
    """A switch."""
    part: Section = field(default_factory=Section)
    """A section."""


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(Options, argv, prog="test", description="A test.")
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--size=7.5", "size is '7.5'; give a whole number"),
        ("--most=few", "most is 'few'; give a whole number"),
        ("--layers=all", "layers is 'all'; give a list such as [1, 2]"),
        ("--quick=maybe", "quick is 'maybe'; give true or false"),
        ("--part.rate=abc", "part.rate is 'abc'; give a number"),
        ("--part.kind=slow", "part.kind is 'slow'; give fast or exact or none"),
    ],
)
def test_a_value_of_the_wrong_type(
    flag: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert refusal(capsys, flag) == f"test: error: {sentence}"
    name, value = flag.removeprefix("--").split("=")
    file = tmp_path / "options.yaml"
    file.write_text(f"part:\n  {name.removeprefix('part.')}: {value}\n" if "." in name else f"{name}: {value}\n")
    found = refusal(capsys, "--config", str(file))
    assert found.replace("'7.5'", "7.5") == f"test: error: {sentence}".replace("'7.5'", "7.5")


def test_an_empty_section(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("size: 4\npart:\n")
    assert refusal(capsys, "--config", str(file)) == (
        f"test: error: part in {file} is empty; give part.kind or another option below it, or leave it out"
    )
    file.write_text("size: 4\nmost: null\n")
    assert parse(Options, ["--config", str(file)], prog="test", description="A test.").size == 4
