"""Where regenerated answers come from: what all sources share, and our engine in this process.

A source runs many dialogues at once and calls `on_result` as each ends. A row always gets the same seed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from slipstream.data_tools.dialogue import Answer, Conversing, Dialogue, Prompt, Result, converse, row_seed
from slipstream.data_tools.target_tokenizer import ChatTemplate
from slipstream.models.chat.messages import Message
from slipstream.serve.chat.answers import AnswerFormat, ChatFormat
from slipstream.serve.chat.forms import AUTO
from slipstream.serve.chat.tools import ToolChoice, ToolError, read_choice
from slipstream.serve.llm import LLM
from slipstream.serve.request import Output, Request, SamplingParams


class AnswerReader:
    """Reads the tokens of an answer as the server does: reasoning, content and calls apart, where the target's chat
    template tells their forms."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._format = ChatFormat(tokenizer, AUTO, AUTO)

    def __call__(self, prompt: Prompt, ids: Sequence[int]) -> Message:
        """`ids`: without the end token."""
        form = self._form(prompt)
        parts = form.parts_of(form.decoder(list(ids)))
        reasoning = {"reasoning_content": parts.reasoning} if parts.reasoning else {}
        calls = {"tool_calls": [piece.to_json() for piece in parts.calls]} if parts.calls else {}
        return {"role": "assistant", "content": parts.content, **reasoning, **calls}

    def _form(self, prompt: Prompt) -> AnswerFormat:
        try:
            choice = read_choice(prompt.tools, None, None, ignore_unknown=True)
            return self._format.answer(choice, prompt.token_ids, None)
        except ToolError:  # the template takes no tools, or not these: calls are content
            return self._format.answer(ToolChoice(), prompt.token_ids, None)


@dataclass(slots=True, kw_only=True)
class Answers:
    """Fields and steps that all sources share. `on_tokens` gets the number of new tokens."""

    chat: ChatTemplate | None  # None: the endpoints render the messages with their own template
    reader: AnswerReader | None  # None without `chat`
    end_ids: frozenset[int]
    params: SamplingParams
    keep_cut: bool
    on_result: Callable[[Result], None]
    on_tokens: Callable[[int], None]

    def converse(self, dialogue: Dialogue) -> Conversing:
        return converse(dialogue, self.chat, keep_cut=self.keep_cut, end_ids=self.end_ids)

    def params_of(self, identity: str, room: int | None) -> SamplingParams:
        """The row's own seed, and at most `room` tokens."""
        assert self.params.seed is not None
        max_tokens = self.params.max_tokens if room is None else min(room, self.params.max_tokens)
        return replace(self.params, max_tokens=max_tokens, seed=row_seed(self.params.seed, identity))

    def read(self, prompt: Prompt, ids: Sequence[int]) -> Message:
        """The message that the tokens of an answer, with or without an end token, are."""
        assert self.reader is not None
        return self.reader(prompt, ids[:-1] if ids and ids[-1] in self.end_ids else ids)


@dataclass(slots=True)
class Conversation:
    """A dialogue that the engine is at."""

    steps: Conversing
    prompt: Prompt | None = None
    tokens: list[int] = field(default_factory=list)  # of the current answer


@dataclass(slots=True, kw_only=True)
class EngineAnswers(Answers):
    """Drives dialogues through `llm.stream`."""

    llm: LLM
    _running: dict[str, Conversation] = field(default_factory=dict)  # by dialogue id
    _requests: deque[Request] = field(default_factory=deque)  # later turns; they go before new dialogues

    def run(self, dialogues: Iterable[Dialogue]) -> None:
        waiting = iter(dialogues)
        more = True
        while more:
            for output in self.llm.stream(self._draw(waiting)):
                self.on_tokens(len(output.tokens))
                self._take(output)
            # The engine stops drawing at the end of `waiting`; later turns that became ready since need another round.
            more = bool(self._requests)

    def _draw(self, waiting: Iterator[Dialogue]) -> Iterator[Request]:
        while True:
            while not self._requests:
                dialogue = next(waiting, None)
                if dialogue is None:
                    return
                self._running[dialogue.id] = Conversation(self.converse(dialogue))
                self._step(dialogue.id, None)
            yield self._requests.popleft()

    def _take(self, output: Output) -> None:
        identity = output.request_id
        reason = output.finish_reason
        running = self._running[identity]
        running.tokens += output.tokens
        if reason in ("abort", "error"):
            self._end(Result(id=identity, failed=output.error or "the engine ended the request"))
        elif reason is not None:
            assert running.prompt is not None
            tokens = running.tokens
            message = self.read(running.prompt, tokens)
            answer = Answer(message=message, finish_reason=reason, num_tokens=len(tokens), token_ids=tokens)
            self._step(identity, answer)

    def _step(self, identity: str, answer: Answer | None) -> None:
        """Sends `answer` to its dialogue; queues the next prompt or ends the dialogue."""
        running = self._running[identity]
        try:
            # A generator's first send must be None, which its type cannot say.
            prompt = next(running.steps) if answer is None else running.steps.send(answer)
        except StopIteration as stop:
            self._end(stop.value)
            return
        running.prompt = prompt
        running.tokens = []
        room = self.llm.engine.info.max_model_len - len(prompt.token_ids)
        if room < 1:
            self._end(Result(id=identity, dropped="prompt_too_long"))
            return
        self._requests.append(Request(id=identity, prompt=prompt.token_ids, params=self.params_of(identity, room)))

    def _end(self, result: Result) -> None:
        del self._running[result.id]
        self.on_result(result)
