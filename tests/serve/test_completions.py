"""Compares the text of a call that joins outputs while nobody reads with the same outputs read one by one."""

import asyncio
import random
from unittest.mock import Mock
from unittest.mock import call as mock_call

import pytest

from slipstream.serve.chat.answers import AnswerFormat
from slipstream.serve.chat.parser import AnswerParser
from slipstream.serve.detokenize import Decoder, TokenTexts
from slipstream.serve.http.completions import Completion, Delta, RequestFailed
from slipstream.serve.http.engine_client import EngineError
from slipstream.serve.http.metrics import Metrics
from slipstream.serve.http.responses import ItemWriter
from slipstream.serve.request import Output, Request, RequestStats, SamplingParams
from slipstream.tests.pairwise import grouped
from slipstream.tests.serve.fake_engine import logprobs_of, trace_of
from slipstream.tests.serve.test_answer_parser import EXAMPLES, TOOLS, syntax_of
from slipstream.tests.serve.test_detokenize import byte_level

LETTERS = [byte_level().convert_tokens_to_ids(chr(code)) for code in range(ord("a"), ord("z") + 1)]

FAILED = "slipstream_requests_total", {"finish_reason": "error"}


def call(num_choices: int) -> Completion:
    """A call whose engine only takes note."""
    completion = Completion(Mock(), Metrics(), watched=True)
    params = SamplingParams(max_tokens=99)
    completion.submit(
        [Request(id=str(index), prompt=[1], params=params) for index in range(num_choices)],
        (),
        AnswerFormat(Decoder(byte_level())),
    )
    return completion


def output(index: int, tokens: list[int], is_last: bool = False) -> Output:
    stats = RequestStats(completion_tokens=9) if is_last else None
    return Output(request_id=str(index), tokens=tokens, finish_reason="length" if is_last else None, stats=stats)


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_text_that_waits_is_joined(burst):
    """Two choices, interleaved by chance: nothing is lost or moved, whoever waits for whom."""
    rng = random.Random(burst)
    lengths = [40, 25]
    order = [0] * 40 + [1] * 25
    rng.shuffle(order)

    async def run():
        completion = call(2)
        deltas = []

        async def take():
            async for delta in completion.deltas():
                deltas.append(delta)

        task = asyncio.create_task(take())
        num_sent = [0, 0]
        for step, index in enumerate(order):
            num_sent[index] += 1
            completion.choices[index].receive(output(index, [LETTERS[step % 26]], num_sent[index] == lengths[index]))
            if step % burst == burst - 1:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        await task
        return deltas

    deltas = asyncio.run(run())
    for index in (0, 1):
        expected = "".join(chr(97 + step % 26) for step, choice in enumerate(order) if choice == index)
        deltas_of_choice = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.content for delta in deltas_of_choice) == expected
        assert [delta.finish_reason for delta in deltas_of_choice] == [None] * (len(deltas_of_choice) - 1) + ["length"]
    changes = 1 + sum(choice != other for choice, other in zip(order, order[1:], strict=False))
    assert len(deltas) == {1: len(order), 1000: changes}.get(burst, len(deltas))


def test_what_came_before_a_failure_is_not_lost():
    async def run():
        completion = call(2)
        texts = []

        async def take():
            async for delta in completion.deltas():
                texts.append(delta.content)

        completion.choices[0].receive(output(0, [LETTERS[0]]))
        completion.choices[0].receive(output(0, [LETTERS[1]]))
        completion.choices[1].fail(EngineError("the engine is gone"))
        with pytest.raises(RequestFailed, match="the engine is gone"):
            await take()
        assert completion.metrics.registry.get_sample_value(*FAILED) == 1
        assert completion.engine.abort.mock_calls == [mock_call("0"), mock_call("1")]
        return texts

    assert asyncio.run(run()) == ["ab"]


@grouped()
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("tools", "reasoning", "text", "expected"), EXAMPLES)
def test_log_probabilities_and_traces_come_once_with_their_text(tools, reasoning, text, expected, seed):
    """However the tokens are split over outputs, with a stop string and without; those of markers with what follows.
    A trace has the tokens of a stop string, too."""
    rng = random.Random(seed)
    tokenizer = byte_level()
    syntax = syntax_of(tools, reasoning)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    stop = [text[(at := rng.randrange(len(text))) : at + 3]] if seed % 2 else []
    completion = Completion(Mock(), Metrics(), watched=True)
    deltas = []
    completion.put = deltas.append
    answers = AnswerFormat(Decoder(tokenizer), parser=lambda: AnswerParser(syntax, TOOLS))
    params = SamplingParams(max_tokens=999, logprobs=1, speculation={"trace": True})
    completion.submit([Request(id="0", prompt=[1], params=params)], stop, answers)
    [choice] = completion.choices
    left = list(tokens)
    while left:
        count = rng.randrange(1, 5)
        tokens_of_step = left[:count]
        left = left[count:]
        stats = None if left else RequestStats(completion_tokens=len(tokens), accepted_by_position=[0] * 4)
        reason = None if left else "length"
        fields = {"logprobs": logprobs_of(tokens_of_step, 1), "trace": trace_of(tokens_of_step, len(left))}
        choice.receive(Output(request_id="0", tokens=tokens_of_step, finish_reason=reason, stats=stats, **fields))
    visible = text[: text.index(stop[0])] if stop else text
    scored = [token for delta in deltas for token in delta.scored]
    ends = [len(tokenizer.decode(tokens[:count])) for count in range(len(tokens))]
    assert [entry.token for entry in scored] == [
        token for token, end in zip(tokens, ends, strict=True) if end < len(visible)
    ]
    assert [entry.logprob for entry in scored] == logprobs_of([entry.token for entry in scored], 1).tokens
    assert all(delta.content or delta.reasoning or delta.calls for delta in deltas[:-1])
    traced = [entry.token for delta in deltas for entry in delta.traced]
    assert traced == tokens[: choice.stats.completion_tokens]
    for delta in deltas[:-1]:
        assert [entry.token for entry in delta.traced] == [entry.token for entry in delta.scored]
    if not stop:
        joined = Delta.join(deltas)
        calls = [(call.name, call.arguments) for call in joined.calls]
        assert (joined.reasoning, joined.content, calls) == expected
        assert joined.scored == scored
    check_items(deltas, TokenTexts(tokenizer))


def check_items(deltas: list[Delta], texts: TokenTexts):
    """Output items of /v1/responses are the same however the answer comes, with the entries of their text."""
    streamed = ItemWriter(1, texts)
    joined = ItemWriter(1, texts)
    for delta in deltas:
        streamed.take(delta)
    joined.take(Delta.join(deltas))
    ids = ("id", "call_id")
    items, expected = (
        [{name: value for name, value in item.items() if name not in ids} for item in writer.items]
        for writer in (streamed, joined)
    )
    assert items == expected
    for item in items:
        for part in item.get("content", []) if item["type"] == "message" else []:
            spelled = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode(errors="ignore")
            assert part["text"].strip() in spelled
            assert len(spelled) <= len(part["text"]) + 12, "no more than the tokens at its ends"
