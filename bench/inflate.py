"""A function-preserving enlargement of a small Qwen3 target and its draft, to measure speed-ups end to end.

    python bench/inflate.py --draft runs/demo/draft/best --shape llama31-8b --output runs/llama31-8b --device cuda

Writes OUTPUT/target and OUTPUT/draft, ordinary checkpoints that emit the small pair's tokens at the big pair's cost:
real text, real acceptance, real cost. The tokens are the same up to floating-point ties, since sums over more channels
may round otherwise. Of the big vocabulary only the small one's tokens are ever emitted.

How: hidden channels, heads, neurons, layers and vocabulary rows are added so that none of them changes what the small
ones compute (bench/inflate_weights.py). At both 8B shapes 70 % of the target's weights are random at their ordinary
size, 30 % (o_proj, down_proj, padding of embeddings) are random but so small that they vanish in every sum, 0.1 % are
the small target's and 0.007 % are zero. Activations beyond the small model's channels are as small, too.
`--random-weights` writes the same shapes with nothing but ordinary random weights, to be measured beside it: zeros, and
what comes close, cost a matrix product less power.

"llama31-8b" has Llama-3.1-8B's sizes under Qwen3ForCausalLM, since Llama has no q/k norms. The small model's rotary
embedding, head size and ratio of query to KV heads stay. The draft is of the same kind as the small one: an EAGLE3 head
(bench/inflate_eagle3.py) or a DFLASH draft (bench/inflate_dflash.py).
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from slipstream.bench import inflate_dflash, inflate_eagle3
from slipstream.bench.inflate_draft import CPU, Draft
from slipstream.bench.inflate_shapes import SHAPES, Shape, check, places, target_json
from slipstream.bench.inflate_weights import Inflation, Layer, Part, read_parts, target_tensors
from slipstream.bench.shards import ShardWriter
from slipstream.config import parse
from slipstream.models.atomic import atomic_folder
from slipstream.models.checkpoint import (
    read_json,
    resolve,
    tokenizer_hash,
    weights_fingerprint,
    write_checkpoint,
)
from slipstream.models.config import ModelConfig
from slipstream.models.outputs import CHECKPOINT, FolderKind, check_output_folder
from slipstream.models.target import load_config, load_target
from slipstream.serve.drafters.base import drafter_name
from slipstream.serve.options import EngineConfig, find_target

DRAFTS: dict[str, type[Draft]] = {"eagle3": inflate_eagle3.Draft, "dflash": inflate_dflash.Draft}
PAIR = FolderKind(
    "an enlarged target and draft",
    ("target/config.json", *(f"draft/{name}" for name in CHECKPOINT.markers)),
    (r"target/[^/]+\.(json|safetensors|jinja|txt|model)", *CHECKPOINT.below("draft")),
)
COPIED = ("tokenizer*", "*.jinja", "generation_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class InflateConfig:
    """Options."""

    draft: str
    """Draft checkpoint of the small target."""
    output: str
    """Folder for target/ and draft/; an earlier pair there is replaced."""
    target: str = ""
    """The small target. Empty: the one that the draft names."""
    shape: str = "llama31-8b"
    """Sizes to reach: llama31-8b, qwen3-8b, mid or small."""
    random_weights: bool = False
    """Write ordinary random weights of these shapes instead: a pair that says nothing."""
    seed: int = 0
    """Seed of the random weights."""
    device: str = "cpu"
    """Where random weights are made: cpu or cuda."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape is {self.shape!r}; choose one of {', '.join(SHAPES)}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}; choose cpu or cuda")


def inflate(config: InflateConfig) -> None:
    """Writes both checkpoints, or nothing. Raises ValueError for a pair that cannot reach this shape."""
    output = Path(config.output)
    _, source = find_target(EngineConfig(target=config.target, draft=config.draft))
    inputs = {"draft": [config.draft], "target": [str(source)]}
    check_output_folder(config.output, PAIR, inputs, overwrite=True)
    model = load_config(source)
    draft = load_draft(config.draft, model)
    check_pair(model, draft, SHAPES[config.shape])
    with atomic_folder(output, PAIR.check) as folder:
        write_target(config, model, source, folder / "target")
        write_draft(config, draft, folder / "draft", folder / "target", output / "target")


def check_pair(model: ModelConfig, draft: Draft, shape: Shape) -> None:
    """Raises ValueError naming what does not fit."""
    check(model, shape)
    draft.check(model, shape)


def load_draft(name: str, model: ModelConfig) -> Draft:
    """The checkpoint `name` of any drafter that can be enlarged."""
    drafter = drafter_name(name)
    if drafter not in DRAFTS:
        raise ValueError(f"draft {name} is of drafter {drafter}; only {', '.join(DRAFTS)} can be inflated")
    return DRAFTS[drafter].load(resolve(name), model)


def write_target(config: InflateConfig, model: ModelConfig, source: Path, folder: Path) -> None:
    shape = SHAPES[config.shape]
    tensors = target_tensors(
        None if config.random_weights else read_parts(load_target(source, model, torch.bfloat16, CPU), model),
        inflation(config, model.hidden_size),
        Layer.of(shape, model.head_dim),
        places(model.num_layers, shape.num_layers),
        shape,
    )
    with ShardWriter(folder) as writer:
        for name, tensor in progress(tensors, "target", 3 + 11 * shape.num_layers):
            writer.add(name, tensor)
    values = target_json(read_json(source / "config.json"), shape)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def write_draft(config: InflateConfig, draft: Draft, folder: Path, target: Path, target_name: Path) -> None:
    """`target`: the big target's folder, which will be renamed to `target_name`."""
    shape = SHAPES[config.shape]
    tensors = draft.tensors(inflation(config, draft.config.hidden_size), shape)
    values = draft.big_json(
        shape,
        target=str(target_name),
        target_fingerprint=weights_fingerprint(target),
        tokenizer_hash=tokenizer_hash(AutoTokenizer.from_pretrained(target)),
    )
    folder.mkdir()
    values |= {"torch_dtype": "bfloat16"}
    run = {"inflated": asdict(config), "target_path": str(target_name.resolve())}
    write_checkpoint(folder, values, dict(progress(tensors, "draft")), run)


def inflation(config: InflateConfig, hidden_size: int) -> Inflation:
    sizes = (hidden_size, SHAPES[config.shape].hidden_size)
    return Inflation(*sizes, torch.device(config.device), config.seed, random=config.random_weights)


def progress(tensors: Iterable[Part], title: str, total: int | None = None) -> Iterator[Part]:
    yield from tqdm(tensors, desc=title, total=total, unit="tensor")


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(InflateConfig, argv, prog="inflate", description="Enlarges a small target and its draft.")
    began = time.perf_counter()
    try:
        inflate(config)
    except (ValueError, OSError) as error:
        raise SystemExit(f"inflate: error: {error}") from error
    num_bytes = sum(file.stat().st_size for file in Path(config.output).rglob("*.safetensors"))
    print(f"{num_bytes / 1e9:.1f} GB in {time.perf_counter() - began:.0f} s; try: serve --draft {config.output}/draft")


if __name__ == "__main__":
    main()
