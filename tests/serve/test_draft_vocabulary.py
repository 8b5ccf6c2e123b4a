"""Token maps in serving: which tokens are drafted, that no answer changes, and which maps are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.kernels.gemm.gathered_head import DraftHead
from slipstream.models.drafts.token_map import TokenMap, read_token_map
from slipstream.serve.drafters.options import TreeOptions, options_of
from slipstream.serve.drafters.registry import build_options
from slipstream.serve.drafters.vocabulary import HALF_LIFE, DraftVocabulary, RecentTokens
from slipstream.serve.dry_run import DryRun
from slipstream.serve.engine.engine import Engine
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.request import Speculation
from slipstream.serve.runner.batch import PassRows
from slipstream.serve.runner.request_state import KVSlots
from slipstream.tests.pairwise import pairwise, rotating
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft, save_random_eagle
from slipstream.tests.serve.engine_runs import (
    VOCAB,
    build_engine,
    make_request,
    plain_answers,
    random_prompt,
    run,
    run_checked,
    sized_requests,
    texts_of,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import play
from slipstream.tests.serve.test_eagle import Oracle
from slipstream.tests.sources import TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

EOS = 2  # of the tiny targets
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": {"depth": 3},
    "eagle tree": {"depth": 3, "topk": 3, "nodes": 9},
    "dflash": {},
}


def save_map(folder: Path, size: int = 60, special_ids: tuple[int, ...] = (EOS,)) -> str:
    """Saves a token map and returns its path, for drafter.token_map."""
    counts = torch.randint(1, 100, (VOCAB,), generator=torch.Generator().manual_seed(6))
    TokenMap.build(counts, size, list(special_ids), {}).write(folder / "map.safetensors")
    return str(folder / "map.safetensors")


@pytest.fixture(scope="module")
def drafts(target, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    texts = [text for temperature in (0.0, 0.8) for text in texts_of(target, sized_requests(temperature=temperature))]
    save_random_eagle(target, folder / "eagle", texts)
    save_random_eagle(target, folder / "reduced", draft_vocab_size=50)
    save_random_dflash(target, folder / "dflash", texts)
    save_random_draft(target, folder / "eagle3")
    return {name: folder / name.split()[0] for name in (*DRAFTERS, "reduced", "eagle3")}


def drafted_tokens(engine: Engine) -> set[int]:
    """Runs a request; every token that was ever proposed for it."""
    tokens = set()
    request = make_request("seen", random_prompt(9, 4), temperature=0.8, max_tokens=24)
    run(engine, [request], lambda *_: tokens.update(engine.runner.state.stored.tokens[:, 1:].flatten().tolist()))
    return tokens - {-1}


@pytest.mark.parametrize(("drafter", "temperature", "dynamic"), pairwise(DRAFTERS, [0.0, 0.8], [0, 16]))
def test_a_map_changes_no_token(drafter, temperature, dynamic, target, drafts, tmp_path):
    options = {"token_map": save_map(tmp_path), "token_map_dynamic": dynamic}
    engine = build_engine(target, drafts[drafter], drafter=DRAFTERS[drafter] | options)
    requests = sized_requests(temperature=temperature)
    answers = run(engine, requests)
    assert tokens_of(answers) == plain_answers(target, requests)
    assert sum(answer.counts.accepted_tokens for answer in answers.values()) > 0


@pytest.mark.parametrize(("drafter", "size"), rotating(DRAFTERS, [20, None]))
def test_only_the_maps_tokens_are_drafted(drafter, size, target, drafts, tmp_path):
    options = {"token_map": save_map(tmp_path)} | ({"token_map_size": size} if size else {})
    engine = build_engine(target, drafts[drafter], drafter=DRAFTERS[drafter] | options)
    ids = TokenMap.read(tmp_path / "map.safetensors").ids_by_frequency(size, [EOS])
    assert len(ids) == (size or 60)
    drafted = drafted_tokens(engine)
    assert drafted <= set(ids.tolist())
    assert len(drafted) > 5
    everything = drafted_tokens(build_engine(target, drafts[drafter], drafter=DRAFTERS[drafter]))
    assert not everything <= set(ids.tolist())


def test_proposals_are_those_of_a_head_with_the_maps_rows(target, drafts, tmp_path):
    path = save_map(tmp_path)
    options = {"depth": 3, "topk": 3, "nodes": 9}
    oracle = Oracle(target, drafts["eagle"], TreeOptions(**options))
    oracle.naive.target_ids = TokenMap.read(Path(path)).ids
    oracle.naive.head = oracle.naive.head[oracle.naive.target_ids]
    engine = build_engine(target, drafts["eagle"], drafter=options | {"token_map": path})
    run_checked(engine, oracle, sized_requests(temperature=0.8))


def test_recent_tokens_are_those_that_occurred_most_of_late():
    """Against a dict: an occurrence counts 2 ** (-age / half-life), and the map's own tokens never enter."""
    generator = torch.Generator().manual_seed(0)
    static = 10
    vocab_size = 50
    size = 6
    ids = torch.cat((torch.randperm(vocab_size, generator=generator)[:static], torch.full((size,), -1)))
    recent = RecentTokens(ids, static, vocab_size)
    scores = {}
    for step in range(30):
        tokens = torch.randint(-1, 3 + step, (8,), generator=generator)
        counts = (tokens >= 0) & (torch.rand(8, generator=generator) < 0.8)
        recent.add(tokens, counts)
        scores = {token: score * 2 ** (-int(counts.sum()) / HALF_LIFE) for token, score in scores.items()}
        for token in tokens[counts].tolist():
            if token not in ids[:static].tolist():
                scores[token] = scores.get(token, 0.0) + 1
        recent_ids = [token for token in ids[static:].tolist() if token >= 0]
        assert len(recent_ids) == len(set(recent_ids)) == min(size, len(scores))
        worst = min((scores[token] for token in recent_ids), default=0.0)
        left_out = [score for token, score in scores.items() if token not in recent_ids]
        assert all(score <= worst + 1e-4 for score in left_out)
    assert (ids[:static] >= 0).all()
    recent.forget()
    assert (ids[static:] == -1).all()
    token = next(token for token in range(vocab_size) if token not in ids[:static].tolist())
    recent.add(torch.tensor([token]), torch.tensor([True]))
    assert [recent for recent in ids[static:].tolist() if recent >= 0] == [token], "nothing of what was is left"


def test_prompts_and_answers_count_but_not_rows_that_fill_up():
    """A map of tokens 0..9 and 4 recent ones."""
    ids = torch.cat((torch.arange(10), torch.full((4,), -1)))
    head = DraftHead(torch.zeros(40, 8), ids, gathered=True)
    vocabulary = DraftVocabulary(head, RecentTokens(ids, 10, 40))

    def observe(*next_tokens):
        places = torch.zeros(len(next_tokens), dtype=torch.int64)
        zeros = torch.zeros(1, dtype=torch.int64)
        slots = KVSlots(lambda _: places)
        vocabulary.observe(PassRows(places, slots, torch.tensor(next_tokens), zeros, zeros))

    observe(7, 21, 22, -1, -1)
    assert sorted(ids[10:].tolist()) == [-1, -1, 21, 22]
    observe(36, -1)  # a rejected node
    assert sorted(ids[10:].tolist()) == [-1, 21, 22, 36]
    observe(25, -1, -1)
    assert sorted(ids[10:].tolist()) == [21, 22, 25, 36]
    assert ids[:10].tolist() == list(range(10))


def test_recent_tokens_can_be_drafted(target, drafts, tmp_path):
    """With a map of nearly nothing, what is drafted right comes from the prompt and the answer so far."""
    options = {"token_map": save_map(tmp_path, size=4)}
    accepted = []
    for dynamic in (0, 100):
        engine = build_engine(target, drafts["eagle"], drafter=options | {"token_map_dynamic": dynamic})
        answers = run(engine, [make_request("long", random_prompt(100, 33), max_tokens=60, ignore_eos=True)])
        answers |= run(engine, [make_request("again", random_prompt(33, 33))])
        accepted.append(sum(answer.counts.accepted_tokens for answer in answers.values()))
    assert accepted[1] > accepted[0]


@pytest.mark.parametrize(("drafter", "mixed"), [("eagle", {"ngram_first": 5}), ("dflash", {})])
def test_recent_tokens_of_all_do_not_go_with_a_salt(drafter, mixed, target, drafts, tmp_path):
    """Another tenant's words would show in the accept length. A static map shows nothing."""
    salted = replace(make_request("salted", [5, 6], max_tokens=2), namespace="tenant")
    options = mixed | {"token_map": save_map(tmp_path)}
    run(build_engine(target, drafts[drafter], drafter=options), [salted])
    engine = build_engine(target, drafts[drafter], drafter=options | {"token_map_dynamic": 16})
    with user_error("cache_salt is set, but .* without --drafter.token-map-dynamic"):
        engine.add(salted)
    run(engine, [make_request("plain", [5, 6], max_tokens=2)])


@pytest.mark.parametrize("dynamic", [0, 16])
def test_a_trace_names_no_recent_tokens(dynamic, target, drafts, tmp_path):
    """They may be another request's. Those of the map are named, beside recent ones, too."""
    path = save_map(tmp_path)
    options = DRAFTERS["eagle tree"] | {"token_map": path, "token_map_dynamic": dynamic}
    engine = build_engine(target, drafts["eagle"], drafter=options)
    requests = [
        make_request(str(seed), random_prompt(30, seed), max_tokens=40, speculation=Speculation(trace=True))
        for seed in range(3)
    ]
    answers = run(engine, requests).values()
    refused = [token for answer in answers for entry in answer.trace for token in entry.refused]
    assert None in refused if dynamic else None not in refused
    names = {token for token in refused if token is not None}
    assert len(names) > 5
    assert names <= set(read_token_map(Path(path), VOCAB).ids_by_frequency(None, [EOS]).tolist())


@pytest.mark.parametrize("drafter", ["eagle tree", "dflash"])
def test_steps_of_fixed_buffers(drafter, target, drafts, tmp_path):
    """As captured ones: passes filled up with padding."""
    options = DRAFTERS[drafter] | {"token_map": save_map(tmp_path), "token_map_dynamic": 16}
    config = {"draft": str(drafts[drafter]), "drafter": options, "kv_cache_tokens": 2048}
    engine = play(EngineConfig(target=str(target), max_running=5, **config))
    requests = sized_requests(temperature=0.8)
    assert tokens_of(run(engine, requests)) == plain_answers(target, requests)


@each_case()
def test_maps_that_do_not_fit_are_refused(size, options, message, target, drafts, tmp_path):
    if size is not None:
        save_map(tmp_path, size, special_ids=(0, 1, EOS))
    options |= {"token_map": str(tmp_path / "map.safetensors")}
    with user_error(message):
        build_engine(target, drafts["dflash"], drafter=options)
    with user_error(message):
        DryRun(ServeConfig(target=str(target), draft=str(drafts["dflash"]), drafter=options))


def test_as_many_children_as_the_map_has_tokens_while_nothing_has_been_read(target, drafts, tmp_path):
    """Places for recent tokens are empty at first: they give no child."""
    options = {"token_map": save_map(tmp_path, size=3), "token_map_dynamic": 20, "depth": 2}
    with user_error(r"drafter\.topk is 4; the draft has 3 tokens to choose from"):
        build_engine(target, drafts["eagle"], drafter=options | {"topk": 4})
    request = make_request("short", [5], max_tokens=12)
    answers = run(build_engine(target, drafts["eagle"], drafter=options | {"topk": 3}), [request])
    assert tokens_of(answers) == plain_answers(target, [request])


def test_a_map_of_another_tokenizer_is_refused(tmp_path):
    counts = torch.ones(4096, dtype=torch.int64)
    TokenMap.build(counts, 1024, [], {"tokenizer_hash": "0" * 64}).write(tmp_path / "map.safetensors")
    save_random_eagle(TINY, tmp_path / "draft", intermediate_size=16)
    with user_error(r"map.safetensors was counted with another tokenizer \(000000000000"):
        build_engine(TINY, tmp_path / "draft", drafter={"token_map": str(tmp_path / "map.safetensors")})


def test_drafts_with_a_vocabulary_of_their_own_take_no_map(target, drafts, tmp_path):
    options = {"token_map": save_map(tmp_path)}
    with user_error(r"has a vocabulary of its own of 50 tokens \(d2t\)"):
        build_engine(target, drafts["reduced"], drafter=options)
    with user_error(r"an EAGLE3 draft has its own vocabulary \(d2t\) and head"):
        build_engine(target, drafts["eagle3"], drafter=options)


@pytest.mark.parametrize("drafter", ["eagle", "dflash"])
def test_options_are_checked(drafter):
    for options in ({"token_map_size": 9}, {"token_map_dynamic": 9}):
        with user_error(r"need drafter\.token_map, a file"):
            build_options(options_of(drafter), options)
    with user_error("token_map_dynamic is -1"):
        build_options(options_of(drafter), {"token_map": "map", "token_map_dynamic": -1})
