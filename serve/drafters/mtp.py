"""MTP drafter: the module in the target's own files that predicts a token more drafts, as EAGLE's network does."""

from typing import Any

import torch
from torch import Tensor

from slipstream.models.drafts.mtp import MTP, MTPConfig, check_files, load_mtp
from slipstream.models.drafts.source import DraftSource
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import Target
from slipstream.serve.drafters.autoregressive import AutoregressiveDrafter


class Drafter(AutoregressiveDrafter):
    Network = MTP
    module: MTP

    @classmethod
    def read_config(cls, source: DraftSource, options: Any, target: TargetSpec) -> MTPConfig:  # noqa: ARG003
        path = source.folder()
        config = MTPConfig.of(target, path)
        check_files(config, target, path)
        return config

    @classmethod
    def read_network(cls, source: DraftSource, options: Any, target: Target) -> MTP:  # noqa: ARG003
        return load_mtp(target)

    def embeds(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embeds = super().embeds(tokens, positions)
        return torch.where(positions[:, None] == 0, 0, embeds) if self.module.config.zero_first else embeds
