"""Files of the target that a draft is trained for, and a new draft for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from slipstream.models.drafts.base import HEAD, DraftNetwork, Network
from slipstream.models.drafts.token_map import check_tokenizer, read_token_map
from slipstream.models.files.checkpoint import read_json, resolve, tokenizer_hash, weights_fingerprint
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.frozen import FrozenTarget, empty_target, is_served, load_frozen_target
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.models.targets.sharded import sharding_mesh
from slipstream.models.targets.sizes import TargetSize, target_size
from slipstream.train.draft_options import BaseDraftOptions, DraftRunOptions
from slipstream.train.warm_start import read_start, token_ids


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The target before its weights are read."""

    options: Any  # a program's DraftRunOptions
    accelerator: Accelerator
    path: Path
    config: TargetSpec
    tokenizer: PreTrainedTokenizerBase
    tokenizer_hash: str
    start: DraftNetwork | None = None  # if init_from is given: the draft there, or the newest of a run that continues

    @classmethod
    def find(cls, options: DraftRunOptions, accelerator: Accelerator, network: type[DraftNetwork]) -> "TargetFiles":
        """The files of `options.target`, and the draft to start from."""
        trust = options.trust_remote_code
        path = resolve(options.target, options.revision, trust_remote_code=trust)
        config = load_config(path, trust)
        tokenizer = load_tokenizer(path, trust)
        start = None
        if options.init_from is not None:
            newest = options.newest_step
            option = "init_from" if newest is None else "output"
            name = options.init_from if newest is None else str(newest)
            start = read_start(option, name, network, options.DRAFTER, config)
        return cls(options, accelerator, path, config, tokenizer, tokenizer_hash(tokenizer), start)

    def new_draft(self, network: type[Network], options: BaseDraftOptions, **fields: Any) -> Network:
        """A random draft for this target; `fields` of its config."""
        ids = self.read_vocabulary(options.vocabulary)
        has_map = len(ids) < self.config.vocab_size or HEAD not in network.shared  # a head of its own always has one
        fields |= {"draft_vocab_size": len(ids) if has_map else None, **self.origin()}
        width = options.intermediate_size or self.config.intermediate_size
        module = network(network.Config.from_target(self.config, intermediate_size=width, **fields))
        if has_map:
            module.set_vocabulary(ids)
        return module

    def origin(self) -> dict[str, Any]:
        return {
            "target": self.options.target,
            "target_revision": self.options.revision,
            "target_fingerprint": weights_fingerprint(self.path),
            "tokenizer_hash": self.tokenizer_hash,
        }

    def freeze(self, aux_layers: tuple[int, ...], starting_layers: int) -> FrozenTarget:
        """Reads the target; if it does not run, only the `starting_layers` last layers, from which the draft starts."""
        if self.options.dry_run:
            return empty_target(self.path, aux_layers, self.options.trust_remote_code)
        data = self.options.data
        sharding = self.options.target_sharding
        device = self.accelerator.device
        is_stored = data.aux_states is not None and data.aux_states_missing == "error"
        last_layers = starting_layers if is_stored or self.options.states.is_used else None
        mesh = None if sharding == "none" else sharding_mesh(device, within_machine=sharding == "machine")
        target = load_frozen_target(self.path, aux_layers, device, self.options.trust_remote_code, last_layers, mesh)
        if self.options.target_compile:
            target.compile_layers()
        return target

    def size(self, dtype: torch.dtype) -> TargetSize | None:
        """Size of the target's weights, before they are read; None where transformers is to run it."""
        if self.options.target_sharding != "none" or not is_served(read_json(self.path / "config.json")):
            return None
        return target_size(self.path, self.config, dtype)

    def read_vocabulary(self, path: str | None) -> Tensor:
        """(Vd,) int64 ids of the token map at `path`, in any public format; without a map those of the draft to start
        from, or all of the target's. Raises ValueError for another target's."""
        if path is None:
            return torch.arange(self.config.vocab_size) if self.start is None else token_ids(self.start)
        token_map = read_token_map(Path(path), self.config.vocab_size)
        check_tokenizer(token_map, self.tokenizer_hash, f"draft.vocabulary {path}")
        return token_map.ids
