"""Enlarges a small Qwen3 target and its draft without changing their function, to measure speed-ups end to end.

    python bench/inflate.py --draft EAGLE3 --shape llama31-8b --output runs/llama31-8b --device cuda
    python bench/inflate.py --draft EAGLE3 --more.dflash2 DFLASH2 --more.dspark DSPARK --output runs/llama31-8b

Writes OUTPUT/target and OUTPUT/draft, and OUTPUT/draft-NAME of each of `more`: ordinary checkpoints that emit the
small pair's tokens at the big pair's cost: real text, real acceptance, real cost. The tokens are the same up to
floating-point ties, since sums over more channels may round otherwise. Of the big vocabulary only the small one's
tokens are ever emitted.

How: hidden channels, heads, neurons, layers and vocabulary rows are added so that none of them changes what the small
ones compute (bench/inflate_weights.py). At both 8B shapes 70 % of the target's weights are random at their ordinary
size, 30 % (o_proj, down_proj, padding of embeddings) are random but so small that they vanish in every sum, 0.1 % are
the small target's and 0.007 % are zero. Activations beyond the small model's channels are as small, too.

"llama31-8b" has Llama-3.1-8B's sizes under Qwen3ForCausalLM, since Llama has no q/k norms. The small model's rotary
embedding, head size and ratio of query to KV heads stay. The draft is of the same kind as the small one: an EAGLE3 head
without the flags of EAGLE-3.1 (train with --draft.norms [qk_norm]), or a block draft with its convolutions, selector,
Markov head and confidence head; LiLiCorr's scorer is refused.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from slipstream.bench.inflate_weights import (
    RANK,
    SHAPES,
    Inflation,
    Make,
    Shape,
    check,
    check_layer,
    check_room,
    places,
    target_json,
)
from slipstream.config import run
from slipstream.models.drafts.base import DraftNetwork, ids_of, load_draft
from slipstream.models.drafts.dflash import DFlash, DFlashConfig
from slipstream.models.drafts.eagle3 import FLAGS, Eagle3
from slipstream.models.drafts.heads.config import HeadConfig, LiLiCorrConfig
from slipstream.models.drafts.heads.markov import MarkovConfig
from slipstream.models.drafts.heads.selector import SelectorConfig
from slipstream.models.drafts.source import source_of
from slipstream.models.files.atomic import atomic_folder
from slipstream.models.files.checkpoint import (
    INDEX,
    read_json,
    resolve,
    tokenizer_hash,
    weights_fingerprint,
    write_checkpoint,
)
from slipstream.models.files.outputs import CHECKPOINT, FolderKind, check_output_folder
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.serve.options import EngineConfig, find_target

CPU = torch.device("cpu")
NUM_LAYERS = 5  # of a big DFLASH draft
NUM_STATES = 5
NAME = r"[A-Za-z0-9._-]+"  # of one of `more`
PAIR = FolderKind(
    "an enlarged target and draft",
    ("target/config.json", *(f"draft/{name}" for name in CHECKPOINT.markers)),
    (r"target/[^/]+\.(json|safetensors|jinja|txt|model)", *CHECKPOINT.below(f"draft(?:-{NAME})?")),
)
COPIED = ("tokenizer*", "*.jinja", "generation_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class InflateConfig:
    """Enlarge a small target and its draft."""

    draft: str
    """Draft checkpoint of the small target."""
    output: str
    """Folder for target/ and draft/. Replaces an earlier pair."""
    more: dict[str, str] = field(default_factory=dict)
    """More draft checkpoints of the same target, by a name of your choice: --more.NAME PATH."""
    target: str = ""
    """The small target. Default: the target of the draft."""
    shape: Literal["llama31-8b", "qwen3-8b", "mid", "small"] = "llama31-8b"
    """Sizes to reach."""
    seed: int = 0
    """Seed of the random weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where random weights are made."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.more if not re.fullmatch(NAME, name)]:
            raise ValueError(f"more has the name {unknown[0]!r}; give letters, digits, dots, dashes and underscores")

    @property
    def drafts(self) -> dict[str, str]:
        """Folders below `output` -> the small checkpoints."""
        return {"draft": self.draft} | {f"draft-{name}": path for name, path in self.more.items()}


@dataclass(frozen=True, slots=True)
class Draft:
    """A small draft and how to enlarge it."""

    config: Any
    weights: Mapping[str, Tensor]
    """By public name, projections taken apart."""

    network: ClassVar[type[DraftNetwork]]

    @classmethod
    def load(cls, path: Path, model: TargetSpec) -> "Draft":
        """Reads the draft of the target `model` in bf16."""
        module: Any = load_draft(cls.network, path, model, torch.bfloat16, CPU)
        return cls(module.config, public_tensors(module))

    def check(self, model: TargetSpec, shape: Shape) -> None:
        """Raises ValueError naming what of the target or the draft does not fit."""
        check(model, shape)
        config = self.config
        if config.attention_bias:
            raise ValueError("draft has attention_bias; only drafts without biases can be inflated")
        if config.hidden_size != model.hidden_size:
            raise ValueError(
                f"draft has hidden_size {config.hidden_size}, its target {model.hidden_size}; make them equal"
            )
        check_layer("draft", config, shape)
        if config.draft_vocab_size is not None:
            check_room("draft_vocab_size", config.draft_vocab_size, shape.draft_vocab_size)
            unused = shape.draft_vocab_size - config.draft_vocab_size
            check_room("unused draft tokens", unused, shape.vocab_size - model.vocab_size)

    def big_config(self, shape: Shape, **fields: Any) -> Any:
        """Config of the big draft; `fields`: target, target_fingerprint, tokenizer_hash, and what only some have."""
        config = self.config
        sizes = "hidden_size intermediate_size num_heads num_kv_heads vocab_size max_position_embeddings"
        return replace(
            config,
            **{name: getattr(shape, name) for name in sizes.split()},
            draft_vocab_size=None if config.draft_vocab_size is None else shape.draft_vocab_size,
            rms_norm_eps=config.rms_norm_eps * config.hidden_size / shape.hidden_size,
            target_hidden_size=shape.hidden_size,
            target_num_layers=shape.num_layers,
            target_revision=None,
            aux_layers=tuple(self.states(shape)),
            **fields,
        )

    def states(self, shape: Shape) -> dict[int, int | None]:
        """States of the big target that the big draft reads, in order -> the small draft's that each is; None: an added
        one."""
        return {layer: index for index, layer in enumerate(self.aux_states(shape))}

    def aux_states(self, shape: Shape) -> tuple[int, ...]:
        """States of the big target that equal the small draft's aux hidden states."""
        place_of = {index: big for big, index in places(self.config.target_num_layers, shape.num_layers).items()}
        return tuple(place_of.get(layer, shape.num_layers) for layer in self.config.aux_layers)

    def tensors(self, inflation: Inflation, shape: Shape) -> dict[str, Make]:
        """Makers of the big draft's tensors, by name. The small one's tokens come first in its vocabulary."""
        config = self.config
        big = self.big_config(shape)
        with torch.device("meta"):
            like = public_tensors(self.network(big))
        layer_at = places(len(config.layers), len(big.layers))
        states = [(index, layer == shape.num_layers) for layer, index in self.states(shape).items()]
        make = inflation.network(like, self.weights, layer_at)
        make["fc.weight"] = lambda: inflation.fusion(self.weights["fc.weight"].to(inflation.device), states)
        return make | (self.vocabulary(shape) if "d2t" in like else {})

    def vocabulary(self, shape: Shape) -> dict[str, Make]:
        """The big draft's map: the small one's (Vd,), then the first unused tokens."""
        small_ids = ids_of(self.weights["d2t"])
        ids = torch.cat((small_ids, self.config.vocab_size + torch.arange(shape.draft_vocab_size - len(small_ids))))
        return {
            "d2t": lambda: ids - torch.arange(len(ids)),
            "t2d": lambda: torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, True),
        }


class Eagle3Draft(Draft):
    network = Eagle3

    def check(self, model: TargetSpec, shape: Shape) -> None:
        super().check(model, shape)
        for name in (*FLAGS, "sliding_window"):
            if getattr(self.config, name):
                raise ValueError(f"draft sets {name}; train one without it (--draft.norms [qk_norm] sets no flag)")


RANKED = (SelectorConfig, MarkovConfig)  # heads whose rank grows


class DFlashDraft(Draft):
    """The usual five layers over five target states. Its residual stream starts from the target's embedding and
    ends at the target's head, so that the constant channel needs nothing but the lift of the last norm. Added
    layers add next to nothing to the stream, and next to nothing is read of added states. Block size and mask token
    stay.
    """

    network = DFlash

    def check(self, model: TargetSpec, shape: Shape) -> None:
        super().check(model, shape)
        check_room("draft num_layers", self.config.num_layers, NUM_LAYERS)
        check_room("draft aux_layers", len(self.config.aux_layers), NUM_STATES)
        for head in self.config.heads:
            if isinstance(head, RANKED):
                check_room("rank", getattr(head, head.option), RANK)
        if self.config.head(LiLiCorrConfig) is not None:
            raise ValueError("draft has a LiLiCorr scorer; only block drafts without one can be inflated")

    def states(self, shape: Shape) -> dict[int, int | None]:
        """In rising order."""
        small = self.aux_states(shape)
        free = [layer for layer in range(shape.num_layers) if layer not in small]
        count = NUM_STATES - len(small)
        added = [free[index * len(free) // count] for index in range(count)]
        return {layer: small.index(layer) if layer in small else None for layer in sorted((*small, *added))}

    def big_config(self, shape: Shape, **fields: Any) -> DFlashConfig:
        """An added layer has the window, or none, of the one before it."""
        layer_at = places(self.config.num_layers, NUM_LAYERS)
        before = [layer_at[max(big for big in layer_at if big <= index)] for index in range(NUM_LAYERS)]
        windowed = tuple(index for index in range(NUM_LAYERS) if before[index] in self.config.windowed_layers)
        heads = tuple(map(big_head, self.config.heads))
        return super().big_config(shape, num_layers=NUM_LAYERS, windowed_layers=windowed, heads=heads, **fields)


def big_head(head: HeadConfig) -> HeadConfig:
    fields: dict[str, Any] = {head.option: RANK} if isinstance(head, RANKED) else {}
    return replace(head, **fields)


DRAFTS: dict[str, type[Draft]] = {"eagle3": Eagle3Draft, "dflash": DFlashDraft}


def inflate(config: InflateConfig) -> None:
    """Writes all checkpoints, or nothing. Raises ValueError for a pair that cannot reach this shape."""
    output = Path(config.output)
    paths = config.drafts.values()
    source, *more = (find_target(EngineConfig(target=config.target, draft=path))[1] for path in paths)
    if strange := [path for path in more if path != source]:
        raise ValueError(f"more has a draft of {strange[0]}, and draft is of {source}; give drafts of one target")
    inputs = {"draft": [config.draft], "more": config.more.values(), "target": [str(source)]}
    check_output_folder(config.output, PAIR, inputs, overwrite=True)
    model = load_config(source)
    drafts = {name: load_small_draft(path, model) for name, path in config.drafts.items()}
    for draft in drafts.values():
        draft.check(model, SHAPES[config.shape])
    with atomic_folder(output, PAIR.check) as folder:
        write_target(config, model, source, folder / "target")
        for name, draft in drafts.items():
            write_draft(config, draft, folder / name, folder / "target", output / "target")
    num_bytes = sum(file.stat().st_size for file in output.rglob("*.safetensors"))
    print(f"{num_bytes / 1e9:.1f} GB; try: serve --draft {output}/draft")


def load_small_draft(name: str, model: TargetSpec) -> Draft:
    """The checkpoint `name` of any drafter that can be enlarged."""
    drafter = source_of(name).drafter
    if drafter not in DRAFTS:
        raise ValueError(f"draft {name} is of drafter {drafter}; only {', '.join(DRAFTS)} can be inflated")
    return DRAFTS[drafter].load(resolve(name), model)


def write_target(config: InflateConfig, model: TargetSpec, source: Path, folder: Path) -> None:
    values = target_json(read_json(source / "config.json"), SHAPES[config.shape])
    big = TargetSpec.from_json(values)
    with torch.device("meta"):
        like = public_tensors(Target(big).to(torch.bfloat16))
    small = public_tensors(load_target(source, model, torch.bfloat16, CPU))
    small.setdefault("lm_head.weight", small["embed_tokens.weight"])  # where they are tied
    make = inflation(config, model.hidden_size).network(like, small, places(model.num_layers, big.num_layers))
    names = {key: key if key.startswith("lm_head") else f"model.{key}" for key in like}
    folder.mkdir(exist_ok=True)
    write_shards(folder, {names[key]: like[key] for key in like}, {names[key]: make[key] for key in make})
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def write_shards(folder: Path, like: dict[str, Tensor], make: Mapping[str, Make], size: int = 2**30) -> None:
    """Writes a checkpoint in files of about `size` bytes, of which one is in memory at a time. `like`: its tensors, of
    which shapes and dtypes count."""
    plan = split_torch_state_dict_into_shards(like, max_shard_size=size)
    with tqdm(desc="target", total=len(like), unit="tensor") as bar:
        for file, names in plan.filename_to_tensors.items():
            shard = {}
            for name in names:
                shard[name] = make[name]().cpu().contiguous()
                bar.update()
            save_file(shard, folder / file, {"format": "pt"})
    index_file = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    (folder / INDEX).write_text(json.dumps(index_file, indent=2) + "\n")


def write_draft(config: InflateConfig, draft: Draft, folder: Path, target: Path, target_name: Path) -> None:
    """`target`: the big target's folder, which will be renamed to `target_name`."""
    shape = SHAPES[config.shape]
    makers = draft.tensors(inflation(config, draft.config.hidden_size), shape)
    big_config = draft.big_config(
        shape,
        target=str(target_name),
        target_fingerprint=weights_fingerprint(target),
        tokenizer_hash=tokenizer_hash(AutoTokenizer.from_pretrained(target)),
    )
    folder.mkdir()
    values = big_config.to_json() | {"torch_dtype": "bfloat16"}
    provenance = {"inflated": asdict(config), "target_path": str(target_name.resolve())}
    tensors = {name: make().cpu() for name, make in tqdm(makers.items(), desc="draft", unit="tensor")}
    write_checkpoint(folder, values, tensors, provenance)


def inflation(config: InflateConfig, hidden_size: int) -> Inflation:
    return Inflation(hidden_size, SHAPES[config.shape].hidden_size, torch.device(config.device), config.seed)


main = partial(run, inflate, InflateConfig, "bench/inflate.py")

if __name__ == "__main__":
    main()
