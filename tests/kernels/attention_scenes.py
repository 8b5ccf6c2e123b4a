"""Random proposals over random paged contexts, and what their attention must give: data for the kernel's tests."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.tests.tables import objects_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """N new nodes after each request's committed tokens."""

    lengths: tuple[int, ...]
    N: int
    mask: str = "causal"
    Q: int = 4
    G: int = 2
    D: int = 64
    page_size: int = 16
    prefix: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    starts: tuple[int, ...] | None = None  # first committed token that is read


CASES = objects_of(__file__, "cases", Case)


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    G = rng.choice([1, 2, 3])
    return Case(
        lengths=tuple(rng.choice([0, 1, 16, rng.randrange(64), rng.randrange(400)]) for _ in range(rng.randint(1, 3))),
        N=rng.choice([1, 2, 7, 16, 31, 64]),
        mask=rng.choice(["causal", "tree", "block"]),
        Q=G * rng.choice([1, 4, 8]),
        G=G,
        D=rng.choice([64, 128, 256]),
        page_size=rng.choice([1, 16, 32, 64]),
        prefix=rng.random() < 0.8,
        window=rng.choice([1, 5, 17, 64, 200]) if seed >= 12 else None,
    )


CASES |= {f"random {seed}": random_case(seed) for seed in range(24)}
REAL = Case(lengths=(700,), N=4, mask="tree", Q=32, G=8, D=128)
LONG = tuple(random.Random(0).sample(range(6000), 32))


def real_case(lengths: int | tuple[int, ...] = REAL.lengths, **changes: Any) -> Case:
    """lengths: how many of LONG, or the lengths themselves."""
    return replace(REAL, lengths=LONG[:lengths] if isinstance(lengths, int) else lengths, **changes)


GPU_CASES = objects_of(__file__, "gpu_cases", real_case)
GPU_CASES["batch 64, long enough for even parts"] = replace(REAL, lengths=(*LONG, *(8000 - x for x in LONG)))


def random_parents(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [-1, *(rng.randrange(max(0, node - 5), node) for node in range(1, count))]


def path_of(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors."""
    path = [node]
    while (above := parents[path[-1]]) >= 0:
        path.append(above)
    return sorted(path)


def signed_mask(nodes: list[int]) -> int:
    """Their bits as an int64."""
    mask = sum(1 << node for node in nodes)
    return mask - 2**64 if mask >= 2**63 else mask


def attend_in_fp64(
    q: Tensor, keys: Tensor, values: Tensor, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q (Q, D); keys, values (S, G, D) -> output (Q, D), and log-sum-exp (Q,) without sinks. Scores are times 0.3."""
    G = keys.shape[1]
    scores = torch.einsum("grd,sgd->grs", q.double().view(G, -1, q.shape[1]), keys.double()) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    lse = scores.logsumexp(-1).flatten()
    if sinks is not None:  # a score more, without a value
        scores = torch.cat((scores, sinks.double().view(G, -1, 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("grs,sgd->grd", weights, values.double()).flatten(0, 1), lse


class Scene:
    """Slots that hold nothing or lie before every window are NaN; page tables are shuffled; every other row of a batch
    pads it."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str):
        self.case = case
        B = len(case.lengths)
        generator = torch.Generator(device).manual_seed(2)
        options = {"generator": generator, "device": device}
        capacity = -(-(max(case.lengths) + case.N) // case.page_size) + 1
        num_pages = B * capacity + 1
        self.pages = torch.zeros(B + 1, capacity, dtype=torch.int64, device=device)  # the last row, the padding's: 0
        self.pages[:B] = (torch.randperm(num_pages - 1, **options) + 1).view(B, -1)
        self.rows = torch.full((2 * B,), B, device=device)
        self.rows[::2] = torch.randperm(B, **options)
        self.lengths = torch.zeros(2 * B, dtype=torch.int64, device=device)
        self.lengths[::2] = torch.tensor(case.lengths, device=device)
        self.q = torch.randn(2 * B, case.N, case.Q, case.D, **options).to(dtype)
        shape = (2, num_pages, case.page_size, case.G, case.D)
        self.keys, self.values = torch.full(shape, torch.nan, dtype=dtype, device=device)
        for request in range(0, 2 * B, 2):
            slots = self.slots(request)
            for x in (self.keys, self.values):
                x.flatten(0, 1)[slots] = torch.randn(len(slots), case.G, case.D, **options).to(dtype)
        self.parents = [random_parents(seed, case.N) for seed in range(2 * B)]
        masks = [[signed_mask(self.allowed(b, n)) for n in range(case.N)] for b in range(2 * B)]
        self.ancestors = torch.tensor(masks, device=device) if case.mask == "tree" else None
        self.sinks = 2 * torch.randn(case.Q, **options).to(dtype) if case.sinks else None
        self.starts = None
        if case.starts is not None:
            self.starts = torch.zeros(B + 1, dtype=torch.int64, device=device)
            self.starts[self.rows[::2]] = torch.tensor(case.starts, device=device)
        self.give_back(first_position=0)

    def give_back(self, first_position: int):
        """Makes NaN what lies before the starts, and the windows of nodes at lengths + first_position and later. Pages
        wholly before them become page 0, the padding's, which is NaN, too."""
        for request in range(0, len(self.lengths), 2):
            passed = self.start(request)
            if self.case.window is not None:
                passed = max(passed, int(self.lengths[request]) + first_position + 1 - self.case.window)
            self.keys.flatten(0, 1)[self.slots(request)[:passed]] = torch.nan
            self.values.flatten(0, 1)[self.slots(request)[:passed]] = torch.nan
            self.pages[self.rows[request], : passed // self.case.page_size] = 0

    def slots(self, request: int) -> Tensor:
        """Returns the slots of the request's committed tokens and new nodes."""
        positions = torch.arange(int(self.lengths[request]) + self.case.N, device=self.pages.device)
        page = self.pages[self.rows[request], positions // self.case.page_size]
        return page * self.case.page_size + positions % self.case.page_size

    def start(self, request: int) -> int:
        return 0 if self.case.starts is None else self.case.starts[request // 2]

    def depth(self, request: int, node: int) -> int:
        return len(path_of(self.parents[request], node)) - 1 if self.case.mask == "tree" else node

    def allowed(self, request: int, node: int) -> list[int]:
        """The nodes that a node sees without a window."""
        if self.case.mask == "tree":
            return path_of(self.parents[request], node)
        return list(range(node + 1 if self.case.mask == "causal" else self.case.N))

    def seen(self, request: int, node: int) -> list[int]:
        """The positions of committed tokens and the slots of nodes that a node sees, counted from the first token."""
        length = int(self.lengths[request])
        depths = {length + other: self.depth(request, other) for other in self.allowed(request, node)}
        if self.case.prefix:
            depths |= {position: position - length for position in range(self.start(request), length)}
        first = -length if self.case.window is None else self.depth(request, node) + 1 - self.case.window
        return sorted(slot for slot, depth in depths.items() if depth >= first)

    def run(self, kernel: Callable[..., tuple[Tensor, Tensor]], **options: object) -> tuple[Tensor, Tensor]:
        """Output (B, N, Q, D), and log-sum-exp (B, N, Q) without sinks, of the requests that do not pad."""
        kernel = partial(kernel, self.q, self.keys, self.values, self.pages, self.rows, self.lengths, self.ancestors)
        options |= {"window": self.case.window, "prefix": self.case.prefix, "softcap": self.case.softcap}
        options |= {"starts": self.starts}
        out, lse = kernel(self.case.mask, 0.3, return_lse=True, **options)
        if self.sinks is not None:
            out = kernel(self.case.mask, 0.3, sinks=self.sinks, **options)
        assert out.dtype == self.q.dtype
        assert lse.dtype == torch.float32
        return out[::2], lse[::2]

    def expected(self) -> tuple[Tensor, Tensor]:
        """The same in fp64."""
        case = self.case
        B = len(self.lengths) // 2
        out = torch.empty(B, case.N, case.Q, case.D, dtype=torch.float64, device=self.q.device)
        lse = torch.empty(B, case.N, case.Q, dtype=torch.float64, device=self.q.device)
        for request in range(0, 2 * B, 2):
            slots = self.slots(request)
            keys, values = (x.flatten(0, 1)[slots] for x in (self.keys, self.values))  # (S, G, D)
            for node in range(case.N):
                tokens = self.seen(request, node)
                out[request // 2, node], lse[request // 2, node] = attend_in_fp64(
                    self.q[request, node], keys[tokens], values[tokens], case.softcap, self.sinks
                )
        return out, lse
