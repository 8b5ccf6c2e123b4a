"""Both ends of a round: the kernels against the references, and the references against loops."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.speculation.round_state import end_round, start_round, store_proposal
from slipstream.tests.kernels.triton_runs import DEVICES

NULL = 9


def state(device: str, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    tokens = torch.randint(-1, 50, (NULL + 1, width + 2), dtype=torch.int32, generator=generator)
    parents = torch.randint(-1, width + 2, (NULL + 1, width + 2), dtype=torch.int32, generator=generator)
    lengths = torch.randint(0, 900, (NULL + 1,), dtype=torch.int32, generator=generator)
    rows = torch.tensor([4, 0, 8, NULL, NULL])
    return tokens.to(device), parents.to(device), lengths.to(device), rows.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 4, 64])
def test_a_round_starts_with_what_its_rows_hold(device: str, width: int) -> None:
    tokens, parents, lengths, rows = state(device, width)
    for start in (start_round.triton, start_round.reference):
        found = start(tokens, parents, lengths, rows, width)
        assert found.tokens.tolist() == [tokens[row, :width].tolist() for row in rows.tolist()]
        assert found.parents.tolist() == [parents[row, :width].tolist() for row in rows.tolist()]
        assert found.lengths.tolist() == [int(lengths[row]) for row in rows.tolist()]
        assert found.inputs.tolist() == [max(0, token) for row in found.tokens.tolist() for token in row]
        assert [x.dtype for x in found] == [torch.int32, torch.int32, torch.int64, torch.int64]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 4, 64])
def test_a_round_ends_with_its_tokens_committed(device: str, width: int) -> None:
    _, _, lengths, rows = state(device, width)
    generator = torch.Generator().manual_seed(width)
    counts = torch.randint(1, width + 1, (len(rows),), dtype=torch.int32, generator=generator).to(device)
    emitted = torch.randint(0, 50, (len(rows), width), dtype=torch.int32, generator=generator).to(device)
    emitted[0, counts[0] - 1] = -1  # a token that could not be sampled: no index of an embedding
    emitted.masked_fill_(torch.arange(width, device=device) >= counts[:, None], -1)
    before = lengths[rows].long()
    for end in (end_round.triton, end_round.reference):
        after = lengths.clone()
        found = end(after, rows, NULL, before, emitted, counts)
        expected = lengths.tolist()
        for index, row in enumerate(rows.tolist()):
            expected[row] = 0 if row == NULL else int(before[index] + counts[index])
        assert after.tolist() == expected
        assert found.lengths.tolist() == (before + counts).tolist()
        last = [int(emitted[index, count - 1]) for index, count in enumerate(counts.tolist())]
        assert found.roots.tolist() == [max(0, token) for token in last]
        assert found.results.tolist() == torch.cat((counts[:, None], emitted), dim=1).tolist()
        assert [x.dtype for x in found] == [torch.int64, torch.int64, torch.int32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "dtype"), [(1, torch.int32), (4, torch.int64), (64, torch.int32)])
def test_a_proposal_replaces_all_that_its_row_held(width: int, dtype: torch.dtype, device: str) -> None:
    tokens, parents, _, rows = state(device, width)
    rows = rows[:4]  # where row NULL is there twice, either may stay
    nodes = torch.arange(4 * width, dtype=dtype, device=device).view(width, 4).t()
    chain = torch.arange(-1, width - 1, dtype=dtype, device=device).expand(4, width)
    for store in (store_proposal.triton, store_proposal.reference):
        found = tokens.clone(), parents.clone()
        store(*found, rows, nodes, chain)
        for stored, before, new in zip(found, (tokens, parents), (nodes, chain), strict=True):
            expected = before.tolist()
            for index, row in enumerate(rows.tolist()):
                expected[row] = [*new[index].tolist(), -1, -1]
            assert stored.tolist() == expected
