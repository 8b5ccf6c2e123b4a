"""Limits on one request to the HTTP process, each with its reason, and the code that enforces them.

All streams share one process and one event loop, so a request must cost little memory and must not hold the loop or the
GIL for more than some tens of milliseconds.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import Request
from tokenizers.pre_tokenizers import ByteLevel

from slipstream.models.chat.quotes import shorten
from slipstream.serve.detokenize import overrides_none
from slipstream.serve.options import ServeConfig

# A body has room for a context of 256k tokens, or of max_model_len if that is more: 16 bytes per token (4 MiB), and one
# value per token for clients that send token ids.
BODY_TOKENS = 2**18
BODY_BYTES_PER_TOKEN = 16
# Longer bodies count towards MAX_BODIES_BYTES and have their own parsing threads, so short ones never wait for them.
SHORT_BODY_BYTES = 64 * 2**10
# Total of all bodies in memory, so that many long ones cannot fill it.
MAX_BODIES_BYTES = 64 * 2**20
MAX_LONG_WAITING = 16  # long bodies queued for a thread; tokenising one can take seconds

MAX_NESTING = 64  # levels of a body; recursive code, such as chat templates, overflows its stack on deeper ones
# Strings, lists and objects in a body: the parser holds the GIL until it has built them all, and turns 3 bytes of input
# into 50 to 200 bytes of objects.
MAX_NODES = 2**16
MAX_MESSAGES = 4096  # checking one takes about 10 us
MAX_PARTS = 4096  # over all messages of a call

MAX_CHOICES_PER_PROMPT = 128  # as OpenAI
# The event loop compares every token of an answer with every stop string; 16 take a few microseconds.
MAX_STOP_STRINGS = 16
MAX_STRING_CHARS = 256  # of these and of bad words
MAX_STOP_IDS = 64
MAX_BAD_WORDS = 128  # the engine compares each path of each proposal with every one
MAX_BAD_TOKENS = 4096  # of them all, by both spellings: each request of a call carries and checks them
MAX_BIASES = 1024
MAX_GRAMMAR_CHOICES = 1024
# Log-probabilities of prompts that a call may get, each some 100 bytes of JSON: tokens times n times one more than the
# likeliest tokens asked for.
MAX_PROMPT_LOGPROBS = 2**18

RETRY_AFTER_S = 1  # sent with 429 and 503: a place may be free after any step
MAX_ERROR_CHARS = 1000  # error messages may quote what the client sent

# A string (possibly unterminated), a bracket, or whatever is between those: numbers, commas, colons.
JSON_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]|[^"\[\]{}]{1,65536}+', re.DOTALL)
Result = TypeVar("Result")


class ApiError(Exception):
    """An error in OpenAI's shape; `param` names the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = shorten(message, MAX_ERROR_CHARS)
        self.param = param and shorten(param, MAX_ERROR_CHARS)

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class BodyReader:
    """Reads bodies. Invariant: `num_bytes` is the size of all bodies held at the moment."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: limit for one body."""
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body; it counts as held until the block ends. Raises ApiError (413, 415, or 429 if too much is held)."""
        check_content_type(request)
        if int(request.headers.get("content-length", 0)) > self.max_bytes:
            raise self._too_long()
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self.num_bytes += len(chunk)
                if size > self.max_bytes:  # a chunked body has no content-length
                    raise self._too_long()
                if size > SHORT_BODY_BYTES and self.num_bytes > MAX_BODIES_BYTES:
                    raise ApiError(429, "too many long bodies at once; try again later", code="server_overloaded")
                chunks.append(chunk)
            chunks = [b"".join(chunks)]  # frees the chunks
            yield chunks[0]
        finally:
            self.num_bytes -= size

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self.max_bytes} bytes, this server's limit")


def check_content_type(request: Request) -> None:
    """JSON only: browsers send JSON to another site only if that site allows it."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")


def parse_json(raw: bytes, max_values: int) -> dict[str, Any]:
    """Raises ApiError unless `raw` is a JSON object within the limits."""
    try:
        text = raw.decode()
        check_structure(text, max_values)
        body = from_json(text, allow_inf_nan=False, cache_strings="keys") if text else None
    except ValueError as error:  # UnicodeDecodeError or the parser's; both say what is wrong and where
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def check_structure(text: str, max_values: int) -> None:
    """Refuses JSON that is cheap to send and expensive to parse. Scans in pieces, so that other threads get turns."""
    depth = num_nodes = num_values = 0
    field = None  # the last top-level key read
    for match in JSON_TOKEN.finditer(text):
        start, end = match.span()
        if text[start] == '"':
            num_nodes += 1
            field = text[start + 1 : min(end - 1, start + 64)] if depth == 1 else field
        elif text[start] in "[{":
            num_nodes += 1
            depth += 1
        elif text[start] in "]}":
            depth -= 1
        else:
            num_values += text.count(",", start, end)
        place = field or "the body"
        if depth > MAX_NESTING:
            raise ApiError(400, f"{place} nests deeper than {MAX_NESTING} levels", field)
        if num_nodes > MAX_NODES:
            message = f"{place} is too large: a body may hold {MAX_NODES} strings, lists and objects"
            raise ApiError(400, message, field)
        if num_values > max_values:
            raise ApiError(400, f"{place} is too large: a body may hold {max_values} values", field)


class BoundedPool:
    """Threads for work that would block the event loop. Work waits on the loop, not in the executor: if its client
    leaves, its data are freed at once."""

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self._executor = ThreadPoolExecutor(num_threads, "tokenizer")
        self._free = asyncio.Semaphore(num_threads)

    async def run(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Raises ApiError (429) if too many wait. If cancelled before a thread is free, the work never starts; after
        that, its result is dropped."""
        if self.num_waiting >= self.max_waiting:
            message = f"{self.num_waiting} requests are waiting to be tokenised; try again later"
            raise ApiError(429, message, code="server_overloaded")
        self.num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.num_waiting -= 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, without_panics, work, *arguments)
        future.add_done_callback(self._release)
        return await asyncio.shield(future)  # a cancelled caller does not free the thread

    def _release(self, future: asyncio.Future) -> None:
        self._free.release()
        future.exception()  # marks it as retrieved: asyncio logs exceptions that no one awaits


def without_panics(work: Callable[..., Result], *arguments: object) -> Result:
    """A panic of the tokenizer, which is written in Rust, is no Exception, and nobody who waits would catch it."""
    try:
        return work(*arguments)
    except Exception:
        raise
    except BaseException as panic:
        raise RuntimeError(f"{type(panic).__name__}: {panic}") from panic


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits that depend on the target and the server's options."""

    body_bytes: int
    values: int  # in a body; room for a full context of token ids
    text_chars: int | None  # of one prompt; see `longest_text`
    choices: int  # of one call: half of all places, so that one call cannot take them all

    @classmethod
    def of(cls, config: ServeConfig, max_model_len: int, tokenizer: Any) -> "HttpLimits":
        tokens = max(max_model_len, BODY_TOKENS)
        return cls(
            body_bytes=tokens * BODY_BYTES_PER_TOKEN if config.max_body_mb is None else int(config.max_body_mb * 2**20),
            values=tokens + MAX_NODES,
            text_chars=longest_text(tokenizer, max_model_len),
            choices=max((config.max_running + config.max_waiting) // 2, 1),
        )


def longest_text(tokenizer: Any, num_tokens: int) -> int | None:
    """The most characters that `num_tokens` tokens can encode. None (no bound) if the tokenizer may drop text, may make
    one token of a word of any length, or overrides how transformers encodes."""
    if not overrides_none(tokenizer, "__call__", "_encode_plus"):
        return None
    backend = tokenizer.backend_tokenizer
    parts = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True)
    drops_spaces = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    splits = all(keeps_text(part) for part in components(parts["pre_tokenizer"], "pretokenizers"))
    if drops_spaces or not splits or not spells_everything(parts, vocabulary):
        return None
    shrinkage = 1
    for part in components(parts["normalizer"], "normalizers"):
        factor = normalizer_shrinkage(part)
        if factor is None:
            return None
        shrinkage *= factor
    # A character is at least one byte, so the bound also holds for tokens that spell bytes.
    return num_tokens * max(map(len, vocabulary)) * shrinkage


def components(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, with sequences flattened."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for child in part[inner] for step in components(child, inner)]


def spells_everything(parts: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Whether the model has a token for every byte, so that it drops no character and needs no unknown token."""
    if parts["model"]["type"] != "BPE":
        return False
    if parts["model"]["byte_fallback"]:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    steps = [*components(parts["pre_tokenizer"], "pretokenizers"), *components(parts["normalizer"], "normalizers")]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    return is_byte_level and all(letter in vocabulary for letter in ByteLevel.alphabet())


def keeps_text(part: dict[str, Any]) -> bool:
    if part["type"] in ("Split", "Punctuation"):
        return part["behavior"] != "Removed"
    return part["type"] in ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")


def normalizer_shrinkage(part: dict[str, Any]) -> int | None:
    """Returns the most characters that a normalizer turns into one; None if there is no bound."""
    kind = part["type"]
    if kind in ("NFC", "NFKC"):
        return 4  # the longest canonical decomposition (Unicode Standard Annex 15)
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        content = part["content"]
        return -(-len(pattern) // len(content)) if pattern and content else None
    return 1 if kind in ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel") else None
