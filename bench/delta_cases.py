"""Gated delta nets for bench/kernel_times.py, of Qwen3.5-27B and Qwen3.5-35B-A3B: prompts, and walks along chains and
trees of nodes. Each set of buffers is a layer, with states and inputs of its own."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.bench.kernel_cases import COLD_BYTES, Case, random
from slipstream.kernels.recurrent.delta import Records, States, Weights, delta_net
from slipstream.kernels.recurrent.delta_blocks import FACTORS, GATE, Sizes, absorb_blocks
from slipstream.kernels.recurrent.walks import TAPS, Columns, PassPlan, plan_blocks_triton, plan_walks_triton
from slipstream.kernels.speculation.ragged import Layout
from slipstream.kernels.speculation.verify import ancestor_masks

MODELS = {
    "27B": Sizes(num_keys=16, num_values=48, key_dim=128, value_dim=128),
    "35B-A3B": Sizes(num_keys=16, num_values=32, key_dim=128, value_dim=128),
}
NODES = 16  # that a slot records
LEAST_PROMPT = 64
MOST_LAYERS = 16  # each has its states


class Pass(NamedTuple):
    """Segments of a pass: requests with `nodes` each, or one prompt."""

    num_requests: int
    parents: list[int]  # of each request's nodes
    num_tokens: int  # of the prompt
    num_replayed: int = 0  # accepted nodes of the pass before


def prompt(rows: int, sizes: Sizes) -> Case:
    """A prompt through the whole layer: convolution, blocks, the last inputs."""
    return layer_case(sizes, Pass(0, [], rows))


def prompt_blocks(rows: int, sizes: Sizes) -> Case:
    """Its blocks alone."""
    plan = plan_pass(Pass(0, [], rows))
    C = num_channels(sizes)
    num_bytes = rows * (2 * C + 8 * sizes.num_values + 2 * sizes.num_values * sizes.value_dim)
    memory = torch.zeros(2, sizes.num_values, sizes.key_dim, sizes.value_dim, device="cuda")
    outputs = random(rows, sizes.num_values, sizes.value_dim)
    sets = [(random(rows, C), random_factors(rows, sizes)) for _ in range(num_layers(num_bytes))]

    def run(layer: tuple[Tensor, Tensor]) -> None:
        absorb_blocks(outputs, *layer, memory, sizes, plan)

    return Case(bytes=num_bytes, sets=sets, ours=run)


def walk(rows: int, sizes: Sizes, parents: list[int]) -> Case:
    """Nodes of so many requests, after some that the last pass accepted."""
    return layer_case(sizes, Pass(rows, parents, 0, num_replayed=1 + len(parents) // 4))


def layer_case(sizes: Sizes, work: Pass) -> Case:
    plan = plan_pass(work)
    num_rows = work.num_requests * len(work.parents) + work.num_tokens
    num_read = num_rows + work.num_requests * work.num_replayed
    num_stored = work.num_requests * len(work.parents)
    C = num_channels(sizes)
    num_segments = max(work.num_requests, 1)
    state = 4 * (sizes.num_values * sizes.key_dim * sizes.value_dim + (TAPS - 1) * C)
    record = 2 * (C + 2 * sizes.num_values)
    num_bytes = (num_read + num_stored) * record + 2 * num_rows * sizes.num_values * sizes.value_dim
    num_bytes += (2 if work.num_requests else 1) * num_segments * state  # a new prompt reads none
    weights = Weights(
        random(C, TAPS), torch.zeros(sizes.num_values, device="cuda"), torch.zeros(sizes.num_values, device="cuda")
    )
    heads = 2 * sizes.num_values
    sets = [
        (
            Records(random(num_rows, C), random(num_rows, heads)),
            Records(random(num_segments + 1, NODES, C), random(num_segments + 1, NODES, heads)),
            States(
                torch.zeros(num_segments + 1, TAPS - 1, C, device="cuda"),
                torch.zeros(num_segments + 1, *sizes[1:], device="cuda"),
            ),
        )
        for _ in range(num_layers(num_bytes))
    ]

    def run(layer: tuple[Records, Records, States]) -> Tensor:
        rows, stored, states = layer
        return delta_net(rows, stored, states, weights, sizes, plan)

    return Case(bytes=num_bytes, sets=sets, ours=run)


def plan_pass(work: Pass) -> PassPlan:
    counts = [len(work.parents)] * work.num_requests + ([work.num_tokens] if work.num_tokens else [])
    num_segments = len(counts)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    parents = torch.tensor(work.parents * work.num_requests + [-1] * work.num_tokens)
    nodes = torch.cat([torch.arange(count) for count in counts])
    is_chain = work.parents == list(range(-1, len(work.parents) - 1))
    masks = None if is_chain or not work.parents else ancestor_masks(torch.tensor([work.parents]))[0]
    lengths = torch.full((num_segments,), 64 * (work.num_requests > 0))
    unused = torch.zeros(len(nodes), dtype=torch.int64, device="cuda")
    layout = Layout(
        starts=starts.cuda(), segment_slots=torch.arange(num_segments, device="cuda"), segment_lengths=lengths.cuda(),
        requests=unused, nodes=nodes.int().cuda(), tokens=unused, parents=parents.int().cuda(), positions=unused,
        following=unused, places=unused, kv_slots=unused,
        ancestors=None if masks is None else masks.repeat(work.num_requests).cuda(),
    )  # fmt: skip
    table = torch.zeros(num_segments, len(Columns._fields), dtype=torch.int64)
    table[:, :2] = torch.arange(num_segments)[:, None] + 1  # sources and entries
    columns = Columns(*table.cuda().unbind(1))
    replays = torch.full((num_segments, NODES), -1, dtype=torch.int32)
    replays[:, : work.num_replayed] = torch.arange(work.num_replayed)
    walks = plan_walks_triton(layout, replays.cuda(), columns, work.num_requests)
    blocks = plan_blocks_triton(layout, columns, work.num_requests)
    return PassPlan(layout, walks, columns, blocks, work.num_requests)


def num_channels(sizes: Sizes) -> int:
    return 2 * sizes.num_keys * sizes.key_dim + sizes.num_values * sizes.value_dim


def random_factors(rows: int, sizes: Sizes) -> Tensor:
    """(rows, HV, FACTORS), of which blocks read g and beta."""
    factors = torch.rand(rows, sizes.num_values, FACTORS.value, device="cuda")
    factors[..., GATE.value] *= -0.1
    return factors


def num_layers(num_bytes: int) -> int:
    """Enough to exceed the L2 cache."""
    return max(2, min(MOST_LAYERS, COLD_BYTES // num_bytes))


TREE = [-1, *((node - 1) // 2 for node in range(1, NODES))]
WALKS = {
    **{f"{count} node{'s' if count > 1 else ''}": list(range(-1, count - 1)) for count in (1, 8, NODES)},
    f"a tree of {NODES}": TREE,
}
PROMPTS = ("delta prompt", "delta blocks")
# A prompt has so many tokens, a walk so many requests.
DELTA_MAKERS: dict[str, Callable[[int], Case]] = {
    **{f"delta prompt {model}": partial(prompt, sizes=sizes) for model, sizes in MODELS.items()},
    **{f"delta blocks {model}": partial(prompt_blocks, sizes=sizes) for model, sizes in MODELS.items()},
    **{
        f"delta walk {model}, {kind}": partial(walk, sizes=sizes, parents=parents)
        for model, sizes in MODELS.items()
        for kind, parents in WALKS.items()
    },
}
