"""The offline API: `LLM(target, draft).generate(prompts, params)`, the server's engine without HTTP."""

import logging
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal, Self

from tqdm import tqdm

from slipstream import runtime
from slipstream.models.chat.messages import DEFAULT_DATE, Message, check_text, read_messages
from slipstream.models.chat.quotes import quote
from slipstream.models.chat.template import PromptTemplate
from slipstream.models.drafts.source import warn_if_changed
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.chat.answers import AnswerFormat, ChatFormat
from slipstream.serve.chat.parser import CallPiece
from slipstream.serve.chat.tools import ToolChoice, read_choice
from slipstream.serve.detokenize import Decoder, TextStream, spellings
from slipstream.serve.engine.build import build_engine
from slipstream.serve.grammar.grammars import translate
from slipstream.serve.options import TRIAL_ROUNDS, EngineConfig, find_target
from slipstream.serve.request import (
    FinishReason,
    Logprobs,
    Output,
    Request,
    RequestStats,
    SamplingParams,
    TokenTrace,
    prompt_seed,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. `tokens` includes the end-of-text token, if there is one; `text` does not. Its prompt alone gets the
    same answer with `seed`. `error` says what failed where `finish_reason` is "error"; other answers are whole.
    `logprobs` are those of `tokens`, `prompt_logprobs` those of the prompt's tokens from the second on, where the
    params ask for them; so does `trace` belong to `tokens`. `metrics` has `speculative_decoding`, as over HTTP."""

    tokens: list[int]
    text: str
    finish_reason: FinishReason | Literal["tool_calls"]
    stats: RequestStats
    seed: int
    error: str = ""
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    reasoning: str = ""  # with `chat`, whose `text` is the content alone
    tool_calls: tuple[CallPiece, ...] = ()  # with `chat`: id, name and arguments, JSON text
    metrics: Mapping[str, Any] = field(default_factory=dict)
    trace: list[TokenTrace] | None = None


class Answer:
    """Collects the Outputs of a request. `form`: how to read it; `num_spec_tokens`: most that a round drafts."""

    def __init__(self, request: Request, form: AnswerFormat, stop: Sequence[str], num_spec_tokens: int) -> None:
        self.request = request
        self._form = form
        self._num_spec_tokens = num_spec_tokens if request.params.wants_drafts else 0
        self._trace: list[TokenTrace] = []
        min_tokens = request.params.min_tokens
        prompt = request.prompt if form.continues else ()
        self.text = TextStream(form.decoder, form.stops(stop), watched=False, min_tokens=min_tokens, prompt=prompt)
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: Logprobs | None = None

    def add(self, output: Output) -> None:
        self._tokens += output.tokens
        self._pieces.append(self.text.push(output.tokens, output.finish_reason))
        self._trace += output.trace or ()
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs

    def generation(self, ended: Output) -> Generation:
        """Builds the answer. `ended`: the request's last output."""
        assert ended.stats is not None
        assert ended.finish_reason is not None
        reason: FinishReason = "stop" if self.text.stopped else ended.finish_reason
        stats = self.text.cut(replace(ended.stats))
        count = self.text.num_tokens
        text = "".join(self._pieces)
        parts = self._form.parts_of(text)
        calls = tuple(parts.calls)
        params = self.request.params
        return Generation(
            tokens=self._tokens[:count],
            text=parts.content,
            finish_reason="tool_calls" if calls and reason == "stop" else reason,
            stats=stats,
            seed=self.request.seed,
            error=ended.error,
            logprobs=None if params.logprobs is None else Logprobs.join(self._logprobs)[:count],
            prompt_logprobs=self._prompt_logprobs,
            reasoning=parts.reasoning,
            tool_calls=calls,
            metrics={"speculative_decoding": stats.speculative_decoding(self._num_spec_tokens)},
            trace=self._trace[:count] if params.wants_trace else None,
        )


class LLM:
    """A target, with or without a draft, in this process. Keyword arguments are the fields of EngineConfig."""

    def __init__(self, target: str = "", draft: str = "none", **options: Any) -> None:
        config = EngineConfig(target=target, draft=draft, **options)
        _, path = find_target(config)
        self.tokenizer = load_tokenizer(path, config.trust_remote_code)
        self.engine = build_engine(config)
        warn_if_changed(config.source, path, self.tokenizer)
        self._decoder = Decoder(self.tokenizer)
        self._json_whitespace = config.json_whitespace
        self._chat = ChatFormat(self.tokenizer, config.tool_parser, config.reasoning_parser)
        if runtime.THREADS_SPIN and self.engine.runner.state.device.type == "cpu":
            logger.warning(
                "torch was imported before slipstream, so its threads spin while they wait, which is slow next to "
                "other busy programs; import slipstream first, or set GOMP_SPINCOUNT=1000"
            )

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        stop: str | Sequence[str] = (),
        bad_words: str | Sequence[str] = (),
        progress: bool = False,
    ) -> list[Generation]:
        """Answers prompts, in their order; they are texts (tokenised without a template) or token ids.

        An answer ends before the first of the texts `stop`, and contains none of `bad_words` as the tokenizer spells
        them, with a space before them and without.

        If one `params` serves all prompts, the first has its seed and each further one a seed derived from it and the
        index. With one `params` per prompt, seeds are used as given. A prompt without a seed draws one.

        Raises ValueError for a prompt that cannot be served, before anything is generated.
        """
        check_prompts(prompts)
        tokens = [self.encode(prompt) for prompt in prompts]
        every = params_of(prompts, params)
        formats = [AnswerFormat(self._decoder, params.grammar, continues=True) for params in every]
        return self._generate(tokens, every, formats, stop, bad_words, progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop: str | Sequence[str] = (),
        bad_words: str | Sequence[str] = (),
        progress: bool = False,
    ) -> list[Generation]:
        """Answers one conversation, a list of messages, or several, through the target's chat template.

        `tools`, `tool_choice` and `parallel_tool_calls` are OpenAI's; the other arguments are those of `generate`.
        Each answer has its reasoning and calls beside its `text`, where the target has forms of them. Raises ValueError
        for a conversation that cannot be served, before anything is generated.
        """
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        several: Sequence[Any] = [conversations] if is_one else conversations
        choice = read_choice(None if tools is None else list(tools), tool_choice, parallel_tool_calls)
        prompts = [self._chat_prompt(messages, choice, chat_template_kwargs or {}) for messages in several]
        every = params_of(prompts, params)
        pairs = zip(prompts, every, strict=True)
        formats = [self._chat.answer(choice, prompt, params.grammar) for prompt, params in pairs]
        return self._generate(prompts, every, formats, stop, bad_words, progress)

    def _chat_prompt(self, messages: Any, choice: ToolChoice, variables: Mapping[str, Any]) -> list[int]:
        template = PromptTemplate(self.tokenizer, date=DEFAULT_DATE, variables={})
        read = self._chat.named_reasoning(read_messages(messages))
        tools = [tool.definition for tool in choice.tools] or None
        text = template.render(read, tools, prompt=True, variables=variables)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _generate(
        self,
        prompts: Sequence[list[int]],
        every: Sequence[SamplingParams],
        formats: Sequence[AnswerFormat],
        stop: str | Sequence[str],
        bad_words: str | Sequence[str],
        progress: bool,
    ) -> list[Generation]:
        """Answers token ids. `every` has the params of each prompt, `formats` say how to read its answer."""
        self._check_idle()
        stop = check_texts("stop", stop)
        words = check_texts("bad_words", bad_words)
        bad_tokens = spellings(self.tokenizer, words)
        answers: list[Answer] = []
        for prompt, params, form in zip(prompts, every, formats, strict=True):
            params = replace(params, bad_words=params.bad_words + bad_tokens)
            answers.append(self._begin(str(len(answers)), prompt, params, form, stop))
        done: dict[int, Generation] = {}
        bar = tqdm(total=len(answers), unit="answer", disable=not progress)
        with bar, closing(self.stream(answer.request for answer in answers)) as outputs:
            for output in outputs:
                index = int(output.request_id)
                answers[index].add(output)
                ended = output
                if answers[index].text.stopped and not output.finish_reason:
                    with runtime.held_interrupt():
                        ended = self.engine.abort(output.request_id) or output
                if ended.finish_reason and index not in done:
                    done[index] = answers[index].generation(ended)
                    bar.update()
        return [done[index] for index in range(len(answers))]

    def _begin(
        self, name: str, prompt: list[int], params: SamplingParams, form: AnswerFormat, stop: Sequence[str]
    ) -> Answer:
        stop_ids = params.stop_token_ids + form.stop_ids
        grammar = None if form.grammar is None else translate(form.grammar, self._json_whitespace)
        request = Request(id=name, prompt=prompt, params=replace(params, grammar=grammar, stop_token_ids=stop_ids))
        self.engine.check(request)
        return Answer(request, form, stop, self.engine.info.num_spec_tokens)

    def begin(
        self,
        name: str,
        prompt: str | list[int] | Sequence[Message],
        params: SamplingParams,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Returns an answer that has not begun, for programs that step `engine` themselves: they give the engine
        `answer.request` and the answer its Outputs, whose `request_id` is `name`. The prompt is a text, token ids or
        messages. Raises ValueError for one that cannot be served."""
        if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], Mapping):
            tokens = self.encode(prompt)  # type: ignore[arg-type]
            return self._begin(name, tokens, params, AnswerFormat(self._decoder, params.grammar, continues=True), ())
        choice = read_choice(None, None, True)
        tokens = self._chat_prompt(prompt, choice, chat_template_kwargs or {})
        return self._begin(name, tokens, params, self._chat.answer(choice, tokens, params.grammar), ())

    def swap_draft(self, draft: str, trial_rounds: int = TRIAL_ROUNDS) -> str:
        """Lets the weights of another checkpoint draft from the next step on; no token changes by that. They are on
        trial for so many rounds with drafts: if they are accepted less than those before on the same kinds of requests,
        these return. 0: for good. Returns their version, the beginning of the fingerprint of their files.

        Raises ValueError, or OSError, for a checkpoint that cannot be read or whose network is another; nothing has
        changed then."""
        if trial_rounds < 0:
            raise ValueError(f"trial_rounds is {trial_rounds}; give a number of rounds, or 0 for no trial")
        staged = self.engine.stage_draft(draft)
        with runtime.held_interrupt():
            return self.engine.swap_draft(staged, trial_rounds).version

    def close(self) -> None:
        """Ends the engine and lets its drafter save its state. Do not use the LLM afterwards. Raises OSError where the
        file cannot be written, and ValueError where another process is writing it."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(map(int, prompt))

    def stream(self, requests: Iterable[Request]) -> Generator[Output, None, None]:
        """Yields the Outputs of all requests as they come. Takes requests while the engine has room, however many.

        Closing the generator, or an error, aborts the requests that have not ended. Ctrl-C does so after the step at
        hand, a second one at once. Raises ValueError while requests of another call are open, whose outputs it would
        take.
        """
        self._check_idle()
        pending = iter(requests)
        added: set[str] = set()
        more = True
        try:
            while more or self.engine.has_work:
                while more and self.engine.num_open < 2 * self.engine.config.max_running:
                    request = next(pending, None)
                    more = request is not None
                    if request is not None:
                        with runtime.held_interrupt():
                            self.engine.add(request)
                            added.add(request.id)
                with runtime.held_interrupt():
                    outputs = self.engine.step()
                for output in outputs:
                    if output.finish_reason:
                        added.discard(output.request_id)
                    yield output
        finally:
            with runtime.held_interrupt():
                for name in added:
                    self.engine.abort(name)

    def _check_idle(self) -> None:
        if self.engine.has_work:
            raise ValueError(
                f"{self.engine.num_open} requests of another call are open; take all outputs of its stream, or close it"
            )


def check_prompts(prompts: Sequence[str | list[int]]) -> None:
    """Raises ValueError naming the first prompt that is neither text nor token ids."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Collection):
        raise ValueError(f"prompts is {quote(prompts)}; give a list of prompts")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_text(f"prompts[{index}]", prompt)
        elif isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Collection):
            raise ValueError(f"prompts[{index}] is {quote(prompt)}; give a text or a list of token ids")
        else:
            wrong = next((token for token in prompt if not isinstance(token, Integral)), None)
            if wrong is not None:
                raise ValueError(f"prompts[{index}] holds {quote(wrong)}; token ids are integers")


def check_texts(name: str, texts: str | Sequence[str]) -> tuple[str, ...]:
    strings = (texts,) if isinstance(texts, str) else tuple(texts) if isinstance(texts, Sequence) else (texts,)
    for string in strings:
        if not isinstance(string, str):
            raise ValueError(f"{name} holds {quote(string)}; give a text or a list of texts")
    if "" in strings:
        raise ValueError(f"{name} has an empty string, which every answer contains; leave that out")
    return strings


def params_of(prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams]) -> list[SamplingParams]:
    """Returns the params of each prompt. Raises ValueError unless there is one for all or one per prompt."""
    if isinstance(params, SamplingParams):
        if params.seed is None:
            return [params] * len(prompts)
        return [replace(params, seed=prompt_seed(params.seed, index)) for index in range(len(prompts))]
    remedy = "give SamplingParams, one for all or one per prompt"
    if isinstance(params, str | Mapping) or not isinstance(params, Collection):
        raise ValueError(f"params is {quote(params)}; {remedy}")
    entries = list(params)
    for index, entry in enumerate(entries):
        if not isinstance(entry, SamplingParams):
            raise ValueError(f"params[{index}] is {quote(entry)}; {remedy}")
    if len(entries) != len(prompts):
        raise ValueError(f"params has {len(entries)} entries for {len(prompts)} prompts; give one, or one per prompt")
    return entries
