"""Turns request bodies into Requests, with the target's tokenizer, chat template and default sampling."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from slipstream.models.chat.quotes import PLACE_CHARS, quote, shorten
from slipstream.models.chat.template import QUESTION, PromptTemplate, TemplateFailed, TemplateRefused
from slipstream.models.drafts.source import warn_if_changed
from slipstream.models.files.checkpoint import read_json, tokenizer_hash
from slipstream.models.files.prepared import read_report
from slipstream.models.files.text import read_text_file
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.chat.answers import AnswerFormat, ChatFormat
from slipstream.serve.chat.tools import ToolChoice, read_choice, read_tools
from slipstream.serve.detokenize import Decoder, TokenTexts, spellings
from slipstream.serve.http.control_tokens import PlainTextTokenizer
from slipstream.serve.http.limits import MAX_BAD_TOKENS, MAX_PROMPT_LOGPROBS, ApiError, HttpLimits
from slipstream.serve.http.logprobs import Echo
from slipstream.serve.http.responses_body import ResponsesBody
from slipstream.serve.http.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    DraftBody,
    TokenizeBody,
    grammar_of,
)
from slipstream.serve.options import ServeConfig, find_target
from slipstream.serve.request import (
    EngineInfo,
    Request,
    SamplingParams,
    check_token_ids,
    draw_seed,
    prompt_seed,
)

# What generation_config.json may set, and what else a body says in the words of SamplingParams.
DEFAULTED_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SAMPLING_FIELDS = (*DEFAULTED_FIELDS, "frequency_penalty", "presence_penalty", "logit_bias", "min_tokens", "ignore_eos")
# Names that transformers itself passes to a template, besides the parameters of apply_chat_template.
RESERVED_IN_TEMPLATES = ("self", "messages", "conversations", "strftime_now")


@dataclass(frozen=True, slots=True)
class TargetText:
    """A target's part that the server reads: its texts and defaults. The engine reads the rest."""

    tokenizer: Any
    template: PromptTemplate | None  # None: the target has none
    plain_text: PlainTextTokenizer | None  # None: control tokens are encoded as such
    chat: ChatFormat
    sampling_defaults: dict[str, Any]

    @classmethod
    def read(cls, config: ServeConfig) -> "TargetText":
        """Logs a warning where the draft was trained for another target. Raises ValueError, with file and remedy, for
        what cannot be used."""
        _, path = find_target(config, weights=False)
        defaults = read_sampling_defaults(path)
        tokenizer = load_tokenizer(path, config.trust_remote_code)
        if config.chat_template is not None:
            tokenizer.chat_template = read_text_file("chat_template", config.chat_template)
        if tokenizer.chat_template:
            check_template(tokenizer, config, path)
        tokenizer("")  # its first call may change its settings, which fails while another thread uses it
        warn_if_changed(config.source, path, tokenizer)
        if config.learn.data is not None:
            read_report(Path(config.learn.data), "learn.data", tokenizer_hash(tokenizer))
        plain_text = PlainTextTokenizer(tokenizer) if config.control_tokens_as_text else None
        template: PromptTemplate | None = None
        if tokenizer.chat_template and plain_text is not None:
            template = plain_text.template(tokenizer, date=config.date)
        elif tokenizer.chat_template:
            template = PromptTemplate(tokenizer, date=config.date, variables={})
        chat = ChatFormat(tokenizer, config.tool_parser, config.reasoning_parser)
        return cls(tokenizer, template, plain_text, chat, defaults)


def check_template(tokenizer: Any, config: ServeConfig, path: Path) -> None:
    """Raises ValueError for a chat template that is not valid, and for a file of the options that holds none. Those of
    targets may want other messages."""
    try:
        template = PromptTemplate(tokenizer, date=config.date, variables={})
        offers: tuple[list[Any] | None, ...] = (None, [])
        for tools in offers:
            try:
                text = template.render([QUESTION], tools, prompt=True)
            except TemplateFailed:
                if tools is None:
                    raise
            except TemplateRefused:
                continue  # it may want a system message
            else:
                if config.chat_template is not None and str(QUESTION["content"]) not in text:
                    raise ValueError("it does not write the messages")
    except ValueError as error:
        if config.chat_template is not None:
            place = f"chat_template is {config.chat_template!r}"
            remedy = "name a file with a Jinja chat template"
        else:
            file = path / "chat_template.jinja"
            place = f"target has {file if file.exists() else path / 'tokenizer_config.json'}"
            remedy = "mend it, or name a file with another by --chat-template"
        raise ValueError(f"{place}, which cannot be used: {error}; {remedy}") from error


Conversation = ChatBody | ResponsesBody
CallBody = Conversation | CompletionBody


class Frontend:
    """Tokenizer and rules of one target; stateless, so `read` may run on several threads at once."""

    def __init__(self, config: ServeConfig, info: EngineInfo, text: TargetText | None = None) -> None:
        """`text`: the target's, if it has been read. Raises ValueError for a target that cannot be read."""
        target, path = find_target(config, weights=False)
        text = text or TargetText.read(config)
        self.model_name = config.served_model_name or (path.resolve().name if Path(target).is_dir() else target)
        self.sampling_defaults = text.sampling_defaults
        self.tokenizer = text.tokenizer
        self.plain_text = text.plain_text
        self.template = text.template
        self.decoder = Decoder(self.tokenizer)
        self.texts = TokenTexts(self.tokenizer)
        self.chat = text.chat
        self._ignore_unknown = config.ignore_unknown_fields
        self.max_model_len = info.max_model_len
        self.vocab_size = info.vocab_size
        self.inexact = info.inexact
        self.fingerprint = info.fingerprint
        self.draft_fingerprint = info.draft_fingerprint
        self.draft_folder = config.draft_folder
        self.num_spec_tokens = info.num_spec_tokens
        self.draft_adapters = info.draft_adapters
        self.limits = HttpLimits.of(config, info.max_model_len, self.tokenizer)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"model {quote(name)} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def check_choices(self, body: CallBody) -> None:
        num_choices = body.n * (len(body.prompt) if isinstance(body, CompletionBody) else 1)
        if num_choices > self.limits.choices:
            message = (
                f"the call asks for {num_choices} choices (prompts times n); the limit is {self.limits.choices}, "
                "half of max_running + max_waiting"
            )
            raise ApiError(400, message, "n" if body.n > 1 else "prompt")

    def tool_choice(self, body: Conversation | TokenizeBody) -> ToolChoice:
        if not body.tools and (isinstance(body, TokenizeBody) or body.tool_choice is None):
            return ToolChoice()
        if isinstance(body, TokenizeBody):
            tools = tuple(read_tools(body.tools, ignore_unknown=self._ignore_unknown))
            return ToolChoice(tools, "auto" if tools else "none")
        return read_choice(
            body.tools,
            body.tool_choice,
            body.parallel_tool_calls,
            is_flat=isinstance(body, ResponsesBody),
            ignore_unknown=self._ignore_unknown,
        )

    def chat_prompt(self, body: Conversation | TokenizeBody, choice: ToolChoice) -> list[int]:
        assert body.messages is not None
        if self.template is None:
            message = f"{self.model_name} has no chat template; use /v1/completions"
            raise ApiError(400, message, body.prompt_field, "no_chat_template")
        reserved = {*RESERVED_IN_TEMPLATES, *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        for name in body.chat_template_kwargs:
            if name in reserved:
                raise ApiError(400, f"chat_template_kwargs must not hold {name}", "chat_template_kwargs")
        variables = {**body.chat_template_kwargs}
        if not isinstance(body, TokenizeBody):
            variables = self.chat.variables(body.reasoning_effort, body.effort_field) | variables
        tools = [tool.definition for tool in choice.tools] or None
        try:
            messages = self.chat.named_reasoning(body.messages)
            text = self.template.render(messages, tools, prompt=body.add_generation_prompt, variables=variables)
        except TemplateFailed as error:
            # Bodies are flat; the arguments of a call, which are JSON in a string, may not be.
            is_deep = isinstance(error.__cause__, RecursionError)
            values = {body.prompt_field: is_deep, "chat_template_kwargs": body.chat_template_kwargs, "tools": tools}
            field = next((name for name, value in values.items() if value), None)
            if field is None:
                raise  # a bug in the template
            raise ApiError(400, f"the chat template failed on a value in {field}; leave it out", field) from error
        except TemplateRefused as error:  # the template's own message to its users
            field = "chat_template_kwargs" if body.chat_template_kwargs else body.prompt_field
            message = f"the chat template refuses this request: {shorten(str(error), PLACE_CHARS)}"
            raise ApiError(400, message, field) from error
        except ValueError as error:
            raise ApiError(400, str(error), body.prompt_field) from error
        return self.encode(text, body.prompt_field, add_special_tokens=False)

    def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Answers /tokenize."""
        if body.prompt is None:
            tokens = self.chat_prompt(body, self.tool_choice(body))
        else:
            tokens = self.encode(body.prompt, "prompt", body.add_special_tokens)
        strings = self.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens, "token_strs": strings}

    def count_input(self, body: ResponsesBody) -> dict[str, Any]:
        """Answers /v1/responses/input_tokens."""
        tokens = self.chat_prompt(body, self.tool_choice(body))
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}

    def draft_path(self, body: DraftBody) -> str:
        """Returns the folder of a checkpoint that POST /v1/drafts names. Raises ApiError for one elsewhere."""
        assert self.draft_folder is not None
        name = Path(body.draft)
        path = Path(self.draft_folder) / name
        is_inside = bool(body.draft) and not name.is_absolute() and ".." not in name.parts
        if not is_inside or not os.path.isdir(path):  # noqa: PTH112  Path.is_dir raises for a name that is too long
            raise ApiError(400, "draft names no folder in the server's draft_folder; give the name of one", "draft")
        return str(path)

    def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """Answers /detokenize, special tokens included."""
        self.check_tokens(body.tokens, "tokens")
        return {"prompt": self.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)}

    def tokenizer_info(self) -> dict[str, Any]:
        """Answers /tokenizer_info: special tokens, and the chat template for clients that render prompts."""
        template = self.tokenizer.get_chat_template() if self.template is not None else None
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            "model_max_length": self.max_model_len,
            **{name: getattr(self.tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
            "chat_template": template,
        }

    def check_tokens(self, tokens: list[int], field: str) -> None:
        try:
            check_token_ids(field, tokens, self.vocab_size)
        except ValueError as error:
            raise ApiError(400, str(error), field) from error

    def completion_prompts(self, body: CompletionBody) -> list[list[int]]:
        prompts: list[list[int]] = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                prompts.append(self.encode(prompt, "prompt", add_special_tokens=True))
                continue
            self.check_tokens(prompt, "prompt")
            prompts.append(prompt)
        return prompts

    def encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        limit = self.limits.text_chars
        if limit is not None and len(text) > limit:
            context = f"this model's context holds {self.max_model_len} tokens, at most {limit} characters"
            message = f"the prompt has {len(text)} characters; {context}"
            raise ApiError(400, message, field, "context_length_exceeded")
        if self.plain_text is not None:
            return self.plain_text(text, add_special_tokens=add_special_tokens)
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids

    def read(self, body: CallBody, response_id: str) -> tuple[list[Request], AnswerFormat]:
        """Returns a Request for each choice, first those of the first prompt, and the format of their answers. The
        first Request has the seed of the call."""
        self.check_choices(body)
        grammar, field = grammar_of(body, ignore_unknown=self._ignore_unknown) or (None, "tools")
        if not isinstance(body, CompletionBody):
            tools = self.tool_choice(body)
            prompts = [self.chat_prompt(body, tools)]
            answers = self.chat.answer(tools, prompts[0], grammar)
            labels = ("chat", *["tools"] * (tools.mode != "none"), *["reasoning"] * answers.reasons)
        else:
            prompts = self.completion_prompts(body)
            answers = AnswerFormat(self.decoder, grammar, continues=True)
            check_prompt_logprobs(body, sum(map(len, prompts)))
            labels = ("completion",)
        seed = draw_seed() if body.seed is None else body.seed
        namespace = digest(body.cache_salt)
        requests: list[Request] = []
        bad_words = spellings(self.tokenizer, body.bad_words)
        if (size := sum(map(len, bad_words))) > MAX_BAD_TOKENS:
            message = f"bad_words has {size} tokens, at the beginning and after a space; the limit is {MAX_BAD_TOKENS}"
            raise ApiError(400, f"{message}: send fewer or shorter words", "bad_words")
        for index, prompt in enumerate(prompts):
            params = self.sampling_params(body, len(prompt), prompt_seed(seed, index), answers, bad_words)
            for choice in range(body.n):
                request_id = f"{response_id}-{len(requests)}"
                requests.append(
                    Request(
                        id=request_id,
                        prompt=prompt,
                        params=params,
                        choice=choice,
                        namespace=namespace,
                        labels=labels,
                    )
                )
        return requests, replace(answers, grammar_field=field)

    def echoes(self, body: CallBody, requests: Sequence[Request]) -> list[Echo]:
        """Returns the prompts that the choices repeat, in order; empty if they repeat none."""
        if not isinstance(body, CompletionBody) or not body.echo:
            return []
        echoes: list[Echo] = []
        size = 0
        for prompt, request in zip(body.prompt, requests[:: body.n], strict=True):
            tokens = request.prompt
            text = self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
            text = prompt if isinstance(prompt, str) else text
            size += body.n * len(text)
            if size > self.limits.body_bytes:
                limit = f"the limit is {self.limits.body_bytes}, as of a body"
                message = f"echo repeats {size} characters of prompts or more; {limit}: send fewer, or a lower n"
                raise ApiError(400, message, "echo")
            echoes += [Echo(text, tokens, self.texts.starts(tokens, text))] * body.n
        return echoes

    def sampling_params(
        self,
        body: CallBody,
        prompt_len: int,
        seed: int,
        answers: AnswerFormat,
        bad_words: tuple[tuple[int, ...], ...],
    ) -> SamplingParams:
        """`bad_words`: by their tokens, which take long to find."""
        field = body.prompt_field
        if prompt_len == 0:
            raise ApiError(400, f"{field} is empty: it must hold at least one token", field)
        room = self.max_model_len - prompt_len
        lengths = f"the prompt has {prompt_len} tokens"
        if body.max_tokens is not None:
            lengths += f" and {body.length_field} is {body.max_tokens}, together {prompt_len + body.max_tokens}"
        if room < (1 if body.max_tokens is None else body.max_tokens):
            message = f"{lengths}; this model's context holds {self.max_model_len} tokens, prompt and answer"
            raise ApiError(400, message, field, "context_length_exceeded")
        unset_max_tokens = min(room, DEFAULT_COMPLETION_TOKENS) if isinstance(body, CompletionBody) else room
        options = {name: getattr(body, name) for name in SAMPLING_FIELDS if getattr(body, name) is not None}
        try:
            params = SamplingParams(
                max_tokens=unset_max_tokens if body.max_tokens is None else body.max_tokens,
                seed=seed,
                grammar=answers.grammar,
                logprobs=body.answer_logprobs,
                prompt_logprobs=body.all_prompt_logprobs,
                bad_words=bad_words,
                stop_token_ids=(*body.stop_token_ids, *answers.stop_ids),
                speculation=body.asked_speculation,
                draft_adapter=body.draft_adapter,
                **{**self.sampling_defaults, **options},
            )
            params.check_token_ids(self.vocab_size)
            params.check_adapter(self.draft_adapters)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).split()[0]) from error
        return params


def check_prompt_logprobs(body: CompletionBody, num_tokens: int) -> None:
    k = body.all_prompt_logprobs
    count = 0 if k is None else num_tokens * body.n * (k + 1)
    if count > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        message = (
            f"{field} asks for {count} log-probabilities of prompts (tokens times n times one more than the likeliest "
            f"tokens); the limit is {MAX_PROMPT_LOGPROBS}: ask for fewer, or send fewer or shorter prompts"
        )
        raise ApiError(400, message, field)


def digest(salt: str) -> str:
    """Returns the engine's namespace for a salt: a digest, since every cached prefix stores it."""
    return blake2b(salt.encode(), digest_size=16).hexdigest() if salt else ""


def read_sampling_defaults(path: Path) -> dict[str, Any]:
    """Reads DEFAULTED_FIELDS from generation_config.json. Fields that it leaves out keep OpenAI's defaults. Raises
    ValueError for values that no request may have."""
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    generation = read_json(file)
    defaults = {name: generation[name] for name in DEFAULTED_FIELDS if generation.get(name) is not None}
    try:
        SamplingParams(max_tokens=1, **defaults)
    except ValueError as error:
        raise ValueError(f"{file} has defaults that no request may have: {error}; correct or remove them") from error
    return defaults
