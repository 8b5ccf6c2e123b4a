"""Asks questions turn by turn, of a server or of an `LLM` in this process, and says how each answer was drafted."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from slipstream.serve.load import Answer, Client, Prompt
from slipstream.serve.measure.questions import Question
from slipstream.serve.measure.server_counts import Kind, RoundCounts, kind_of, read_counts

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING = ("default", "on", "off", *EFFORTS)
PROBE: Prompt = [{"role": "user", "content": "Count from 1 to 30, one number after the other."}]
Source = Literal["server", "counters", "pieces", "none"]
"""Where the rounds of an answer come from: the answer itself; the server's counters before and after it; estimated, a
round for each streamed piece; nobody counted them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How questions are asked. `thinking`: see `template_variables`; `concurrency`: conversations at once."""

    temperature: float
    thinking: str
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """What all requests have in common. `template`: variables of the chat template; `fields`: further fields of a
    request, or of SamplingParams in this process."""

    max_tokens: int
    seed: int = 0
    template: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


def template_variables(thinking: str) -> dict[str, Any]:
    """Variables of chat templates: `enable_thinking` (Qwen) and `thinking` (DeepSeek, Granite) for on and off,
    `reasoning_effort` (gpt-oss) for an effort."""
    if thinking == "default":
        return {}
    if thinking in EFFORTS:
        return {"reasoning_effort": thinking}
    return {"enable_thinking": thinking == "on", "thinking": thinking == "on"}


class Conversation:
    """A question that is asked turn by turn: each answer goes into the next turn, without its reasoning."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.turn = 0
        self.prompt: Prompt = question.first

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], dict)

    def seed(self, seed: int) -> int:
        """Of this turn: the same whatever was asked before it."""
        name = f"{seed}/{self.question.id}/{self.turn}"
        return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little") >> 1

    def take(self, answer: str) -> bool:
        """Goes on to the next turn; whether there is one."""
        if self.turn == len(self.question.turns):
            return False
        messages: list[Any] = [*self.prompt, {"role": "assistant", "content": answer}]
        self.prompt = [*messages, {"role": "user", "content": self.question.turns[self.turn]}]
        self.turn += 1
        return True


@dataclass(frozen=True, slots=True)
class Told:
    """An answer and where its rounds come from."""

    answer: Answer
    source: Source


# Called with each answer that came; the next turn is asked afterwards.
OnAnswer = Callable[[Conversation, Told], None]


class ServerVoice:
    """A server that answers conversations. `speculates`: false asks ours to draft nothing.

    Its kind is found by its /metrics, and whether its answers say how they were drafted by a first request, which is
    streamed, and sent again whole if that told nothing (as SGLang, which tells it in whole answers alone).
    """

    def __init__(self, client: Client, kind: Kind, *, speculates: bool, salt: str) -> None:
        self.client, self.kind = client, kind
        self._own: dict[str, Any] = {"stream": True}
        self._speculates = speculates
        if kind == "slipstream" and not speculates:
            self._own["speculation"] = {"enabled": False}
        if kind in ("slipstream", "vllm"):  # prompts that another setting has asked are not in this one's cache
            self._own["cache_salt"] = salt
        if kind == "sglang":
            self._own["return_meta_info"] = True
        self.tells = self.counts = False

    async def probe(self, manner: Manner) -> None:
        """Raises ValueError if the server does not answer, or drafts nothing where it should."""
        fields = {"max_tokens": 48, "temperature": 0.0, **self._own}
        answer = await self.client.ask(PROBE, fields)
        if answer.error is None and not answer.rounds and self._speculates and self.kind != "slipstream":
            answer = await self.client.ask(PROBE, {**fields, "stream": False})
            self._own["stream"] = not answer.rounds  # pieces are counted otherwise
        if answer.error is not None:
            raise ValueError(f"{self.client.root} failed a first request: {answer.error}")
        self.tells = bool(answer.rounds)
        self.counts = read_counts(await self.client.read("/metrics")) is not None
        if self._speculates and self.kind == "slipstream" and not self.tells:
            raise ValueError(f"{self.client.root} drafts nothing; start it with --draft, or name another url")

    async def count(self) -> RoundCounts | None:
        return read_counts(await self.client.read("/metrics")) if self.counts else None

    def fields(self, conversation: Conversation, setting: Setting, manner: Manner) -> dict[str, Any]:
        """Of a request, without its prompt."""
        fields: dict[str, Any] = {"max_tokens": manner.max_tokens, "temperature": setting.temperature}
        fields["seed"] = conversation.seed(manner.seed)
        if conversation.is_chat:
            variables = template_variables(setting.thinking)
            effort = variables.pop("reasoning_effort", None)  # OpenAI has a field for it
            if effort is not None:
                fields["reasoning_effort"] = effort
            if variables or manner.template:
                fields["chat_template_kwargs"] = {**variables, **manner.template}
        return {**fields, **self._own, **manner.fields}

    async def answer(self, conversation: Conversation, setting: Setting, manner: Manner) -> Told:
        alone = setting.concurrency == 1 and not self.tells and self._speculates
        before = await self.count() if alone else None
        answer = await self.client.ask(conversation.prompt, self.fields(conversation, setting, manner))
        if answer.error is not None or answer.rounds or self.tells or not self._speculates:
            return Told(answer, "server" if answer.rounds else "none")
        after = await self.count() if before is not None else None
        if before is not None and after is not None and after.rounds > before.rounds:
            counted = after.since(before)
            answer.rounds, answer.decoded_tokens = counted.rounds, counted.decoded_tokens
            answer.accepted_by_position = list(counted.accepted_by_position)
            return Told(answer, "counters")
        pieces = len(answer.arrivals_s)
        if pieces > 1:
            answer.rounds, answer.decoded_tokens = pieces - 1, answer.completion_tokens - 1
        return Told(answer, "pieces" if pieces > 1 else "none")


@asynccontextmanager
async def server_voice(
    url: str, manner: Manner, *, speculates: bool, salt: str, connections: int, model: str | None, api_key: str | None
) -> AsyncIterator[ServerVoice]:
    async with Client(url, connections=connections, model=model, api_key=api_key) as client:
        voice = ServerVoice(client, kind_of(await client.read("/metrics")), speculates=speculates, salt=salt)
        await voice.probe(manner)
        yield voice


async def ask_server(
    voice: ServerVoice, conversations: Iterable[Conversation], setting: Setting, manner: Manner, on_answer: OnAnswer
) -> None:
    """Keeps `setting.concurrency` conversations open until all have ended. One whose request fails ends with it."""
    waiting = iter(conversations)

    async def work() -> None:
        for conversation in waiting:  # shared by the workers
            more = True
            while more:
                told = await voice.answer(conversation, setting, manner)
                on_answer(conversation, told)
                more = told.answer.error is None and conversation.take(told.answer.text)

    await asyncio.gather(*(work() for _ in range(setting.concurrency)))
