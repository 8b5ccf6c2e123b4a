"""Which replica gets a request: against a table of prompts, and by what it should bring about."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serve.fleet.routing import PAGE_TOKENS, PrefixTable, page_keys, rank_replicas
from slipstream.serve.fleet.scaling import ScalingPolicy, wanted_replicas
from slipstream.tests.tables import each_case

LETTERS = st.lists(st.integers(0, 1), max_size=5)  # pages, each of equal tokens


def prompt_of(pages: list[int]) -> list[int]:
    return [page for page in pages for _ in range(PAGE_TOKENS)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(LETTERS, st.sampled_from("abc")), max_size=12), LETTERS, st.sampled_from(["", "salt"]))
def test_the_table_knows_the_longest_beginning_that_each_replica_had(computed, pages, salt):
    table = PrefixTable()
    expected = {}
    for earlier, name in computed:
        table.add(page_keys(prompt_of(earlier), ""), name)
        depth = next((k for k in range(min(len(earlier), len(pages)), 0, -1) if earlier[:k] == pages[:k]), 0)
        if depth and not salt:
            expected[name] = max(depth, expected.get(name, 0))
    assert table.matches(page_keys([*prompt_of(pages), 7], salt)) == expected


def test_pages_are_whole_and_keys_depend_on_all_tokens_before():
    assert page_keys(range(PAGE_TOKENS - 1), "") == []
    first = page_keys(range(3 * PAGE_TOKENS), "")
    other = page_keys([99, *range(1, 3 * PAGE_TOKENS)], "")
    assert len({*first, *other}) == 6


def test_ingresses_tell_one_another_once():
    tables = [PrefixTable(), PrefixTable()]
    keys = page_keys(prompt_of([0, 1]), "")
    tables[0].add(keys, "a")
    news = tables[0].take_news()
    tables[1].learn(news)
    assert tables[1].matches(keys) == {"a": 2}
    assert (tables[0].take_news(), tables[1].take_news()) == ([], [])  # what was learnt is not told again


def test_the_table_forgets_ends_before_beginnings_and_replicas_that_ended():
    table = PrefixTable(limit=3)
    long = page_keys(prompt_of([0, 1, 2]), "")
    short = page_keys(prompt_of([5]), "")
    table.add(long, "a")
    table.add(short, "b")
    assert (table.matches(long), table.matches(short), len(table)) == ({"a": 2}, {"b": 1}, 3)
    table.add(short, "a")
    table.forget("a")
    assert (table.matches(long), table.matches(short)) == ({}, {"b": 1})


def test_the_table_holds_as_much_as_it_may():
    table = PrefixTable(limit=10)
    for number in range(30):
        table.add(page_keys(prompt_of([number]), ""), "a")
        assert len(table) == min(number + 1, 10)
    assert table.matches(page_keys(prompt_of([20]), "")) == {"a": 1}
    assert table.matches(page_keys(prompt_of([19]), "")) == {}


@each_case()
def test_a_holder_is_preferred_unless_its_queue_is_long(matches, loads, first):
    num_pages = 50 if matches == {"a": 1} else 8
    names = rank_replicas(matches, num_pages, loads, random.Random(1))
    assert names[0] == first
    assert sorted(names) == sorted(loads)


def test_without_a_holder_load_is_balanced():
    """Each request stays open: the fullest replica has hardly more than the emptiest."""
    draw = random.Random(3)
    loads = dict.fromkeys("abcdef", 0)
    for _ in range(600):
        loads[rank_replicas({}, 4, loads, draw)[0]] += 1
    assert max(loads.values()) - min(loads.values()) <= 6


def test_conversations_stay_where_they_began_and_share_a_preamble():
    """40 conversations of 5 turns with one system prompt, 40 turns open at once: nine of ten later turns hit, and no
    replica has most of them."""
    draw = random.Random(0)
    table = PrefixTable()
    preamble = prompt_of([1, 2, 3])
    homes = {}
    loads = dict.fromkeys("abcd", 0)
    misses = 0
    for turn in range(5):
        for talk in range(40):
            prompt = preamble + [100 + talk] * (PAGE_TOKENS * (turn + 1))
            keys = page_keys(prompt, "")
            name = rank_replicas(table.matches(keys), len(keys), loads, draw)[0]
            table.add(keys, name)
            misses += homes.setdefault(talk, name) != name
            loads[name] += 1
        loads = dict.fromkeys(loads, 0)  # all have been answered
    assert misses <= 16
    assert max(sum(home == name for home in homes.values()) for name in loads) <= 14


@pytest.mark.parametrize(
    ("running", "requests", "step_ms", "most_ms", "expected"),
    [
        (2, 64, 0, None, 2),
        (2, 130, 0, None, 130 / 32),
        (2, 0, 50, None, 0),
        (2, 64, 30, 20, 3),  # steps take half as long again as the objective allows
        (2, 64, 10, 20, 2),  # fast steps are no reason to have fewer than the requests want
        (0, 10, 0, 20, 10 / 32),
    ],
)
def test_scaling_follows_requests_and_the_times_of_steps(running, requests, step_ms, most_ms, expected):
    number = wanted_replicas(running=running, open_requests=requests, aim=32, step_ms=step_ms, most_ms=most_ms)
    assert number == pytest.approx(expected)


def test_the_policy_reads_rays_context():
    class Context:
        aggregated_metrics = {"step_ms": {"a": 40.0, "b": 80.0, "c": 0.0}}  # c made no step
        current_num_replicas = 3
        total_num_requests = 10

    assert ScalingPolicy(aim=32, most_ms=20)(Context()) == (9, {})
    assert ScalingPolicy(aim=4)(Context()) == (3, {})
