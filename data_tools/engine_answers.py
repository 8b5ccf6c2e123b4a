"""Answers from our own engine, with many dialogues under way at once so that it never runs dry."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from slipstream.data_tools.chat_template import ChatTemplate
from slipstream.data_tools.dialogue import Answer, Conversing, Dialogue, Result, converse, row_seed
from slipstream.serve.llm import LLM
from slipstream.serve.request import Output, Request, SamplingParams


class EngineAnswers:
    """Drives dialogues through `llm.stream`. `params.max_tokens` is cut to what the context has room for."""

    def __init__(self, llm: LLM, chat: ChatTemplate, params: SamplingParams, *, keep_cut: bool) -> None:
        self._llm = llm
        self._chat = chat
        self._params = params
        self._keep_cut = keep_cut
        self._running: dict[str, Conversing] = {}  # by dialogue id
        self._tokens: dict[str, list[int]] = {}  # of the answer under way, by dialogue id
        self._requests: deque[Request] = deque()  # later turns, which go before new dialogues
        self._results: deque[Result] = deque()

    def run(self, dialogues: Iterable[Dialogue], on_tokens: Callable[[int], None]) -> Iterator[Result]:
        """Results as they come; `on_tokens` hears of every few tokens."""
        waiting = iter(dialogues)
        more = True
        while more:
            for output in self._llm.stream(self._draw(waiting)):
                on_tokens(len(output.tokens))
                self._take(output)
                yield from self._drain()
            yield from self._drain()
            # The engine draws until there is nothing; turns that became ready while it ran dry need another round.
            more = bool(self._requests)

    def _draw(self, waiting: Iterator[Dialogue]) -> Iterator[Request]:
        while True:
            while not self._requests:
                dialogue = next(waiting, None)
                if dialogue is None:
                    return
                self._running[dialogue.id] = converse(dialogue, self._chat, keep_cut=self._keep_cut)
                self._step(dialogue.id, None)
            yield self._requests.popleft()

    def _take(self, output: Output) -> None:
        identity = output.request_id
        tokens = self._tokens[identity]
        tokens += output.tokens
        if output.finish_reason == "abort":
            self._end(Result(id=identity, failed="the engine ended the request"))
        elif output.finish_reason is not None:
            text_ids = tokens[:-1] if output.finish_reason == "stop" else tokens
            text = str(self._llm.tokenizer.decode(text_ids, skip_special_tokens=True))
            reason = output.finish_reason
            self._step(identity, Answer(text=text, finish_reason=reason, num_tokens=len(tokens), token_ids=tokens))

    def _step(self, identity: str, answer: Answer | None) -> None:
        """Sends `answer` to its dialogue; queues the next prompt or the result."""
        try:
            # A generator's first send must be None; its type does not know that.
            prompt = next(self._running[identity]) if answer is None else self._running[identity].send(answer)
        except StopIteration as stop:
            self._end(stop.value)
            return
        self._tokens[identity] = []
        room = self._llm.engine.info.max_model_len - len(prompt.token_ids)
        if room < 1:
            self._end(Result(id=identity, dropped="prompt_too_long"))
            return
        self._requests.append(self._request(identity, prompt.token_ids, min(room, self._params.max_tokens)))

    def _request(self, identity: str, prompt: list[int], max_tokens: int) -> Request:
        seed = row_seed(self._params.seed, identity)
        return Request(id=identity, prompt=prompt, params=replace(self._params, max_tokens=max_tokens, seed=seed))

    def _end(self, result: Result) -> None:
        del self._running[result.id]
        self._tokens.pop(result.id, None)
        self._results.append(result)

    def _drain(self) -> Iterator[Result]:
        while self._results:
            yield self._results.popleft()
