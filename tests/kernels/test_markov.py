"""A walk over the whole vocabulary against a loop in fp64."""

import pytest
import torch

from slipstream.kernels.sampling.sample import Sampling, gumbel
from slipstream.kernels.speculation.lattice import Confidence, Factors
from slipstream.kernels.speculation.markov import markov_walk
from slipstream.tests.kernels.triton_runs import DEVICES, keys_of, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating


@grouped()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", ["reference", "triton"])
@pytest.mark.parametrize(
    ("shape", "form", "has_ids", "has_confidence"),
    rotating([(3, 4, 300, 24), (1, 1, 128, 64), (2, 3, 40, 100)], ["plain", "gated"], [True, False], [False, True]),
)
def test_the_walk(
    shape: tuple[int, ...], form: str, has_ids: bool, has_confidence: bool, run: str, device: str
) -> None:
    B, K, size, rank = shape
    vocab = 400
    generator = torch.Generator().manual_seed(size)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    factors = Factors(random(vocab, rank), random(size, rank) / 5, random(vocab, rank) if form == "gated" else None)
    logits = random(B, K, size) * 2
    slots = random(B, K, rank) if form == "gated" else None
    ids = torch.randperm(vocab, generator=generator)[:size].to(device) if has_ids else None
    roots = torch.arange(B, device=device) + 7
    positions = torch.arange(B * K, device=device).view(B, K)
    temperature = torch.tensor([0.0, 1.0, 0.6], device=device)[:B]
    sampling = Sampling(keys_of(range(B), device), temperature if B > 1 else None, None)
    sure = Confidence(random(B, K), torch.rand(K, device=device) + 0.5, random(vocab)) if has_confidence else None
    with poisoned():
        tokens, reached = getattr(markov_walk, run)(
            logits, roots, factors, slots, positions, sampling, ids, confidence=sure
        )
    places = torch.arange(size, device=device) if ids is None else ids
    for b in range(B):
        token = int(roots[b])
        total = 0.0
        for s in range(K):
            factor = factors.predecessors[token].double()
            if factors.gates is not None and slots is not None:
                factor = factor * torch.sigmoid(slots[b, s].double() + factors.gates[token].double())
            scores = logits[b, s].double() + factors.successors.double() @ factor
            if sampling.temperature is not None:
                noise = gumbel(sampling.keys[b : b + 1], positions[b, s : s + 1], places)[0]
                scores = scores + float(temperature[b]) * noise.double()
            step = float(scores.log_softmax(0).max())
            if sure is not None and sure.by_token is not None:
                logit = (sure.slots[b, s] + sure.by_token[token]) / sure.temperatures[s]
                step = float(logit.double().sigmoid().log())
            token = int(places[scores.argmax()])
            total = total + step
            assert tokens[b, s + 1] == token
            assert float(reached[b, s + 1]) == pytest.approx(total, abs=1e-3)
    assert torch.equal(tokens[:, 0].long(), roots)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 32])
def test_replays_equal_the_reference(B: int) -> None:
    K = 7
    size = 32_768
    rank = 256
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", generator=generator)

    factors = Factors(random(128_256, rank).bfloat16(), random(size, rank).bfloat16() / 16)
    logits = random(B, K, size).bfloat16()
    roots = torch.arange(B, device="cuda")
    positions = torch.arange(B * K, device="cuda").view(B, K)
    sampling = Sampling(keys_of(range(B), "cuda"), torch.full((B,), 0.5, device="cuda"), None)
    walk = replayed(lambda: markov_walk.triton(logits, roots, factors, None, positions, sampling))
    expected = markov_walk.reference(logits, roots, factors, None, positions, sampling)
    assert (walk.tokens == expected.tokens).float().mean() > 0.95, "of near ties either"
