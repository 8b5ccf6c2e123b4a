"""Coverage and its cost, against sums written out and a simulated draft."""

import random

import pytest

from slipstream.data_tools.token_coverage import expected_accept_length
from slipstream.data_tools.verb_options import check_accept_rates


def test_the_expected_loss_is_that_of_a_draft_whose_tokens_fall_out_of_the_map_by_chance():
    conditional = (0.8, 0.7, 0.6)
    coverage = 0.9
    rounds = 40_000
    generator = random.Random(0)
    emitted = 0
    for _ in range(rounds):
        emitted += 1
        for rate in conditional:
            if generator.random() >= rate or generator.random() >= coverage:
                break
            emitted += 1
    rates = (0.8, 0.8 * 0.7, 0.8 * 0.7 * 0.6)
    assert expected_accept_length(rates, coverage) == pytest.approx(emitted / rounds, abs=0.02)
    assert expected_accept_length(rates, 1.0) == pytest.approx(1 + sum(rates))
    assert expected_accept_length(rates, 0.0) == 1.0


def test_published_losses_are_smaller_than_the_models():
    """FR-Spec, Llama-3-8B and Qwen2-7B: 25% of the vocabulary, 95% of the tokens, 93.3% and 95.4% of the length."""
    for full, published in ((3.89, 0.933), (3.74, 0.954)):
        ratio = next(rate / 1e4 for rate in range(10_000) if sum((rate / 1e4) ** k for k in range(7)) >= full)
        rates = [ratio**k for k in range(1, 7)]
        modelled = expected_accept_length(rates, 0.95) / full
        assert published - 0.06 < modelled < published


@pytest.mark.parametrize("rates", [(), (0.5, 0.6), (1.1,), (-0.1,), (float("nan"),)])
def test_rates_that_rise_are_refused(rates):
    with pytest.raises(ValueError, match="accept_rates is"):
        check_accept_rates(rates)
    check_accept_rates((1.0, 1.0, 0.0))
