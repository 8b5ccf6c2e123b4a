"""`speculators train` (0.9.0) on a CPU: bench/peer_training.py runs it with the Python that has this package.

    PEER_PYTHON -P bench/speculators_on_cpu.py --verifier-name-or-path TARGET --num-workers 0 ...

The trainer asks for an accelerator. Replaced are the device that it moves tensors to and the calls that need a driver;
nothing of the training itself. Its attention and loss for a CPU are its own flags (CPU_FLAGS in peer_training.py).
"""

import sys

import torch
from speculators.train import cli, trainer
from speculators.train.config import TrainConfig

CPU = torch.device("cpu")

trainer.get_local_rank = lambda: CPU
torch.accelerator.is_available = lambda: False
torch.accelerator.synchronize = lambda *_: None
torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else CPU
if __name__ == "__main__":  # a loader process (--num-workers) imports this file
    cli.main(TrainConfig.resolve(sys.argv[1:]))
