"""Decides what the engine computes next: admission, chunked prefill, decoding, preemption, the end of requests.

Imports no torch. Invariant: of each tenant every running sequence arrived before every waiting one, and the running
ones are in order of admission; one that restarts arrives anew. A step is
    sequences = scheduler.next_decodes(reserve)
    chunks = scheduler.next_chunks(num_tokens, admission_limit)
    ... launch ...                                scheduler.mark_launched(chunks)
                                                  scheduler.commit_chunks(chunks, first_tokens)
                                                  scheduler.commit_decodes(sequences, tokens, drafted)
The caller launches what `next_...` returns at once, on a device that works in order. `commit_...` brings the tokens in
the same order, perhaps after further steps were launched; those continue after known tokens and those in flight.

Prefilling sequences compute chunks of their prompt; decoding ones verify a proposal in each step and commit between 1
token and all of its nodes. "Tokens" are those of a text, "KV tokens" places in the KV cache: nodes take some, too.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

from slipstream.serve.engine.kv_cache import PageCache, PageTable
from slipstream.serve.engine.plan import Refusal
from slipstream.serve.request import FinishReason, Logprobs, Output, Request, RequestStats, SamplingTraits


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """State of one request: waiting (no slot), prefilling or decoding. A preempted sequence continues as a new object.

    While it decodes, tokens[num_computed:] is the next step's root, or empty until the token sampled after the prompt
    arrives.
    """

    request: Request
    tokens: list[int]  # prompt + emitted
    stop_ids: frozenset[int]
    table: PageTable
    stats: RequestStats
    traits: SamplingTraits
    slot: int = -1  # -1: not running
    num_computed: int = 0  # tokens whose KV is there: committed, or of chunks that are launched
    decoding: bool = False  # its prefill is launched
    in_flight: deque[int] = field(default_factory=deque)  # by unread pass: KV tokens that it may commit
    num_preemptions: int = 0
    resumes: bool = False  # it was preempted: another object continues it
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # by chunk, so far
    num_rounds: int = 0  # steps that verified a proposal; stats.rounds has them only if drafts are wanted

    @classmethod
    def of(cls, request: Request, stop_ids: frozenset[int], lookahead: int) -> "Sequence":
        params = request.params
        end_ids = stop_ids if not params.ignore_eos else frozenset()
        return cls(
            request=request,
            tokens=list(request.prompt),
            stop_ids=end_ids.union(params.stop_token_ids),
            table=PageTable(request.cache_namespace, lookahead, len(request.prompt)),
            stats=RequestStats(prompt_tokens=len(request.prompt)),
            traits=SamplingTraits.of(params),
        )

    @property
    def kv_bound(self) -> int:
        """Most tokens whose KV is committed once every launched pass is done."""
        return self.num_computed + sum(self.in_flight)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are still to be computed."""
        return self.request.params.prompt_logprobs is not None and self.stats.prefills == 0

    @property
    def is_ending(self) -> bool:
        """Whether the launched passes, which emit at least one token each, reach max_tokens."""
        return self.stats.completion_tokens + len(self.in_flight) >= self.request.params.max_tokens

    def resumed(self) -> "Sequence":
        """Returns a copy that waits after a preemption. Passes in flight point to the old object and are ignored."""
        table = PageTable(self.table.namespace, self.table.lookahead, self.table.num_prompt)
        return replace(
            self,
            table=table,
            slot=-1,
            num_computed=0,
            decoding=False,
            in_flight=deque(),
            num_preemptions=self.num_preemptions + 1,
            prompt_logprobs=[],
        )

    def cut(self, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
        """Returns the emitted tokens that belong to the answer, up to max_tokens and the first stop id, which is
        included; and why the sequence ends with them, or None."""
        assert emitted, "every step emits at least one token of a request that decodes or ends its prompt"
        num_left = self.request.params.max_tokens - self.stats.completion_tokens
        for index, token in enumerate(emitted[:num_left]):
            if token in self.stop_ids:
                return emitted[: index + 1], "stop"
        return emitted[:num_left], "length" if len(emitted) >= num_left else None

    def count_round(self, drafted: int, num_accepted: int) -> None:
        """Counts one step that verified `drafted` tokens, `num_accepted` of which are part of the answer."""
        self.num_rounds += 1
        if not self.traits.wants_drafts:
            return
        self.stats.rounds += 1
        self.stats.drafted_tokens += drafted
        accepted = self.stats.accepted_by_position
        accepted += [0] * (num_accepted - len(accepted))
        for position in range(num_accepted):
            accepted[position] += 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int
    is_last: bool  # end was len(sequence.tokens) when the chunk was made: a token is sampled after it


def ignore(sequence: Sequence) -> None:
    """Does nothing, as nobody listens."""


class Scheduler:
    """Requests in, work out, tokens in, outputs out.

    A waiting sequence has neither request slot nor pages. Admission gives it both: pages for all its tokens and for
    `max_reserve` KV tokens more, so that no two half-computed prompts wait for each other. `next_decodes` adds pages as
    a sequence grows. When pages run out it preempts the newest sequence, prefilling or decoding: the computed pages
    stay in the prefix cache, and the sequence returns to the front of the queue. Later a prefill of all its tokens
    yields the token that the lost steps would have given. The oldest is never preempted, so it always ends: `add`
    refuses requests that cannot fit. Of a window group a sequence is admitted to a quota, and gets pages with each
    chunk and step and gives them back with each commit: these never run out.

    The scheduler calls `on_admit` when a sequence has its slot and pages, also when it resumes, `on_release` before it
    takes them back, and `on_finish` before that if its answer is whole.
    """

    def __init__(
        self,
        *,
        cache: PageCache,
        max_running: int,  # request slots 0..max_running-1
        max_model_len: int,  # prompt + answer, in tokens
        stop_ids: frozenset[int],  # the model's end-of-text ids
        lookahead: int,  # tokens that the drafter's KV looks ahead: see serve/engine/kv_cache.py
        max_reserve: int,  # most KV tokens that the passes in flight write beyond the committed ones
        max_chunks: int | None = None,  # chunks of a step; None: any number
    ) -> None:
        self.cache = cache
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.max_chunks = max_chunks
        self.stop_ids = stop_ids
        self.lookahead = lookahead
        self.max_reserve = max_reserve
        self.on_admit: Callable[[Sequence], None] = ignore
        self.on_release: Callable[[Sequence], None] = ignore
        self.on_finish: Callable[[Sequence], None] = ignore
        self.num_preemptions = 0
        self._sequences: dict[str, Sequence] = {}  # waiting and running, by request id
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._free_slots = list(reversed(range(max_running)))
        # Whether the next in the queue has found too few free pages, and no sequence has left or gone before it since.
        self._is_stalled = False

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Running sequences, oldest first."""
        return tuple(self._running)

    @property
    def has_prompts(self) -> bool:
        """Whether a sequence has tokens to compute before it decodes."""
        return bool(self._waiting) or not all(map(attrgetter("decoding"), self._running))

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never run."""
        self.validate(request)
        sequence = Sequence.of(request, self.stop_ids, self.lookahead)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)
        if self._is_stalled:
            self._is_stalled = self._next_waiting() is not sequence

    def abort(self, request_id: str, *, is_whole: bool = False) -> Output | None:
        """Ends a request in any state, also with passes in flight; one whose answer `is_whole` as by an end token.
        Returns None if it is unknown or ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        return self._end(sequence, [], "stop" if is_whole else "abort")

    def fail(self, sequence: Sequence, error: str) -> Output | None:
        """Ends a running request that cannot go on. An `error` that is a Refusal is the request's own fault (status
        400). Returns None if it has ended or was preempted."""
        if sequence.slot < 0:
            return None
        return replace(self._end(sequence, [], "error"), error=error, is_refusal=isinstance(error, Refusal))

    def restart(self, sequence: Sequence) -> None:
        """Preempts a running request whose last step does not count. Nothing happens if it has ended or was preempted.
        It resumes after those that run now, as the newest of them."""
        if sequence.slot >= 0:
            self._preempt(sequence)

    def change_draft(self, version: str) -> None:
        """Notes that from now on the draft's KV is that of weights of this version. Running sequences keep what they
        have."""
        self.cache.change_draft(version, [sequence.table for sequence in self._running])

    def next_chunks(self, num_tokens: int, admission_limit: int | None = None) -> list[Chunk]:
        """Returns the next prompt tokens to compute, at most `num_tokens` in all. After `admission_limit` tokens no
        further prompt joins the step."""
        chunks: list[Chunk] = []
        if num_tokens < 1:
            return chunks
        num_taken = 0
        limit = num_tokens if admission_limit is None else min(num_tokens, admission_limit)
        for sequence in self._prefilling():
            start = sequence.num_computed
            length = len(sequence.tokens)
            end = min(length, start + num_tokens - num_taken)
            reach = self.cache.reach(sequence.table, length + self.max_reserve)  # pages of windows are few
            is_last = end == length and reach == length + self.max_reserve  # decoding goes on in the reserve
            end = length if is_last else min(end, reach, length - 1)
            end = self.cache.cut_chunk(sequence.table, start, end, is_last=is_last)
            if end <= start:
                break
            is_last = end == length
            self.cache.extend_groups(sequence.table, reach if is_last else end)
            self.cache.begin_chunk(sequence.table, sequence.tokens, start, end)
            chunks.append(Chunk(sequence, start, end, is_last))
            num_taken += end - start
            if num_taken >= limit or len(chunks) == self.max_chunks:  # do not admit one more
                break
        return chunks

    def mark_launched(self, chunks: list[Chunk]) -> None:
        """Counts chunks as computed once their pass is launched, and shares their pages; sequences with a last chunk
        decode from now on. Not earlier: pages of a failed launch hold no KV."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.end
            self.cache.publish(sequence.table, sequence.tokens, sequence.num_computed)
            self.cache.slide(sequence.table, sequence.num_computed)
            if chunk.is_last:
                sequence.decoding = True
                sequence.in_flight.append(0)  # the next step writes the sampled token's KV

    def commit_chunks(self, chunks: list[Chunk], first_tokens: list[int | None]) -> list[Output]:
        """Takes the token sampled after each last chunk. Chunks of ended or preempted sequences are ignored."""
        outputs: list[Output] = []
        for chunk, token in zip(chunks, first_tokens, strict=True):
            sequence = chunk.sequence
            assert chunk.is_last == (token is not None), "last chunks bring a token, others none"
            if token is None or sequence.slot < 0:
                continue
            sequence.in_flight.popleft()
            sequence.stats.prefills += 1
            outputs.append(self._emit(sequence, *sequence.cut([token])))
        return outputs

    def next_decodes(self, reserve: int) -> list[Sequence]:
        """Returns the decoding sequences, oldest first, each with pages for `reserve` KV tokens beyond its `kv_bound`,
        which grows by them. Preempts where pages run out.

        Leaves out those that end with the tokens in flight.
        """
        sequences: list[Sequence] = []
        for sequence in self._running.copy():
            while sequence.slot >= 0 and sequence.decoding and not sequence.is_ending:
                bound = sequence.kv_bound + reserve
                if bound <= sequence.table.room or self.cache.extend(sequence.table, bound):
                    sequences.append(sequence)
                    break
                self._preempt_newest()  # in the end this very sequence
        sequences = [sequence for sequence in sequences if sequence.slot >= 0]  # some may have been preempted since
        for sequence in sequences:
            assert sum(sequence.in_flight) + reserve <= self.max_reserve, "admission and add() count on max_reserve"
            if sequence.table.groups:
                self.cache.extend_groups(sequence.table, sequence.kv_bound + reserve)
            sequence.in_flight.append(reserve)
        return sequences

    def commit_decodes(self, sequences: list[Sequence], tokens: list[list[int]], drafted: list[int]) -> list[Output]:
        """Takes the tokens of a step: `tokens[i]` for `sequences[i]`, accepted drafts, then the target's token.

        `drafted[i]` of its drafted tokens were verified. Sequences that ended or were preempted since are ignored.
        """
        outputs: list[Output] = []
        for sequence, emitted, num_drafted in zip(sequences, tokens, drafted, strict=True):
            if sequence.slot < 0:
                continue
            sequence.in_flight.popleft()
            answer_tokens, reason = sequence.cut(emitted)
            sequence.count_round(num_drafted, num_accepted=min(len(answer_tokens), len(emitted) - 1))
            outputs.append(self._emit(sequence, answer_tokens, reason))
        return outputs

    def validate(self, request: Request, open_ids: Collection[str] = ()) -> None:
        """Raises ValueError if the request can never run. `open_ids`: ids of requests that were not added yet."""
        prompt_len = len(request.prompt)
        max_tokens = request.params.max_tokens
        if request.id in self._sequences or request.id in open_ids:
            raise ValueError(f"id {request.id!r} belongs to a request that has not ended; give each request its own")
        if prompt_len == 0:
            raise ValueError("prompt is empty; it must hold at least one token")
        sizes = f"prompt has {prompt_len} tokens and max_tokens is {max_tokens}, together {prompt_len + max_tokens}"
        if prompt_len + max_tokens > self.max_model_len:
            raise ValueError(f"{sizes}: more than max_model_len {self.max_model_len}; shorten one of them")
        limit = self._limit(request)
        page_size = self.cache.page_size
        fits = f"{sizes}: with {self.max_reserve} kept for drafting this never fits"
        remedy = "; shorten one of them or raise kv_cache_tokens"
        if self.cache.pages_for(limit) > self.cache.total_pages:
            raise ValueError(f"{fits} the KV cache of {self.cache.total_pages * page_size} tokens{remedy}")
        for pages in self.cache.groups:
            if pages.quota(limit) > pages.total_pages:
                raise ValueError(
                    f"{fits} the KV cache of {pages.total_pages * page_size} tokens of the layers that see the last "
                    f"{pages.window}{remedy}"
                )

    def _limit(self, request: Request) -> int:
        """Returns the most KV tokens for which a request ever needs pages."""
        return len(request.prompt) + request.params.max_tokens + self.max_reserve

    def _prefilling(self) -> Iterator[Sequence]:
        """Yields running sequences with tokens to compute, then waiting ones. Admits each only when the caller asks for
        it."""
        yield from [sequence for sequence in self._running if not sequence.decoding]
        while self._waiting and self._free_slots and not self._is_stalled:
            sequence = self._next_waiting()
            if not self._admit(sequence):
                self._is_stalled = True
                return
            yield sequence

    def _next_waiting(self) -> Sequence:
        """Returns the first of those that were preempted, else of the tenants with the fewest running sequences, and of
        their namespaces likewise: none holds up the others, and each has its turn once its own have ended."""
        head = self._waiting[0]
        if head.num_preemptions:
            return head
        tenants = Counter(sequence.request.tenant for sequence in self._running)
        namespaces = Counter((sequence.request.tenant, sequence.request.namespace) for sequence in self._running)

        def num_running(sequence: Sequence) -> tuple[int, int]:
            request = sequence.request
            return tenants[request.tenant], namespaces[request.tenant, request.namespace]

        return min(self._waiting, key=num_running)

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a free request slot, and pages. Returns False if these are lacking."""
        num_tokens = len(sequence.tokens) + self.max_reserve
        headroom = len(self._running)  # a page for each, or the next step would preempt the new one
        limit = self._limit(sequence.request)
        shares = not sequence.scores_prompt  # cached pages hold no log-probabilities
        if not self.cache.admit(sequence.table, sequence.tokens, num_tokens, headroom, limit, shares=shares):
            assert self._running, "an empty cache is too small for a request that add() accepted"
            return False
        self._waiting.remove(sequence)
        sequence.slot = self._free_slots.pop()
        sequence.num_computed = len(sequence.table.nodes) * self.cache.page_size
        if sequence.num_preemptions == 0:
            sequence.stats.cached_tokens = sequence.num_computed
            sequence.stats.idle_tokens = sequence.table.num_idle * self.cache.page_size
            sequence.stats.missed_tokens = sequence.table.num_missed * self.cache.page_size
            sequence.stats.miss_reason = sequence.table.miss_reason
        self._running.append(sequence)
        self.on_admit(sequence)
        return True

    def _preempt_newest(self) -> None:
        assert len(self._running) > 1, "one sequence alone outgrew the cache, which add() rules out"
        self._preempt(self._running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Puts a running sequence back to the front of the queue, as a new object."""
        resumed = sequence.resumed()
        sequence.resumes = True
        self._release(sequence)
        self._sequences[sequence.request.id] = resumed
        self._waiting.appendleft(resumed)
        self.num_preemptions += 1

    def _emit(self, sequence: Sequence, tokens: list[int], reason: FinishReason | None) -> Output:
        """Appends tokens to the answer, and ends the sequence for `reason`, if there is one."""
        sequence.tokens += tokens
        if tokens:  # the last one's KV is not written yet. None: max_tokens is 0, and the prompt's KV is all there
            sequence.num_computed = len(sequence.tokens) - 1
        sequence.stats.completion_tokens += len(tokens)
        if reason is not None:
            return self._end(sequence, tokens, reason)
        if sequence.table.groups:
            self.cache.slide(sequence.table, sequence.num_computed)
        return Output(request_id=sequence.request.id, tokens=tokens)

    def _end(self, sequence: Sequence, tokens: list[int], reason: FinishReason) -> Output:
        """Removes a sequence, waiting or running, and returns its last output."""
        del self._sequences[sequence.request.id]
        if reason in ("stop", "length"):
            self.on_finish(sequence)
        if sequence.slot < 0:
            self._waiting.remove(sequence)
            self._is_stalled = False
        else:
            self._release(sequence)
        return Output(request_id=sequence.request.id, tokens=tokens, finish_reason=reason, stats=sequence.stats)

    def _release(self, sequence: Sequence) -> None:
        """Takes request slot and pages from a running sequence."""
        self.on_release(sequence)
        self.cache.release(sequence.table, sequence.tokens, sequence.num_computed)
        self._running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._is_stalled = False
        sequence.slot = -1
        sequence.num_computed = 0
        sequence.decoding = False
