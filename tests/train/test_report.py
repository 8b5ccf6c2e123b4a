"""The page of a run: complete, self-contained, and its curves where the numbers are."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import cli
from slipstream.models.drafts.eagle import Eagle
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.tests.train.block_cases import make_training, packed
from slipstream.tests.train.conftest import make_eagle3, random_parts
from slipstream.tests.train.runs import refusal
from slipstream.train.eagle import EagleTraining
from slipstream.train.eagle_options import DraftOptions as EagleOptions
from slipstream.train.report import (
    TITLES,
    ReportConfig,
    families,
    load_run,
    main,
    smoothed,
    thinned,
    write_report,
)
from slipstream.train.samples import Sample
from slipstream.train.speed import StepTimes
from slipstream.train.trackers import read_metrics

EMPTY_TAGS = {"meta"}
OPEN_TAGS = {"tr", "th", "td", "p", "html"}  # may end without an end tag


class Page(HTMLParser):
    """Elements with their attributes; every end tag closes the innermost open element of its kind."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY_TAGS:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str):
        while self.stack[-1] != tag:
            assert self.stack.pop() in OPEN_TAGS
        self.stack.pop()

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def record(step: int, **more: float) -> dict[str, Any]:
    values = {"loss": 9.0 / step, "lr": 1e-3, "tokens": 100 * step, "tokens_per_second": 500.0, "grad_norm": 1.0}
    return {"step": step, **values, "accept_rate_0": 0.5, "accept_rate_1": 0.25, **more}


def write_run(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def page_of(folder: Path) -> tuple[str, Page]:
    text = write_report(ReportConfig(run=str(folder))).read_text()
    assert not re.search(r"https?://|src=|url\((?!#)|<script|<link|@import", text)
    return text, Page(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    lines = [record(step) for step in range(1, 41)]
    for step, length in ((10, 1.5), (20, 2.25), (30, 2.25), (40, 2.0)):
        lines[step - 1] |= {"eval_accept_length": length, "eval_accept_rate_0": length / 4, "eval_other": 3.0}
    samples = [Sample("old?", "old", ()), Sample("1 < 2?", "Yes & <no>.\nEnd", ((0, 3), (6, 10), (12, 15)))]
    lines += [sample.record(step) for step, sample in zip((30, 40), samples, strict=True)]
    return write_run(tmp_path_factory.mktemp("report") / "a<run>", lines)


@pytest.fixture(scope="module")
def text(run) -> str:
    return page_of(run)[0]


def test_every_curve_is_on_the_page(text):
    titles = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert titles[:4] == [
        "Loss (logarithmic axis)",
        "Learning rate",
        "Accept length on held-out answers",
        "Accept rate by position, held out: share of rounds",
    ]
    assert titles[4].startswith("Agreement with the target (")
    assert titles[5:] == ["Throughput: supervised tokens per second", "Gradient norm before clipping", "eval_other"]
    assert "<h1>a&lt;run&gt;</h1>" in text
    assert "<b>2.250</b>best accept length, step 20<" in text
    assert "<b>40</b>steps<" in text
    assert "<b>4,000</b>supervised tokens<" in text
    assert len(Page(text).all("svg")) == len(titles)
    legends = re.findall("<figcaption>(.*?)</figcaption><div class=legend>(.*?)</div>", text)
    names = {title: re.sub("<[^>]*>", " ", legend).split() for title, legend in legends}
    assert names[titles[3]] == []  # one curve
    assert names[titles[4]] == ["position", "1", "position", "2"]


def test_every_metric_of_training_has_a_title(target_model, token_map, finished, run):
    chain = make_eagle3(target_model, token_map.ids)
    chain.state_weight = 0.5
    heads = {"selector_rank": 6, "selector_top_k": 4, "confidence_head": True}
    trainings = [
        chain,
        EagleTraining(*random_parts(Eagle, target_model, None), EagleOptions(), depth=3),
        make_training(target_model, **heads),
        make_training(target_model, lilicorr=LiLiCorrConfig()),
    ]
    chain.categories = ["math"]
    batch, _ = packed(seed=1)
    chain.step_times = StepTimes(requests=1, plain=1.0, by_depth={1: 1.0})
    names = {name for line in read_metrics(finished / "metrics.jsonl") for name in line} | {"skipped_steps"}
    for training in trainings:
        names |= training.loss(batch)[1].keys()
        with torch.no_grad():
            metrics = training.evaluate(batch)
            calibrator = training.calibrator
            fitted = {} if calibrator is None else calibrator.end(lambda parts: parts)
            speeds = training.expected_speed(dict.fromkeys(metrics, 1.0))
            evaluated = metrics.keys() | fitted.keys() | speeds.keys()
        names |= {f"eval_{name}" for name in evaluated}
    report_run = replace(load_run(run), records=[dict.fromkeys(names, 1.0)])
    assert {family for family, _ in families(report_run)} == TITLES.keys()


def test_the_best_evaluation_is_ringed_and_every_one_has_a_dot(text):
    figure = next(part for part in text.split("<figure>") if part.startswith("<figcaption>Accept length"))
    dots = re.findall(r'<g><title>([^<]*)</title>.*?<use xlink:href="[^"]*" x="([\d.]+)" y="([\d.]+)"', figure, re.S)
    assert [label for label, _, _ in dots] == ["10: 1.5", "20: 2.25", "30: 2.25", "40: 2"]
    assert figure.count(f'x="{dots[1][1]}" y="{dots[1][2]}"') == 2, "the dot and its ring"
    assert "best: 2.250 at step 20</span></div><svg" in figure
    across = [float(x) for _, x, _ in dots]
    up = [float(y) for _, _, y in dots]
    assert [b - a for a, b in zip(across, across[1:], strict=False)] == pytest.approx([across[1] - across[0]] * 3)
    assert up[1] == up[2] < up[3] < up[0]
    assert (up[3] - up[1]) / (up[0] - up[1]) == pytest.approx(0.25 / 0.75, abs=0.01)


def test_samples_show_what_was_drafted(run, text):
    assert "<mark>Yes</mark> &amp; <mark>&lt;no&gt;</mark>.\n<mark>End</mark>" in text
    assert "1 &lt; 2?" in text
    assert "67% of the text drafted" in text
    assert len(Page(text).all("article")) == 1  # the newest step's
    assert len(load_run(run).records) == 40


@pytest.mark.parametrize("spans", [[3], None])
def test_other_samples_are_named(tmp_path, spans):
    sample = {"step": 3, "sample": {"prompt": "", "answer": "four", "spans": spans}}
    with pytest.raises(ValueError, match="step 3: no readable sample"):
        load_run(write_run(tmp_path, [record(1), sample]))


def test_a_run_of_the_trainer_is_drawn_with_its_options(finished, tmp_path, capsys):
    cli.main(["report", str(finished), "--output", str(tmp_path / "page.html")])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert re.search(f"<h1>EAGLE3 draft for [^/<]+</h1><p>Training run {finished.name}</p>", text)
    assert "<th>optim.lr<td>0.01" in text
    assert "<th>versions.torch<td>" in text
    assert "<th>git_revision<td>" in text
    assert "Accept length on held-out answers" in text
    Page(text)


def test_runs_that_have_just_begun_or_are_none(tmp_path):
    write_run(tmp_path, [record(1)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # still being written
    text, _ = page_of(tmp_path)
    assert "<b>1</b>steps<" in text
    assert "best accept length" not in text
    assert "Options" not in text
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[1]\n')
    assert "metrics.jsonl, line 2, is no record of a run: [1]; remove the line" in refusal([str(tmp_path)], main)
    empty = write_run(tmp_path / "empty", [])
    assert "has no metrics.jsonl with a step in it; name the output of a training" in refusal([str(empty)], main)
    assert "absent does not exist; name the output folder of a training run" in refusal([f"{tmp_path}/absent"], main)


def test_only_a_report_is_replaced(tmp_path):
    write_run(tmp_path, [record(1)])
    assert page_of(tmp_path)[0] == page_of(tmp_path)[0]
    (tmp_path / "page.html").write_text("<!doctype html>mine")
    error = refusal([str(tmp_path), "--output", str(tmp_path / "page.html")], main)
    assert "page.html is not a report of a training run and is not replaced; name another" in error
    assert (tmp_path / "page.html").read_text() == "<!doctype html>mine"


def test_numbers_that_are_none_leave_a_gap_and_not_a_picture(tmp_path):
    """Also constant, negative, tiny and huge ones."""
    values = [-5.0, float("nan"), 1e-9, 1e9]
    lines = [record(step, other=value, constant=0.0, hopeless=float("inf")) for step, value in enumerate(values, 1)]
    text, _ = page_of(write_run(tmp_path, lines))
    assert text.count("<figcaption>other<") == text.count("<figcaption>constant<") == 1
    assert "hopeless" not in text


def test_long_lines_are_averaged_and_smoothing_keeps_constants():
    points = [(float(step), float(step % 2)) for step in range(10_000)]
    assert len(thinned(points)) == 500
    assert thinned(points)[0] == (9.5, 0.5)
    assert smoothed([(step, 3.0) for step in range(200)])[-1] == (199, pytest.approx(3.0))
    assert smoothed(points)[-1][1] == pytest.approx(0.5, abs=0.01)
