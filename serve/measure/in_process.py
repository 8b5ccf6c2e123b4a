"""Asks conversations of an `LLM` in this process, as conversations.py asks them of a server."""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slipstream.serve import llm
from slipstream.serve.engine.engine import Engine
from slipstream.serve.load import Answer
from slipstream.serve.measure.conversations import (
    PROBE,
    Conversation,
    CountedAnswer,
    OnAnswer,
    RequestOptions,
    Setting,
    template_variables,
)
from slipstream.serve.measure.questions import Question
from slipstream.serve.request import Output, SamplingParams


class OpenAnswer:
    """A request of the engine: the conversation that waits for it, and when its tokens came."""

    def __init__(self, conversation: Conversation, answer: llm.Answer) -> None:
        self.conversation = conversation
        self.answer = answer
        self.start = time.perf_counter()
        self.arrivals_s: list[float] = []

    def add(self, output: Output, engine: Engine) -> CountedAnswer | None:
        """The counted answer once it has ended. Ends it at a text that its form ends with."""
        now = time.perf_counter() - self.start
        if output.tokens:
            self.arrivals_s.append(now)
        self.answer.add(output)
        if self.answer.text.stopped and output.finish_reason is None:
            output = engine.abort(output.request_id) or output
        if output.finish_reason is None:
            return None
        generation = self.answer.generation(output)
        stats = generation.stats
        answer = Answer(
            text=generation.text,
            reasoning=generation.reasoning,
            finish_reason=generation.finish_reason,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            latency_s=now,
            arrivals_s=self.arrivals_s,
            rounds=stats.rounds,
            decoded_tokens=stats.decoded_tokens,
            drafted_tokens=stats.drafted_tokens,
            accepted_by_position=list(stats.accepted_by_position),
            error=generation.error or None,
        )
        return CountedAnswer(answer, "server" if answer.rounds else "none")


class EngineResponder:
    """An engine that answers conversations."""

    def __init__(self, model: llm.LLM, request_options: RequestOptions) -> None:
        self._model = model
        self._options = request_options
        self._names: Iterator[int] = iter(range(2**62))

    def begin(self, conversation: Conversation, setting: Setting) -> OpenAnswer:
        options = self._options
        variables = {**template_variables(setting.thinking), **options.template} if conversation.is_chat else {}
        params = {
            "max_tokens": options.max_tokens,
            "temperature": setting.temperature,
            "seed": conversation.seed(options.seed),
            **options.fields,
        }
        answer = self._model.begin(
            str(next(self._names)), conversation.prompt, SamplingParams(**params), chat_template_kwargs=variables
        )
        self._model.engine.add(answer.request)
        return OpenAnswer(conversation, answer)

    def ask(self, conversations: Iterable[Conversation], setting: Setting, on_answer: OnAnswer) -> None:
        """Keeps `setting.concurrency` conversations open until all have ended. Raises ValueError for a prompt that
        cannot be served."""
        waiting = iter(conversations)
        engine = self._model.engine
        running: dict[str, OpenAnswer] = {}
        try:
            while True:
                while len(running) < setting.concurrency:
                    conversation = next(waiting, None)
                    if conversation is None:
                        break
                    self._start(conversation, setting, running)
                if not running:
                    return
                for output in engine.step():
                    counted_answer = running[output.request_id].add(output, engine)
                    if counted_answer is None:
                        continue
                    conversation = running.pop(output.request_id).conversation
                    on_answer(conversation, counted_answer)
                    if counted_answer.answer.error is None and conversation.take(counted_answer.answer.text):
                        self._start(conversation, setting, running)
        finally:
            for name in running:
                engine.abort(name)

    def _start(self, conversation: Conversation, setting: Setting, running: dict[str, OpenAnswer]) -> None:
        started = self.begin(conversation, setting)
        running[started.answer.request.id] = started


@contextmanager
def engine_responder(
    options: dict[str, Any], thinking: Sequence[str], request_options: RequestOptions
) -> Iterator[EngineResponder]:
    """Starts the engine that `options`, fields of EngineConfig, describe, has it answer once, and ends it. Raises
    ValueError if the target's chat template reads nothing of one of `thinking`."""
    with llm.LLM(**options) as model:
        for mode in thinking:
            check_thinking(model, mode)
        probe = Conversation(Question("probe", "", PROBE))
        EngineResponder(model, RequestOptions(max_tokens=48)).ask([probe], Setting(0.0, "default", 1), lambda *_: None)
        yield EngineResponder(model, request_options)
    del model
    gc.collect()
    torch.cuda.empty_cache()


def fills_memory(options: Mapping[str, Any]) -> bool:
    """Whether an engine with these options takes all of a device's memory."""
    return options.get("device", "auto") != "cpu" and torch.cuda.is_available()


def check_thinking(model: llm.LLM, thinking: str) -> None:
    """Raises ValueError if the target's chat template does not ask how it should think."""
    source = model.tokenizer.get_chat_template() if model.tokenizer.chat_template else ""
    names = template_variables(thinking)
    if names and not any(name in source for name in names):
        raise ValueError(f"thinking is {thinking}, but the target's chat template reads none of {', '.join(names)}")
