"""The frozen target against transformers' own output_hidden_states and logits."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Starcoder2Config,
    VaultGemmaConfig,
)

from slipstream.models.drafts.base import HEAD
from slipstream.models.layers.attention import AttentionLayer
from slipstream.models.targets import frozen
from slipstream.models.targets.config import AttentionSpec, ClampedSwiGLU, MoESpec, RopeConfig, TargetSpec
from slipstream.models.targets.frozen import (
    DecoderTarget,
    FrozenTarget,
    TransformersTarget,
    empty_target,
    load_frozen_target,
    read_model,
)
from slipstream.models.targets.packed_attention import PackedAttention
from slipstream.tests.expert_targets import EXPERT_FAMILIES, EXPERTS
from slipstream.tests.pairwise import some_of
from slipstream.tests.random_targets import (
    CAPPED,
    FAMILIES,
    RELATIVES,
    SHAPE,
    change_json,
    load_model,
    roughen,
    shared_weights,
    target_states,
)
from slipstream.tests.user_errors import user_error

CPU = torch.device("cpu")
ALL = torch.arange(SHAPE["vocab_size"])
CONFIGS = EXPERT_FAMILIES | {name: FAMILIES[name] for name in ("llama", "qwen2", "qwen3-tied")}
CONFIGS["gemma2"] = CAPPED["gemma2"]
PRE_NORM = ("llama", "qwen2", "qwen3-tied", "mistral-window")  # a draft's layers are, with silu
LATER = (
    *("gemma4", "gemma4-experts", "gemma4-odd", "gemma4-shared", "gemma4-unified", "hunyuan", "hyperclovax"),
    *("laguna", "laguna-elements", "ministral3", "muse-glimmer", "muse-glimmer-unrotated"),
)
DOCUMENTS = ((0, slice(0, 17)), (0, slice(17, 29)), (1, slice(0, 20)))  # row, tokens; the rest is padding


def random_model(family: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]))  # tests change it


def check_ends(path: Path, target: FrozenTarget, tokens: Tensor):
    """A target of which a draft's start alone is read has the same weights, and no others."""
    ends = load_frozen_target(path, (0,), CPU, last_layers=2)
    assert not list(ends.layers[: len(target.layers) - 2].parameters())
    assert len(ends.layers) == len(target.layers)
    torch.testing.assert_close(ends.initial_weights(2), target.initial_weights(2), rtol=0, atol=0)
    assert torch.equal(ends.embed(tokens), target.embed(tokens))


@pytest.mark.parametrize(
    "family",
    some_of(
        [*EXPERT_FAMILIES, *PRE_NORM, "gemma2", "gemma3", "olmo2", *(name for name in LATER if name in RELATIVES)],
        [*EXPERT_FAMILIES, *PRE_NORM, "gemma2", "gemma3", "olmo2"]
        + ["gemma4-shared", "hyperclovax", "laguna", "ministral3", "muse-glimmer"],
    ),
)
def test_states_are_those_of_transformers(family, make_target):
    """Documents, padding, windows that bind; wrappers, factors of logits and kinds of layers; queries that grow by
    their place in a document. By the decoder and, as for sharded targets, by transformers; and what a draft starts
    from."""
    path = make_target(family)
    model = load_model(path, dtype=torch.float32)
    last = len(model.get_decoder().layers)
    layers = (2, last, 0, 2)  # in any order, and twice
    target = load_frozen_target(path, layers, CPU)
    assert isinstance(target, DecoderTarget)
    divisor = target.model.config.logit_divisor
    tokens = torch.randint(3, 120, (2, 29))
    positions = torch.zeros(2, 29, dtype=torch.int64)
    for row, part in DOCUMENTS:
        positions[row, part] = torch.arange(part.stop - part.start)
    target.aux_states(tokens[:, :5], positions[:, :5])  # longer rows need larger tables
    aux_states, final = target.aux_states(tokens, positions)
    for place in DOCUMENTS:
        states = target_states(model, tokens[place])
        states[last] = states[last] / divisor
        expected = torch.cat([states[layer] for layer in layers], dim=-1)
        torch.testing.assert_close(aux_states[place], expected, atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(final[place], states[last], atol=5e-5, rtol=1e-4)
        with torch.no_grad():
            logits = model(input_ids=tokens[place][None]).logits[0]
        torch.testing.assert_close(target.logits(final[place], ALL)[0], logits, atol=2e-5, rtol=1e-4)
    rows = shared_weights(model)[0][tokens]  # without Gemma's scale
    torch.testing.assert_close(target.embed(tokens), rows)
    check_ends(path, target, tokens)
    weights = target.initial_weights(2)
    names = weights.keys() - {"norm.weight", HEAD}
    assert bool(names) == (family in (*PRE_NORM, "ministral3")), "a draft's layers have no gates, and other norms"
    if family == "hyperclovax":
        with user_error("changes its head's logits, perhaps by logits_scaling"):
            TransformersTarget(model, (2,))
        return
    shared = TransformersTarget(read_model(path, CPU, trust_remote_code=False), layers)
    for states, expected in zip(shared.aux_states(tokens, positions), (aux_states, final), strict=True):
        torch.testing.assert_close(states, expected, atol=5e-5, rtol=1e-4)
    for values, expected in zip(shared.logits(final[0], ALL[::3]), target.logits(final[0], ALL[::3]), strict=True):
        torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(shared.embed(tokens), rows)
    if family not in EXPERT_FAMILIES:  # which transformers' weights have, too
        assert empty_target(path, (2,)).initial_weights(2).keys() == weights.keys()
        if family != "ministral3":
            torch.testing.assert_close(shared.initial_weights(2), weights)


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_documents_attend_at_once_as_one_by_one(window, sinks):
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, rope=RopeConfig(), window=window, sinks=sinks)
    layer = AttentionLayer(0, spec, sinks=torch.randn(8, device="cuda") if sinks else None)
    positions = torch.cat((torch.arange(300), torch.arange(100), torch.zeros(12, dtype=torch.int64), torch.arange(100)))
    attention = PackedAttention()
    attention.plan(positions.view(1, -1).cuda())
    q, k, v = (torch.randn(512, heads, 64, device="cuda") for heads in (8, 2, 2))
    expected = attention._attend_each(q, k, v, layer)
    output = attention._attend_all(q.bfloat16(), k.bfloat16(), v.bfloat16(), layer)
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_layers_give_the_same_states(device):
    """One compilation serves all layers, for rows of documents and of any number."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = random_model("qwen3-tied").to(device)
    target = TransformersTarget(model, (0, 2))
    compiled = TransformersTarget(copy.deepcopy(model), (0, 2))
    compiled.compile_layers()
    positions = torch.cat((torch.arange(9), torch.arange(7))).to(device)
    for count in (2, 3, 4):
        tokens = torch.randint(0, 50, (count, 16), device=device)
        expected = target.aux_states(tokens, positions.expand(count, -1))
        for states, reference in zip(compiled.aux_states(tokens, positions.expand(count, -1)), expected, strict=True):
            torch.testing.assert_close(states, reference, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_in_chunks_equal_the_whole_head(family, monkeypatch):
    model = random_model(family)
    monkeypatch.setattr(frozen, "VOCABULARY_CHUNK", 7)
    states = torch.randn(6, 32)
    ids = torch.tensor([0, 3, 6, 7, 8, 20, 21, 48, 49])
    expected = model.get_output_embeddings()(states)
    logits, best = TransformersTarget(model, (1,)).logits(states, ids)
    if cap := getattr(model.config, "final_logit_softcapping", None):
        expected = cap * torch.tanh(expected / cap)
    torch.testing.assert_close(logits, expected[:, ids].detach())
    assert best.tolist() == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_are_what_the_head_gives_in_its_own_dtype(monkeypatch, device):
    """Rounded by the matrix product alone: fp32 ones of the same hold the same values, and the same token is best."""
    monkeypatch.setattr(frozen, "VOCABULARY_CHUNK", 16)
    torch.manual_seed(0)
    model = random_model("qwen2").to(device, torch.bfloat16)
    states = torch.randn(64, 32, device=device).bfloat16()
    ids = torch.arange(1, 120, 2)
    logits, best = TransformersTarget(model, (1,)).logits(states, ids)
    chunks = [torch.nn.functional.linear(states, part) for part in model.lm_head.weight.split(16)]
    expected = torch.cat(chunks, dim=-1).detach().float()
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits.float(), expected[:, 1::2])
    assert torch.equal(best, expected.argmax(dim=-1))
    assert len(expected.unique()) < expected.numel(), "equal ones occur, and rounding them is not ours"


def test_equal_logits_go_to_the_lowest_id(monkeypatch):
    monkeypatch.setattr(frozen, "VOCABULARY_CHUNK", 7)
    model = random_model("llama")
    model.lm_head.weight.data[[12, 30]] = 9.0  # in different chunks
    assert TransformersTarget(model, (1,)).logits(torch.ones(1, 32), torch.arange(120))[1].tolist() == [12]


def test_nothing_is_trained_and_the_head_is_not_run():
    model = random_model("llama").train()
    target = TransformersTarget(model, (1,))
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    aux_states, final = target.aux_states(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None])
    assert not calls
    assert not aux_states.requires_grad
    assert not final.requires_grad
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen3-moe", "gpt-oss"])
def test_initial_weights_are_the_head_the_final_norm_and_the_last_layers(family):
    model = random_model(family)
    weights = TransformersTarget(model, (1,)).initial_weights(2)
    assert weights["lm_head.weight"] is model.get_output_embeddings().weight
    assert weights["norm.weight"] is model.model.norm.weight
    layers = [f"layers.{i}.{name}" for i in range(2) for name in model.model.layers[2 + i].state_dict()]
    assert list(weights) == [*layers, "norm.weight", "lm_head.weight"]
    for name in layers:
        number, _, rest = name.removeprefix("layers.").partition(".")
        assert torch.equal(weights[name], model.model.layers[2 + int(number)].state_dict()[rest])


def test_gpt_oss_is_read():
    config = random_model("gpt-oss").config
    config.architectures = ["GptOssForCausalLM"]
    trained = TargetSpec.from_json(config.to_dict())
    assert (trained.hidden_size, trained.num_layers, trained.head_dim) == (32, 4, 16)
    assert trained.layers[0].mlp == MoESpec(
        num_experts=4, top_k=2, intermediate_size=48, activation=ClampedSwiGLU(), bias=True, transposed=True
    )
    attention = trained.layers[0].mixer
    assert (attention.window, attention.sinks, attention.qkv_bias, attention.output_bias) == (9, True, True, True)
    assert trained.layers[1].mixer.window is None
    assert attention.rope.scaling["truncate"] is False


def test_a_head_that_does_more_is_refused():
    model = AutoModelForCausalLM.from_config(GraniteConfig(**SHAPE, logits_scaling=8.0))
    with user_error("changes its head.s logits, perhaps by logits_scaling, which"):
        TransformersTarget(model, (1,))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (None, "LlamaForCausalLM has no output embeddings; training needs an nn.Linear: choose another target"),
        (torch.nn.Sequential(torch.nn.Linear(32, 120)), "has output embeddings of class Sequential; training needs"),
    ],
)
def test_a_head_of_another_kind_is_refused(head, message):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    model.get_output_embeddings = lambda: head
    with user_error(message):
        TransformersTarget(model, (1,))


def test_a_model_that_does_not_name_its_decoder_is_refused():
    sizes = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(Llama4TextConfig(**SHAPE | sizes))
    with user_error("Llama4ForCausalLM names no decoder apart from its head"):
        TransformersTarget(model, (1,))


def test_a_multiplier_of_an_unlisted_name_is_found():
    """The model's own output decides, not a list of names."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    head = model.lm_head
    forward = model.lm_head.forward
    head.forward = lambda states: 1.1 * forward(states)
    with user_error("changes its head.s logits, perhaps by its code"):
        TransformersTarget(model, (1,))
    del head.forward
    TransformersTarget(model, (1,))


@pytest.mark.parametrize(("config", "offset"), [(LlamaConfig, 0), (GemmaConfig, 1), (VaultGemmaConfig, 1)])
def test_a_final_norm_starts_as_the_targets_is(config, offset):
    model = AutoModelForCausalLM.from_config(config(**SHAPE | {"head_dim": 8}))
    roughen(model)
    weights = TransformersTarget(model, (1,)).initial_weights(1)
    states = torch.randn(5, 32)
    normed = torch.nn.functional.rms_norm(states, (32,), weights["norm.weight"], eps=1e-6)
    torch.testing.assert_close(normed, model.model.norm(states))
    assert ("layers.0.mlp.up_proj.weight" in weights) == (not offset), "norms of layers have the offset, too"


def test_a_final_norm_that_no_draft_has_is_not_taken_over():
    target = TransformersTarget(AutoModelForCausalLM.from_config(Starcoder2Config(**SHAPE)), (1,))
    assert target.initial_weights(1).keys() == {"lm_head.weight"}


def test_mxfp4_experts_become_numbers_in_transformers(tmp_path):
    """Sharded targets run in it: two 4-bit floats a byte, low half first, in blocks of 32 that share an exponent."""
    sizes = SHAPE | {"intermediate_size": 32, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(GptOssConfig(**sizes, **EXPERTS)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((values, -values))  # of the 16 codes
    expected = {}
    for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
        key = f"model.layers.0.mlp.experts.{name}"
        del tensors[key]
        blocks = tensors[f"{key}_blocks"] = torch.randint(0, 256, (4, rows, 1, 16), generator=generator).byte()
        scales = tensors[f"{key}_scales"] = torch.randint(120, 130, (4, rows, 1), generator=generator).byte()
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2).long()  # (E, rows, 32)
        expected[name] = (values[codes] * 2.0 ** (scales.float() - 127)).transpose(1, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_json(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"})
    experts = read_model(tmp_path, CPU, False).model.layers[0].mlp.experts
    for name, tensor in expected.items():
        torch.testing.assert_close(getattr(experts, name).data, tensor, rtol=0, atol=0)


def test_loads_a_bf16_checkpoint_in_fp32_on_the_cpu(tmp_path):
    random_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    target = load_frozen_target(tmp_path, (1,), CPU)
    assert target.embed(torch.tensor([3])).dtype == torch.float32
