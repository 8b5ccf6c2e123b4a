"""Reads how a server has drafted from its /metrics: ours, vLLM's or SGLang's counters, by their documented names.

vLLM: `vllm:spec_decode_num_drafts`, `..._num_accepted_tokens`, `..._num_accepted_tokens_per_pos` (with or without
`_total`). SGLang, started with --enable-metrics: `sglang:spec_verify_calls_total` and `sglang:generation_tokens_total`;
its gauge `sglang:spec_accept_length` is of its last interval and cannot be told apart by run.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["slipstream", "vllm", "sglang", "unknown"]
PREFIXES: dict[str, Kind] = {"slipstream_": "slipstream", "vllm:": "vllm", "sglang:": "sglang"}
SAMPLE = re.compile(r"([\w:]+?)(?:_total)?(?:\{(.*)\})? ([-+.\deE]+|NaN)(?: \d+)?")
BY_POSITION = {  # and the first position
    "slipstream_accepted_tokens": 1,
    "vllm:spec_decode_num_accepted_tokens_per_pos": 0,
}
ROUNDS = {
    "slipstream": "slipstream_rounds",
    "vllm": "vllm:spec_decode_num_drafts",
    "sglang": "sglang:spec_verify_calls",
}
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """`decoded_tokens`: emitted by the rounds, that is, without those that come with a prompt."""

    rounds: int = 0
    decoded_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()

    def since(self, earlier: "RoundCounts") -> "RoundCounts":
        before = (*earlier.accepted_by_position, *[0] * len(self.accepted_by_position))
        positions = zip(self.accepted_by_position, before, strict=False)
        return RoundCounts(
            self.rounds - earlier.rounds,
            self.decoded_tokens - earlier.decoded_tokens,
            tuple(now - then for now, then in positions),
        )


def kind_of(metrics: str | None) -> Kind:
    """Recognises the server by its text of /metrics; None: it has none."""
    lines = (metrics or "").splitlines()
    return next((kind for line in lines for prefix, kind in PREFIXES.items() if line.startswith(prefix)), "unknown")


def read_counts(metrics: str | None) -> RoundCounts | None:
    """Reads the counts of a text of /metrics, summed over engines; None if it has no counters of speculation."""
    kind = kind_of(metrics)
    totals = defaultdict[str, float](float)
    positions = defaultdict[int, float](float)
    for line in (metrics or "").splitlines():
        match = SAMPLE.fullmatch(line)
        if match is None or match[3] == "NaN":
            continue
        name = match[1]
        labels = match[2] or ""
        value = float(match[3])
        totals[name] += value
        position = POSITION.search(labels)
        if position is not None and name in BY_POSITION:
            positions[int(position[1]) - BY_POSITION[name]] += value
    counts = tuple(int(positions[index]) for index in range(max(positions, default=-1) + 1))
    return counts_of(kind, totals, counts)


def counts_of(kind: Kind, totals: dict[str, Any], positions: tuple[int, ...]) -> RoundCounts | None:
    if kind == "unknown" or ROUNDS[kind] not in totals:
        return None
    rounds = totals[ROUNDS[kind]]
    if kind == "slipstream":
        decoded = totals["slipstream_decoded_tokens"]
    elif kind == "vllm":
        decoded = rounds + totals["vllm:spec_decode_num_accepted_tokens"]
    else:  # a prompt gives an answer its first token
        decoded = totals["sglang:generation_tokens"] - totals["sglang:num_requests"]
    return RoundCounts(int(rounds), int(decoded), positions)
