"""How ranks meet."""

import logging

import torch

from slipstream.kernels.collectives.peer_ranks import PeerRanks
from slipstream.kernels.collectives.ranks import TIMEOUT, GroupRanks, NCCLRanks, Ranks

logger = logging.getLogger(__name__)


def join_ranks(device: torch.device, rank: int, world: int, file: str) -> Ranks:
    """Joins the ranks that meet in `file`, which does not exist before; waits for all. On GPUs the current one is the
    rank's. Raises RuntimeError where the others do not come."""
    from torch import distributed  # here, since few processes need it

    store = distributed.FileStore(file, world)
    group = distributed.ProcessGroupGloo(store, rank, world, TIMEOUT)
    if device.type == "cpu":
        return GroupRanks(group, rank, world)
    if all(torch.cuda.can_device_access_peer(rank, other) for other in range(world) if other != rank):
        return PeerRanks(group, rank, world, torch.device("cuda", rank))
    logger.warning("GPU %d does not reach the others' memory: sums over ranks take NCCL, and more time", rank)
    options = distributed.ProcessGroupNCCL.Options()
    return NCCLRanks(distributed.ProcessGroupNCCL(store, rank, world, options), rank, world)
