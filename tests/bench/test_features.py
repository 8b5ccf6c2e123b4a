"""What features cost: which of them are measured, and that a wrong name is refused."""

from pathlib import Path

import pytest

from slipstream.bench.features import FeaturesConfig, features
from slipstream.bench.lines import read_lines

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"


def test_each_feature_is_measured_for_all_requests_and_for_one(tmp_path: Path) -> None:
    names = ["bias", "any text"]
    sizes = {"levels": "2", "turns": 2, "max_tokens": 10, "engine": {"max_model_len": 512}}
    features(FeaturesConfig(target=str(TINY), features=names, output=str(tmp_path / "lines.jsonl"), **sizes))
    lines = read_lines(tmp_path / "lines.jsonl")
    assert [(line["feature"], line["requests"], line["share"]) for line in lines] == [
        (name, 2, share) for name in names for share in (2, 1)
    ]
    for line in lines:
        assert (line["masks_us"] > 0) == (line["feature"] == "any text")
        assert line["tokens"] == line["plain_tokens"] == 2.0, "a token of each request a step"
        assert line["ratio"] == pytest.approx(line["ms"] / line["plain_ms"], rel=1e-2)


def test_unknown_features_are_named() -> None:
    with pytest.raises(ValueError, match="features has 'colour'; choose from penalties, bias"):
        FeaturesConfig(features=["colour"])
