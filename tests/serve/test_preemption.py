"""What happens when pages run out, and how admission keeps that rare."""

from slipstream.serve.request import Output
from slipstream.tests.serve.scheduler_recorder import Recorder, count


def test_the_newest_is_preempted_and_resumes_before_others_with_its_tokens() -> None:
    recorder = Recorder(num_pages=21, max_running=2)
    recorder.add("a", count(0, 12), 60)
    recorder.add("b", count(100, 12), 60)
    recorder.add("c", count(200, 8), 1)
    recorder.prefill()
    num_b_tokens = 0
    while len(recorder.decoding()) == 2:
        recorder.round([7, 7], [8, 8])
        num_b_tokens += 2
    assert recorder.decoding() == ["a"]
    assert (recorder.scheduler.num_preemptions, recorder.scheduler.num_waiting) == (1, 2)
    assert recorder.calls[-1][:2] == ("release", "b")
    while "a" in recorder.decoding():
        assert recorder.prefill() == [], "a keeps the pages that b would need"
        recorder.round([7, 7])
    chunks = recorder.prefill()
    assert [name for name, _, _ in chunks] == ["b", "c"]
    assert chunks[0][2] == 12 + 1 + num_b_tokens
    assert recorder.outputs[0] == Output(request_id="b", tokens=[1])
    output = recorder.scheduler.abort("b")
    assert output is not None
    assert output.stats is not None
    assert (output.stats.cached_tokens, output.stats.prefills) == (0, 2)
    assert output.stats.completion_tokens == 2 + num_b_tokens == 2 + 2 * output.stats.rounds


def test_a_half_computed_prompt_is_preempted_and_keeps_its_pages_in_cache() -> None:
    recorder = Recorder(num_pages=21, prefill_budget=12)
    recorder.add("a", count(0, 12), 60)
    recorder.prefill()
    recorder.add("b", count(100, 40), 20)
    assert recorder.prefill() == [("b", 0, 12)]
    while recorder.scheduler.num_running == 2:
        recorder.round([7, 7])
    assert recorder.calls[-1][:2] == ("release", "b")
    recorder.scheduler.abort("a")
    assert recorder.prefill() == [("b", 12, 24)]


def test_admission_leaves_a_page_for_each_running_sequence() -> None:
    recorder = Recorder(num_pages=21)
    recorder.add("a", count(0, 12), 20)
    recorder.prefill()
    recorder.add("b", count(100, 12), 20)
    recorder.prefill()
    assert recorder.cache.num_free == 12
    recorder.add("c", count(200, 40), 20)  # needs 11 of 12 pages, and then one round could take 2
    assert recorder.prefill() == []
    recorder.scheduler.abort("b")
    assert [name for name, _, _ in recorder.prefill()] == ["c"]
    recorder.round([7, 7], [7, 7])
    assert recorder.scheduler.num_preemptions == 0
