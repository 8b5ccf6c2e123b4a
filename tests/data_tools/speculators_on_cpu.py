"""`speculators train` (0.9.0) on a CPU, for test_train_on_in_speculators.py.

The trainer asks for an accelerator. Replaced are the device that it moves tensors to and the calls that need a driver;
nothing of the training itself. Its attention and loss for a CPU are its own flags (CPU_FLAGS in the test).
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
