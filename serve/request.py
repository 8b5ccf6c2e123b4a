"""Requests, sampling parameters and outputs, as front ends and the engine exchange them. Imports no torch."""

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise, zip_longest
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

from slipstream.models.chat.quotes import quote, shorten

FinishReason = Literal["stop", "length", "abort", "error"]
MissReason = Literal["no_snapshot", "given_up", "no_entry", "grid", "window"]  # docs/operations.md says what they mean
INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
MOST_LOGPROBS = 20  # as OpenAI
NO_ADAPTER = "none"  # the draft as it is
SEED_BITS = 53  # bits of drawn seeds: JSON readers that parse numbers as doubles keep them exactly


@dataclass(frozen=True, slots=True)
class Speculation:
    """Options of a request for speculative decoding, which changes none of its tokens."""

    enabled: bool = True
    """False: nothing is drafted for it."""
    trace: bool = False
    """Each of its tokens comes with a TokenTrace."""

    def __post_init__(self) -> None:
        for name in ("enabled", "trace"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"speculation.{name} is {quote(value)}; it must be true or false")


GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag", "ast"]


class Grammar(NamedTuple):
    """The only texts that an answer may be: JSON of a schema, any JSON object, full matches of a regular expression,
    one of a JSON list of texts, texts that xgrammar's EBNF derives from `root`, or texts of its structural tag.
    `translate` in serve/grammar/grammars.py makes an "ast" of each of these: EBNF for xgrammar, made once for all."""

    kind: GrammarKind
    text: str = ""  # the schema, the list, the tag or the ast as JSON, the expression, or the grammar

    def digest(self) -> bytes:
        """Returns a short key for tables, since the text may have megabytes."""
        text = f"{self.kind} {self.text}".encode(errors="surrogatepass")
        return hashlib.blake2b(text, digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options for sampling a request's tokens and ending it.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off. `stop_token_ids` are added to
    the model's own end-of-text ids, which `ignore_eos` switches off. A request without a `seed` draws its own. Front
    ends handle stop strings (serve/detokenize.py); the engine sees tokens only.

    Before all that, and at temperature 0, too, `logit_bias` is added to the logits of its token ids, -100 to 100.
    `repetition_penalty` divides positive logits of the tokens of prompt and answer, and multiplies negative ones.
    `frequency_penalty`, for each time that a token is in the answer, and `presence_penalty`, once, are subtracted.
    Before `min_tokens` tokens no end-of-text or `stop_token_ids` id is sampled. `bad_words` are sequences of token ids
    that the answer never contains. With a `grammar` an answer is one of its texts, or the beginning of one where
    `max_tokens` cut it.

    With `logprobs` each token of the answer comes with its log-probability and those of so many likeliest tokens at its
    place, 0 to 20; with `prompt_logprobs` each token of the prompt but the first. They are the target's own, before
    bias, penalties, temperature and filters, unless the engine's `logprobs_mode` is "processed". `max_tokens` may be 0
    with `prompt_logprobs`. `speculation` may be a mapping of its fields. `draft_adapter` names the adapter with which
    the draft drafts, "none" or one of drafter.adapters; tokens do not depend on it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # kept as pairs
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: Speculation | Mapping[str, bool] = Speculation()  # kept as Speculation
    draft_adapter: str | None = None

    def __post_init__(self) -> None:
        for names, kind, kind_name in ((INTEGERS, Integral, "an integer"), (NUMBERS, Real, "a number")):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) and not (name in OPTIONAL and value is None):
                    raise ValueError(f"{name} is {quote(value)}; it must be {kind_name}")
        fewest = 1 if self.prompt_logprobs is None else 0
        for name, valid, remedy in (
            ("max_tokens", self.max_tokens >= fewest, f"at least {fewest}"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens, {max_tokens}"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or a positive number below 2**31"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 1e-4 <= self.repetition_penalty <= 1e4, "between 0.0001 and 10000"),  # fp32 holds it
            ("logprobs", 0 <= (self.logprobs or 0) <= MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}"),
        ):
            if not valid:
                bound = remedy.format(max_tokens=quote(self.max_tokens))
                raise ValueError(f"{name} is {quote(getattr(self, name))}; it must be {bound}")
        for name in ("ignore_eos", "min_tokens", "bad_words"):
            if self.grammar is not None and getattr(self, name):
                raise ValueError(
                    f"{name} does not go with a grammar, which may allow nothing else; leave one of them out"
                )
        object.__setattr__(self, "stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", bias_pairs(self.logit_bias))
        object.__setattr__(self, "bad_words", token_sequences(self.bad_words))
        object.__setattr__(self, "speculation", read_speculation(self.speculation))

    @property
    def wants_drafts(self) -> bool:
        """Whether tokens are drafted for the request."""
        return self.speculation.enabled  # type: ignore[union-attr]

    @property
    def wants_trace(self) -> bool:
        """Whether its tokens come with a trace."""
        return self.speculation.trace  # type: ignore[union-attr]

    @property
    def has_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises ValueError if a field has a token id that is not in the vocabulary."""
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("logit_bias", dict(self.logit_bias), vocab_size)
        check_token_ids("bad_words", chain(*self.bad_words), vocab_size)

    def check_adapter(self, names: Sequence[str]) -> None:
        """Raises ValueError for a `draft_adapter` that is none of `names`."""
        if self.draft_adapter not in (None, NO_ADAPTER, *names):
            raise ValueError(
                f"draft_adapter is {quote(self.draft_adapter)}; give {', '.join((*names, NO_ADAPTER))}, or leave it out"
            )

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias`, and minus infinity for bad words of one token."""
        return dict(self.logit_bias) | {word[0]: -math.inf for word in self.bad_words if len(word) == 1}

    @property
    def changes_logits(self) -> bool:
        """Whether fields change logits; drafts do not know that, so they may be accepted less often."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens or self.bad_words or self.grammar)


@dataclass(frozen=True, slots=True)
class SamplingTraits:
    """Properties of SamplingParams that every step asks for, computed once."""

    is_greedy: bool
    has_filters: bool
    has_processors: bool  # penalties or biases
    changes_logits: bool
    wants_drafts: bool
    wants_trace: bool

    @classmethod
    def of(cls, params: SamplingParams) -> "SamplingTraits":
        return cls(
            is_greedy=params.temperature == 0,
            has_filters=params.has_filters,
            has_processors=params.has_penalties or bool(params.biases),
            changes_logits=params.changes_logits,
            wants_drafts=params.wants_drafts,
            wants_trace=params.wants_trace,
        )


def token_ids(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Reads the token ids of a field. Raises ValueError for a value that cannot be one."""
    try:
        ids = tuple(values)
    except TypeError as error:
        raise ValueError(f"{name} is {quote(values)}; it must be a list of token ids") from error
    for token in ids:
        if (type(token) is not int and not isinstance(token, Integral)) or token < 0:
            raise ValueError(f"{name} has the token id {quote(token)}; it must be an integer from 0 up")
    return ids


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises ValueError for an id that is not in the vocabulary."""
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{name} has the token id {quote(wrong)}; it must be between 0 and {vocab_size - 1}")


def bias_pairs(bias: Mapping[int, float] | tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """Returns the token ids, sorted, with the numbers to add to their logits. Raises ValueError."""
    try:
        pairs = tuple(sorted(dict(bias).items()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"logit_bias is {quote(bias)}; it must map token ids to numbers") from error
    token_ids("logit_bias", (token for token, _ in pairs))
    for token, value in pairs:
        if not isinstance(value, Real) or not -100 <= value <= 100:
            raise ValueError(f"logit_bias of token {quote(token)} is {quote(value)}; it must be between -100 and 100")
    return pairs


def token_sequences(words: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Reads `bad_words`, each once. Raises ValueError."""
    try:
        sequences = tuple(dict.fromkeys(tuple(word) for word in words))
    except TypeError as error:
        raise ValueError(f"bad_words is {quote(words)}; it must be a list of lists of token ids") from error
    for word in sequences:
        if not token_ids("bad_words", word):
            raise ValueError("bad_words has an empty list; leave it out")
    return sequences


def read_speculation(value: Any) -> Speculation:
    """Raises ValueError naming a wrong field."""
    if isinstance(value, Speculation):
        return value
    names = [field.name for field in fields(Speculation)]
    if not isinstance(value, Mapping):
        raise ValueError(f"speculation is {quote(value)}; it must be Speculation or a mapping of {' and '.join(names)}")
    unknown = next((name for name in value if name not in names), None)
    if unknown is not None:
        raise ValueError(f"speculation.{shorten(str(unknown))} does not exist; valid: {', '.join(names)}")
    return Speculation(**value)


def draw_seed() -> int:
    return secrets.randbits(SEED_BITS)


def prompt_seed(seed: int, index: int) -> int:
    """Returns the seed of prompt `index` of a call. The first has the call's seed, so that it samples as if alone."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"prompt {seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. The `n` choices of a prompt are n requests that differ in `id` and `choice`. `params`
    always has a seed, drawn here if none is given."""

    id: str
    prompt: list[int]
    params: SamplingParams
    choice: int = 0  # index among `n`; hashed into the noise key
    namespace: str = ""  # cached prefixes are shared within a namespace only
    adapter: int = 0  # number of the draft's adapter, which the engine chooses; 0: none
    tenant: str = ""  # among whom, and then among whose namespaces, request slots are shared evenly
    client: str = ""  # its client; n-grams are shared between requests of one client and namespace, if not with all
    labels: tuple[str, ...] = ()  # the kind of call, by which acceptance is watched: chat, tools, reasoning, completion
    compiled_grammar: Any = field(default=None, repr=False, compare=False)  # the engine's, for as long as it runs

    def __post_init__(self) -> None:
        if self.params.seed is None:
            object.__setattr__(self, "params", replace(self.params, seed=draw_seed()))

    @property
    def cache_namespace(self) -> str:
        """The namespace of its pages, whose draft KV its adapter has written."""
        return f"{self.adapter} {self.namespace}" if self.adapter else self.namespace

    @property
    def seed(self) -> int:
        assert self.params.seed is not None
        return self.params.seed


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Counts of one request, final with its last Output.

    Accept length, as everywhere in Slipstream: (completion_tokens - 1) / rounds, since the prefill samples the first
    token. A preempted request prefills again, all its tokens, when it resumes, and samples its next token there: in
    general (completion_tokens - prefills) / rounds. `cached_tokens` counts prompt tokens found in the prefix cache when
    the request first ran, `missed_tokens` those after them that it knew, but not what every layer needs of them,
    `idle_tokens` those of `cached_tokens` that were computed in idle time for this first use.
    `accepted_by_position[j]` counts the rounds in which draft token j was accepted and emitted.
    A request without speculation has no rounds.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    missed_tokens: int = 0
    idle_tokens: int = 0
    miss_reason: MissReason | None = None
    completion_tokens: int = 0
    prefills: int = 0  # completed prefills: 1, and 1 more per resumption
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    weight_version: str = ""  # of the draft's weights as it ended; empty where no network drafts
    draft_adapter: str = ""  # name of its adapter, or names of several choices; empty where the draft has none

    @property
    def decoded_tokens(self) -> int:
        """Tokens that its rounds emitted."""
        return self.completion_tokens - self.prefills if self.rounds else 0

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    def speculative_decoding(self, num_spec_tokens: int) -> dict[str, Any] | None:
        """Returns vLLM's `metrics.speculative_decoding`; None where `num_spec_tokens`, most tokens that a round usually
        drafts, is 0 and nothing was drafted.

        Every round counts as a step, also one that verified no drafted token.
        """
        if num_spec_tokens == 0 and not self.drafted_tokens:
            return None
        num_spec_tokens = max(num_spec_tokens, len(self.accepted_by_position))
        at_least = [self.rounds, *self.accepted_by_position]  # rounds by how many tokens they accepted
        at_least += [0] * (num_spec_tokens + 2 - len(at_least))
        rounds = self.rounds
        accepted = self.accepted_tokens
        drafted = self.drafted_tokens
        return {
            "mean_acceptance_length": 1 + accepted / rounds if rounds else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": [count - more for count, more in pairwise(at_least)],
            "num_spec_steps": rounds,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": num_spec_tokens,
            "weight_version": self.weight_version,
            **({"draft_adapter": self.draft_adapter} if self.draft_adapter else {}),
        }

    def add(self, other: "RequestStats") -> None:
        """Adds every count of `other`."""
        pairs = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        self.accepted_by_position = [sum(pair) for pair in pairs]
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "prefills", "rounds", "drafted_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.weight_version = other.weight_version
        names = {*self.draft_adapter.split("+"), other.draft_adapter} - {""}
        self.draft_adapter = "+".join(sorted(names))


class TokenTrace(NamedTuple):
    """Origin of a token of an answer."""

    source: str  # the drafter or host stage that proposed it; "target": nobody did
    position: int  # in its draft, from 1: how many tokens of it were emitted up to this one; 0: the target's own
    round: int  # round of the request, from 1; 0: sampled after a prompt, or after its text when it resumed
    # Tokens that were drafted after the same text, verified, and not sampled; None: withheld, another request's text.
    refused: tuple[int | None, ...] = ()
    drafted: int = 0  # drafted tokens of the request that the pass of this round verified
    rows: int = 0  # rows of that pass: nodes and prompt tokens of all its requests


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of N tokens, and the K likeliest tokens at the place of each, the likeliest first."""

    tokens: list[float] = field(default_factory=list)  # (N,)
    ranks: list[int] = field(default_factory=list)  # (N,) 1: no token is likelier
    top: list[list[float]] = field(default_factory=list)  # (N, K)
    top_ids: list[list[int]] = field(default_factory=list)  # (N, K)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def join(cls, parts: "Iterable[Logprobs]") -> "Logprobs":
        columns = zip(*(part._columns for part in parts), strict=True)
        return cls(*(list(chain.from_iterable(column)) for column in columns))

    def __getitem__(self, part: slice) -> "Logprobs":
        return Logprobs(*(column[part] for column in self._columns))

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        return self.tokens, self.ranks, self.top, self.top_ids


@dataclass(slots=True, kw_only=True)  # each step makes one for each request; to freeze them takes 2 us each
class Output:
    """New tokens of one request. Only its last Output has `finish_reason` and `stats`, and, where that is "error", the
    sentence that says what failed, and whether the request itself is at fault (`is_refusal`). `logprobs` and `trace`
    belong to `tokens`, if the request wants them; `prompt_logprobs`, of the prompt's tokens from the second on, come
    with its first Output."""

    request_id: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str = ""
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    trace: list[TokenTrace] | None = None
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of a running engine that front ends read."""

    max_model_len: int
    vocab_size: int
    kv_cache_tokens: int
    inexact: str = "not known"  # why answers may depend on the requests beside them; empty: they do not
    fingerprint: str = ""  # hash of everything that answers depend on, with all options where they are inexact
    draft_fingerprint: str = ""  # hash of the draft's checkpoint, or the name of a drafter that has none
    num_spec_tokens: int = 0  # most tokens that a round drafts
    draft_adapters: tuple[str, ...] = ()  # names of its LoRA adapters
