"""What a call makes of its requests' outputs while nobody takes its text, against the same outputs taken one by one."""

import asyncio
import random
from typing import Any

import pytest

from slipstream.serve.client import EngineError
from slipstream.serve.completion import Completion, Delta, RequestFailed
from slipstream.serve.metrics import Metrics
from slipstream.serve.request import Output, Request, RequestStats, SamplingParams


class Hands:
    """In the engine's place: keeps receivers, aborts nothing."""

    def __init__(self) -> None:
        self.receivers: dict[str, Any] = {}
        self.aborted: list[str] = []

    def submit(self, request: Request, receiver: Any) -> None:
        self.receivers[request.id] = receiver

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Letters:
    """A decoder of one letter per token."""

    silent_ids = frozenset[int]()

    def __call__(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


def call(num_choices: int) -> tuple[Completion, Hands]:
    hands: Any = Hands()
    decoder: Any = Letters()
    completion = Completion(hands, decoder, Metrics(), watched=True)
    params = SamplingParams(max_tokens=99)
    requests = [Request(id=str(index), prompt=[1], params=params) for index in range(num_choices)]
    completion.submit(requests, ())
    return completion, hands


def output(index: int, tokens: list[int], is_last: bool = False) -> Output:
    stats = RequestStats(completion_tokens=9) if is_last else None
    return Output(request_id=str(index), tokens=tokens, finish_reason="length" if is_last else None, stats=stats)


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_text_that_waits_is_joined(burst: int) -> None:
    """Two choices, interleaved by chance: nothing is lost or moved, whoever waits for whom."""
    rng, lengths = random.Random(burst), [40, 25]
    order = [0] * 40 + [1] * 25
    rng.shuffle(order)

    async def run() -> list[Delta]:
        completion, hands = call(2)
        found: list[Delta] = []

        async def take() -> None:
            async for delta in completion.deltas():
                found.append(delta)

        task, num_sent = asyncio.create_task(take()), [0, 0]
        for step, index in enumerate(order):
            num_sent[index] += 1
            hands.receivers[str(index)].receive(output(index, [step], num_sent[index] == lengths[index]))
            if step % burst == burst - 1:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        await task
        return found

    found = asyncio.run(run())
    for index in (0, 1):
        expected = "".join(chr(97 + step % 26) for step, one in enumerate(order) if one == index)
        own = [delta for delta in found if delta.index == index]
        assert "".join(delta.text for delta in own) == expected
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]
    changes = 1 + sum(one != other for one, other in zip(order, order[1:], strict=False))
    assert len(found) == {1: len(order), 1000: changes}.get(burst, len(found))


def test_what_came_before_a_failure_is_not_lost() -> None:
    async def run() -> list[str]:
        completion, hands = call(2)
        texts: list[str] = []

        async def take() -> None:
            async for delta in completion.deltas():
                texts.append(delta.text)

        hands.receivers["0"].receive(output(0, [0]))
        hands.receivers["0"].receive(output(0, [1]))
        hands.receivers["1"].fail(EngineError("the engine is gone"))
        with pytest.raises(RequestFailed, match="the engine is gone"):
            await take()
        assert completion.metrics.finished == {"error": 1}
        assert hands.aborted == ["0", "1"]
        return texts

    assert asyncio.run(run()) == ["ab"]
