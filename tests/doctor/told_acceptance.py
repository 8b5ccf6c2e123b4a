"""Acceptance that an engine tells, in a module that its process loads at once."""

from slipstream.serve.engine.counts import AcceptanceView, CategoryState, EngineCounts, RecentAcceptance
from slipstream.tests.serve.fake_engine import FakeEngine

FACTS = {
    **{"draft": "d1", "target": "t1", "trained_target": "same", "trained_length": "4096"},
    **{"quantization": "none", "kv_cache": "auto", "changed": ""},
}
Rates = dict[str, float]  # of late, by category; 0.7 by the record


def view(rates: Rates, clients: str = "several", new_prompts: float = 0.0, **facts: str) -> AcceptanceView:
    """Categories below 0.6 are alarmed."""
    states = []
    for name, rate in rates.items():
        recent = RecentAcceptance(segments=100, rate=rate, length=1 + 2 * rate, record_rate=0.7, record_length=2.4)
        is_alarmed = rate < 0.6
        states.append(CategoryState(name, "day", clients if is_alarmed else "", 1.0 if is_alarmed else 0.1, recent))
    return AcceptanceView(tuple(states), new_prompts, FACTS | facts)


SOUND: Rates = {"all": 0.7, "chat": 0.7, "greedy": 0.7, "sampled": 0.69, "context <1k": 0.7, "context 1-4k": 0.7}
FELL: Rates = dict.fromkeys(SOUND, 0.1)


class FallenEngine(FakeEngine):
    def counts(self) -> EngineCounts:
        return EngineCounts(acceptance=view(FELL))


class SoundEngine(FakeEngine):
    def counts(self) -> EngineCounts:
        return EngineCounts(acceptance=view(SOUND))
