"""Each rule of the scheduler by itself; tests/serve/test_scheduler_simulation.py tries them all together."""

import random
from typing import Any

import pytest

from slipstream.serve.engine.kv_cache import PageCache
from slipstream.serve.engine.kv_windows import WindowPages
from slipstream.serve.engine.scheduler import Scheduler, Sequence
from slipstream.serve.request import Output, Request, SamplingParams
from slipstream.tests.serve.cache_invariants import check_scheduler
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

STOP_ID = 99
RESERVE = 4


class Recorder:
    """A scheduler, the calls it made, and an engine that samples token 1 behind every prompt."""

    def __init__(
        self,
        *,
        num_pages: int = 100,
        max_running: int = 4,
        prefill_budget: int = 1000,
        lookahead: int = 0,
        windows: tuple[WindowPages, ...] = (),
        **limits: int,
    ):
        self.calls: list[tuple[str, str, int]] = []
        self.prefill_budget = prefill_budget
        self.cache = PageCache(num_pages, 4, windows)
        self.scheduler = Scheduler(
            cache=self.cache,
            max_running=max_running,
            max_model_len=200,
            stop_ids=frozenset({STOP_ID}),
            lookahead=lookahead,
            max_reserve=RESERVE,
            **limits,
        )
        self.scheduler.on_admit = lambda sequence: self._record("admit", sequence)
        self.scheduler.on_release = lambda sequence: self._record("release", sequence)

    def _record(self, name: str, sequence: Sequence):
        assert sequence.table.pages, "pages are held at both calls"
        self.calls.append((name, sequence.request.id, sequence.slot))

    def add(self, name: str, prompt: list[int], max_tokens: int = 50, **params: Any):
        self.scheduler.add(Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens, **params)))
        check_scheduler(self.scheduler)

    def prefill(self) -> list[tuple[str, int, int]]:
        """A step that computes prompts alone; returns (request, start, end) of its chunks."""
        return self.step()[0]

    def decode(self, *emitted: list[int], drafted: int = 3) -> list[Output]:
        """A step that computes no prompts, in which the decoding requests emit this."""
        return self.step(*emitted, drafted=drafted, prompt_tokens=0)[1]

    def step(
        self,
        *emitted: list[int],
        drafted: int = 3,
        prompt_tokens: int | None = None,
        admission_limit: int | None = None,
    ) -> tuple[list[tuple[str, int, int]], list[Output]]:
        """Runs a step and returns its chunks and the outputs of the decoding requests, none if nothing is emitted."""
        scheduler = self.scheduler
        sequences = scheduler.next_decodes(RESERVE) if emitted else []
        check_scheduler(scheduler)
        chunks = scheduler.next_chunks(self.prefill_budget if prompt_tokens is None else prompt_tokens, admission_limit)
        check_scheduler(scheduler)
        scheduler.mark_launched(chunks)
        check_scheduler(scheduler)
        outputs = scheduler.commit_decodes(sequences, list(emitted), [drafted] * len(sequences))
        check_scheduler(scheduler)
        self.outputs = scheduler.commit_chunks(chunks, [1 if chunk.is_last else None for chunk in chunks])
        check_scheduler(scheduler)
        return [(chunk.sequence.request.id, chunk.start, chunk.end) for chunk in chunks], outputs

    def decoding(self) -> list[str]:
        """The requests that would decode in a step, which is not launched."""
        sequences = self.scheduler.next_decodes(RESERVE)
        for sequence in sequences:
            sequence.in_flight.pop()
        return [sequence.request.id for sequence in sequences]


def count(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


# Adding


@each_case()
def test_what_can_never_run_is_refused(prompt_len, max_tokens, message):
    recorder = Recorder(num_pages=21)
    with user_error(message):
        recorder.add("a", count(0, prompt_len), max_tokens)
    assert not recorder.scheduler.has_work


def test_ids_are_unique_while_a_request_lives():
    recorder = Recorder()
    recorder.add("a", [5])
    with user_error("id 'a' belongs to a request that has not ended"):
        recorder.add("a", [5])
    recorder.scheduler.abort("a")
    recorder.add("a", [5])


def test_the_largest_request_that_fits_runs_to_its_end_alone():
    recorder = Recorder(num_pages=21)
    recorder.add("a", count(0, 40), 36)
    recorder.prefill()
    for _ in range(35):
        outputs = recorder.decode([7])
    assert outputs[0].finish_reason == "length"


# Order


def test_prompts_are_cut_by_the_budget_and_taken_in_order():
    recorder = Recorder(prefill_budget=10)
    for name, start, length in (("a", 0, 12), ("b", 100, 5), ("c", 200, 30)):
        recorder.add(name, count(start, length))
    assert recorder.prefill() == [("a", 0, 10)]
    assert recorder.scheduler.num_running == 1, "no one is admitted before there is budget"
    assert recorder.decoding() == []
    assert recorder.prefill() == [("a", 10, 12), ("b", 0, 5), ("c", 0, 3)]
    assert [(output.request_id, output.tokens) for output in recorder.outputs] == [("a", [1]), ("b", [1])]
    assert recorder.decoding() == ["a", "b"]
    assert recorder.prefill() == [("c", 3, 13)]


def test_a_step_has_so_many_chunks():
    recorder = Recorder(prefill_budget=16, max_chunks=3)
    for name, length in (("a", 1), ("b", 5), ("c", 20), ("d", 1), ("e", 1), ("f", 1)):
        recorder.add(name, count(10 * ord(name), length))
    assert recorder.prefill() == [("a", 0, 1), ("b", 0, 5), ("c", 0, 10)]
    assert recorder.prefill() == [("c", 10, 20), ("d", 0, 1)], "no slot is free for e"
    recorder.decode([99], [99], [99], [99])
    assert recorder.prefill() == [("e", 0, 1), ("f", 0, 1)]


def test_a_step_without_tokens_for_prompts_admits_no_one():
    recorder = Recorder()
    recorder.add("a", [5])
    for num_tokens in (0, -3):
        assert recorder.scheduler.next_chunks(num_tokens) == []
    assert recorder.scheduler.num_running == 0


def test_no_prompt_follows_in_a_step_that_has_enough_tokens():
    recorder = Recorder()
    for token, (name, length) in enumerate((("a", 3), ("b", 4), ("c", 20), ("d", 1))):
        recorder.add(name, [token] * length)

    def next_chunks(num_tokens):
        return recorder.step(prompt_tokens=num_tokens, admission_limit=5)[0]

    assert next_chunks(16) == [("a", 0, 3), ("b", 0, 4)], "a prompt that was begun is not cut"
    assert recorder.scheduler.num_running == 2
    assert next_chunks(16) == [("c", 0, 16)], "a long one may have more"
    assert next_chunks(2) == [("c", 16, 18)]
    assert next_chunks(16) == [("c", 18, 20), ("d", 0, 1)]


def test_prompts_are_computed_while_others_decode():
    """Chunks of any size ride with the requests that decode; a prompt that ends decodes from the next step on."""
    recorder = Recorder()
    recorder.add("a", [5])
    recorder.prefill()
    recorder.add("b", count(100, 10))
    assert recorder.step([7, 7], prompt_tokens=4) == ([("b", 0, 4)], [Output(request_id="a", tokens=[7, 7])])
    assert recorder.step([8], prompt_tokens=1) == ([("b", 4, 5)], [Output(request_id="a", tokens=[8])])
    assert recorder.decoding() == ["a"]
    assert recorder.step([9], prompt_tokens=90) == ([("b", 5, 10)], [Output(request_id="a", tokens=[9])])
    assert recorder.outputs == [Output(request_id="b", tokens=[1])]
    assert recorder.decoding() == ["a", "b"]


def test_a_large_prompt_is_not_overtaken():
    recorder = Recorder(num_pages=21)
    recorder.add("a", count(0, 40), 20)
    recorder.prefill()
    recorder.add("large", count(100, 60), 10)
    recorder.add("small", [5], 1)
    for _ in range(18):
        assert recorder.prefill() == []
        recorder.decode([7])
    recorder.decode([7])  # the end of a
    assert [name for name, _, _ in recorder.prefill()] == ["large", "small"]


def test_those_behind_a_large_prompt_go_on_if_it_is_aborted_or_another_tenant_comes():
    recorder = Recorder(num_pages=21)
    recorder.add("a", count(0, 40), 20)
    recorder.prefill()
    recorder.add("large", count(100, 60), 10)
    assert recorder.prefill() == []
    recorder.scheduler.add(Request(id="guest", prompt=[5], params=SamplingParams(max_tokens=1), tenant="other"))
    assert [name for name, _, _ in recorder.prefill()] == ["guest"]
    recorder.add("small", [5], 1)
    assert recorder.prefill() == []
    recorder.scheduler.abort("large")
    assert [name for name, _, _ in recorder.prefill()] == ["small"]


@pytest.mark.parametrize("seed", range(20))
def test_tenants_share_slots_and_keep_their_order(seed):
    rng = random.Random(seed)
    recorder = Recorder(num_pages=200, max_running=6)
    scheduler = recorder.scheduler
    waiting = []  # (request, tenant, namespace), in order of arrival
    running = []
    for number in range(150):
        if rng.random() < 0.6:
            tenant = rng.choice("aaaaabc")
            salt = rng.choice("xxy") if tenant == "a" else str(number)  # others get no more turns by new salts
            waiting.append((str(number), tenant, salt))
            params = SamplingParams(max_tokens=50)
            scheduler.add(Request(id=str(number), prompt=[5, 6], params=params, tenant=tenant, namespace=salt))
        elif running:
            scheduler.abort(running.pop(rng.randrange(len(running)))[0])
        recorder.calls.clear()
        recorder.prefill()
        for name, request_id, _ in recorder.calls:
            assert name == "admit"
            tenants = [tenant for _, tenant, _ in running]
            salts = [entry[1:] for entry in running]
            expected = min(waiting, key=lambda entry: (tenants.count(entry[1]), salts.count(entry[1:])))  # noqa: B023
            assert request_id == expected[0]
            waiting.remove(expected)
            running.append(expected)
        assert not waiting or len(running) == 6, "a slot is free"


# Prefix reuse


@pytest.mark.parametrize(("lookahead", "cached"), [(0, 8), (1, 4)])
def test_a_prompt_reuses_pages_up_to_its_lookahead(lookahead, cached):
    recorder = Recorder(lookahead=lookahead)
    recorder.add("a", [*count(0, 8), 50, 51, 52])
    recorder.prefill()
    recorder.add("b", [*count(0, 8), 60, 61, 62])
    assert recorder.prefill() == [("b", cached, 11)]
    output = recorder.scheduler.abort("b")
    assert output.stats.cached_tokens == cached


def test_a_prompt_in_cache_is_computed_from_its_last_page_on():
    recorder = Recorder()
    recorder.add("a", count(0, 8))
    recorder.add("b", count(0, 8))
    assert recorder.prefill() == [("a", 0, 8), ("b", 0, 8)]  # at once: nothing to share yet
    recorder.add("c", count(0, 8))
    assert recorder.prefill() == [("c", 4, 8)]


def test_an_answer_is_reused_by_the_next_turn():
    recorder = Recorder(lookahead=1)
    recorder.add("a", count(0, 5), 8)
    recorder.prefill()
    recorder.decode([20, 21, 22, 23])
    recorder.decode([24, 25, 26])
    recorder.add("b", [*count(0, 5), 1, 20, 21, 22, 23, 24, 25, 26, 30])
    assert recorder.prefill() == [("b", 12, 14)]


# When pages run out


def test_the_newest_is_preempted_and_resumes_before_others_with_its_tokens():
    recorder = Recorder(num_pages=21, max_running=2)
    recorder.add("a", count(0, 12), 60)
    recorder.add("b", count(100, 12), 60)
    recorder.add("c", count(200, 8), 1)
    recorder.prefill()
    num_b_tokens = 0
    while len(recorder.decoding()) == 2:
        recorder.decode([7, 7], [8, 8])
        num_b_tokens += 2
    assert recorder.decoding() == ["a"]
    assert (recorder.scheduler.num_preemptions, recorder.scheduler.num_waiting) == (1, 2)
    assert recorder.calls[-1][:2] == ("release", "b")
    while "a" in recorder.decoding():
        assert recorder.prefill() == [], "a keeps the pages that b would need"
        recorder.decode([7, 7])
    chunks = recorder.prefill()
    assert [name for name, _, _ in chunks] == ["b", "c"]
    assert chunks[0][2] == 12 + 1 + num_b_tokens
    assert recorder.outputs[0] == Output(request_id="b", tokens=[1])
    output = recorder.scheduler.abort("b")
    assert (output.stats.cached_tokens, output.stats.prefills) == (0, 2)
    assert output.stats.completion_tokens == 2 + num_b_tokens == 2 + 2 * output.stats.rounds


def test_a_half_computed_prompt_is_preempted_and_keeps_its_pages_in_cache():
    recorder = Recorder(num_pages=21, prefill_budget=12)
    recorder.add("a", count(0, 12), 60)
    recorder.prefill()
    recorder.add("b", count(100, 40), 20)
    assert recorder.prefill() == [("b", 0, 12)]
    while recorder.scheduler.num_running == 2:
        recorder.decode([7, 7])
    assert recorder.calls[-1][:2] == ("release", "b")
    recorder.scheduler.abort("a")
    assert recorder.prefill() == [("b", 12, 24)]


def test_who_decodes_takes_the_pages_of_a_prompt_before_its_next_chunk():
    """In one step: the newest is preempted for the nodes of an older one, and none of its tokens is computed."""
    recorder = Recorder(num_pages=21, prefill_budget=2)
    recorder.add("a", count(0, 2), 70)
    recorder.prefill()
    recorder.add("b", count(100, 50), 20)
    computed = 0
    while recorder.scheduler.num_preemptions == 0:
        chunks, outputs = recorder.step([7, 7, 7])
        assert [output.request_id for output in outputs] == ["a"]
        computed += sum(end - start for _, start, end in chunks)
    assert chunks == [], "nor is it admitted again at once"
    assert 0 < computed < 50
    recorder.scheduler.abort("a")
    assert recorder.prefill() == [("b", computed // 4 * 4, computed // 4 * 4 + 2)]


def test_admission_leaves_a_page_for_each_running_sequence():
    recorder = Recorder(num_pages=21)
    recorder.add("a", count(0, 12), 20)
    recorder.prefill()
    recorder.add("b", count(100, 12), 20)
    recorder.prefill()
    assert recorder.cache.num_available == 12
    recorder.add("c", count(200, 40), 20)  # needs 11 of 12 pages, and then one step could take 2
    assert recorder.prefill() == []
    recorder.scheduler.abort("b")
    assert [name for name, _, _ in recorder.prefill()] == ["c"]
    recorder.decode([7, 7], [7, 7])
    assert recorder.scheduler.num_preemptions == 0


# Layers with a window


def window_pages(num_pages: int, window: int = 8) -> WindowPages:
    """Pages of 4 tokens. The quota of a long request at a window of 8: 2 before the page being filled, 1 after it."""
    return WindowPages(num_pages, 4, window, RESERVE)


def test_what_never_fits_a_window_group_is_refused():
    recorder = Recorder(windows=(window_pages(100), window_pages(4)))
    recorder.add("short", count(0, 4), 4)
    message = (
        "together 9: with 4 kept for drafting this never fits the KV cache of 12 tokens of the layers that see the"
    )
    with user_error(f"{message} last 8; shorten one of them or raise kv_cache_tokens"):
        recorder.add("long", count(0, 4), 5)


def test_pages_of_a_window_come_with_chunks_and_decodes_and_go_with_what_they_commit():
    recorder = Recorder(windows=(window_pages(20),), prefill_budget=20)
    recorder.add("a", count(0, 50))
    windows = []
    for _ in range(3):
        sequence = recorder.scheduler.next_chunks(recorder.prefill_budget)[0].sequence
        before = len(sequence.table.groups[0].pages)
        recorder.prefill()
        windows.append((before, sequence.table.groups[0].first, sequence.table.groups[0].end))
    assert windows == [(5, 3, 5), (7, 8, 10), (6, 10, 14)], "of the prompt's 13 pages and one to draft in"
    for _ in range(9):
        recorder.decode([7, 7, 7])
    assert sequence.num_computed == 50 + 27
    assert (sequence.table.groups[0].first, sequence.table.groups[0].end) == (17, 20)


def test_sequences_wait_for_the_quotas_of_windows():
    recorder = Recorder(windows=(window_pages(9),))
    for name, start in (("a", 0), ("b", 100), ("c", 200)):
        recorder.add(name, count(start, 4), 40)
    assert [name for name, _, _ in recorder.prefill()] == ["a", "b"], "4 pages each"
    recorder.scheduler.abort("a")
    assert [name for name, _, _ in recorder.prefill()] == ["c"]
    for _ in range(12):
        recorder.decode([7, 7, 7], [8, 8, 8])
    assert recorder.scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_decodes", range(1, 9))
def test_an_answer_is_reused_by_the_next_turn_with_windows(num_decodes):
    """Whatever its length, up to the last full page."""
    recorder = Recorder(windows=(window_pages(40), window_pages(40, window=3)))
    recorder.add("a", count(0, 13), num_decodes + 1)
    recorder.prefill()
    for _ in range(num_decodes):
        recorder.decode([7])
    recorder.add("b", [*count(0, 13), 1, *[7] * num_decodes, 30, 31, 32, 33])
    num_known = 13 + num_decodes
    assert recorder.prefill() == [("b", num_known // 4 * 4, num_known + 5)]
