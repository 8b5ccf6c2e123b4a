"""Every attention backend that runs here against one loop per request, query and head."""

import math
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.kernels.rope import rotate_and_store
from slipstream.kernels.tree_attention import tree_attention
from slipstream.models.config import RopeConfig
from slipstream.models.layers import RotaryEmbedding
from slipstream.serve.attention.base import Backend
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.attention.triton import Backend as TritonBackend
from slipstream.serve.batch import Batch, RequestState
from slipstream.serve.round import Runner
from slipstream.tests.pairwise import gate_of

NUM_LAYERS, LAYER, HEAD_DIM, NUM_ROWS, MAX_LEN, THETA = 2, 1, 8, 6, 96, 100.0
BACKENDS = {"sdpa": SDPABackend, "triton": TritonBackend}
TESTED_ELSEWHERE = {"flashinfer"}  # tests/serve/test_flashinfer.py
# dtype -> tolerance. The interpreter of Triton kernels multiplies the bits of bf16 as integers.
DTYPES = {
    "sdpa": [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
    "triton": [(torch.float32, 1e-5), (torch.float16, 4e-3)],
}


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Backend]:
    """By its name. Triton's runs under the interpreter; where kernels are compiled for a GPU, their references run."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        for op in (rotate_and_store, tree_attention):
            monkeypatch.setattr(op, "when", lambda *_args, **_options: request.param == "triton")
    return BACKENDS[request.param]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Committed lengths and new queries of each request, and who sees whom."""

    mask: str
    lengths: tuple[int, ...]
    query_lens: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...] = ()  # of each request's queries, trees only
    window: int | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    page_size: int = 16


def random_parents(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return (-1, *(rng.randrange(node) for node in range(1, count)))


CASES = {
    "ragged prefill": Case(mask="causal", lengths=(0, 0, 0), query_lens=(1, 17, 40)),
    "ragged prefill with prefix": Case(mask="causal", lengths=(16, 5, 33, 0), query_lens=(3, 20, 1, 16)),
    "one request": Case(mask="causal", lengths=(31,), query_lens=(4,)),
    "decode": Case(mask="causal", lengths=(1, 16, 60, 15), query_lens=(1,) * 4),
    "chain round": Case(mask="causal", lengths=(0, 9, 14, 47), query_lens=(5,) * 4),
    "pages of one token": Case(mask="causal", lengths=(3, 0, 21), query_lens=(4, 7, 2), page_size=1),
    "chain round, pages of one token": Case(mask="causal", lengths=(3, 30), query_lens=(4, 4), page_size=1),
    "one KV head": Case(mask="causal", lengths=(3, 18), query_lens=(6, 6), num_kv_heads=1),
    "no sharing of heads": Case(mask="causal", lengths=(3, 18), query_lens=(6, 6), num_kv_heads=4),
    "six heads for two": Case(mask="causal", lengths=(3, 18), query_lens=(6, 2), num_heads=6),
    "window": Case(mask="causal", lengths=(0, 9, 14, 47), query_lens=(5,) * 4, window=7),
    "window of one": Case(mask="causal", lengths=(0, 33), query_lens=(3,) * 2, window=1),
    "window, decode": Case(mask="causal", lengths=(1, 16, 60, 15), query_lens=(1,) * 4, window=16, page_size=1),
    "window wider than all": Case(mask="causal", lengths=(3, 30), query_lens=(4, 4), window=90),
    "window, ragged prefill": Case(mask="causal", lengths=(16, 5, 33, 0), query_lens=(3, 20, 1, 16), window=9),
    "block": Case(mask="block", lengths=(12, 0, 30), query_lens=(5, 5, 5)),
    "ragged block": Case(mask="block", lengths=(12, 4), query_lens=(5, 9), page_size=1),
    **{
        f"tree {seed}": Case(
            mask="tree",
            lengths=(7, 15, 0),
            query_lens=(9,) * 3,
            parents=tuple(random_parents(9, 10 * seed + row) for row in range(3)),
            page_size=(16, 1)[seed % 2],
        )
        for seed in range(4)
    },
    "chain as a tree": Case(mask="tree", lengths=(5,), query_lens=(4,), parents=((-1, 0, 1, 2),)),
}


def ancestors_of(node: int, parents: tuple[int, ...]) -> set[int]:
    return {node} if parents[node] < 0 else {node} | ancestors_of(parents[node], parents)


def visible(case: Case, request: int, query: int) -> set[int]:
    """Which of the request's new tokens a query sees; without a window it sees all committed ones."""
    if case.window is not None:
        return set(range(max(0, query + 1 - case.window), query + 1))
    if case.mask == "causal":
        return set(range(query + 1))
    if case.mask == "block":
        return set(range(case.query_lens[request]))
    return ancestors_of(query, case.parents[request])


def depth(case: Case, request: int, query: int) -> int:
    return query if case.mask != "tree" else len(ancestors_of(query, case.parents[request])) - 1


def turn(x: Tensor, position: int) -> Tensor:
    """x (..., D) as complex numbers (x[i], x[i + D / 2]), each turned by its angle."""
    half = HEAD_DIM // 2
    angles = position * THETA ** (-torch.arange(half, dtype=torch.float64) * 2 / HEAD_DIM)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


class Scene:
    """A cache full of noise, page tables in random order, and the committed keys and values in their slots."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.case, num_pages = case, NUM_ROWS * MAX_LEN // case.page_size + 1
        shape = (NUM_LAYERS, 2, num_pages, case.page_size, case.num_kv_heads, HEAD_DIM)
        self.cache = torch.randn(shape, generator=generator).to(dtype)
        self.state = RequestState(NUM_ROWS, MAX_LEN // case.page_size, case.page_size, 1, torch.device("cpu"))
        pages = torch.randperm(num_pages - 1, generator=generator) + 1
        self.state.pages[:NUM_ROWS] = pages.view(NUM_ROWS, -1)
        self.rows = torch.randperm(NUM_ROWS, generator=generator)[: len(case.lengths)].tolist()
        total = sum(case.query_lens)
        self.q = torch.randn(total, case.num_heads, HEAD_DIM, generator=generator).to(dtype)
        self.k, self.v = (torch.randn(total, *shape[4:], generator=generator).to(dtype) for _ in range(2))
        for request, length in enumerate(case.lengths):
            for position in range(length):
                keys = self.cache[LAYER, 0].flatten(0, 1)
                keys[self.slot(request, position)] = turn(keys[self.slot(request, position)], position).to(dtype)

    def slot(self, request: int, position: int) -> int:
        page = int(self.state.pages[self.rows[request], position // self.case.page_size])
        return page * self.case.page_size + position % self.case.page_size

    def batch(self, spare: int) -> Batch:
        """`spare`: how far the host's bounds lie above the true lengths."""
        case = self.case
        queries = [(request, query) for request, count in enumerate(case.query_lens) for query in range(count)]
        masks = [
            [sum(1 << key for key in visible(case, request, query)) for query in range(count)]
            for request, count in enumerate(case.query_lens)
        ]
        return Batch(
            state=self.state,
            rows=torch.tensor(self.rows),
            lengths=torch.tensor(case.lengths),
            positions=torch.tensor([case.lengths[request] + depth(case, request, query) for request, query in queries]),
            slots=torch.tensor([self.slot(request, case.lengths[request] + query) for request, query in queries]),
            query_lens=case.query_lens,
            kv_bounds=tuple(
                length + count + spare for length, count in zip(case.lengths, case.query_lens, strict=True)
            ),
            ancestors=torch.tensor(masks) if case.mask == "tree" else None,
        )

    def expected(self) -> Tensor:
        case, out = self.case, torch.zeros(self.q.shape, dtype=torch.float64)
        group = case.num_heads // case.num_kv_heads
        keys, values = self.cache[LAYER].flatten(1, 2).double()
        start = 0
        for request, count in enumerate(case.query_lens):
            length = case.lengths[request]
            turned = [turn(self.k[start + j], length + depth(case, request, j)) for j in range(count)]
            for query in range(count):
                seen = sorted(visible(case, request, query))
                first = 0 if case.window is None else max(0, length + query + 1 - case.window)
                past = [self.slot(request, position) for position in range(first, length)]
                for head in range(case.num_heads):
                    shared = head // group
                    q = turn(self.q[start + query, head], length + depth(case, request, query))
                    k = [keys[slot, shared] for slot in past] + [turned[j][shared] for j in seen]
                    v = [values[slot, shared] for slot in past] + [self.v[start + j, shared].double() for j in seen]
                    weights = (torch.stack(k) @ q / math.sqrt(HEAD_DIM)).softmax(-1)
                    out[start + query, head] = weights @ torch.stack(v)
            start += count
        return out


def check_stored(scene: Scene, before: Tensor, batch: Batch, tolerance: float) -> None:
    """The new keys and values are in their slots of the layer, and nothing else of the cache changed."""
    assert torch.equal(scene.cache[0], before[0]), "another layer's KV changed"
    keys, values = scene.cache[LAYER].flatten(1, 2)
    for index, (slot, position) in enumerate(zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)):
        torch.testing.assert_close(keys[slot].double(), turn(scene.k[index], position), atol=tolerance, rtol=tolerance)
        assert torch.equal(values[slot], scene.v[index])
    untouched = torch.ones(len(keys), dtype=torch.bool).index_fill_(0, batch.slots, False)
    assert torch.equal(scene.cache[LAYER].flatten(1, 2)[:, untouched], before[LAYER].flatten(1, 2)[:, untouched])


ATTENDED = [
    (backend, name, *precision)
    for backend in BACKENDS
    for name, case in CASES.items()
    for precision in DTYPES[backend]
    if backend != "triton" or len(set(case.query_lens)) == 1  # prompts are not for it
]
# The interpreter takes a second or two for each, and tests/kernels has more of them.
INTERPRETED = ("chain round, pages of one token", "window, decode", "one KV head", "block", "tree 1", "tree 2")
GATE = [case for case in ATTENDED if case[0] == "sdpa" or case[1] in INTERPRETED and case[2] == torch.float32]
GATE.append(("triton", "chain as a tree", *DTYPES["triton"][1]))


@pytest.mark.parametrize(("backend", "name", "dtype", "tolerance"), gate_of(ATTENDED, GATE), indirect=["backend"])
def test_attention_equals_a_loop(backend: type[Backend], name: str, dtype: torch.dtype, tolerance: float) -> None:
    scene = Scene(CASES[name], dtype)
    expected, before = scene.expected(), scene.cache.clone()
    attention = backend(scene.cache, RotaryEmbedding(RopeConfig(THETA), HEAD_DIM, MAX_LEN))
    for spare in (0, 20):  # the second pass writes the same rows again
        batch = scene.batch(spare)
        attention.plan(batch)
        out = attention.attend(scene.q, scene.k, scene.v, LAYER, CASES[name].mask, CASES[name].window)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    check_stored(scene, before, batch, tolerance)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_prompts_are_written_by_every_backend(backend: type[Backend]) -> None:
    """A drafter may write a prompt's KV by the backend of its own phase."""
    scene = Scene(CASES["ragged prefill with prefix"], torch.float32)
    batch, before = scene.batch(0), scene.cache.clone()
    attention = backend(scene.cache, RotaryEmbedding(RopeConfig(THETA), HEAD_DIM, MAX_LEN))
    attention.plan(batch)
    attention.write(scene.k, scene.v, LAYER)
    check_stored(scene, before, batch, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_write_stores_what_attend_stores(backend: type[Backend]) -> None:
    caches = []
    for writes_only in (True, False):
        scene = Scene(CASES["chain round"], torch.float32)
        attention = backend(scene.cache, RotaryEmbedding(RopeConfig(THETA), HEAD_DIM, MAX_LEN))
        attention.plan(scene.batch(0))
        if writes_only:
            attention.write(scene.k, scene.v, LAYER)
        else:
            attention.attend(scene.q, scene.k, scene.v, LAYER, "causal")
        caches.append(scene.cache)
    assert torch.equal(*caches)


def test_every_backend_of_the_folder_is_tested() -> None:
    folder = Path(__file__).parents[2] / "serve/attention"
    assert {path.stem for path in folder.glob("*.py")} - {"base"} == BACKENDS.keys() | TESTED_ELSEWHERE


def test_a_pass_is_planned_by_the_backend_of_its_phase() -> None:
    scene = Scene(CASES["decode"], torch.float32)
    rope = RotaryEmbedding(RopeConfig(THETA), HEAD_DIM, MAX_LEN)
    backends = {phase: SDPABackend(scene.cache, rope) for phase in ("prefill", "verify")}
    runner = Runner(None, backends, None, None, ())  # type: ignore[arg-type]
    verify = scene.batch(0)
    prefill = replace(verify, next_tokens=torch.zeros_like(verify.positions))
    for phase, batch in (("prefill", prefill), ("verify", verify)):
        assert runner.attention_for(batch) is backends[phase]
        assert backends[phase].batch is batch
