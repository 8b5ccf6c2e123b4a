"""Every attention backend that runs here against one loop per request, query and head."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels.attention.ragged import plan_work, ragged_attention
from slipstream.kernels.attention.tree import tree_attention
from slipstream.kernels.kv.rope import rotate_and_store
from slipstream.serve.attention import sdpa
from slipstream.serve.attention.base import NO_BACKENDS, Backend
from slipstream.serve.attention.parts import Nodes, PartsAttention
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.attention.triton import Backend as TritonBackend
from slipstream.serve.runner.batch import AttentionMetadata
from slipstream.serve.runner.request_state import KVSlots
from slipstream.tests.pairwise import gate_of, grouped
from slipstream.tests.serve.attention_passes import LAYER, RAGGED, Pass, Scene
from slipstream.tests.sources import ROOT
from slipstream.tests.tables import objects_of

HEAD_DIM = 8
BACKENDS = {"sdpa": SDPABackend, "triton": TritonBackend}
TESTED_ELSEWHERE = {"flashinfer"}  # tests/serve/test_flashinfer.py
# dtype -> tolerance. The interpreter of Triton kernels multiplies the bits of bf16 as integers.
DTYPES = {
    "sdpa": [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
    "triton": [(torch.float32, 1e-5), (torch.float16, 4e-3)],
}


@pytest.fixture
def backend(request, monkeypatch) -> type[Backend]:
    """Returns the backend of this name. Triton's runs under the interpreter; where kernels are compiled for a GPU,
    their references run."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        for op in (rotate_and_store, tree_attention, plan_work, ragged_attention):
            monkeypatch.setattr(op, "when", lambda *_args, **_options: request.param == "triton")
    return BACKENDS[request.param]


CASES = objects_of(__file__, "cases", Pass)


def ancestors_of(node: int, parents: list[int]) -> set[int]:
    return {node} if parents[node] < 0 else {node} | ancestors_of(parents[node], parents)


def visible(scene: Scene, request: int, query: int) -> set[int]:
    """Which of the request's new tokens a query sees; without a window it sees all committed ones."""
    case = scene.case
    count = scene.case.query_lens[request]
    mask = case.mask_of(request)
    ancestors = ancestors_of(query, scene.parents[request]) if mask == "tree" else set()
    nodes = {"causal": set(range(query + 1)), "block": set(range(count)), "tree": ancestors}[mask]
    if case.window is None:
        return nodes
    depth_of_query = depth(scene, request, query)
    return {node for node in nodes if depth(scene, request, node) > depth_of_query - case.window}


def depth(scene: Scene, request: int, query: int) -> int:
    is_tree = scene.case.mask_of(request) == "tree"
    return query if not is_tree else len(ancestors_of(query, scene.parents[request])) - 1


def turn(x: Tensor, position: int) -> Tensor:
    """x (..., D) as complex numbers (x[i], x[i + D / 2]), each turned by its angle."""
    half = HEAD_DIM // 2
    angles = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) * 2 / HEAD_DIM)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def expected(scene: Scene) -> Tensor:
    """(T, Q, D) in fp64."""
    case = scene.case
    all_q, all_k, all_v = (x.double() for x in scene.qkv)
    out = torch.zeros_like(all_q)
    group = case.num_heads // case.num_kv_heads
    keys, values = scene.cache[LAYER].flatten(1, 2).double()
    start = 0
    for request, (count, length) in enumerate(zip(case.query_lens, case.lengths, strict=True)):
        rows = slice(start, start + count)
        depths = [length + depth(scene, request, query) for query in range(count)]
        turned = torch.stack([turn(k, place) for k, place in zip(all_k[rows], depths, strict=True)])
        for query, place in enumerate(depths):
            nodes = sorted(visible(scene, request, query))
            first = 0 if case.starts is None else case.starts[request]
            first = first if case.window is None else max(first, place + 1 - case.window)
            past = scene.slots(request, min(first, length), length)
            k = torch.cat((keys[past], turned[nodes]))
            v = torch.cat((values[past], all_v[rows][nodes]))
            for head in range(case.num_heads):
                scores = k[:, head // group] @ turn(all_q[start + query, head], place)
                scores = scores * (case.scale or HEAD_DIM**-0.5)
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                if scene.sinks is not None:  # a score more, without a value
                    scores = torch.cat((scores, scene.sinks[head, None].double()))
                out[start + query, head] = scores.softmax(-1)[: len(k)] @ v[:, head // group]
        start += count
    return out


def scene_of(name: str, dtype: torch.dtype = torch.float32) -> Scene:
    return Scene((CASES | RAGGED)[name], HEAD_DIM, dtype, "cpu")


def check_stored(scene: Scene, before: Tensor, metadata: AttentionMetadata, tolerance: float):
    """The new keys and values are in their slots of the layer, and nothing else of the cache changed."""
    cache = scene.cache.nan_to_num(-1)
    before = before.nan_to_num(-1)
    assert torch.equal(cache[0], before[0]), "another layer's KV changed"
    keys, values = cache[LAYER].flatten(1, 2)
    _, k, v = scene.qkv
    places = zip(scene.written.tolist(), metadata.positions[: sum(scene.case.query_lens)].tolist(), strict=False)
    for index, (slot, position) in enumerate(places):
        torch.testing.assert_close(keys[slot].double(), turn(k[index], position), atol=tolerance, rtol=tolerance)
        assert torch.equal(values[slot], v[index])
    untouched = torch.ones(len(keys), dtype=torch.bool).index_fill_(0, scene.written, False)
    assert torch.equal(cache[LAYER].flatten(1, 2)[:, untouched], before[LAYER].flatten(1, 2)[:, untouched])


ATTENDED = [
    (backend, name, *precision)
    for backend in BACKENDS
    for name, case in CASES.items()
    for precision in DTYPES[backend]
    if backend != "triton" or len(set(case.query_lens)) == 1  # prompts are not for it
]
# The interpreter takes a second or two for each, and tests/kernels has more of them.
INTERPRETED = {"chain, pages of one token", "window, decode", "one KV head", "block", "tree 2", "tree 4"}
INTERPRETED |= {"sinks and a cap, tree", "starts, decode"}
GATE = [case for case in ATTENDED if case[0] == "sdpa" or case[1] in INTERPRETED and case[2] == torch.float32]
GATE.append(("triton", "tree 1", *DTYPES["triton"][1]))


@pytest.mark.parametrize(("backend", "name", "dtype", "tolerance"), gate_of(ATTENDED, GATE), indirect=["backend"])
def test_attention_equals_a_loop(backend, name, dtype, tolerance):
    scene = scene_of(name, dtype)
    reference = expected(scene)
    before = scene.cache.clone()
    attention = backend(scene.kv, scene.ropes)
    for spare in (0, 20):  # the second pass writes the same rows again
        metadata = scene.metadata(spare)
        attention.plan(metadata)
        out = attention.attend(*scene.qkv, scene.layer(), CASES[name].mask)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), reference, atol=tolerance, rtol=tolerance)
    check_stored(scene, before, metadata, tolerance)


@grouped()
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(set(case.query_lens)) == 1])
def test_many_requests_share_a_call_on_a_cpu(name, monkeypatch):
    """As long as their keys, padded to the longest request, are few."""
    scene = scene_of(name)
    calls = []
    attend_pages = SDPABackend._attend_pages

    def record(backend, q, pages, *arguments):
        calls.append(len(pages))
        return attend_pages(backend, q, pages, *arguments)

    monkeypatch.setattr(SDPABackend, "_attend_pages", record)
    monkeypatch.setattr(sdpa, "MANY_REQUESTS", 2)
    count = len(scene.case.query_lens)
    for limit, expected_calls in ((sdpa.MOST_AT_ONCE, [count]), (0, [1] * count)):
        monkeypatch.setattr(sdpa, "MOST_AT_ONCE", limit)
        calls.clear()
        attention = SDPABackend(scene.kv, scene.ropes)
        attention.plan(scene.metadata(0))
        out = attention.attend(*scene.qkv, scene.layer(), scene.case.mask)
        torch.testing.assert_close(out.double(), expected(scene), atol=1e-5, rtol=1e-5)
        assert calls == expected_calls


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_prompts_are_written_by_every_backend(backend):
    """A drafter may write a prompt's KV by the backend of its own phase."""
    scene = scene_of("ragged prefill with prefix")
    metadata = scene.metadata(spare=0)
    before = scene.cache.clone()
    attention = backend(scene.kv, scene.ropes)
    attention.plan(metadata)
    attention.write(*scene.qkv[1:], scene.layer())
    check_stored(scene, before, metadata, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_write_stores_what_attend_stores(backend):
    caches = []
    for writes_only in (True, False):
        scene = scene_of("chain")
        attention = backend(scene.kv, scene.ropes)
        attention.plan(scene.metadata(spare=0))
        if writes_only:
            attention.write(*scene.qkv[1:], scene.layer())
        else:
            attention.attend(*scene.qkv, scene.layer(), "causal")
        caches.append(scene.cache)
    assert torch.equal(*caches)


def test_every_backend_of_the_folder_is_tested():
    folder = ROOT / "serve/attention"
    assert {path.stem for path in folder.glob("*.py")} - {*NO_BACKENDS} == BACKENDS.keys() | TESTED_ELSEWHERE


RAGGED_ON_TRITON = [("triton", name, *precision) for name in RAGGED for precision in DTYPES["triton"]]
RAGGED_GATE = [RAGGED_ON_TRITON[2 * list(RAGGED).index("trees and chunks, window")]]


@pytest.mark.parametrize(
    ("backend", "name", "dtype", "tolerance"), gate_of(RAGGED_ON_TRITON, RAGGED_GATE), indirect=["backend"]
)
def test_a_ragged_pass_equals_a_loop(backend, name, dtype, tolerance):
    check_ragged(backend, name, dtype, tolerance)


@pytest.mark.parametrize("name", RAGGED)
def test_a_ragged_pass_by_the_references_equals_a_loop(name):
    check_ragged(TritonBackend, name, torch.float32, 1e-5)


def check_ragged(backend: type[Backend], name: str, dtype: torch.dtype, tolerance: float):
    """Checks a ragged pass with unused rows at its end."""
    scene = scene_of(name, dtype)
    num_used = sum(scene.case.query_lens)
    reference = expected(scene)[:num_used]
    before = scene.cache.clone()
    metadata = scene.ragged()
    attention = backend(scene.kv, scene.ropes)
    attention.plan(metadata)
    out = attention.attend(*scene.qkv, scene.layer(), scene.case.mask)
    assert out.dtype == dtype
    torch.testing.assert_close(out[:num_used].double(), reference, atol=tolerance, rtol=tolerance)
    check_stored(scene, before, metadata, tolerance)


@grouped()
@pytest.mark.parametrize("nodes", BACKENDS.values())
@pytest.mark.parametrize("name", RAGGED)
def test_a_pass_by_parts_equals_a_loop(nodes, name):
    """Nodes by a backend that takes any numbers of them or as many for each request, and prompts by another backend."""
    scene = scene_of(name)
    case = scene.case
    num_used = sum(scene.case.query_lens)
    reference = expected(scene)[:num_used]
    before = scene.cache.clone()
    ragged = scene.ragged()
    assert case.num_decoding is not None
    counts = case.query_lens[: case.num_decoding]
    lens = case.query_lens[case.num_decoding :]
    split = Nodes.of(counts, scene.device)
    attention = PartsAttention(split, nodes(scene.kv, scene.ropes), SDPABackend(scene.kv, scene.ropes))

    def part(phase, requests, **shape):
        return AttentionMetadata(
            phase=phase,
            state=scene.state,
            requests=ragged.requests[requests],
            lengths=ragged.lengths[requests],
            positions=ragged.positions[:num_used],
            slots=KVSlots(lambda _: scene.written[:num_used]),
            **shape,
        )

    of_nodes = None
    of_prompts = None
    if counts:
        ancestors = None if ragged.ancestors is None else split.pad(ragged.ancestors).view(len(counts), -1)
        own_counts = counts if nodes.supports_ragged_nodes else (split.max_nodes,) * len(counts)
        bounds = tuple(length + count for length, count in zip(case.lengths, own_counts, strict=False))
        shape = {"query_lens": own_counts, "kv_bounds": bounds, "ancestors": ancestors}
        of_nodes = part("verify", slice(len(counts)), **shape)
    if lens:
        ends = tuple(scene.ends[len(counts) :])
        of_prompts = part("prefill", slice(len(counts), None), query_lens=lens, kv_bounds=ends)
    attention.plan(of_nodes, of_prompts)
    out = attention.attend(*(x[:num_used] for x in scene.qkv), scene.layer(), case.mask)
    torch.testing.assert_close(out.double(), reference, atol=1e-5, rtol=1e-5)
    before.flatten(2, 3)[:, :, 0] = scene.cache.flatten(2, 3)[:, :, 0]
    check_stored(scene, before, ragged, 1e-5)


@given(st.lists(st.integers(1, 16), max_size=12))
def test_nodes_are_padded_and_kept_in_their_order(counts):
    nodes = Nodes.of(counts, torch.device("cpu"))
    starts = [sum(counts[:index]) for index in range(len(counts))]
    values = torch.arange(sum(counts) + 4)
    padded = [
        start + min(node, count - 1)
        for start, count in zip(starts, counts, strict=True)
        for node in range(nodes.max_nodes)
    ]
    assert nodes.pad(values).tolist() == padded
    assert nodes.keep(nodes.pad(values)).tolist() == list(range(sum(counts)))
