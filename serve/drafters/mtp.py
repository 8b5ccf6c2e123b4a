"""MTP drafter: the module that predicts a token more drafts, as EAGLE's network does. It is in the target's own files,
or in a draft checkpoint that train/mtp.py wrote."""

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
    def read_config(cls, source: DraftSource, options: Any, target: TargetSpec) -> MTPConfig:
        if not source.is_in_target:
            return super().read_config(source, options, target)
        path = source.folder()
        config = MTPConfig.of(target, path)
        check_files(config, target, path)
        return config

    @classmethod
    def read_network(cls, source: DraftSource, options: Any, target: Target) -> MTP:
        return load_mtp(target) if source.is_in_target else super().read_network(source, options, target)

    def embeds(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embeds = super().embeds(tokens, positions)
        return torch.where(positions[:, None] == 0, 0, embeds) if self.module.config.zero_first else embeds
