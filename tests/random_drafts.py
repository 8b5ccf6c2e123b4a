"""EAGLE3 drafts for the tiny random targets. Started from the target's own weights, they are right now and then."""

from pathlib import Path

import torch

from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.eagle3_checkpoint import save_eagle3
from slipstream.models.target import load_config, load_target

SEED = 4  # with it, 10 to 50 % of the drafted tokens are accepted, greedy or not


def random_draft(target: Path, draft_vocab_size: int | None = None, seed: int = SEED) -> Eagle3:
    """A draft as wide as the target in the folder `target`; a reduced vocabulary leaves out ids all over the range."""
    config = load_config(target)
    model = load_target(target, config, torch.float32, torch.device("cpu"))
    torch.manual_seed(seed)
    module = Eagle3(
        Eagle3Config.from_target(
            config,
            draft_vocab_size=draft_vocab_size or config.vocab_size,
            feature_layers=(1, 2, config.num_layers),
            target=str(target),
        )
    )
    module.set_vocabulary(torch.randperm(config.vocab_size)[: module.config.draft_vocab_size].sort().values)
    mlp = model.layers[-1].mlp
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": mlp.down_proj.weight}
    module.init_from_target(model.head, model.norm.weight, parts)
    return module


def save_random_draft(target: Path, folder: Path, draft_vocab_size: int | None = None, seed: int = SEED) -> None:
    module = random_draft(target, draft_vocab_size, seed)
    folder.mkdir(parents=True)
    save_eagle3(module, module.state_dict(), folder, {})
