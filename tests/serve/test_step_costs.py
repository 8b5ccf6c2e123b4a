"""Expected times of steps, from tables or fitted, and corrected by measured ones."""

import json
import random

import numpy as np
import pytest

from slipstream.models.files.cost_tables import CostTables
from slipstream.serve.engine.step_costs import FittedCosts, StepCosts

TARGET = {1: 4.0, 8: 4.2, 64: 5.0, 128: 8.0}
DRAFT = {(1, 1): 0.1, (1, 4): 1.0, (8, 1): 0.2, (8, 4): 1.5}
TABLES = CostTables(
    {"plain": TARGET, "all": {rows: ms + 1 for rows, ms in TARGET.items()}},
    {"plain": DRAFT, "all": {key: 2 * ms for key, ms in DRAFT.items()}},
)


def step_ms(rows: int, requests: int, width: int) -> float:
    return 3.0 + 0.4 * rows + requests * (0.3 + 0.15 * (width - 1)) + 0.8 * (width > 1)


def test_passes_are_filled_up_to_what_was_measured():
    costs = StepCosts(TABLES)
    assert [costs.target(rows, filtered=False) for rows in (1, 2, 8, 65, 256)] == [4.0, 4.2, 4.2, 8.0, 16.0]
    assert [costs.round_up(rows) for rows in (1, 2, 128, 200)] == [1, 8, 128, 200]
    assert costs.targets(np.array([1, 64]), filtered=True).tolist() == [5.0, 6.0]
    assert [costs.draft(*key, filtered=False) for key in ((1, 1), (2, 3), (9, 9), (0, 4))] == [0.1, 1.5, 1.5, 0.0]
    assert costs.time(5, 2, 4, filtered=True) == 5.2 + 3.0
    assert (costs.most_rows, costs.is_fitted) == (128, False)
    assert [costs.passes(*rows).tolist() for rows in ((1, 300), (2, 9), (200, 300))] == [
        [1, 8, 64, 128],
        [8, 64],
        [200],
    ]
    assert FittedCosts(20).passes(3, 50, stride=8).tolist() == [3, 11, 19]


def test_passes_slower_than_larger_ones_are_left_out():
    target = {1: 4.0, 2: 4.05, 4: 4.0, 64: 9.0, 128: 8.0, 256: 8.5, 512: 12.0}
    tables = CostTables({"plain": target, "all": dict.fromkeys(target, 1.0)}, TABLES.draft).without_slow()
    assert list(tables.target["plain"].values()) == [4.0, 4.05, 4.0, 8.0, 8.5, 12.0], "about as fast ones stay"
    assert set(tables.target["all"]) == set(target) - {64}
    assert StepCosts(tables).round_up(33) == 128


def test_no_table_of_drafts_means_that_they_take_no_time():
    costs = StepCosts(CostTables(TABLES.target, {"plain": {}, "all": {}}))
    assert costs.draft(4, 1, filtered=True) == 0
    costs.observe(1, 1, 1, 5.0, filtered=True)
    assert costs.time(1, 1, 1, filtered=True) == 5.0


def test_all_steps_learn_from_each():
    costs = StepCosts(TABLES)
    for _ in range(400):
        costs.observe(8, 8, 4, 2 * 5.7, filtered=False)
    assert costs.time(8, 8, 4, filtered=False) == pytest.approx(11.4, rel=0.01)
    assert costs.time(128, 1, 1, filtered=True) == pytest.approx(2 * 9.2, rel=0.05), "never seen"
    assert costs.error() < 0.01
    assert costs.slower == pytest.approx(2, rel=0.05)


def test_parts_are_told_apart_where_steps_differ():
    """The target takes what its table says, but passes of 64 rows 20 % longer; drafts of 4 nodes 30 %."""
    costs = StepCosts(TABLES)
    rng = random.Random(0)
    for _ in range(3000):
        rows = rng.choice([8, 64, 128])
        width = rng.choice([1, 4])
        ms = TARGET[rows] * (1.2 if rows == 64 else 1.0) + DRAFT[8, width] * (1.3 if width == 4 else 1.0)
        costs.observe(rows, 8, width, ms, filtered=False)
    assert costs.target(64, filtered=False) == pytest.approx(6.0, rel=0.03)
    assert costs.target(8, filtered=False) == pytest.approx(4.2, rel=0.03)
    assert costs.draft(8, 4, filtered=False) == pytest.approx(1.95, rel=0.1)
    assert costs.error() < 0.02


def test_a_size_that_is_faster_than_measured_stays_so_while_others_are_used():
    """As with experts: text reads fewer than the random tokens of start-up, unless there is one row."""
    costs = StepCosts(TABLES)
    for rows, ms, steps in ((1, 4.1, 200), (8, 0.8 * 4.4, 30), (1, 4.1, 500)):
        for _ in range(steps):
            costs.observe(rows, 1, 1, ms, filtered=False)
    assert costs.time(1, 1, 1, filtered=False) == pytest.approx(4.1, rel=0.01)
    assert costs.time(8, 1, 1, filtered=False) == pytest.approx(0.8 * 4.4, rel=0.05)


@pytest.mark.parametrize("costs", [StepCosts(TABLES), FittedCosts(128)])
def test_a_disturbance_moves_little(costs):
    for _ in range(100):
        costs.observe(8, 8, 4, 5.7, filtered=False)
    costs.observe(8, 8, 4, 1000.0, filtered=False)
    assert costs.time(8, 8, 4, filtered=False) < 1.15 * 5.7
    costs.observe(8, 8, 4, 0.0, filtered=False)  # a clock that stood still
    costs.observe(8, 8, 4, 1e-9, filtered=False)
    assert costs.time(8, 8, 4, filtered=False) > 0.9 * 5.7
    assert costs.error() < 0.01, "the median"


def test_slow_steps_are_foreseen():
    costs = StepCosts(TABLES)
    for step in range(400):
        costs.observe(8, 8, 4, 5.7 * (1.4 if step % 10 == 0 else 1.0), filtered=False)
    assert costs.p95() == pytest.approx(1.4, rel=0.05)
    for _ in range(400):
        costs.observe(8, 8, 4, 5.7, filtered=False)
    assert costs.p95() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_finds_the_coefficients(seed):
    costs = FittedCosts(1024)
    rng = random.Random(seed)
    for step in range(1500):
        requests = rng.randint(1, 16)
        width = rng.choice([1, 2, 4, 8])
        rows = requests * width + rng.choice([0, 0, 0, 100])
        noise = rng.gauss(1, 0.05) * (5 if step % 50 == 0 else 1)
        costs.observe(rows, requests, width, noise * step_ms(rows, requests, width), filtered=False)
    for key in ((1, 1, 1), (16, 16, 1), (32, 16, 8), (128, 16, 8), (500, 4, 2)):
        assert costs.time(*key, filtered=False) == pytest.approx(step_ms(*key), rel=0.06)
    assert costs.coefficients[2] == pytest.approx(0.4, rel=0.1)
    assert costs.error() < 0.06


def test_a_fit_learns_which_numbers_of_rows_are_fast():
    """A library may compute 8 rows as fast as 5, and take longer for a ninth."""
    costs = FittedCosts(256)
    rng = random.Random(0)

    def stairs(rows, width):
        return 10.0 + 4.0 * ((rows > 4) + (rows > 8) + (rows > 24)) + 1.0 * (width > 1)

    for _ in range(3000):
        rows = rng.choice([4, 5, 8, 9, 16, 24, 32, 40])
        width = rng.choice([1, 4])
        costs.observe(rows, 4, width, rng.gauss(1, 0.05) * stairs(rows, width), filtered=False)
    for rows in (4, 5, 8, 9, 16, 24, 32):
        for width in (1, 4):
            assert costs.time(rows, 4, width, filtered=False) == pytest.approx(stairs(rows, width), rel=0.06), rows
    assert costs.error() < 0.06


def test_a_fit_forgets_nothing_of_steps_that_are_not_taken_now():
    costs = FittedCosts(1024)
    for width in (8, 4, 2, 1) * 10:
        costs.observe(4 * width, 4, width, step_ms(4 * width, 4, width), filtered=False)
    for _ in range(5000):
        costs.observe(4, 4, 1, step_ms(4, 4, 1), filtered=False)
    for width in (1, 2, 8):
        expected = step_ms(4 * width, 4, width)
        assert costs.time(4 * width, 4, width, filtered=False) == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("seed", range(3))
def test_no_coefficient_of_a_fit_is_negative(seed):
    """Whatever was measured."""
    costs = FittedCosts(256)
    rng = random.Random(seed)
    for _ in range(300):
        requests = rng.randint(0, 8)
        width = rng.choice([1, 8])
        ms = 10 ** rng.uniform(-1, 2)
        costs.observe(requests * width + rng.choice([0, 64]), requests, width, ms, filtered=rng.random() < 0.5)
        assert (costs.coefficients >= 0).all()
        assert 0 < costs.time(8, 8, 1, filtered=False) < 1e4
    assert np.isfinite(costs.targets(np.arange(1, 100), filtered=True)).all()


def test_a_fit_starts_from_the_fastest_of_its_first_steps():
    """The first one compiles."""
    costs = FittedCosts(256)
    for ms in (3000.0, *[step_ms(8, 1, 8)] * 7):
        costs.observe(8, 1, 8, ms, filtered=False)
    assert costs.time(8, 1, 8, filtered=False) == pytest.approx(step_ms(8, 1, 8), rel=0.05)
    assert costs.time(1, 1, 1, filtered=False) < step_ms(8, 1, 8)


def test_filtered_steps_of_a_fit_take_longer_by_a_factor():
    costs = FittedCosts(256)
    rng = random.Random(0)
    for step in range(2000):
        width = rng.choice([1, 2, 8])
        filtered = step > 20 and rng.random() < 0.5
        costs.observe(width, 1, width, step_ms(width, 1, width) * (1.4 if filtered else 1), filtered=filtered)
    ratio = costs.time(4, 1, 4, filtered=True) / costs.time(4, 1, 4, filtered=False)
    assert ratio == pytest.approx(1.4, rel=0.05)


def test_tables_as_json():
    assert CostTables.from_json(json.loads(json.dumps(TABLES.to_json()))) == TABLES


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("draft"),
        lambda data: data["target"].pop("all"),
        lambda data: data["target"].update(plain=[]),
        lambda data: data["target"].update(plain=[[1]]),
        lambda data: data["draft"].update(plain=[[1, 2, "x"]]),
        lambda data: data["target"].update(plain=[[1, float("nan")]]),
        lambda data: data["target"].update(plain=None),
        lambda data: data["target"]["plain"][0].__setitem__(1, 0.0),
        lambda data: data["target"]["plain"][0].__setitem__(1, -1.0),
        lambda data: data["draft"]["all"][0].__setitem__(2, 0.0),
        lambda data: data["target"]["all"].pop(),
        lambda data: data["draft"]["plain"].pop(),
    ],
)
def test_other_json_is_refused(damage):
    data = TABLES.to_json()
    damage(data)
    with pytest.raises(ValueError, match="no tables of step times"):
        CostTables.from_json(data)


def test_one_request_does_not_make_drafting_for_many_seem_dear():
    """A draft's passes take their time for any number of requests: what one request shows of them is not multiplied."""
    costs = FittedCosts(1024)
    rng = random.Random(0)

    def taken(rows, requests, width):
        return 10.0 + 0.15 * rows + (width - 1) * (1.4 + 0.1 * requests)

    for _ in range(200):
        width = rng.choice([1, 2, 4])
        rows = width + rng.choice([0, 0, 0, 100])  # some steps have prompts
        costs.observe(rows, 1, width, rng.gauss(1, 0.03) * taken(rows, 1, width), filtered=False)
    assert costs.time(32, 8, 4, filtered=False) == pytest.approx(taken(32, 8, 4), rel=0.2)
