"""Asks questions turn by turn, of a server or of an `LLM` in this process, and says how each answer was drafted."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from slipstream.models.files.names import KEY_FILE, check_file
from slipstream.serve.load import Answer, Client, Prompt
from slipstream.serve.measure.questions import Question
from slipstream.serve.measure.server_counts import Kind, RoundCounts, kind_of, read_counts

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING = ("default", "on", "off", *EFFORTS)
FREE = ("output", "overwrite", "fail_below", "api_key_file", "seconds")  # options that do not change results
PROBE: Prompt = [{"role": "user", "content": "Count from 1 to 30, one number after the other."}]
Source = Literal["server", "counters", "pieces", "none"]
"""Origin of an answer's rounds: the answer itself; the server's counters before and after it; an estimate, a round for
each streamed piece; none, since nobody counted them."""


@dataclass(frozen=True, kw_only=True)  # without slots: it may be a second base
class MeasureOptions:
    """Options of programs that measure servers and keep the results in a folder."""

    template: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    model: str | None = None
    """Model to request. Default: the first that a server lists."""
    api_key_file: str | None = None
    """File with the key of the servers."""
    overwrite: bool = False
    """Measure anew if OUTPUT holds a run with other options."""

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        check_file("api_key_file", self.api_key_file, KEY_FILE)

    @property
    def result_options(self) -> dict[str, Any]:
        """Options that decide the results."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


@dataclass(frozen=True, slots=True)
class Setting:
    """Options for asking questions. `thinking`: see `template_variables`; `concurrency`: conversations at once."""

    temperature: float
    thinking: str
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of all requests. `template`: variables of the chat template; `fields`: further fields of a request, or of
    SamplingParams in this process."""

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


def chat_fields(thinking: str, template: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a chat request for a thinking and further variables of the chat template."""
    variables = template_variables(thinking)
    effort = variables.pop("reasoning_effort", None)  # OpenAI has a field for it
    fields = {"reasoning_effort": effort, "chat_template_kwargs": {**variables, **template}}
    return {name: value for name, value in fields.items() if value}


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
        """Returns the seed of this turn, which does not depend on the turns before."""
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
class CountedAnswer:
    """An answer and where its rounds come from."""

    answer: Answer
    source: Source


# Called with each answer that came; the next turn is asked afterwards.
OnAnswer = Callable[[Conversation, CountedAnswer], None]


class ServerResponder:
    """A server that answers conversations. `speculates`: false asks ours to draft nothing.

    /metrics tells which kind of server it is. A first request shows whether answers say how they were drafted: it is
    streamed, and sent again without streaming if that told nothing (SGLang tells it only without streaming).
    """

    def __init__(
        self, client: Client, kind: Kind, request_options: RequestOptions, *, speculates: bool, salt: str
    ) -> None:
        self.client = client
        self.kind = kind
        self.request_options = request_options
        self._own: dict[str, Any] = {"stream": True}
        self._speculates = speculates
        if kind == "slipstream" and not speculates:
            self._own["speculation"] = {"enabled": False}
        if kind in ("slipstream", "vllm"):  # prompts that another setting has asked are not in this one's cache
            self._own["cache_salt"] = salt
        if kind == "sglang":
            self._own["return_meta_info"] = True
        self.reports_rounds = self.reports_usage = self.counts = False

    async def probe(self) -> None:
        """Raises ValueError if the server does not answer, or drafts nothing where it should."""
        fields = {"max_tokens": 48, "temperature": 0.0, **self._own}
        answer = await self.client.ask(PROBE, fields)
        if answer.error is None and not answer.rounds and self._speculates and self.kind != "slipstream":
            answer = await self.client.ask(PROBE, {**fields, "stream": False})
            self._own["stream"] = not answer.rounds  # pieces are counted otherwise
        if answer.error is not None:
            raise ValueError(f"{self.client.root} failed a first request: {answer.error}")
        self.reports_rounds = bool(answer.rounds)
        self.reports_usage = bool(answer.completion_tokens)
        self.counts = read_counts(await self.client.read("/metrics")) is not None
        if self._speculates and self.kind == "slipstream" and not self.reports_rounds:
            raise ValueError(f"{self.client.root} drafts nothing; start it with --draft, or name another url")

    async def count(self) -> RoundCounts | None:
        return read_counts(await self.client.read("/metrics")) if self.counts else None

    def fields(self, conversation: Conversation, setting: Setting) -> dict[str, Any]:
        """Returns the fields of a request but for its prompt."""
        options = self.request_options
        fields: dict[str, Any] = {"max_tokens": options.max_tokens, "temperature": setting.temperature}
        fields["seed"] = conversation.seed(options.seed)
        if conversation.is_chat:
            fields |= chat_fields(setting.thinking, options.template)
        return {**fields, **self._own, **options.fields}

    async def answer(self, conversation: Conversation, setting: Setting) -> CountedAnswer:
        alone = setting.concurrency == 1 and not self.reports_rounds and self._speculates
        before = await self.count() if alone else None
        answer = await self.client.ask(conversation.prompt, self.fields(conversation, setting))
        if answer.error is not None or answer.rounds or self.reports_rounds or not self._speculates:
            return CountedAnswer(answer, "server" if answer.rounds else "none")
        after = await self.count() if before is not None else None
        if before is not None and after is not None and after.rounds > before.rounds:
            counted = after.since(before)
            answer.rounds = counted.rounds
            answer.decoded_tokens = counted.decoded_tokens
            answer.accepted_by_position = list(counted.accepted_by_position)
            return CountedAnswer(answer, "counters")
        pieces = len(answer.arrivals_s)
        if pieces < 2 or not answer.completion_tokens:
            return CountedAnswer(answer, "none")
        answer.rounds = pieces - 1
        answer.decoded_tokens = answer.completion_tokens - 1
        return CountedAnswer(answer, "pieces")

    async def ask(self, conversations: Iterable[Conversation], setting: Setting, on_answer: OnAnswer) -> None:
        """Keeps `setting.concurrency` conversations open until all have ended. One whose request fails ends with it."""
        waiting = iter(conversations)

        async def work() -> None:
            for conversation in waiting:  # shared by the workers
                more = True
                while more:
                    counted_answer = await self.answer(conversation, setting)
                    on_answer(conversation, counted_answer)
                    more = counted_answer.answer.error is None and conversation.take(counted_answer.answer.text)

        await asyncio.gather(*(work() for _ in range(setting.concurrency)))


@asynccontextmanager
async def server_responder(
    url: str,
    request_options: RequestOptions,
    *,
    speculates: bool,
    salt: str,
    connections: int,
    model: str | None,
    api_key: str | None,
) -> AsyncIterator[ServerResponder]:
    async with Client(url, connections=connections, model=model, api_key=api_key) as client:
        kind = kind_of(await client.read("/metrics"))
        responder = ServerResponder(client, kind, request_options, speculates=speculates, salt=salt)
        await responder.probe()
        yield responder
