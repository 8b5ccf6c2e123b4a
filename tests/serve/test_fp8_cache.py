"""An FP8 KV cache, served: text with and without a draft, where scales come from, and what is refused."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

from slipstream.kernels.kv.fp8 import E4M3, decode, encode
from slipstream.models.files.checkpoint import read_tensors
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.dry_run import DryRun
from slipstream.serve.engine import build, calibration
from slipstream.serve.engine.engine import Engine
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.runner.kv import LayerCache, NetworkKV
from slipstream.tests.pairwise import some_of
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft
from slipstream.tests.random_targets import CAPPED, FAMILIES, RELATIVES, SHAPE, save_random_target
from slipstream.tests.serve.attention_passes import GROUP, LAYER, Pass, Scene
from slipstream.tests.serve.engine_runs import (
    build_engine,
    caches_of,
    make_request,
    plain_answers,
    random_prompt,
    run,
    sized_requests,
    texts_of,
    tokens_of,
)
from slipstream.tests.sources import TINY
from slipstream.tests.user_errors import user_error

FP8 = {"kv_cache_dtype": "fp8"}
SCALE = 0.02
LAYERS = SHAPE["num_hidden_layers"]
HEADS = SHAPE["num_key_value_heads"]


def scales_of(engine: Engine) -> list[list[list[float]]]:
    """The scales of keys and of values, by layer and head."""
    return [scale.tolist() for scale in engine.runner.passes.kv[0].layer_scales if scale is not None]


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch):
    """Two chunks of text, the second one shorter."""
    monkeypatch.setattr(calibration, "MOST_TOKENS", calibration.CHUNK + 90)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory) -> Path:
    """A random target with windows whose file has scales, as compressed-tensors writes them."""
    folder = tmp_path_factory.mktemp("scaled") / "target"
    windows = {
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    save_random_target(Qwen3Config(**SHAPE, **windows, head_dim=16), folder)
    add(folder, scale_tensors())
    return folder


def scale_tensors(count: int = LAYERS) -> dict[str, Tensor]:
    """Returns SCALE for the keys and values of so many layers."""
    return {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor([SCALE]) for i in range(count) for x in "kv"}


def add(folder: Path, tensors: dict[str, Tensor], **config: Any):
    """Writes more tensors into a checkpoint, and fields into its config."""
    save_file({**read_tensors(folder), **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.mark.parametrize("draft", ["eagle3 tree", "dflash", "ngram"])
def test_text_does_not_depend_on_the_draft_the_batch_or_chunks(draft, scaled, tmp_path):
    requests = sized_requests((1, 9, 33, 50), temperature=0.7)
    expected = tokens_of(run(build_engine(scaled, max_running=1, **FP8), requests))
    assert expected != plain_answers(scaled, requests), "the cache is rounded"
    options = {"prefill_budget": 7, "page_size": 1}
    if draft == "eagle3 tree":
        save_random_draft(scaled, tmp_path / draft)
        options = {"drafter": {"topk": 3, "depth": 3}}
    elif draft == "dflash":
        save_random_dflash(scaled, tmp_path / draft, texts_of(scaled, requests))
    engine = build_engine(scaled, draft if draft == "ngram" else tmp_path / draft, **FP8, **options)
    for _ in range(2):  # the second time after cached prompts
        answers = run(engine, requests)
        assert tokens_of(answers) == expected
    assert sum(answer.counts.accepted_tokens for answer in answers.values()) > 0
    assert {cache.dtype for cache in caches_of(engine)} == {E4M3} | ({torch.float32} if draft != "ngram" else set())


class RoundingCache(DynamicCache):
    """transformers' cache of codes times SCALE."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        keys, values = ((x / SCALE).clamp(-448, 448).to(E4M3).float() * SCALE for x in (key_states, value_states))
        return super().update(keys, values, *args, **options)


@pytest.mark.parametrize(
    "family",
    some_of(
        [
            *sorted(set(FAMILIES) - {"qwen2", "qwen3-tied", "mistral", "llama-rope-linear"}),
            *(name for name in ("gemma4-shared",) if name in RELATIVES),  # three layers read what the first three keep
        ],
        ["gemma3", "gemma4-shared", "llama", "mistral-window", "phi4-longrope", "qwen3", "qwen3-moe"],
    ),
)
def test_answers_are_those_of_transformers_with_a_rounded_cache(family, make_target, tmp_path):
    """For each family, beyond its windows: no token is worse by the logits of transformers than the best one."""
    shutil.copytree(make_target(family), tmp_path / "target")
    add(tmp_path / "target", scale_tensors(3 if family == "gemma4-shared" else LAYERS))
    requests = [make_request(str(length), random_prompt(length, length), max_tokens=16) for length in (5, 40)]
    answers = tokens_of(run(build_engine(tmp_path / "target", "ngram", prefill_budget=32, **FP8), requests))
    model = AutoModelForCausalLM.from_pretrained(make_target(family), dtype=torch.float32)
    for request in requests:
        answer = torch.tensor(answers[request.id])
        tokens = torch.tensor([[*request.prompt, *answers[request.id]]])
        with torch.inference_mode():
            logits, plain = (
                model(tokens, past_key_values=cache).logits[0, len(request.prompt) - 1 : -1]
                for cache in (RoundingCache(), None)
            )
        regret = logits.amax(dim=1) - logits.gather(1, answer[:, None])[:, 0]
        assert regret.max() < 2e-3, "a number halfway between two codes may become either"
        assert (logits - plain).abs().max() > 1e-2, "the cache is rounded"


def test_a_draft_may_have_an_fp8_cache_and_others_scales_do_not_change(tmp_path):
    save_random_draft(TINY, tmp_path / "draft")
    requests = [make_request("0", random_prompt(40, 0), max_tokens=12)]
    plain = build_engine(TINY, **FP8)
    drafted = build_engine(TINY, tmp_path / "draft", drafter=FP8, prefill_budget=100, **FP8)
    assert [cache.dtype for cache in caches_of(drafted)] == [E4M3, E4M3]
    assert scales_of(plain) == scales_of(drafted), "neither the draft nor chunks change what the text gives"
    assert tokens_of(run(plain, requests)) == tokens_of(run(drafted, requests))
    alone = build_engine(TINY, tmp_path / "draft", drafter=FP8)
    assert [cache.dtype for cache in caches_of(alone)] == [torch.float32, E4M3]
    answers = [run(engine, requests)["0"].tokens for engine in (alone, build_engine(TINY))]
    assert answers[0] == answers[1]


def test_scales_leave_room_above_what_the_text_holds(tmp_path, caplog):
    text = "How many apples does Mark have? He has 17 apples, and 3 more."
    (tmp_path / "text.txt").write_text(text)
    with caplog.at_level(logging.INFO):
        engine = build_engine(TINY, kv_cache_dtype=f"fp8:{tmp_path / 'text.txt'}")
    tokens = engine.runner.target.tokenizer(text)["input_ids"]
    assert f"calibrated on {len(tokens)} tokens of {tmp_path / 'text.txt'}" in caplog.text
    plain = build_engine(TINY)
    run(plain, [make_request("0", tokens, max_tokens=1)])
    (cache,) = caches_of(plain)
    largest = cache[:, :, 16:].abs().amax(dim=(2, 4))  # all but the dump page
    torch.testing.assert_close(torch.tensor(scales_of(engine)), calibration.MARGIN * largest / 448)
    assert scales_of(build_engine(TINY, **FP8)) != scales_of(engine), "bundled text by default"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b" \n", "a file without text"), (None, "which cannot be read"), (b"\x1f\x8b\xff", "which cannot be read")],
)
def test_a_file_that_holds_no_text_is_refused_before_weights_are_read(content, message, tmp_path, monkeypatch):
    file = tmp_path / "file.txt"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr(build, "load_target", lambda *_: pytest.fail("read the weights"))
    for refused in (build_engine, lambda target, **options: DryRun(ServeConfig(target=str(target), **options))):
        with user_error(f"kv_cache_dtype names '{file}', {message}"):
            refused(TINY, kv_cache_dtype=f"fp8:{file}")


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (("k_scale", "v_scale"), torch.tensor(0.5)),
        (("k_scale", "v_scale"), torch.tensor([0.5, 0.25]).view(2, 1, 1)),
        (("k_proj.k_scale", "v_proj.v_scale"), torch.tensor([0.5])),
        (("k_proj.output_scale", "v_proj.output_scale"), torch.tensor([0.5], dtype=torch.bfloat16)),
        (("kv_scale",), torch.tensor([0.5])),
    ],
)
def test_scales_of_a_checkpoint(names, value, make_target, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(make_target("qwen3"), target)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    scales = {f"model.layers.{i}.self_attn.{name}": value.clone() for i in range(LAYERS) for name in names}
    add(target, scales, quantization_config=config)
    expected = value.float().flatten().expand(HEADS).tolist()
    engine = build_engine(target, **FP8)
    assert scales_of(engine) == [[expected, expected]] * LAYERS
    plain = build_engine(target)
    assert caches_of(plain)[0].dtype == torch.float32
    assert plain.info.fingerprint != engine.info.fingerprint
    add(target, {}, quantization_config={**config, "kv_cache_scheme": scheme | {"num_bits": 4}})
    loaded = load_target(target, load_config(target), torch.float32, torch.device("cpu"))
    assert not loaded.cache_scales, "scales of another format are not those of e4m3"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([0.0]), "scales are above 0"),
        (torch.ones(3), r"is \[3\]; an FP8 KV cache has one scale, or one for"),
    ],
)
def test_wrong_scales_are_named(value, message, scaled, tmp_path):
    shutil.copytree(scaled, tmp_path, dirs_exist_ok=True)
    add(tmp_path, {"model.layers.1.self_attn.v_scale": value})
    with user_error(f"layers.1.self_attn.v_scale {message}|layers.1.self_attn.v_scale is .*{message}"):
        build_engine(tmp_path, **FP8)


@pytest.mark.parametrize(("family", "lack"), [("gpt-oss", "attention sinks"), ("gemma2", "soft caps of scores")])
def test_what_was_not_tried_is_refused_by_name(family, lack, make_target):
    assert family in CAPPED
    for refused in (build_engine, lambda target, **options: DryRun(ServeConfig(target=str(target), **options))):
        with user_error(f"kv_cache_dtype is 'fp8', which was not tried with {lack}"):
            refused(make_target(family), **FP8)
    for dtype in ("int8", "fp8:", f"auto:{TINY}"):
        with user_error(f"kv_cache_dtype is '{dtype}'; choose one of auto, fp8, or fp8:FILE"):
            EngineConfig(kv_cache_dtype=dtype)


def test_a_page_takes_half_of_16_bits_and_the_dry_run_says_so(scaled, tmp_path):
    plans = [DryRun(ServeConfig(target=str(scaled), dtype="bfloat16", **options)).plan for options in ({}, FP8)]
    assert plans[0].page_bytes == [2 * size for size in plans[1].page_bytes]
    save_random_draft(scaled, tmp_path / "draft")
    fp8 = DryRun(ServeConfig(target=str(scaled), draft=str(tmp_path / "draft"), dtype="bfloat16", drafter=FP8))
    assert [network.kv_dtype for network in fp8.plan.networks] == [torch.bfloat16, E4M3]


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["eagle3 tree", "dflash", "ngram"])
def test_exact_text_does_not_depend_on_the_draft(draft, tmp_path):
    """In bf16, captured: bit for bit, in any batch and any chunks."""
    requests = sized_requests((1, 9, 33, 150, 400), temperature=0.7)
    options = {"device": "cuda", "dtype": "bfloat16", "exact": True, "kv_cache_tokens": 4096, **FP8}
    expected = tokens_of(run(build_engine(TINY, max_running=1, **options), requests))
    draft_options = {"prefill_budget": 64, "cuda_graph": False}
    if draft != "ngram":
        save_random_draft(TINY, tmp_path / "eagle3 tree")
        save_random_dflash(TINY, tmp_path / "dflash", texts_of(TINY, requests[:2]))
        draft_options = {"drafter": FP8 | ({"topk": 3, "depth": 3} if draft == "eagle3 tree" else {})}
    engine = build_engine(TINY, draft if draft == "ngram" else tmp_path / draft, **options, **draft_options)
    for _ in range(2):  # the second time after cached prompts
        assert tokens_of(run(engine, requests)) == expected


@pytest.mark.parametrize("mask", ["causal", "tree"])
def test_sdpa_attends_to_what_it_has_stored(mask):
    """Its own tokens, too, as codes: the same as attention over a cache of what the codes stand for."""
    case = Pass(mask=mask, lengths=(16, 5, 130), query_lens=(4, 4, 4))
    scene, plain = (Scene(case, 16, torch.float32, "cpu") for _ in range(2))
    scales = [torch.tensor([[0.02, 0.03], [0.015, 0.04]])] * 2
    per_head = torch.stack(scales)[:, :, None, None, :, None]
    scene.kv = NetworkKV(
        (LayerCache(GROUP, encode(scene.cache, per_head), torch.stack(scales)),),
        scene.kv.places,
        scene.kv.specs,
        torch.float32,
    )
    attention = SDPABackend(scene.kv, scene.ropes)
    metadata = scene.metadata()
    attention.plan(metadata)
    out = attention.attend(*scene.qkv, scene.layer(with_norms=True), mask)
    oracle = SDPABackend(plain.kv, plain.ropes)
    oracle.plan(plain.metadata())
    q = oracle.rotate_and_store(*plain.qkv, plain.layer(with_norms=True))
    new = plain.cache.flatten(2, 3)[LAYER][:, plain.written]
    stored = scene.kv.caches[0].flat[LAYER].view(torch.uint8)[:, scene.written].view(E4M3)
    expected = encode(new, scales[LAYER][:, None, :, None])
    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    plain.cache.copy_(decode(scene.kv.caches[0].pages, per_head, torch.float32))
    torch.testing.assert_close(out, oracle.attend_stored(q, plain.layer(), mask), atol=1e-5, rtol=1e-5)
