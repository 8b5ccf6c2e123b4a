"""Gated delta nets over passes of prompts and trees, against the recurrence over each text by itself."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as oracle

from slipstream.kernels.recurrent import delta
from slipstream.kernels.recurrent.delta import Records, States, Weights, delta_net
from slipstream.kernels.recurrent.delta_blocks import Sizes, absorb_block
from slipstream.kernels.recurrent.walks import (
    EMIT,
    LEAF,
    NOTHING,
    RESTART,
    ROW,
    Blocks,
    Columns,
    PassPlan,
    Walks,
    path_above,
    plan_blocks,
    plan_walks,
    tree_steps,
)
from slipstream.kernels.speculation.ragged import Layout
from slipstream.kernels.speculation.verify import ancestor_masks
from slipstream.tests.kernels.triton_runs import SLOW, each_device, poisoned

SMALL = Sizes(num_keys=2, num_values=4, key_dim=16, value_dim=16)
ODD = Sizes(num_keys=1, num_values=2, key_dim=24, value_dim=40)  # more columns than a program steps
FEW_HEADS = Sizes(num_keys=1, num_values=2, key_dim=32, value_dim=32)
NUM_CHANNELS = 128  # of each
WIDTH = NUM_CHANNELS + 2 * SMALL.num_values  # of random inputs: channels, and the most gates
SLOTS = 5
NODES = 8


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter is slow for each program of the convolution, of which long prompts still have several."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(delta, "BLOCK_ROWS", 32)


@dataclass
class Segment:
    """A request's part of a pass: `parents` of its nodes, or None for a chunk of a prompt."""

    slot: int
    inputs: Tensor  # (n, C + 2 HV)
    parents: list[int] | None = None
    path: list[int] = field(default_factory=list)  # accepted nodes
    prompt: int = 0  # tokens of the prompt; 0: the chunk is of it alone


class Layer:
    """A layer that computes passes as the engine runs them. Entry i is the state of slot i, the last one a snapshot."""

    def __init__(self, device: str, dtype: torch.dtype, sizes: Sizes = SMALL):
        rng = torch.Generator().manual_seed(0)
        self.sizes = sizes
        self.device = torch.device(device)
        self.dtype = dtype
        heads = sizes.num_values
        conv = (torch.randn(NUM_CHANNELS, 4, generator=rng) * 0.6).to(device, dtype)
        rates, biases = torch.randn(2, heads, generator=rng).to(device)
        self.weights = Weights(conv, rates, biases)
        self.stored = Records(
            torch.zeros(SLOTS, NODES, NUM_CHANNELS, dtype=dtype, device=device),
            torch.zeros(SLOTS, NODES, 2 * heads, dtype=dtype, device=device),
        )
        self.states = States(
            torch.full((SLOTS + 1, 3, NUM_CHANNELS), torch.nan, device=device),
            torch.full((SLOTS + 1, heads, sizes.key_dim, sizes.value_dim), torch.nan, device=device),
        )
        self.replays = torch.full((SLOTS, NODES), -1, dtype=torch.int32, device=device)
        self.lengths = [0] * SLOTS

    def layout(self, segments: list[Segment], spare: int) -> Layout:
        rows = []
        masks = torch.empty(0, dtype=torch.int64)
        are_chains = all(s.parents is None or s.parents == list(range(-1, len(s.parents) - 1)) for s in segments)
        for segment in segments:
            count = len(segment.inputs)
            parents = [-1] * count if segment.parents is None else segment.parents
            length = self.lengths[segment.slot]
            rows += [[segment.slot, index, parent, length + index] for index, parent in enumerate(parents)]
            above = ancestor_masks(torch.tensor([parents]))[0] if segment.parents is not None else None
            masks = torch.cat((masks, torch.full((count,), -1) if above is None else above))
        rows += [[len(self.lengths) - 1, 0, -1, 0]] * spare
        table = torch.tensor(rows, device=self.device).reshape(-1, 4)
        ends = torch.tensor([0, *(len(s.inputs) for s in segments)]).cumsum(0)
        unused = table[:, 0]
        return Layout(
            starts=ends.int().to(self.device),
            segment_slots=torch.tensor([s.slot for s in segments], device=self.device),
            segment_lengths=torch.tensor([self.lengths[s.slot] for s in segments], device=self.device),
            requests=table[:, 0].contiguous(),
            nodes=table[:, 1].int().contiguous(),
            tokens=unused, parents=table[:, 2].int().contiguous(), positions=unused, following=unused,
            places=table[:, 3].contiguous(), kv_slots=unused,
            ancestors=None if are_chains else torch.cat((masks, torch.full((spare,), -1))).to(self.device),
        )  # fmt: skip

    def step(self, segments: list[Segment], spare: int = 0, mark: int = 0) -> list[Tensor]:
        """Runs a pass, decoding segments first. Returns the outputs of each segment. Chunks leave a snapshot after
        `mark` tokens of their texts."""
        segments = sorted(segments, key=lambda segment: segment.parents is None)
        layout = self.layout(segments, spare)
        inputs = torch.cat([s.inputs for s in segments] + [torch.ones(spare, WIDTH)]).to(self.device)
        num_decoding = sum(segment.parents is not None for segment in segments)
        slots = layout.segment_slots
        prompts = torch.tensor([segment.prompt for segment in segments], device=self.device)
        columns = Columns(
            *torch.stack(
                (slots, slots, torch.full_like(slots, SLOTS), torch.full_like(slots, mark), prompts), dim=1
            ).unbind(1)
        )
        inputs = inputs.to(self.dtype)
        gates = slice(NUM_CHANNELS, NUM_CHANNELS + 2 * self.sizes.num_values)
        rows = Records(inputs[:, :NUM_CHANNELS], inputs[:, gates])
        blocks = self.plan_blocks(layout, columns, num_decoding)
        plan = PassPlan(layout, self.plan(layout, columns, num_decoding), columns, blocks, num_decoding)
        with poisoned():
            outputs = delta_net(rows, self.stored, self.states, self.weights, self.sizes, plan)
        assert not outputs[layout.starts[-1] :].any(), "of unused rows"
        for segment in segments:
            path = segment.path if segment.parents is not None else []
            self.replays[segment.slot] = torch.tensor(path + [-1] * (NODES - len(path)), dtype=torch.int32)
            self.lengths[segment.slot] += len(path or segment.inputs)
        starts = layout.starts.tolist()
        return [outputs[a:b].cpu() for a, b in zip(starts, starts[1:], strict=False)]

    def plan(self, layout: Layout, columns: Columns, num_decoding: int) -> Walks:
        """Returns the kernel's plan, once it equals the reference's."""
        with poisoned():
            walks = plan_walks.triton(layout, self.replays, columns, num_decoding)
        expected = plan_walks.reference(layout, self.replays, columns, num_decoding)
        assert torch.equal(walks.counts, expected.counts)
        assert torch.equal(walks.replayed, expected.replayed)
        for steps, reference, count in zip(walks.steps, expected.steps, expected.counts.tolist(), strict=True):
            assert torch.equal(steps[:count], reference[:count])
        in_use = expected.sources[:, 0] != NOTHING
        assert torch.equal(walks.sources[in_use], expected.sources[in_use])
        assert (walks.sources[~in_use, 0] == NOTHING).all()
        return walks

    def plan_blocks(self, layout: Layout, columns: Columns, num_decoding: int) -> Blocks:
        """Returns the kernel's plan, once it equals the reference's."""
        with poisoned():
            blocks = plan_blocks.triton(layout, columns, num_decoding)
        expected = plan_blocks.reference(layout, columns, num_decoding)
        assert torch.equal(blocks.rows, expected.rows)
        if len(layout.segment_slots) > num_decoding:
            assert torch.equal(blocks.starts, expected.starts)
        return blocks


def alone(layer: Layer, text: Tensor) -> Tensor:
    """Outputs (n, HV, DV) of one text by the convolution of torch and the recurrence of transformers."""
    sizes = layer.sizes
    x = text[:, :NUM_CHANNELS].to(layer.dtype).float()
    weights = layer.weights
    conv = weights.conv.float().cpu()
    mixed = F.silu(F.conv1d(F.pad(x.T, (3, 0)), conv[:, None], groups=NUM_CHANNELS)).T.to(layer.dtype).float()
    keys = sizes.num_keys * sizes.key_dim
    q, k, v = (part[None] for part in mixed.split((keys, keys, sizes.num_values * sizes.value_dim), dim=1))
    b, a = text[:, NUM_CHANNELS : NUM_CHANNELS + 2 * sizes.num_values].to(layer.dtype).chunk(2, dim=1)
    decay = -weights.A_log.exp().cpu() * F.softplus(a.float() + weights.dt_bias.cpu())
    ratio = sizes.num_values // sizes.num_keys
    outputs, _ = oracle.torch_recurrent_gated_delta_rule(
        q.unflatten(-1, (sizes.num_keys, -1)).repeat_interleave(ratio, dim=2),
        k.unflatten(-1, (sizes.num_keys, -1)).repeat_interleave(ratio, dim=2),
        v.unflatten(-1, (sizes.num_values, -1)),
        decay[None], b.sigmoid().float()[None], initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return outputs[0]


def random_inputs(rng: random.Random, count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))


def random_parents(rng: random.Random, size: int) -> list[int]:
    """Parents of a chain, or of any tree."""
    is_chain = rng.random() < 0.4
    return [-1] + [node - 1 if is_chain else rng.randrange(node) for node in range(1, size)]


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root to `node`."""
    return [*path_to(parents[node], parents), node] if node >= 0 else []


def check(outputs: Tensor, expected: Tensor, dtype: torch.dtype):
    tolerance = {torch.float32: 2e-4, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(outputs.float(), expected.float(), atol=tolerance, rtol=tolerance)


@each_device
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        (SMALL, torch.float32),
        pytest.param(ODD, torch.float32, marks=SLOW),
        pytest.param(ODD, torch.bfloat16, marks=SLOW),
    ],
)
def test_texts_equal_the_recurrence_over_each_alone(sizes, dtype, device):
    """Prompts in chunks beside trees and chains of random nodes, of which random paths are accepted."""
    rng = random.Random(1)
    layer = Layer(device, dtype, sizes)
    prompts = {0: 63, 1: 1, 2: 200, 3: 64}
    texts = {slot: torch.empty(0, WIDTH) for slot in prompts}
    for turn in range(7):
        segments = []
        for slot, length in prompts.items():
            left = length - len(texts[slot])
            if left > 0:
                if rng.random() < 0.7:
                    count = min(left, 64 * rng.randint(1, 2))
                    segments.append(Segment(slot, random_inputs(rng, count)))
            elif rng.random() < 0.8:
                size = rng.choice([1, 1, 2, 5, 8])
                parents = random_parents(rng, size)
                path = path_to(rng.randrange(size), parents)
                segments.append(Segment(slot, random_inputs(rng, size), parents, path))
        if not segments:
            continue
        rng.shuffle(segments)
        segments.sort(key=lambda segment: segment.parents is None)
        for segment, outputs in zip(segments, layer.step(segments, spare=turn % 3), strict=True):
            before = texts[segment.slot]
            if segment.parents is None:
                texts[segment.slot] = torch.cat((before, segment.inputs))
                check(outputs, alone(layer, texts[segment.slot])[len(before) :], dtype)
                continue
            for leaf in set(range(len(segment.inputs))) - set(segment.parents):
                path = path_to(leaf, segment.parents)
                expected = alone(layer, torch.cat((before, segment.inputs[path])))[len(before) :]
                check(outputs[path], expected, dtype)
            texts[segment.slot] = torch.cat((before, segment.inputs[segment.path]))
    assert min(len(text) for text in texts.values()) > 4


def test_each_node_steps_once_from_the_state_of_its_parent():
    rng = random.Random(4)
    for _ in range(100):
        parents = random_parents(rng, rng.randint(1, 16))
        emitted = []
        state = []  # the nodes that it has been through
        for step in tree_steps(parents):
            node = step & ROW
            if step & RESTART:
                state = []  # the written one has been through none
            after = [*state, node]
            assert after == [*path_above(node, parents)[::-1], node]
            assert bool(step & LEAF) == (node not in parents)
            if not step & LEAF:
                state = after
            if step & EMIT:
                emitted.append(node)
        assert sorted(emitted) == list(range(len(parents)))


def test_trees_take_few_steps_more_than_they_have_nodes():
    chain = list(range(-1, 15))
    assert len(tree_steps(chain)) == 16
    comb = [-1, *(node - 2 + node % 2 for node in range(1, 16))]  # each inner node has a leaf beside the next
    assert len(tree_steps(comb)) == 16
    binary = [-1, *((node - 1) // 2 for node in range(1, 16))]
    assert len(tree_steps(binary)) == 21


@each_device
def test_bits_depend_neither_on_drafts_nor_on_company(device):
    rng = random.Random(2)
    plain = Layer(device, torch.bfloat16, FEW_HEADS)
    drafted = Layer(device, torch.bfloat16, FEW_HEADS)
    prompt = random_inputs(rng, 185)
    company = random_inputs(rng, 65)
    [outputs] = plain.step([Segment(0, prompt)])
    first = drafted.step([Segment(2, prompt[:64]), Segment(1, company)])[0]
    second = drafted.step([Segment(2, prompt[64:])], spare=3, mark=128)[0]
    assert torch.equal(torch.cat((first, second)), outputs)
    from_snapshot = Layer(device, torch.bfloat16, FEW_HEADS)
    from_snapshot.step([Segment(0, prompt[:128])])
    for states, expected in zip(drafted.states, from_snapshot.states, strict=True):
        assert torch.equal(states[SLOTS], expected[0]), "the snapshot is the state after 128 tokens"
    answer = []
    for _ in range(4):
        size = rng.choice([3, 8])
        parents = random_parents(rng, size)
        path = path_to(rng.randrange(size), parents)
        inputs = random_inputs(rng, size)
        neighbour = Segment(1, random_inputs(rng, 2), [-1, 0], [0])
        outputs = drafted.step([neighbour, Segment(2, inputs, parents, path)])[1]
        for node in path:
            [expected] = plain.step([Segment(0, inputs[node : node + 1], [-1], [0])])
            assert torch.equal(outputs[node], expected[0])
            answer.append(inputs[node : node + 1])
    for layer in (plain, drafted):  # writes the states of all accepted nodes
        layer.step([Segment(0 if layer is plain else 2, company[:1], [-1], [0])])
    for states, expected in zip(drafted.states, plain.states, strict=True):
        assert torch.equal(states[2], expected[0])
    resumed = Layer(device, torch.bfloat16, FEW_HEADS)  # after a preemption
    text = torch.cat([prompt, *answer])
    assert len(text) > 192, "its third block is partly of the answer"
    for part in text.split(192):
        resumed.step([Segment(0, part, prompt=len(prompt))])
    for states, expected in zip(resumed.states, plain.states, strict=True):
        assert torch.equal(states[0], expected[0])


def test_a_block_equals_the_chunk_rule_of_transformers():
    rng = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 1, 64, 2, 16, generator=rng)
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    g = -torch.rand(1, 64, 2, generator=rng)
    beta = torch.rand(1, 64, 2, generator=rng)
    state = torch.randn(1, 2, 16, 16, generator=rng)
    expected, last = oracle.torch_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
    after, outputs = absorb_block(state, *(x.transpose(1, 2) for x in (q, k, v, g, beta)))
    torch.testing.assert_close(outputs.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, last, atol=1e-5, rtol=1e-5)
