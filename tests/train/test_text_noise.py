"""Posterior noise of a text: with it the target samples the text, and its law is that of the noise."""

import math

import torch

from slipstream.kernels.sampling.sample import gumbel
from slipstream.train.text_noise import noise_behind

ROWS = 40_000
SIZE = 6
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
DRAFT = torch.tensor([1.0, 1.5, -0.5, 1.0, 0.0, -1.0])  # another distribution, of a draft


def test_the_text_is_what_the_noise_makes_the_target_say():
    """Texts that were sampled with noise of their own: the posterior noise has the law of that noise, and a draft
    meets the text as often as with it."""
    ids = torch.arange(SIZE)
    rows = torch.arange(ROWS)
    real = gumbel(torch.full((ROWS,), 5), rows, ids)
    tokens = (LOGITS + real).argmax(dim=1)
    logits = LOGITS.expand(ROWS, -1)
    posterior = noise_behind(tokens, logits, torch.full((ROWS,), 77), rows, ids)
    assert torch.equal((LOGITS + posterior).argmax(dim=1), tokens)
    torch.testing.assert_close(posterior.mean(0), torch.full((SIZE,), 0.5772), atol=0.03, rtol=0)
    torch.testing.assert_close(posterior.var(0), torch.full((SIZE,), math.pi**2 / 6), atol=0.06, rtol=0)
    assert (posterior.T.corrcoef() - torch.eye(SIZE)).abs().max() < 0.03, "of tokens, independent"
    met, really = (((DRAFT + noise).argmax(dim=1) == tokens).float().mean() for noise in (posterior, real))
    torch.testing.assert_close(met, really, atol=0.01, rtol=0)
    some = torch.tensor([4, 0, 3])
    of_some = noise_behind(tokens, logits, torch.full((ROWS,), 77), rows, some)
    torch.testing.assert_close(of_some, posterior[:, some])
