"""Counts answer tokens and chooses the vocabulary of a draft.

    python data_tools/frequency_map.py --data runs/data --size 32000 -o runs/tokens.safetensors
    slipstream frequency-map --data chats.jsonl --target Qwen/Qwen3-8B --sglang-pt tokens.pt -o tokens.safetensors
    slipstream frequency-map --from-responses served.jsonl --target Qwen/Qwen3-8B --plot map.png -o map.safetensors
    slipstream frequency-map --merge a.safetensors b.safetensors -o c.safetensors

Invariant: end tokens, and special tokens of answers, are always in the map; of equal counts the lower id wins, so the
same data gives the same file on every machine.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from os import sched_getaffinity
from pathlib import Path

import numpy as np
import pyarrow
import torch
from tqdm import tqdm

from slipstream.config import run
from slipstream.data_tools.options import counted
from slipstream.data_tools.prepare import Tally
from slipstream.data_tools.rows import check_data, read_rows
from slipstream.data_tools.target_tokenizer import load_target_tokenizer
from slipstream.data_tools.token_coverage import (
    coverage_table,
    is_coverage_plot,
    plot_coverage,
)
from slipstream.data_tools.tokenization import AnswerTokenizer, RowTokenizer, tokenize_rows
from slipstream.data_tools.verb_options import FrequencyMapConfig
from slipstream.models.drafts.token_map import TokenMap, is_listed, is_token_map
from slipstream.models.files.outputs import check_output_file
from slipstream.models.files.prepared import load_saved, missing, read_report

SHARD_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Occurrences of each token id, and the data they were counted in."""

    counts: np.ndarray  # (V,) int64
    tokenizer_hash: str
    data_hash: str
    kept_ids: tuple[int, ...]  # which the map holds whatever its size, ascending


def kept_ids(counts: np.ndarray, special_ids: Iterable[int], end_ids: Iterable[int]) -> tuple[int, ...]:
    """End tokens, and special tokens that answers have. Some vocabularies hold thousands that nothing uses."""
    return tuple(sorted({*end_ids, *(token for token in special_ids if counts[token])}))


def frequency_map(config: FrequencyMapConfig) -> None:
    """Writes the files that `config` asks for and prints the coverage curve."""
    check_files(config)
    token_map = build_map(count(config), config.size)
    if config.plot is not None:  # first, since it takes longest: until then a kill leaves nothing
        plot_coverage(token_map, Path(config.plot), config.accept_rates)
    if config.sglang_pt is not None:
        token_map.write_sglang(Path(config.sglang_pt))
    if config.fr_spec is not None:
        token_map.write_fr_spec(Path(config.fr_spec))
    token_map.write(Path(config.output))
    print(f"{config.output}:")
    print(coverage_table(token_map, config.accept_rates))


def check_files(config: FrequencyMapConfig) -> None:
    """Raises ValueError unless every file may be written."""
    inputs = {**config.inputs(), "merge": config.merge, "from_responses": config.from_responses}
    kinds: dict[str, tuple[Callable[[Path], bool], str]] = {
        "output": (is_token_map, "a token map"),
        "sglang_pt": (partial(is_listed, kind=torch.Tensor), "a token map of SGLang"),
        "fr_spec": (partial(is_listed, kind=list), "a frequency list of FR-Spec"),
        "plot": (is_coverage_plot, "a coverage curve that frequency-map drew"),
    }
    files = {option: getattr(config, option) for option in kinds if getattr(config, option) is not None}
    for option, name in files.items():
        check_output_file(name, *kinds[option], inputs, overwrite=config.overwrite, option=option)
    if len({Path(name).resolve() for name in files.values()}) < len(files):
        raise ValueError(f"{' and '.join(files)} name the same file; give each its own")


def count(config: FrequencyMapConfig) -> Counted:
    """Counts what `config` names: token maps, served answers, prepared datasets or conversations."""
    if config.merge:
        return combine([from_map(Path(path)) for path in config.merge])
    if config.from_responses:
        return count_rows(config, AnswerTokenizer)
    prepared = [not missing(Path(path)) for path in config.data]
    if not any(prepared):
        if not config.target:
            raise ValueError(f"{config.data[0]} is not a prepared dataset; add --target to count conversations")
        check_data(config)
        return count_rows(config, RowTokenizer)
    if not all(prepared):
        raise ValueError("data mixes prepared datasets and conversations; count them separately and --merge the maps")
    return combine([count_dataset(Path(path), config) for path in config.data])


def build_map(counted: Counted, size: int | None) -> TokenMap:
    """The map of `size` tokens; by default a quarter of the vocabulary, or the kept ids if those are more."""
    size = max(len(counted.counts) // 4, len(counted.kept_ids)) if size is None else size
    metadata = {"tokenizer_hash": counted.tokenizer_hash, "data_hash": counted.data_hash}
    return TokenMap.build(torch.from_numpy(counted.counts), size, list(counted.kept_ids), metadata)


def combine(parts: Sequence[Counted]) -> Counted:
    """The sum of the counts, in any order of `parts`. Raises ValueError if the tokenizers differ."""
    first = parts[0]
    for part in parts[1:]:
        if part.tokenizer_hash != first.tokenizer_hash or len(part.counts) != len(first.counts):
            raise ValueError(
                f"the parts come from different tokenizers ({first.tokenizer_hash[:12]} of {len(first.counts)} ids, "
                f"{part.tokenizer_hash[:12]} of {len(part.counts)}); counts can only be added for one tokenizer"
            )
    if len(parts) == 1:
        return first
    hashes = sorted(part.data_hash for part in parts)
    return Counted(
        counts=np.sum([part.counts for part in parts], axis=0),
        tokenizer_hash=first.tokenizer_hash,
        data_hash=hashlib.sha256(" ".join(hashes).encode()).hexdigest(),
        kept_ids=tuple(sorted({token for part in parts for token in part.kept_ids})),
    )


def from_map(path: Path) -> Counted:
    token_map = TokenMap.read(path)
    return Counted(
        counts=token_map.counts.numpy(),
        tokenizer_hash=token_map.metadata["tokenizer_hash"],
        data_hash=token_map.metadata["data_hash"],
        kept_ids=tuple(token_map.metadata["kept_ids"]),
    )


def count_dataset(path: Path, config: FrequencyMapConfig) -> Counted:
    """Counts a prepared dataset; a target supplies vocabulary size and special tokens."""
    target = load_target_tokenizer(config) if config.target else None
    report = read_report(path, "data", None if target is None else target.hash)
    vocab_size = report["vocab_size"]
    special_ids = report["special_ids"]
    end_ids = report["end_ids"]
    if target is not None:
        vocab_size = target.vocab_size
        special_ids = target.special_ids
        end_ids = target.end_ids
    counts = count_tokens(path, config.split, vocab_size, config.num_proc)
    return Counted(
        counts=counts,
        tokenizer_hash=report["tokenizer_hash"],
        data_hash=report["data_hash"],
        kept_ids=kept_ids(counts, special_ids, end_ids),
    )


def count_tokens(path: Path, split: str, vocab_size: int, threads: int | None = None) -> np.ndarray:
    """(V,) int64 occurrences of every id among the supervised tokens of one split of a prepared dataset."""
    splits = load_saved(path)
    if split not in splits:
        raise ValueError(f"split is {split!r}; {path} has {', '.join(splits)}")
    shards = splits[split].data.table.to_batches(max_chunksize=SHARD_ROWS)  # views, no copies
    total = np.zeros(vocab_size, np.int64)
    # Threads, not processes: numpy releases the GIL while it counts, and no buffer is copied.
    with ThreadPoolExecutor(threads or len(sched_getaffinity(0))) as pool:
        for counts in pool.map(lambda shard: _count_shard(shard, vocab_size), shards):
            total += counts
    return total


def _count_shard(shard: pyarrow.RecordBatch, vocab_size: int) -> np.ndarray:
    ids = shard.column("input_ids").flatten().to_numpy(zero_copy_only=True)
    mask = shard.column("loss_mask").flatten().to_numpy(zero_copy_only=False)  # Arrow packs booleans into bits
    return count_ids(ids[mask], vocab_size)


def count_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """(V,) int64 occurrences. Raises ValueError for an id outside the vocabulary."""
    for wrong in (ids.min(initial=0), ids.max(initial=0)):
        if not 0 <= wrong < vocab_size:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size} tokens; check --target")
    return np.bincount(ids, minlength=vocab_size)


def count_rows(config: FrequencyMapConfig, kind: type[RowTokenizer]) -> Counted:
    """Counts the supervised tokens of raw conversations, masked as `slipstream prepare` masks them, or the tokens of
    served answers, and prints the number of rows. Raises ValueError if none was kept."""
    target = load_target_tokenizer(config)
    rows = read_rows(replace(config, data=config.from_responses or config.data, from_responses=()))
    outcomes = tokenize_rows(rows, kind(target, config))
    counts = np.zeros(target.vocab_size, np.int64)
    digest = hashlib.sha256()
    tally = Tally()
    conversations = tally.kept(tqdm(outcomes, unit=" rows", desc="frequency-map"))
    documents = itertools.chain.from_iterable(conversation.documents for conversation in conversations)
    while shard := list(itertools.islice(documents, SHARD_ROWS)):
        supervised = np.concatenate([ids[mask > 0] for ids, mask in shard])
        counts += count_ids(supervised, target.vocab_size)
        digest.update(supervised.tobytes())
    tally.check()
    print(f"{tally.rows:,} rows, of which dropped: {counted(tally.dropped)}")
    return Counted(
        counts=counts,
        tokenizer_hash=target.hash,
        data_hash=digest.hexdigest(),
        kept_ids=kept_ids(counts, target.special_ids, target.end_ids),
    )


main = partial(run, frequency_map, FrequencyMapConfig, "slipstream frequency-map")

if __name__ == "__main__":
    main()
