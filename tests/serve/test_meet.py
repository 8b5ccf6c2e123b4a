"""How ranks meet, and how rank 0 misses them."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from slipstream.kernels.collectives.ranks import Ranks, join_ranks
from slipstream.serve.engine import team as teams

CPU = torch.device("cpu")
WORLD = 3


def test_all_have_joined_when_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may remove the file then, which the others read while they join."""
    joined: set[int] = set()

    def join_late(device: torch.device, rank: int, world: int, file: str) -> Ranks:
        ranks = join_ranks(device, rank, world, file)
        time.sleep(0.2 * rank)
        joined.add(rank)
        return ranks

    def meet(rank: int) -> set[int]:
        teams.meet(CPU, rank, WORLD, str(tmp_path / "ranks"))
        return set(joined)

    monkeypatch.setattr(teams, "join_ranks", join_late)
    with ThreadPoolExecutor(WORLD) as pool:
        assert list(pool.map(meet, range(WORLD))) == [{0, 1, 2}] * WORLD
