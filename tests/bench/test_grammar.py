"""What drafts of forced tokens gain is measured over answers that are the same with them and without."""

from typing import Any

import pytest

from slipstream.bench.grammar import GrammarConfig, measure
from slipstream.tests.serve.correctness import TARGET


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"requests": 2, "temperature": 1.0, "space_bias": -20.0}])
def test_answers_are_the_same_and_take_fewer_rounds(options: dict[str, Any]) -> None:
    config = GrammarConfig(
        target=str(TARGET), device="cpu", rounds=2, max_tokens=60, engine={"kv_cache_tokens": 2048}, **options
    )
    line = measure(config)
    assert line["same_tokens"]
    assert line["plain_accept_length"] == 1.0
    assert line["accept_length"] > 1.5
    assert 0.1 < line["forced"] < 1
    assert min(line["host_ms"], line["plain_host_ms"], line["ratio"]) > 0


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match="rounds is 1; give at least 2"):
        GrammarConfig(rounds=1)
