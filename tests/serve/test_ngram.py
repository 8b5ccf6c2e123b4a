"""The n-gram drafter in the engine: what it learns, from whom, and what it keeps. Its core: test_ngram_core.py."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipstream.models.files.atomic import NEW, atomic_file, staging_path
from slipstream.serve.cli import read_config
from slipstream.serve.drafters.options import SAVED_MAGIC, NgramOptions
from slipstream.serve.engine.engine import Engine
from slipstream.serve.request import Request
from slipstream.tests.serve.engine_runs import (
    Answer,
    build_engine,
    make_request,
    plain_answers,
    random_prompt,
    run,
    tokens_of,
    watch_outputs,
)
from slipstream.tests.serve.test_overlap import SlowSteps
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error


def requests_of(namespace: str = "", temperature: float = 0.0, client: str = "") -> list[Request]:
    return [
        replace(
            make_request(f"{seed}", random_prompt(12, seed), max_tokens=40, seed=seed, temperature=temperature),
            namespace=namespace,
            client=client,
        )
        for seed in range(4)
    ]


def accept_length(answers: dict[str, Answer]) -> float:
    counts = [answer.counts for answer in answers.values()]
    return sum(count.completion_tokens - 1 for count in counts) / sum(count.rounds for count in counts)


def drafted_per_step(answers: dict[str, Answer]) -> float:
    counts = [answer.counts for answer in answers.values()]
    return sum(count.drafted_tokens for count in counts) / sum(count.rounds for count in counts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_question_asked_again_is_drafted_whole(temperature, target):
    requests = requests_of(temperature=temperature)
    expected = plain_answers(target, requests)
    engine = build_engine(target, "ngram", drafter={"nodes": 16, "breadth": 1})
    first = run(engine, requests)
    again = run(engine, requests)
    assert tokens_of(first) == tokens_of(again) == expected
    assert accept_length(again) > 6 > accept_length(first)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ["namespace", "client"])
def test_namespaces_and_clients_do_not_see_each_other(name, share, target):
    """Clients do where the drafter shares between keys, namespaces never. Prefixes are shared in a namespace."""
    options = {"width": 16, "page_size": 1, "drafter": {"share_between_keys": share}}
    engine = build_engine(target, "ngram", **options)
    requests = requests_of(**{name: "mine"})
    alone = accept_length(run(build_engine(target, "ngram", **options), requests))
    run(engine, requests_of(**{name: "yours"}))
    answers = run(engine, requests)
    beside = accept_length(answers)
    assert any(answer.counts.cached_tokens for answer in answers.values()) == (name == "client")
    if share and name == "client":
        assert beside > 4 * alone
    else:
        assert beside == pytest.approx(alone, rel=0.1), "when the thread inserts is its own business"
        assert accept_length(run(engine, requests)) > 4 * alone


def test_steps_verify_no_more_than_was_drafted(target):
    engine = build_engine(target, "ngram", drafter={"nodes": 16, "min_match": 6})
    verified = []

    def count(plan, output):
        numbers = output.num_verified[: len(plan.slots)].tolist()
        if plan.slots:
            (drafted,) = [dict(zip(proposal.slots, proposal.counts, strict=True)) for proposal in plan.edits.proposals]
            assert numbers == [drafted[slot] for slot in plan.slots]
            assert plan.nodes == sum(numbers)
        verified.extend(numbers)

    watch_outputs(engine, count)
    run(engine, requests_of())
    assert verified.count(1) > len(verified) / 2, "six tokens seldom occur twice"
    verified.clear()
    run(engine, requests_of())
    assert max(verified) == 16


class CostlyNodes(SlowSteps):
    """Four nodes take as much as the rest of a step."""

    def targets(self, rows: NDArray[np.int64], *, filtered: bool) -> NDArray[np.float64]:
        return 1000.0 * (1 + rows / 4)


def test_steps_verify_what_pays(target):
    """Where a step costs by the node, the short matches of random text are left alone, long ones are not."""
    engine = build_engine(target, "ngram", drafter={"breadth": 1})
    policy = engine.planner.policy
    policy.costs = CostlyNodes(policy.costs.most_rows)
    requests = requests_of(temperature=1.0)
    expected = plain_answers(target, requests)
    first = run(engine, requests)
    again = run(engine, requests)
    assert tokens_of(first) == tokens_of(again) == expected
    assert drafted_per_step(first) < 2
    assert drafted_per_step(again) > 4


def test_what_was_saved_is_known_from_the_start(target, tmp_path):
    engine = build_engine(target, "ngram", drafter={"save": str(tmp_path / "texts.trie")})
    run(engine, requests_of())
    engine.close()
    assert [path.name for path in tmp_path.iterdir()] == ["texts.trie"]
    loaded = build_engine(target, "ngram", drafter={"load": str(tmp_path / "texts.trie")})
    assert accept_length(run(loaded, requests_of())) > 6


def test_a_save_that_fails_stops_no_other_stage(target, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    engine = build_engine(target, "ngram", drafter={"save": str(folder / "trie")})
    closed = []
    engine.stages[-1].close = lambda: closed.append("last")
    (folder / "trie").mkdir()
    with user_error("folder/trie is a folder; name a file"):
        engine.close()
    assert closed == ["last"]


def test_two_engines_do_not_write_one_file_at_once(target, tmp_path):
    """The second is refused; the next one removes what a killed writer has left."""
    path = tmp_path / "texts.trie"
    with atomic_file(path) as file:
        file.write_bytes(b"of the first")
        with user_error(r"texts.trie is being written by another process; wait for it"):
            build_engine(target, "ngram", drafter={"save": str(path)}).close()
    assert path.read_bytes() == b"of the first"
    path.unlink()
    engine = build_engine(target, "ngram", drafter={"save": str(path)})
    staging_path(path).mkdir()
    (staging_path(path) / NEW).write_bytes(b"of a killed one")
    engine.close()
    assert path.read_bytes().startswith(SAVED_MAGIC)
    assert [file.name for file in tmp_path.iterdir()] == ["texts.trie"]


def test_what_save_would_spoil_is_found_at_the_start(target, tmp_path, monkeypatch):
    """A place that cannot be written, the corpus, a file of somebody else. An earlier file of n-grams is replaced."""
    (tmp_path / "texts.jsonl").write_text('{"tokens": [1, 2]}\n')
    path = str(tmp_path / "trie")
    corpus = str(tmp_path / "texts.jsonl")
    build_engine(target, "ngram", drafter={"save": path}).close()
    build_engine(target, "ngram", drafter={"save": path, "load": path}).close()
    for options, message in (
        ({"save": corpus}, f"drafter.save {corpus} is not a file of saved n-grams and is not replaced"),
        ({"save": corpus, "corpus": corpus}, f"drafter.save {corpus} is drafter.corpus"),
        ({"save": str(tmp_path)}, f"drafter.save {tmp_path} is a folder; name a file"),
        ({"save": f"{tmp_path}/no/trie"}, "is in a folder that does not exist; create it first"),
    ):
        with user_error(message):
            build_engine(target, "ngram", drafter=options)
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, who may write everywhere
    with user_error(f"drafter.save {path} cannot be written: you may not write to {tmp_path}"):
        NgramOptions(save=path)


@pytest.mark.parametrize("kind", ["jsonl", "dataset"])
def test_a_corpus_is_known_from_the_start_to_all(kind, target, tmp_path):
    answers = plain_answers(target, requests_of())
    texts = [request.prompt + answers[request.id] for request in requests_of()]
    path = tmp_path / ("texts.jsonl" if kind == "jsonl" else "texts")
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"tokens": text}) + "\n" for text in texts))
    else:
        import datasets

        datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": texts})}).save_to_disk(path)
    engine = build_engine(target, "ngram", drafter={"corpus": str(path), "save": str(tmp_path / "saved")})
    for owner in ({}, {"namespace": "mine"}, {"client": "mine"}):
        assert accept_length(run(engine, requests_of(**owner))) > 6
    engine.close()
    loaded = build_engine(target, "ngram", drafter={"load": str(tmp_path / "saved")})
    assert accept_length(run(loaded, requests_of(client="yours"))) > 6


@each_case()
def test_a_broken_corpus_is_named(line, message, target, tmp_path):
    (tmp_path / "texts.jsonl").write_text(line + "\n")
    with user_error(message):
        build_engine(target, "ngram", drafter={"corpus": str(tmp_path / "texts.jsonl")})


def test_a_corpus_that_is_no_json_is_named(target, tmp_path):
    for line in (b"\xff\n", b"[" * 100_000):
        (tmp_path / "texts.jsonl").write_bytes(line)
        with user_error("texts.jsonl:1: not a JSON object with a list `tokens`"):
            build_engine(target, "ngram", drafter={"corpus": str(tmp_path / "texts.jsonl")})


@each_case()
def test_bad_options_are_sentences(options, message, target):
    with user_error(message):
        build_engine(target, "ngram", drafter=options)


def test_metrics_tell_what_it_knows(target):
    engine = build_engine(target, "ngram")
    run(engine, requests_of())
    run(engine, requests_of())
    engine.stages[0].core.flush()
    metrics = engine.metrics()
    assert metrics["ngram_nodes"] > 0
    assert metrics["ngram_hits"] > metrics["ngram_misses"] >= 0
    assert metrics["ngram_hits"] == sum(metrics[f"ngram_match_length_{length}"] for length in range(1, 13))


# Mixed with a network


def build_both(target: Path, draft: Path, **drafter: Any) -> Engine:
    return build_engine(target, draft, drafter={"ngram_first": 5, **drafter})


def test_the_network_drafts_until_texts_repeat(target, draft):
    requests = requests_of(temperature=1.0)
    network = run(build_engine(target, draft), requests)
    engine = build_both(target, draft)
    first = run(engine, requests)
    again = run(engine, requests)
    assert tokens_of(first) == tokens_of(again) == tokens_of(network)
    assert accept_length(first) == pytest.approx(accept_length(network), rel=0.1)
    assert accept_length(again) > 2 * accept_length(first)


def test_each_request_chooses_for_itself(target, draft):
    """One repeats, one does not, in the same batch: both keep what they would have alone."""
    engine = build_both(target, draft, ngram_first=8)
    requests = requests_of()
    request = requests[0]
    run(engine, [request])
    alone = run(build_engine(target, draft), requests[1:2])["1"].counts
    together = run(engine, [replace(request, id="known"), requests[1]])
    assert accept_length({"known": together["known"]}) > 4
    assert together["1"].counts.accepted_tokens == alone.accepted_tokens
    assert together["1"].counts.drafted_tokens == 3 * together["1"].counts.rounds, "what the network drafts, not 15"


def test_the_draft_decides_which_options_there_are(draft):
    options = read_config(["--draft", str(draft), "--drafter.ngram-first", "5", "--drafter.depth", "2"]).drafter
    assert options.items() >= {"ngram_first": 5, "ngram_nodes": 16, "ngram_capacity": 1_000_000, "depth": 2}.items()
    assert read_config(["--draft", "ngram", "--target", "x", "--drafter.nodes", "8"]).drafter["nodes"] == 8


def test_wrong_choices_beside_a_network_are_sentences(target, draft):
    for name, value in (("nodes", 65), ("capacity", 5)):
        with user_error(rf"drafter\.ngram_{name} is {value}; it must be between"):
            build_both(target, draft, **{f"ngram_{name}": value})
    with user_error("drafter.ngram_first is 13; it must be between 0"):
        build_both(target, draft, ngram_first=13)
    with user_error("drafter option 'ngram_first' does not exist"):
        build_engine(target, "none", drafter={"ngram_first": 5})
