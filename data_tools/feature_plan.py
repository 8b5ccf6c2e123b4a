"""Which documents go into which shard of captured features, known before the target is loaded.

The plan depends on the data and the options alone, so that a capture continues, or repairs one shard, with the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset
from tqdm import tqdm

from slipstream.models.feature_store import FeatureFormat, ShardRange

SCAN_ROWS = 4096  # documents measured at once


@dataclass(frozen=True, slots=True)
class Needs:
    """Per document of a split: tokens whose states training reads, and the supervised ones among them."""

    tokens: np.ndarray  # (D,) int64
    supervised: np.ndarray  # (D,) int64


def measure(dataset: Dataset, max_length: int) -> Needs:
    """What documents cut at `max_length` need (models/feature_store.needed_tokens, here for many at once)."""
    tokens, supervised = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    tables = dataset.with_format("arrow").iter(batch_size=SCAN_ROWS)
    num_tables = -(-len(dataset) // SCAN_ROWS)
    for table in tqdm(tables, "measuring documents", num_tables, unit="batch", disable=num_tables <= 1):
        needs = measure_table(table, max_length)
        tokens.append(needs.tokens)
        supervised.append(needs.supervised)
    return Needs(np.concatenate(tokens), np.concatenate(supervised))


def measure_table(table: pyarrow.Table, max_length: int) -> Needs:
    lengths = pc.list_value_length(table["loss_mask"]).to_numpy().astype(np.int64)
    mask = pc.list_flatten(table["loss_mask"]).to_numpy()
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(document)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    chosen = np.flatnonzero(mask & (position > 0) & (position < max_length))
    tokens = np.zeros(len(lengths), np.int64)
    np.maximum.at(tokens, document[chosen], position[chosen])
    supervised = np.bincount(document[chosen], minlength=len(lengths))
    return Needs(tokens, np.maximum(supervised - 1, 0))  # the last one is no state that anything reads


def plan_shards(splits: dict[str, Needs], form: FeatureFormat, shard_bytes: int) -> tuple[ShardRange, ...]:
    """Neighbouring documents together, as many as `shard_bytes` hold, at least one."""
    return tuple(shard for split, needs in splits.items() for shard in _plan_split(split, needs, form, shard_bytes))


def _plan_split(split: str, needs: Needs, form: FeatureFormat, shard_bytes: int) -> Iterator[ShardRange]:
    first = tokens = supervised = 0
    for number, (more, more_supervised) in enumerate(
        zip(needs.tokens.tolist(), needs.supervised.tolist(), strict=True)
    ):
        count = number - first
        if count and form.num_bytes(count + 1, tokens + more, supervised + more_supervised) > shard_bytes:
            yield ShardRange(split, first, count, tokens, supervised)
            first, tokens, supervised = number, 0, 0
        tokens, supervised = tokens + more, supervised + more_supervised
    if len(needs.tokens) > first:
        yield ShardRange(split, first, len(needs.tokens) - first, tokens, supervised)
