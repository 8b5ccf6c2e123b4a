"""Targets of published sizes with random weights that are made on the device, and drafts for them.

On the disk are a config.json and the draft. Nothing is learnt about acceptance: simulate it (`simulate_accept_length`).
Tokens choose their experts almost independently; those of real text hit fewer.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from slipstream.kernels.gemm.fp8 import E4M3
from slipstream.models.drafts.base import DraftNetwork, write_draft
from slipstream.models.drafts.dflash import DFlash, DFlashConfig, default_block_aux_layers
from slipstream.models.drafts.eagle3 import Eagle3, Eagle3Config
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.models.drafts.mtp import MTP, MTPConfig
from slipstream.models.files.weights import allocate
from slipstream.models.layers.formats.table import read_quantization
from slipstream.models.layers.quantized import quantize_by_config
from slipstream.models.targets.config import TargetSpec, default_aux_layers
from slipstream.models.targets.decoder import Target, load_config
from slipstream.serve.engine import build, members

SPREAD = 0.02  # standard deviation of the weights
EMBEDDING_SPREAD = 50.0  # so much that layers hardly change it: attention would make a prompt's tokens alike
DRAFT_VOCABULARY = 32_000
BY_LAYER = ("layer_types", "layer_rope_theta")  # fields with a value for each layer


def read_configs() -> dict[str, dict[str, Any]]:
    """Each target's config.json, by its name."""
    parts = yaml.safe_load(Path(__file__).with_name("published_configs.yaml").read_text())
    configs = {name: values for name, values in parts.items() if not name.startswith(".")}
    for values in configs.values():
        for name in set(BY_LAYER) & values.keys():
            values[name] = values[name] * (values["num_hidden_layers"] // len(values[name]))
    return configs


CONFIGS = read_configs()
DSPARK: dict[str, Any] = {"sample_from_anchor": True, "markov_rank": 256, "confidence_head": True}
HEADS: dict[str, dict[str, Any]] = {  # of block drafts, with the published sizes: fields of their configs
    "none": {},
    "dflash2": {"conv_kernel_size": 2, "selector_rank": 256},
    "dspark": DSPARK,
    "dspark-gated": DSPARK | {"markov_head_type": "gated"},
    "lilicorr": {"lilicorr": LiLiCorrConfig()},
    "lilicorr-conv": {"lilicorr": LiLiCorrConfig(), "conv_kernel_size": 2},
}
BLOCK_DRAFTS = HEADS | {"dflash": {}, "dspark-map": DSPARK | {"draft_vocab_size": 32_768}}
del BLOCK_DRAFTS["none"]
MTP_HEADS = {"mtp": None, "mtp-map": 32_768}  # tokens that they propose; None: all
DRAFTS = ("eagle3", *MTP_HEADS, *BLOCK_DRAFTS)


class Pair(NamedTuple):
    target: str
    draft: str


@contextmanager
def random_pair(name: str, draft: str = "eagle3") -> Iterator[Pair]:
    """Folders of a target and a draft, one of DRAFTS, for engines built in this process within the context.

    Raises ValueError for an unknown name.
    """
    if draft not in DRAFTS:
        raise ValueError(f"draft is random:{draft}; choose of {', '.join(DRAFTS)}")
    if name not in CONFIGS:
        raise ValueError(f"shape is {name!r}; choose of {', '.join(CONFIGS)}")
    load = build.load_target
    follower = members.MODULE
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(f"{folder}/{name}", f"{folder}/{draft}-draft")
        for path in map(Path, pair):
            path.mkdir()
        (Path(pair.target) / "config.json").write_text(json.dumps(CONFIGS[name]))
        save_draft(load_config(Path(pair.target)), pair, draft)
        build.load_target = make_target
        members.MODULE = "slipstream.bench.random_follower"
        try:
            yield pair
        finally:
            build.load_target = load
            members.MODULE = follower


def published_spec(name: str) -> TargetSpec:
    with _folder(name) as path:
        return load_config(path)


def published_target(
    name: str, dtype: torch.dtype, device: torch.device, quantization: str | None = None, **fields: Any
) -> Target:
    """A target of CONFIGS with random weights; `quantization` "fp8" quantises 16-bit weights on the fly, `fields` take
    the place of those of its config.json."""
    with _folder(name, **fields) as path:
        return make_target(path, load_config(path), dtype, device, quantization=quantization)


@contextmanager
def _folder(name: str, **fields: Any) -> Iterator[Path]:
    values = CONFIGS[name] | fields
    values |= {key: values[key][: values["num_hidden_layers"]] for key in set(BY_LAYER) & values.keys()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        yield Path(folder)


def save_draft(target: TargetSpec, pair: Pair, name: str) -> None:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        make = new_mtp if name in MTP_HEADS else new_eagle3 if name == "eagle3" else new_block
        draft = make(target, pair.target, name)
    for parameter in draft.parameters():
        fill(parameter.data)
    size = draft.config.draft_vocab_size
    if size is not None and size < target.vocab_size:
        draft.set_vocabulary(torch.arange(size))
    write_draft(draft, draft.state_dict(), Path(pair.draft), {})


def new_eagle3(target: TargetSpec, path: str, _name: str) -> DraftNetwork:
    size = min(DRAFT_VOCABULARY, target.vocab_size)
    fields = {"aux_layers": default_aux_layers(target.num_layers), "target": path}
    return Eagle3(Eagle3Config.from_target(target, draft_vocab_size=size, **fields)).bfloat16()


def new_mtp(target: TargetSpec, path: str, name: str) -> DraftNetwork:
    """A head as the target's family has it, or of the common form."""
    size = MTP_HEADS[name]
    fields = {} if size is None else {"draft_vocab_size": min(size, target.vocab_size)}
    return MTP(MTPConfig.from_target(target, target=path, **fields)).bfloat16()


def new_block(target: TargetSpec, path: str, name: str) -> DraftNetwork:
    """A block draft of five layers that reads five states."""
    sizes = {"num_layers": 5, "aux_layers": default_block_aux_layers(target.num_layers, 5), "mask_token_id": 0}
    sizes["block_size"] = 7 if "sample_from_anchor" in BLOCK_DRAFTS[name] else 8  # seven drafted tokens
    fields: dict[str, Any] = sizes | {"target": path} | BLOCK_DRAFTS[name]
    if (size := fields.get("draft_vocab_size")) is not None:
        fields["draft_vocab_size"] = min(size, target.vocab_size - 1)
    return DFlash(DFlashConfig.from_target(target, **fields)).bfloat16()


def make_target(
    path: Path,
    config: TargetSpec,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    rank: int = 0,
    world: int = 1,
    *,
    whole_experts: bool = False,
) -> Target:
    """In place of decoder.load_target. All ranks have the same numbers."""
    formats = read_quantization(path, quantization)
    with torch.device("meta"):
        target = Target(config.shard(rank, world, whole_experts=whole_experts))
    target.config = config
    quantize_by_config(target, formats)
    allocate(target, dtype, device)
    torch.manual_seed(0)
    for name, parameter in target.named_parameters():
        fill(parameter.data, vector=0.0 if name.endswith("bias") else 1.0)
    target.embed_tokens.weight.data.normal_(std=EMBEDDING_SPREAD)
    for name, buffer in target.named_buffers():
        fill_codes(name, buffer)
    target.quantization = formats
    target.path = path
    target.trust_remote_code = trust_remote_code
    return target.eval().requires_grad_(False)


def fill_codes(name: str, buffer: torch.Tensor) -> None:
    """Fills a tensor of quantised weights, codes of e4m3, 4-bit codes in words, or scales, so that weights spread by
    SPREAD, or less where codes are integers."""
    if buffer.dtype == E4M3:
        for part in buffer.view(torch.uint8).flatten().split(1 << 26):
            part.random_(0, 256)
            part[(part & 127) == 127] = 0  # no NaN
    elif name.endswith("words"):
        half = torch.iinfo(buffer.dtype).max + 1
        buffer.random_(-half, half)
    elif buffer.dtype == torch.int32:
        buffer.fill_(0x78787878)  # four times 2^-7
    else:
        values = torch.arange(256).to(torch.uint8).view(E4M3).float()
        buffer.fill_(SPREAD / values[values.isfinite()].square().mean().sqrt().item())


def fill(tensor: torch.Tensor, vector: float = 1.0) -> None:
    """Matrices at random, the elements of a vector, such as a norm's scales, with one number."""
    if tensor.dim() == 1:
        tensor.fill_(vector)
    else:
        tensor.normal_(std=SPREAD)
