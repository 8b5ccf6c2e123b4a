"""Token maps: which target tokens a reduced draft vocabulary holds, and how often each target token occurred.

Invariant: `ids` is ascending in memory and in every file but FR-Spec's, so draft id i is always the i-th smallest of
them; `counts` covers the whole vocabulary, so any other size can be cut from the same file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.models.checkpoint import atomic_file

METADATA_KEY = "token_map"
SMALLEST_REPORTED_SIZE = 1024


@dataclass(frozen=True, slots=True, eq=False)
class TokenMap:
    """`metadata` is JSON: tokenizer_hash, data_hash, kept_ids, tokens_seen, coverage and what else the writer adds."""

    ids: Tensor  # (Vd,) int64 target id of each draft id, ascending
    counts: Tensor  # (V,) int64 occurrences of each target id
    metadata: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.counts.ndim != 1 or len(self.ids) == 0:
            raise ValueError(f"token map: ids {list(self.ids.shape)} and counts {list(self.counts.shape)} are no lists")
        if not bool((self.ids[1:] > self.ids[:-1]).all()):
            raise ValueError("token map: ids must be distinct and ascending")
        first, last = int(self.ids[0]), int(self.ids[-1])
        if first < 0 or last >= self.vocab_size:
            raise ValueError(f"token map: ids {first} to {last} leave the vocabulary of {self.vocab_size} tokens")

    @classmethod
    def build(cls, counts: Tensor, size: int, kept_ids: list[int], metadata: Mapping[str, Any]) -> "TokenMap":
        """The `size` most frequent tokens, `kept_ids` always among them; equal counts go to the lower id.

        counts (V,) int64. Raises ValueError when nothing was counted or the sizes do not fit.
        """
        vocab_size, tokens_seen = len(counts), int(counts.sum())
        kept = sorted(set(kept_ids))
        if tokens_seen == 0:
            raise ValueError("no supervised token was counted; a token map needs data with answers")
        if kept and not 0 <= kept[0] <= kept[-1] < vocab_size:
            raise ValueError(f"special token {kept[-1]} lies outside the vocabulary of {vocab_size} tokens")
        if not max(1, len(kept)) <= size <= vocab_size:
            raise ValueError(
                f"size is {size}; it must hold the {len(kept)} special and added tokens and be at most the "
                f"vocabulary of {vocab_size}"
            )
        order = _ranking(counts.numpy(), kept)
        covered = np.cumsum(counts.numpy()[order]) / tokens_seen
        sizes = [n for n in reported_sizes(vocab_size, size) if n >= len(kept)]
        coverage = {str(n): round(float(covered[n - 1]), 6) for n in sizes}
        described = {**metadata, "kept_ids": kept, "tokens_seen": tokens_seen, "coverage": coverage}
        return cls(torch.from_numpy(np.sort(order[:size])), counts, described)

    @property
    def vocab_size(self) -> int:
        return len(self.counts)

    @property
    def d2t(self) -> Tensor:
        """(Vd,) int64 offsets: target id = draft id + d2t[draft id]."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """(V,) bool: can the draft propose this target id?"""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    @property
    def coverage(self) -> float:
        """Share of the counted tokens that the map holds."""
        return int(self.counts[self.ids].sum()) / int(self.counts.sum())

    def by_frequency(self) -> Tensor:
        """(Vd,) int64 the same target ids, most frequent first; equal counts go to the lower id."""
        return self.ids[self.counts[self.ids].sort(descending=True, stable=True).indices]

    def write(self, path: Path) -> None:
        """One safetensors file: d2t, t2d, counts and the metadata as JSON."""
        tensors = {"d2t": self.d2t, "t2d": self.t2d, "counts": self.counts.contiguous()}
        metadata = {"format": "pt", METADATA_KEY: json.dumps(self.metadata)}
        with atomic_file(path) as temporary:
            save_file(tensors, temporary, metadata)

    @classmethod
    def read(cls, path: Path) -> "TokenMap":
        """Raises ValueError for a file that is damaged, is no token map or contradicts itself."""
        try:
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
                metadata = file.metadata() or {}
        except Exception as error:
            raise ValueError(f"{path} is missing, damaged or no safetensors file ({error}); write it again") from error
        missing = {"d2t", "t2d", "counts"} - tensors.keys()
        if missing or METADATA_KEY not in metadata:
            raise ValueError(f"{path} is no token map: it lacks {', '.join(sorted(missing)) or 'metadata'}")
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        token_map = cls(ids, tensors["counts"], json.loads(metadata[METADATA_KEY]))
        if not torch.equal(token_map.t2d, tensors["t2d"]):
            raise ValueError(f"{path}: d2t and t2d name different tokens; write it again")
        return token_map

    def write_sglang(self, path: Path) -> None:
        """SGLang's --speculative-token-map: a 1-D int64 tensor, element i = target id of draft id i, ascending."""
        _save(self.ids.clone(), path)

    def write_fr_spec(self, path: Path) -> None:
        """FR-Spec's freq_{Vd}.pt: a Python list of target ids, most frequent first."""
        _save(self.by_frequency().tolist(), path)


def read_sglang(path: Path) -> Tensor:
    """(Vd,) int64 target id of each draft id, in the file's order."""
    ids = _load(path)
    if not torch.is_tensor(ids) or ids.ndim != 1 or ids.dtype != torch.int64:
        raise ValueError(f"{path} does not hold a 1-D int64 tensor of token ids")
    return ids


def read_fr_spec(path: Path) -> list[int]:
    """Target ids, most frequent first."""
    ids = _load(path)
    if type(ids) is not list or any(type(token) is not int for token in ids):
        raise ValueError(f"{path} does not hold a list of token ids")
    return ids


def reported_sizes(vocab_size: int, size: int) -> list[int]:
    """The sizes whose coverage is worth knowing: powers of two from 1,024, the chosen one and the whole vocabulary."""
    sizes, power = {size, vocab_size}, SMALLEST_REPORTED_SIZE
    while power < vocab_size:
        sizes.add(power)
        power *= 2
    return sorted(sizes)


def _ranking(counts: np.ndarray, kept: list[int]) -> np.ndarray:
    """(V,) int64 all ids: the kept ones first, the others by falling count, equal counts by rising id."""
    order = np.argsort(-counts, kind="stable")
    is_kept = np.zeros(len(counts), np.bool_)
    is_kept[kept] = True
    return np.concatenate((np.array(kept, np.int64), order[~is_kept[order]]))


def _save(value: Any, path: Path) -> None:
    with atomic_file(path) as temporary:
        torch.save(value, temporary)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is missing, damaged or holds more than token ids ({error})") from error
