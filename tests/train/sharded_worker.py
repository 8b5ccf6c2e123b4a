"""One of several processes (torchrun): trains with a whole and with a shared-out target, then looks at the shares.

    torchrun --nproc_per_node 2 tests/train/sharded_worker.py JOBS.json

JOBS.json: `runs`, a list of [program, flags]; `targets`, folders; `stranger`, two folders of unlike models. Each
process writes what it found to JOBS.RANK.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from slipstream.models.targets.frozen import (
    FrozenTarget,
    TransformersTarget,
    decoder_layers,
    empty_model,
    load_frozen_target,
    read_model,
)
from slipstream.models.targets.sharded import sharding_mesh, share_out
from slipstream.train import dflash, eagle3
from slipstream.train.loop import leave_processes

PROGRAMS = {"eagle3": eagle3.main, "dflash": dflash.main}
ON_CPU = os.environ.get("ACCELERATE_USE_CPU") == "true"
DEVICE = torch.device("cpu" if ON_CPU else f"cuda:{os.environ['LOCAL_RANK']}")


def look_at(path: Path) -> dict[str, Any]:
    """Shares of the first layer, and whether training reads the same from both targets.

    States up to rounding: where a gathered weight lies in memory decides in which order the CPU's library adds. All
    comparisons are made before any is judged: a process that left early would gather alone.
    """
    unsharded = TransformersTarget(read_model(path, DEVICE, False).to(DEVICE), (2, 0, 4))
    shared = load_frozen_target(path, (2, 0, 4), DEVICE, mesh=sharding_mesh(DEVICE, within_machine=True))
    compared = [is_equal(unsharded, shared, width) for width in (9, 5, 12)]
    states = [target.layers[1].state_dict() for target in (unsharded, shared)]
    equal = all(compared) and states[0].keys() == states[1].keys()
    equal &= all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    shares = {name: x.to_local().numel() for name, x in shared.layers[0].named_parameters() if isinstance(x, DTensor)}
    sizes = {name: x.numel() for name, x in unsharded.layers[0].named_parameters()}
    outside = [type(x).__name__ for name, x in shared.model.named_parameters() if ".layers." not in name]
    return {"equal": equal, "shares": shares, "sizes": sizes, "outside": outside}


def is_equal(unsharded: FrozenTarget, shared: FrozenTarget, width: int) -> bool:
    """Compares them on rows of this process alone, of a length of its own, two documents each."""
    rank = distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 120, (2, width + rank), generator=generator).to(DEVICE)
    positions = torch.cat((torch.arange(4), torch.arange(width + rank - 4))).expand(2, -1).to(DEVICE)

    def read(target):
        aux_states, final = target.aux_states(tokens, positions)
        return [aux_states, final, target.embed(tokens), *target.logits(final[0], torch.arange(0, 120, 7))]

    return all(torch.allclose(*pair, rtol=0, atol=2e-6) for pair in zip(read(unsharded), read(shared), strict=True))


def refusal(path: Path, other: Path) -> str:
    mesh = sharding_mesh(DEVICE, within_machine=False)
    model = empty_model(path, False)
    source = read_model(other, DEVICE, False)
    try:
        share_out(model, decoder_layers(model), source if mesh.get_local_rank() == 0 else None, mesh, DEVICE)
    except ValueError as error:
        return str(error)
    return "none"


def main(path: Path):
    torch.set_num_threads(1)
    jobs = json.loads(path.read_text())
    for program, flags in jobs["runs"]:
        PROGRAMS[program](flags)
    results = {"targets": [look_at(Path(folder)) for folder in jobs["targets"]]}
    results["refusal"] = refusal(*map(Path, jobs["stranger"]))
    path.with_suffix(f".{distributed.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave_processes()
