"""MTP heads as drafters. The oracle is transformers' module (modeling_layers.MtpModel) over whole texts."""

import gzip
import json
import logging
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.modeling_layers import MtpModel

from slipstream.models.drafts.mtp import load_mtp
from slipstream.models.drafts.mtp_trial import MARGIN
from slipstream.models.drafts.source import source_of
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.models.targets.families import Hidden
from slipstream.serve.drafters.options import TreeOptions
from slipstream.serve.drafters.registry import load_drafter
from slipstream.serve.dry_run import DryRun, report
from slipstream.serve.kernels import report as kernels_report
from slipstream.serve.kernels_options import KernelsConfig
from slipstream.serve.options import ServeConfig
from slipstream.tests.mtp_targets import KINDS, MTPTarget, Oracle, add_tensors, module_tensors
from slipstream.tests.pairwise import grouped, rotating
from slipstream.tests.quantized_targets import LAYOUTS, save_quantized
from slipstream.tests.random_drafts import load_float64
from slipstream.tests.random_targets import change_json, load_model, target_states
from slipstream.tests.serve.engine_runs import (
    acceptance,
    build_engine,
    bytes_of,
    generated,
    make_request,
    plain_answers,
    random_prompt,
    remembered,
    run,
    run_checked,
    sized_requests,
    tokens_of,
)
from slipstream.tests.serve.test_draft_vocabulary import save_map
from slipstream.tests.sources import HYBRID, ROOT
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

CHAIN = {"depth": 3}
TREE = {"depth": 3, "topk": 3, "nodes": 9}


@each_case()
def test_proposals_equal_those_of_transformers(kind, options, temperature, engine_options, make_mtp):
    target = make_mtp(kind)
    engine = build_engine(target.folder, "mtp", drafter=options, **engine_options)
    requests = sized_requests(temperature=temperature, max_tokens=7)
    answers = run_checked(engine, Oracle(target, TreeOptions(**options)), requests)
    assert tokens_of(answers) == plain_answers(target.folder, requests)
    assert sum(answer.counts.drafted_tokens for answer in answers.values()) > 0


def test_the_bundled_module_is_accepted():
    """Answers to questions that were held out of its training are those of transformers. The trial finds the state that
    it was trained with."""
    tokenizer = AutoTokenizer.from_pretrained(HYBRID)
    with gzip.open(ROOT / "assets" / "gsm8k.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(next(lines)) for _ in range(3)]
    requests = [
        make_request(
            row["id"],
            tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False),
            max_tokens=40,
        )
        for row in rows
    ]
    engine = build_engine(HYBRID, "mtp", drafter={"depth": 1}, width=2)
    assert engine.runner.drafter.module.config.hidden == "after_norm"
    answers = run(engine, requests)
    model = load_model(HYBRID, dtype=torch.float32)
    assert tokens_of(answers) == {request.id: generated(model, request) for request in requests}
    assert acceptance(answers) > 0.6


@pytest.mark.parametrize(("kind", "options"), [("ernie", CHAIN), ("qwen3-5", TREE)])
def test_a_module_may_read_states_before_the_final_norm(kind, options, make_mtp):
    target = make_mtp(kind)
    drafter = options | {"hidden": "before_norm"}
    oracle = Oracle(target, TreeOptions(**options), "before_norm")
    requests = sized_requests(temperature=0.8, max_tokens=7)
    run_checked(build_engine(target.folder, "mtp", drafter=drafter), oracle, requests)


def test_the_state_that_a_family_fixes_is_no_choice(make_mtp):
    with user_error(r"hidden is before_norm, but MTP heads of Glm4MoeForCausalLM read the state a"):
        build_engine(make_mtp("glm4-moe").folder, "mtp", drafter={"hidden": "before_norm"})
    with user_error("drafter.hidden is 'none'; choose after_norm or before_norm, or leave it out"):
        build_engine(make_mtp("ernie").folder, "mtp", drafter={"hidden": "none"})


@pytest.mark.parametrize("kind", ["ernie", "qwen3-next", "qwen3-5"])
def test_a_trial_finds_the_state_with_which_the_module_agrees_better(kind, make_mtp, monkeypatch, caplog):
    origin = make_mtp(kind)
    tokens = random_prompt(60, 5)
    agreement = {hidden: agreement_of(origin, tokens, hidden) for hidden in get_args(Hidden)}
    better = "before_norm" if agreement["before_norm"] > MARGIN * agreement["after_norm"] else "after_norm"
    monkeypatch.setattr(Target, "tokenizer", staticmethod(lambda *_, **__: {"input_ids": tokens}))
    caplog.set_level(logging.INFO)
    engine = build_engine(origin.folder, "mtp")
    assert engine.runner.drafter.module.config.hidden == better
    shares = [f"{100 * agreement[hidden]:.0f} %" for hidden in get_args(Hidden)]
    assert f"--drafter.hidden {better} does without a trial" in caplog.text
    assert f"{shares[0]} of a short text after the norm, on {shares[1]} before it" in caplog.text


@torch.no_grad()
def agreement_of(target: MTPTarget, tokens: list[int], hidden: Hidden) -> float:
    """Mean overlap of the module's distributions and the target's, by transformers."""
    oracle = Oracle(target, TreeOptions(), hidden)
    states = target_states(target.model, tokens)
    embeds = oracle.naive.embeddings[tokens[1:-1]]
    drafted = oracle.naive.logits(oracle.naive.states(embeds, states[oracle.state][:-2])).softmax(-1)
    expected = (states[-1][1:-1] @ oracle.naive.head.T).softmax(-1)
    return torch.minimum(drafted, expected).sum(-1).mean().item()


def test_the_module_of_a_multimodal_checkpoint_drafts(make_mtp, tmp_path):
    target = make_mtp("qwen3-5")
    folder = tmp_path / "wrapped"
    folder.mkdir()
    tensors = load_file(target.folder / "model.safetensors")
    wrapped = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in tensors.items()}
    save_file(wrapped, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((target.folder / "config.json").read_text())
    del text["architectures"]
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text | {"mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    run_checked(build_engine(folder, "mtp"), Oracle(target, TreeOptions()), sized_requests((9, 33)))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_change_no_token(kind, options, make_mtp):
    target = make_mtp(kind)
    attention = "prefill=sdpa,verify=triton,draft=triton"
    engine = build_engine(target.folder, "mtp", drafter=options, device="cuda", dtype="float32", attention=attention)
    requests = sized_requests(temperature=0.8)
    plain = build_engine(target.folder, device="cpu")
    assert tokens_of(run(engine, requests)) == tokens_of(run(plain, requests))


def test_proposals_after_a_hit_of_recurrent_layers_equal_those_of_transformers(make_mtp):
    target = make_mtp("qwen3-next")
    engine = build_engine(target.folder, "mtp", prefill_budget=64)
    requests = [make_request("long", random_prompt(150, 1))]
    oracle = remembered(Oracle(target, TreeOptions()))
    for _ in range(2):
        answers = run_checked(engine, oracle, requests)
    assert answers["long"].counts.cached_tokens > 0


@pytest.mark.parametrize(("kind", "pattern"), [("glm4-moe", r"model\.layers\.4\..*"), ("mellum", r"^mtp\.")])
def test_transformers_reads_the_same_files(kind, pattern, make_mtp, monkeypatch):
    target = make_mtp(kind)
    monkeypatch.setattr(type(target.model), "_keys_to_ignore_on_load_unexpected", [pattern])
    loaded = MtpModel.from_pretrained(load_model(target.folder, dtype=torch.float32))
    expected = module_tensors(kind, target.module)
    tensors = module_tensors(kind, loaded)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def save_copying_target(target: MTPTarget, folder: Path):
    """Saves a target that says of a text what its last token says, and a module that knows it."""
    shutil.copytree(target.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]:
        tensors[name] = torch.zeros_like(tensors[name])
    size = len(tensors["model.norm.weight"])
    tensors["model.layers.4.enorm.weight"] = torch.ones(size)
    tensors["model.layers.4.eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    tensors["model.layers.4.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", rms_norm_eps=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_module_that_is_right_is_accepted_whole(temperature, make_mtp, tmp_path):
    """Also after prefix hits, of prompts in chunks."""
    save_copying_target(make_mtp("glm4-moe"), tmp_path / "target")
    requests = sized_requests((1, 9, 50), max_tokens=21, ignore_eos=True, temperature=temperature)
    engine = build_engine(tmp_path / "target", "mtp", drafter={"depth": 4}, width=5, prefill_budget=16)
    for _ in range(2):
        answers = run(engine, requests)
        assert [answer.counts.rounds for answer in answers.values()] == [4] * 3  # 1 token, then 5 in each
        assert tokens_of(answers) == plain_answers(tmp_path / "target", requests)
    assert answers["50"].counts.cached_tokens == 48


def test_copies_of_embedding_and_head_are_dropped_and_others_used(make_mtp, tmp_path, caplog):
    target = make_mtp("glm4-moe")
    folder = tmp_path / "target"
    shutil.copytree(target.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors["lm_head.weight"]
    names = [f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    add_tensors(folder, dict(zip(names, (embedding, head), strict=True)))
    engine = build_engine(folder, "mtp")
    assert engine.runner.drafter.embed is engine.runner.target.embed_tokens
    assert engine.runner.drafter.head.weight is engine.runner.target.lm_head.weight
    torch.manual_seed(0)
    changed = [weight + 0.1 * torch.randn_like(weight) for weight in (embedding, head)]
    add_tensors(folder, dict(zip(names, changed, strict=True)))
    oracle = Oracle(target, TreeOptions())
    oracle.naive.embeddings, oracle.naive.head = (weight.double() for weight in changed)
    caplog.set_level(logging.INFO)
    run_checked(build_engine(folder, "mtp"), oracle, sized_requests(temperature=0.8))
    assert "its own output head" in caplog.text
    assert "its own embedding" in caplog.text
    (tmp_path / "map").write_text("")
    with user_error("token_map is .*, but this draft has an output head of its own"):
        build_engine(folder, "mtp", drafter={"token_map": str(tmp_path / "map")})


@pytest.mark.parametrize("layers", ["none", "target", "all"])
def test_weights_in_fp8_draft_as_well(layers, make_mtp, tmp_path):
    """All of a file's layers, or those of the target alone; and 16 bits that are quantised when they are loaded."""
    target = make_mtp("glm4-moe")
    folder = tmp_path / "target"
    options = {"quantization": "fp8"}
    if layers == "none":
        folder = target.folder
    else:
        save_quantized(LAYOUTS["compressed-channel"], target.folder, folder)
        options = {}
    if layers == "target":
        tensors = load_file(folder / "model.safetensors")
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.4.")}
        save_file(rest | module_tensors("glm4-moe", target.module), folder / "model.safetensors", {"format": "pt"})
    requests = sized_requests(temperature=0.8)
    engine = build_engine(folder, "mtp", **options)
    plain = build_engine(folder, **options)
    assert tokens_of(run(engine, requests)) == tokens_of(run(plain, requests))
    module = engine.runner.drafter.module
    assert module.eh_proj.is_plain == module.layer.mixer.qkv_proj.is_plain == (layers == "target")
    run_config = ServeConfig(target=str(folder), draft="mtp", dtype="float32", device="cpu", **options)
    sizes = [network.size for network in DryRun(run_config).networks]
    assert sizes == [bytes_of(engine.runner.target), bytes_of(module)] or layers == "target"


def test_a_config_lists_layers_by_their_names_in_files(make_mtp, tmp_path):
    target = make_mtp("mellum")
    folder = tmp_path / "target"
    save_quantized(LAYOUTS["compressed-channel"], target.folder, folder)
    values = json.loads((folder / "config.json").read_text())["quantization_config"]
    ignored = [*values.get("ignore", []), "re:.*mtp.*"]
    change_json(folder / "config.json", quantization_config=values | {"ignore": ignored})
    tensors = load_file(folder / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(rest | module_tensors("mellum", target.module), folder / "model.safetensors", {"format": "pt"})
    engine = build_engine(folder, "mtp")
    networks = DryRun(ServeConfig(target=str(folder), draft="mtp", dtype="float32", device="cpu")).networks
    modules = engine.runner.target, engine.runner.drafter.module
    assert [network.size for network in networks] == [bytes_of(module) for module in modules]
    table = kernels_report(KernelsConfig(target=str(folder), draft="mtp", exact=False))
    formats = {line.split()[0]: "16 bits" in line for line in table.splitlines() if "qkv_proj" in line}
    assert formats == {"self_attn.qkv_proj": False, "mtp.self_attn.qkv_proj": True}


def test_a_module_is_written_as_files_have_it(make_mtp):
    target = make_mtp("ernie")
    module = load_mtp(load_target(target.folder, load_config(target.folder), torch.float32, torch.device("cpu")))
    tensors = module.file_tensors(public_tensors(module))
    expected = module_tensors("ernie", target.module)
    assert tensors.keys() - expected.keys() == {"model.norm.weight"}
    assert all(torch.equal(tensors[name], tensor.bfloat16()) for name, tensor in expected.items())


def test_weights_in_4_bits_propose_what_the_same_weights_do_in_transformers(make_mtp, tmp_path, monkeypatch):
    """Its inputs are not rounded, unlike those of FP8."""
    origin = make_mtp("glm4-moe-wide")
    monkeypatch.setattr(type(origin.model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.4\..*"])
    values = save_quantized(LAYOUTS["packed"], origin.folder, tmp_path / "packed")
    plain = tmp_path / "plain"
    shutil.copytree(origin.folder, plain)
    add_tensors(plain, {name: value.float().contiguous() for name, value in values.items()})
    model = load_float64(plain)
    target = MTPTarget(plain, model, MtpModel.from_pretrained(model).double(), zero_first=False)
    engine = build_engine(tmp_path / "packed", "mtp", drafter=TREE, prefill_budget=7)
    run_checked(engine, Oracle(target, TreeOptions(**TREE)), sized_requests(temperature=0.8))
    assert not engine.runner.drafter.module.layer.mixer.qkv_proj.is_plain


def test_its_memory_is_counted(make_mtp):
    folder = make_mtp("mellum").folder
    config = ServeConfig(target=str(folder), draft="mtp", dtype="bfloat16", device="cpu")
    target = load_target(folder, load_config(folder), torch.bfloat16, torch.device("cpu"))
    drafter = load_drafter(source_of("mtp", str(folder)), {}, target)[0]
    run_ = DryRun(config)
    assert run_.networks[1].size == bytes_of(drafter.module)
    assert run_.plan.draft.layers == drafter.module.attention_specs
    assert "draft: mtp (mtp, 1 layer, bfloat16)" in report(config)


def test_targets_without_such_a_module_are_refused(make_target, tmp_path):
    llama = make_target("llama")
    with user_error(f"no MTP head of LlamaForCausalLM, the architecture of {llama}, is served"):
        build_engine(llama, "mtp")
    folder = tmp_path / "target"
    shutil.copytree(make_target("glm4-moe"), folder)
    with user_error(r"have no MTP layer \(such as layers.4.input_layernorm.weight\); fetch a checkpoint that"):
        build_engine(folder, "mtp")
    change_json(folder / "config.json", num_nextn_predict_layers=0)
    with user_error(f"config.json of {folder} has no MTP layers .num_nextn_predict_layers"):
        build_engine(folder, "mtp")
    add_tensors(folder, {"model.layers.4.enorm.weight": torch.ones(32)})
    change_json(folder / "config.json", num_nextn_predict_layers=1)
    with user_error("does not fit its config: missing eh_proj.weight"):
        build_engine(folder, "mtp")
    with user_error("draft 'mtp' is not a checkpoint that names one; add --target"):
        source_of("mtp").check()


def test_of_several_layers_beside_one_projection_the_first_drafts(make_mtp, tmp_path, caplog):
    target = make_mtp("qwen3-next")
    shutil.copytree(target.folder, tmp_path / "target")
    add_tensors(tmp_path / "target", {"mtp.layers.1.input_layernorm.weight": torch.ones(32)})
    change_json(tmp_path / "target" / "config.json", num_nextn_predict_layers=2)
    caplog.set_level(logging.INFO)
    engine = build_engine(tmp_path / "target", "mtp")
    assert "have more MTP heads than draft: the last of 1 drafts all later tokens" in caplog.text
    run_checked(engine, Oracle(target, TreeOptions()), sized_requests((9,)))


@each_case(
    (
        "mellum",
        {},
        {"mtp.fc.weight": torch.ones(32, 64).to(torch.float8_e4m3fn)},
        "eh_proj is quantised already; no file says how; add quantization_config to config.json",
    )
)
def test_broken_files_are_refused_in_one_sentence(kind, fields, changed, sentence, make_mtp, tmp_path):
    """`changed`: tensors, or the shapes of others; None: such a tensor is missing."""
    folder = tmp_path / "target"
    shutil.copytree(make_mtp(kind).folder, folder)
    change_json(folder / "config.json", **fields)
    tensors = load_file(folder / "model.safetensors")
    for name, value in changed.items():
        tensors[name] = torch.ones(value) if isinstance(value, list) else value
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(present, folder / "model.safetensors", {"format": "pt"})
    with user_error(sentence):
        build_engine(folder, "mtp")


ENGINES: dict[str, dict[str, Any]] = {
    "room": {"page_size": 16, "prefill_budget": 64},
    "chunks": {"page_size": 1, "prefill_budget": 7},
    "preempted": {"kv_cache_tokens": 96, "prefill_budget": 16},
}
HYBRID_BUDGET = 64  # fewest prompt tokens of a step with gated delta nets
DRAFTED: dict[str, dict[str, Any]] = {"chain": CHAIN, "tree": TREE, "map": {"depth": 4, "token_map": ""}}


@grouped("kind")
@pytest.mark.parametrize(
    ("kind", "drafted", "temperature", "engine"),
    rotating(["exaone-moe", "glm4-moe", "qwen3-next"], DRAFTED, [0.0, 0.8], ENGINES),
)
def test_a_head_changes_no_token(kind, drafted, temperature, engine, make_mtp, tmp_path):
    """A dense layer, experts, a hybrid; also with prompts that pages hold."""
    folder = make_mtp(kind).folder
    drafter = dict(DRAFTED[drafted])
    if "token_map" in drafter:
        drafter["token_map"] = save_map(tmp_path)
    options = dict(ENGINES[engine])
    if kind == "qwen3-next":
        options["prefill_budget"] = HYBRID_BUDGET
    server = build_engine(folder, "mtp", drafter=drafter, **options)
    lengths, max_tokens = ((14, 15, 16), 32) if engine == "preempted" else ((9, 33, 40, 67), 6)
    requests = sized_requests(lengths, temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    expected = plain_answers(folder, requests)
    for _ in range(2):
        answers = run(server, requests)
        assert tokens_of(answers) == expected
    assert sum(answer.counts.drafted_tokens for answer in answers.values()) > 0
    assert engine != "preempted" or server.scheduler.num_preemptions > 0
    assert engine != "room" or sum(answer.counts.cached_tokens for answer in answers.values()) > 0


def test_only_where_it_is_unused_a_line_tells_of_it(make_mtp, make_target, caplog):
    caplog.set_level(logging.INFO)
    line = "a head that drafts (MTP): --draft mtp serves with it"
    for target in (make_mtp("glm4-moe").folder, make_mtp("mellum").folder):
        caplog.clear()
        build_engine(target)
        assert line in caplog.text
        caplog.clear()
        build_engine(target, "mtp")
        assert line not in caplog.text
    build_engine(make_target("glm4-moe"))
    assert line not in caplog.text
