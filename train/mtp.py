"""Trains an MTP head (multi-token prediction) for a target: the target's own layer further, by its chain of drafted
tokens, or a new one for a target without (models/drafts/mtp.py).

    slipstream train mtp --config configs/mtp/tiny.yaml --optim.lr 1e-3
    accelerate launch train/mtp.py --config configs/mtp/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from slipstream.config import begin, run
from slipstream.train.mtp_options import DraftOptions, MTPOptions

if __name__ == "__main__":
    begin(MTPOptions, "train/mtp.py")

from functools import partial

import torch
from torch import Tensor, nn

from slipstream.models.drafts.base import EMBEDDING, HEAD
from slipstream.models.drafts.mtp import MTP, MTPConfig, check_count, file_keys, read_mtp
from slipstream.models.files.checkpoint import read_tensors, tensor_names
from slipstream.models.files.weights import public_tensors
from slipstream.models.layers.formats.base import QuantizedExperts
from slipstream.models.layers.formats.table import read_quantization
from slipstream.models.layers.moe import Router
from slipstream.models.targets.config import AttentionSpec, MoESpec
from slipstream.models.targets.decoder import decoder_tensors, target_name
from slipstream.models.targets.families import MTP_FORMS
from slipstream.models.targets.frozen import dequantized_tensors
from slipstream.train.draft_setup import train
from slipstream.train.loop import leave_processes
from slipstream.train.losses import regression_losses
from slipstream.train.options import OptimOptions
from slipstream.train.target_files import TargetFiles
from slipstream.train.text_noise import RowValues
from slipstream.train.training import Metrics
from slipstream.train.ttt import ChainStep, FrozenHeadTraining

CPU = torch.device("cpu")


class MTPTraining(FrozenHeadTraining):
    """Distance of the head's distributions at each step of the chain; of a new layer also of the states."""

    Network = MTP
    share_of_rate = 0.33  # of a layer that is trained already
    state_weight = 1.0  # of a smooth L1 loss between the states that the head reads

    @classmethod
    def new_draft(cls, options: DraftOptions, files: TargetFiles) -> MTP:
        draft = files.new_draft(MTP, options)
        check_layer(draft.config, options)
        if begins_in_target(draft.config, options) and not files.options.dry_run:
            copy_weights(read_module(files), draft)
        return draft

    @torch.no_grad()
    def start(self, *, continues: bool = False) -> str:
        """Routers keep sending tokens to the experts that know them, and a final norm that is the target's stays."""
        form = MTP_FORMS.get(self.draft.config.form)
        if form is not None and not form.has_norm:
            for module in self.draft.in_turn:
                module.norm.requires_grad_(False)
        for module in self.draft.modules():
            if isinstance(module, Router):
                module.requires_grad_(False)
        if self.draft.config.form or not self.options.init_from_target:
            return ""
        weights = self.target.initial_weights(0)
        if "norm.weight" in weights:
            self.draft.norm.get_parameter("weight").copy_(weights["norm.weight"])
        return "the MTP layer starts at random: the target has none"

    def peak_lr(self, optim: OptimOptions, tokens: float) -> float:
        rate = super().peak_lr(optim, tokens)
        is_default = optim.lr is None and begins_in_target(self.draft.config, self.options)
        return self.share_of_rate * rate if is_default else rate

    def network_of(self, step: int) -> tuple[nn.Module, int]:
        """The modules in turn, and the last one for all later steps."""
        index = min(step, self.draft.config.num_modules - 1)
        return self.draft.in_turn[index], step - index

    def embeds(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embeds = super().embeds(tokens, positions)
        return torch.where(positions[:, None] == 0, 0, embeds) if self.draft.config.zero_first else embeds

    def predictions(self, states: Tensor, noise: RowValues | None = None) -> Tensor:
        return super().predictions(self.draft.head_input(states), noise)

    def objective(self, index: int, step: ChainStep) -> tuple[Tensor, Tensor, Metrics]:
        loss, drafted = self.distance(step, self.options.loss)
        sums: Metrics = {}
        if not begins_in_target(self.draft.config, self.options):
            regression = (regression_losses(step.states, step.final) * step.row_weights).sum()
            loss = loss + self.state_weight * regression
            sums = {"state_loss": regression}
        return self.options.ttt_decay**index * loss, drafted, sums


def begins_in_target(config: MTPConfig, options: DraftOptions) -> bool:
    """Whether training begins with a layer of the target's files."""
    return bool(config.form) and options.init_from_target


def check_layer(config: MTPConfig, options: DraftOptions) -> None:
    """Raises ValueError for a layer that training lacks."""
    layer = config.layer_spec
    attention = layer.attention
    plain = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, rope=attention.rope)
    fields = ("norm_last", "projection_norm", "sinks", "softcap", "scale", "value_norm", "key_is_value", "kv_source")
    strange = [name for name in fields if getattr(attention, name) != getattr(plain, name)]
    if strange:
        raise ValueError(f"the MTP layer of {config.form} has {', '.join(strange)}, which training lacks")
    if not config.form:
        return
    count = config.num_modules
    if options.ttt_steps < count:
        raise ValueError(
            f"draft.ttt_steps is {options.ttt_steps}, but the target has {count} MTP modules, which draft in turn; "
            f"give at least {count}, so that each is trained"
        )
    if count > 1 and attention.window is not None:
        raise ValueError(f"the {count} MTP modules of {config.form} have windows, which training of several lacks")
    if options.intermediate_size is not None:
        raise ValueError(
            f"draft.intermediate_size is {options.intermediate_size}, but the MTP layer of {config.form} has the size "
            "of its family; leave the option out"
        )
    if isinstance(layer.mlp, MoESpec) and not options.init_from_target:
        raise ValueError(
            f"draft.init_from_target is false, but the MTP layer of {config.form} has experts, whose router is not "
            "trained; leave the option out"
        )


def read_module(files: TargetFiles) -> MTP:
    """Reads the modules in the target's files. Raises ValueError where there are none, or one with an embedding or a
    head of its own."""
    if not file_keys(tensor_names(files.path), files.config):
        raise ValueError(
            f"target {files.options.target} has an MTP layer by its config.json, but not in its files; fetch a "
            "checkpoint that keeps it, or set draft.init_from_target to false to begin at random"
        )
    check_count([target_name(name) for name in tensor_names(files.path)], files.config, files.path)
    tensors = decoder_tensors(read_tensors(files.path))
    shared = {EMBEDDING: tensors[EMBEDDING], HEAD: tensors.get(HEAD, tensors[EMBEDDING])}
    module = read_mtp(files.path, files.config, read_quantization(files.path), torch.float32, CPU, shared)
    if module.embed_tokens is not None or module.lm_head is not None:
        name = "output head" if module.embed_tokens is None else "embedding"
        raise ValueError(
            f"the MTP layer of target {files.options.target} has an {name} of its own, which training lacks; set "
            "draft.init_from_target to false to begin at random"
        )
    if any(isinstance(part, QuantizedExperts) for part in module.modules()):
        raise ValueError(
            f"the MTP layer of target {files.options.target} has quantised experts, which training cannot begin with; "
            "name the target in 16 bits"
        )
    return module


@torch.no_grad()
def copy_weights(module: MTP, draft: MTP) -> None:
    weights = public_tensors(module) | dequantized_tensors(module)
    for name, tensor in public_tensors(draft).items():
        if name not in ("d2t", "t2d"):
            tensor.copy_(weights[name])


program = partial(train, kind=MTPTraining)
main = partial(run, program, MTPOptions, "train/mtp.py")

if __name__ == "__main__":
    main()
    leave_processes()
