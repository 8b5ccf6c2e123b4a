"""Gemma 4's assistants in the engine: every proposal is what transformers' network computes from the target's states,
keys and values of the whole text, and answers are the target's own."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream.kernels.sampling.sample import gumbel, noise_key
from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.gemma4_assistant import Gemma4Assistant
from slipstream.models.targets.decoder import load_config
from slipstream.serve import dry_run
from slipstream.serve.engine import build as engine_build
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.request import Request
from slipstream.tests.naive_eagle3 import grown_tree
from slipstream.tests.pairwise import gate_of, rotating
from slipstream.tests.random_drafts import fit, load_float64
from slipstream.tests.random_targets import RELATIVES, change_json, roughen
from slipstream.tests.serve.engine_runs import (
    Nodes,
    build_engine,
    check_proposals,
    plain_answers,
    run,
    run_checked,
    sized_requests,
    texts_of,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import build_played
from slipstream.tests.tables import each_case

pytestmark = pytest.mark.skipif(
    "gemma4" not in RELATIVES or not hasattr(transformers, "Gemma4AssistantConfig"), reason="an older transformers"
)
CPU = torch.device("cpu")
DEPTH = 3
FAMILIES = ("gemma4", "gemma4-shared", "gemma4 in clusters")  # the second's last layers read those before them
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 6}
requests_of = partial(sized_requests, temperature=0.7, max_tokens=24)
MakeAssistant = Callable[[str], Path]


class Oracle:
    """The chain or tree that transformers' network drafts behind any text."""

    def __init__(self, target: Path, draft: Path, topk: int = 1, nodes: int = DEPTH + 1):
        self.shape = (topk, DEPTH)
        self.nodes = nodes
        self.target = load_float64(target)
        self.draft = transformers.Gemma4AssistantForCausalLM.from_pretrained(draft, dtype=torch.float64)
        self.window = self.draft.config.text_config.sliding_window
        self.text: list[int] = []

    @torch.no_grad()
    def __call__(self, tokens: list[int], request: Request) -> Nodes:
        key = noise_key(request.seed, request.choice)
        hidden, shared = self.read(tokens[:-1])
        states = {(): hidden}  # by path: what the step after it reads

        def children_of(path):
            before = states[tuple(path)]
            logits, _, after = self.step([tokens[-1], *path][-1], before, shared, len(tokens) - 1)
            if self.draft.config.use_ordered_embeddings:  # the network gives others one less than the worst of these
                logits = logits.masked_fill(logits == logits.min(), -torch.inf)
            noise = gumbel(torch.tensor([key]), torch.tensor([len(tokens) + len(path)]), torch.arange(len(logits)))
            scores = (logits + request.params.temperature * noise[0].double()).log_softmax(-1)
            best = scores.sort(descending=True, stable=True)
            children = list(zip(best.values.tolist(), best.indices.tolist(), strict=True))[: self.shape[0]]
            states.update({(*path, token): after for _, token in children})
            return children

        return grown_tree(tokens[-1], self.shape, self.nodes, children_of)

    def read(self, tokens: list[int]) -> tuple[Tensor, dict[str, Any]]:
        """The state behind `tokens` (1, 1, H), and the keys and values that a step sees. What begins the text before is
        not computed again."""
        size = len(tokens)
        if self.text[:size] != tokens:
            options = {"output_hidden_states": True, "return_shared_kv_states": True, "use_cache": True}
            self.outputs = self.target(torch.tensor([tokens]), **options)
            self.text = tokens
        starts = {"sliding_attention": max(0, size - self.window)}
        shared = {
            kind: tuple(x[:, :, starts.get(kind, 0) : size] for x in states)
            for kind, states in self.outputs.shared_kv_states.items()
        }
        return self.outputs.hidden_states[-1][:, size - 1 : size], shared

    def step(self, token: int, hidden: Tensor, shared: dict[str, Any], position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (V,), what the head reads (1, H of the draft), and the next state (1, 1, H)."""
        embeds = self.target.get_input_embeddings()(torch.tensor([[token]]))
        read = []
        hook = self.draft.model.norm.register_forward_hook(lambda _module, _inputs, output: read.append(output[0]))
        outputs = self.draft(
            inputs_embeds=torch.cat((embeds, hidden), dim=-1),
            position_ids=torch.tensor([[position]]),
            shared_kv_states=shared,
        )
        hook.remove()
        return outputs.logits[0, 0], read[0], outputs.last_hidden_state


def assistant_config(target: Path, **options: Any) -> transformers.PretrainedConfig:
    """Two layers of each of the target's kinds, with its heads."""
    text = json.loads((target / "config.json").read_text())
    full = text["layer_types"].index("full_attention")
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": len(kinds), "layer_types": kinds}
    heads = (text.get("per_layer_config") or {}).get(str(full))
    by_layer = {str(index): heads for index, kind in enumerate(kinds) if kind == "full_attention"}
    none = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False}
    fields = text | sizes | none | {"num_kv_shared_layers": len(kinds), "per_layer_config": by_layer if heads else None}
    for name in ("architectures", "model_type", "dtype", "transformers_version"):
        fields.pop(name, None)
    return transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**fields), backbone_hidden_size=text["hidden_size"], **options
    )


@torch.no_grad()
def save_assistant(target: Path, folder: Path, **options: Any):
    """A random assistant whose head is fitted to the first two answers to `requests_of`."""
    torch.manual_seed(7)
    model = transformers.Gemma4AssistantForCausalLM(assistant_config(target, **options))
    roughen(model)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(120))
    model.save_pretrained(folder)
    oracle = Oracle(target, folder)
    inputs = []
    labels = []
    for start, tokens in texts_of(target, requests_of()[:2]):
        for end in reversed(range(start, len(tokens) - 1)):
            inputs.append(oracle.step(tokens[end], *oracle.read(tokens[:end]), end)[1])
            labels.append(tokens[end + 1])
    outputs = torch.nn.functional.one_hot(torch.tensor(labels), len(model.lm_head.weight)).double() * 10
    fit(model.lm_head, torch.cat(inputs), outputs)
    model.model.embed_tokens.weight.data = model.lm_head.weight.data
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def make_assistant(make_target, tmp_path_factory) -> MakeAssistant:
    folders = {}

    def make(family):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("assistants") / family
            name, _, clusters = family.partition(" ")
            save_assistant(make_target(name), folders[family], **CLUSTERS if clusters else {})
        return folders[family]

    return make


@pytest.mark.parametrize(("family", "page_size"), rotating(FAMILIES, [1, 16]))
def test_proposals_equal_transformers(family, page_size, make_target, make_assistant):
    """Pages of one token are given back as soon as they are behind the window."""
    target = make_target(family.split()[0])
    draft = make_assistant(family)
    engine = build_engine(target, draft, drafter={"depth": DEPTH}, page_size=page_size)
    check_proposals(engine, Oracle(target, draft), target, requests_of())


@pytest.mark.parametrize(
    ("family", "topk", "nodes"), [("gemma4", 3, 9), pytest.param("gemma4 in clusters", 2, 8, marks=pytest.mark.slow)]
)
def test_trees_equal_transformers(family, topk, nodes, make_target, make_assistant):
    target = make_target(family.split()[0])
    draft = make_assistant(family)
    engine = build_engine(target, draft, drafter={"depth": DEPTH, "topk": topk, "nodes": nodes})
    answers = run_checked(engine, Oracle(target, draft, topk, nodes), requests_of())
    assert tokens_of(answers) == plain_answers(target, requests_of())
    assert sum(answer.counts.accepted_tokens for answer in answers.values())


@each_case()
def test_answers_are_those_without_a_draft(options, make_target, make_assistant):
    target = make_target("gemma4")
    answers = run(build_engine(target, make_assistant("gemma4"), **options), requests_of())
    assert tokens_of(answers) == plain_answers(target, requests_of())


@pytest.mark.parametrize(("kv_cache_dtype", "drafter"), gate_of([("auto", {"topk": 3}), ("fp8", {})], [("fp8", {})]))
def test_captured_passes_answer_alike(kv_cache_dtype, drafter, make_target, make_assistant, monkeypatch):
    """Trees, and over the target's codes, too."""
    monkeypatch.setattr(engine_build, "tokens_of", lambda *_: list(range(120)))  # the target has no tokenizer
    target = str(make_target("gemma4"))
    sizes = {"target": target, "max_running": 5, "kv_cache_tokens": 400, "grammar_drafts": False}
    config = EngineConfig(**sizes, kv_cache_dtype=kv_cache_dtype)
    answers = [
        run(build_played(replace(config, draft=draft, drafter=options)), requests_of())
        for draft, options in (("none", {}), (str(make_assistant("gemma4")), drafter))
    ]
    assert tokens_of(answers[0]) == tokens_of(answers[1])
    assert sum(answer.counts.accepted_tokens for answer in answers[1].values())


def test_a_dry_run_shows_its_weights(make_target, make_assistant):
    config = ServeConfig(target=str(make_target("gemma4")), draft=str(make_assistant("gemma4")), device="cpu")
    assert f"draft: {config.draft}" in dry_run.report(config)


def test_it_takes_no_memory_for_kv(make_target, make_assistant):
    target = make_target("gemma4")
    plans = [build_engine(target, draft).engine_plan for draft in ("none", make_assistant("gemma4"))]
    assert plans[0].page_bytes == plans[1].page_bytes
    assert plans[0].groups == plans[1].groups


@each_case()
def test_what_does_not_fit_is_refused(values, text, message, make_target, make_assistant, tmp_path):
    target = make_target("gemma4")
    draft = make_assistant("gemma4")
    config = json.loads((draft / "config.json").read_text())
    shutil.copytree(draft, tmp_path, dirs_exist_ok=True)
    change_json(tmp_path / "config.json", **{"text_config": config["text_config"] | text} | values)
    with pytest.raises(ValueError, match=message):
        load_draft(Gemma4Assistant, tmp_path, load_config(target), torch.float32, CPU)
