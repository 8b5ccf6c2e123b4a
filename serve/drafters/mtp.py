"""MTP drafter: the module that predicts a token more drafts, as EAGLE's network does. It is in the target's own files,
or in a draft checkpoint that train/mtp.py wrote."""

import torch
from torch import Tensor

from slipstream.models.drafts.mtp import MTP, MTPConfig, check_files, load_mtp
from slipstream.models.drafts.mtp_trial import choose_hidden
from slipstream.models.drafts.source import DraftSource
from slipstream.models.layers.formats.base import Tensors
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import Target
from slipstream.models.targets.families import MTP_FORMS
from slipstream.serve.drafters.mtp_modules import ModulesDrafter
from slipstream.serve.drafters.options import MTPOptions


class Drafter(ModulesDrafter):
    Network = MTP

    @classmethod
    def read_config(cls, source: DraftSource, options: MTPOptions, target: TargetSpec) -> MTPConfig:
        if not source.is_in_target:
            check_no_choice(options, "draft checkpoints read")
            return super().read_config(source, options, target)
        path = source.folder()
        config = MTPConfig.of(target, path)
        check_files(target, path)
        if MTP_FORMS[target.architecture].hidden is not None:
            check_no_choice(options, f"MTP heads of {target.architecture} read")
        return config

    @classmethod
    def read_network(
        cls, source: DraftSource, options: MTPOptions, target: Target, device: torch.device, shared: Tensors | None
    ) -> MTP:
        if not source.is_in_target:
            return super().read_network(source, options, target, device, shared)
        module = load_mtp(target)
        choose_hidden(module, target, options.hidden or MTP_FORMS[target.config.architecture].hidden)
        return module

    def embeds(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embeds = super().embeds(tokens, positions)
        return torch.where(positions[:, None] == 0, 0, embeds) if self.module.config.zero_first else embeds


def check_no_choice(options: MTPOptions, readers: str) -> None:
    """Raises ValueError for a choice of the state that is read, where `readers` leave none."""
    if options.hidden is not None:
        raise ValueError(
            f"drafter.hidden is {options.hidden}, but {readers} the state after the final norm; leave the option out"
        )
