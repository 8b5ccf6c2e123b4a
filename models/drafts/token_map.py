"""Token maps: the target tokens of a reduced draft vocabulary, and how often each target token occurred.

Invariant: `ids` is ascending in memory and in every file but FR-Spec's, so draft id i is always the i-th smallest;
`counts` covers the whole vocabulary, so any size can be cut from one file. A drafter that gathers rows of the target's
head orders them by `ids_by_frequency`, where every prefix is the map of that size.

`read_token_map` also reads the files of other programs, which do not say which tokenizer they belong to:

    FR-Spec           .pt, a list of target ids, most frequent first: entry i is draft id i
    SGLang            .pt, a 1-D tensor of the same, or ascending; its --speculative-token-map reads both
    SpecForge         .pt, a dict of d2t, offsets of ascending ids, and t2d
    EAGLE3 drafts     .safetensors with d2t, as in a checkpoint
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.models.files.atomic import atomic_file
from slipstream.models.files.checkpoint import Values, disk_errors

METADATA_KEY = "token_map"
SMALLEST_REPORTED_SIZE = 1024
REMEDY = "make a map with slipstream frequency-map"


@dataclass(frozen=True, slots=True, eq=False)
class TokenMap:
    """`metadata` is JSON: tokenizer_hash, data_hash, kept_ids, tokens_seen, coverage and more from the writer.

    A map from a public file has no tokens_seen: its counts are ranks, descending in the file's order, and it can be cut
    but not grow; or, if metadata["ranked"] is False, 1 for every token of the map, and it can only be used whole.
    """

    ids: Tensor  # (Vd,) int64 target id of each draft id, ascending
    counts: Tensor  # (V,) int64 occurrences of each target id
    metadata: Values

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.counts.ndim != 1 or len(self.ids) == 0:
            raise ValueError(
                f"token map: ids {list(self.ids.shape)} and counts {list(self.counts.shape)} are not lists"
            )
        if not bool((self.ids[1:] > self.ids[:-1]).all()):
            raise ValueError("token map: ids must be distinct and ascending")
        first = int(self.ids[0])
        last = int(self.ids[-1])
        if first < 0 or last >= self.vocab_size:
            raise ValueError(f"token map: ids {first} to {last} leave the vocabulary of {self.vocab_size} tokens")

    @classmethod
    def build(cls, counts: Tensor, size: int, kept_ids: list[int], metadata: Values) -> "TokenMap":
        """The `size` most frequent tokens, always including `kept_ids`; equal counts go to the lower id.

        counts (V,) int64. Raises ValueError if nothing was counted or the sizes do not fit.
        """
        vocab_size = len(counts)
        tokens_seen = int(counts.sum())
        special_ids = sorted(set(kept_ids))
        if tokens_seen == 0:
            raise ValueError("no supervised token was counted; a token map needs data with answers")
        if special_ids and not 0 <= special_ids[0] <= special_ids[-1] < vocab_size:
            raise ValueError(f"special token {special_ids[-1]} lies outside the vocabulary of {vocab_size} tokens")
        if not max(1, len(special_ids)) <= size <= vocab_size:
            raise ValueError(
                f"size is {size}; it must hold the {len(special_ids)} special and end tokens and be at most the "
                f"vocabulary of {vocab_size}"
            )
        order = ranking(counts.numpy(), special_ids)
        covered = coverage_curve(counts, special_ids)
        sizes = [n for n in reported_sizes(vocab_size, size) if n >= len(special_ids)]
        coverage = {str(n): round(float(covered[n]), 6) for n in sizes}
        described = {**metadata, "kept_ids": special_ids, "tokens_seen": tokens_seen, "coverage": coverage}
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
        """(V,) bool: whether the draft can propose a target id."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    @property
    def coverage(self) -> float:
        """Share of the counted tokens that the map holds."""
        return int(self.counts[self.ids].sum()) / int(self.counts.sum())

    @property
    def kept_ids(self) -> list[int]:
        """End tokens and the special ones that answers have, which every size includes; ascending."""
        return list(self.metadata.get("kept_ids", ()))

    def ids_by_frequency(self, size: int | None = None, stop_ids: Collection[int] = ()) -> Tensor:
        """(size,) int64 target ids in the order of a head's gathered rows: kept ids and `stop_ids`, then by falling
        count, equal counts by rising id. A shorter result is a prefix of a longer one, and itself a map.

        `size`: default the map's own; a counted map can also give a larger one. Raises ValueError for stop ids that the
        map lacks, and for a size below the number of the first ids or above the number of known ids.
        """
        check_stop_ids(self, stop_ids)
        first = sorted({*self.kept_ids, *stop_ids})
        order = ranking(self.counts.numpy(), first)
        in_map = self.t2d.numpy()[order]
        order = np.concatenate((order[in_map], order[~in_map])) if "tokens_seen" in self.metadata else order[in_map]
        size = len(self.ids) if size is None else size
        if not max(1, len(first)) <= size <= len(order):
            raise ValueError(
                f"token map size is {size}; this map can be cut to {max(1, len(first))} (its special and end tokens) "
                f"up to {len(order)}"
            )
        if size != len(self.ids) and not self.metadata.get("ranked", True):
            raise ValueError(
                f"token map size is {size}, but the file holds its {len(self.ids)} ids without an order of frequency; "
                "leave the size out, or make a map with slipstream frequency-map"
            )
        return torch.from_numpy(order[:size])

    def write(self, path: Path) -> None:
        """One safetensors file: d2t, t2d, counts and the metadata as JSON."""
        tensors = {"d2t": self.d2t, "t2d": self.t2d, "counts": self.counts.contiguous()}
        metadata = json.dumps(self.metadata)
        with atomic_file(path) as temporary, disk_errors(path):
            save_file(tensors, temporary, {METADATA_KEY: metadata})  # one entry, since several have no fixed order
            temporary.chmod(0o644)  # safetensors creates files that only their owner may read

    @classmethod
    def read(cls, path: Path) -> "TokenMap":
        """Raises ValueError for a damaged file, one that is not a token map, or one that contradicts itself."""
        tensors, metadata = _load_safetensors(path)
        missing = {"d2t", "t2d", "counts"} - tensors.keys()
        if missing or METADATA_KEY not in metadata:
            raise ValueError(f"{path} is not a token map: it lacks {', '.join(sorted(missing)) or 'metadata'}")
        ids = ids_of(tensors["d2t"])
        token_map = cls(ids, tensors["counts"], json.loads(metadata[METADATA_KEY]))
        if tensors["t2d"].shape != token_map.counts.shape:
            raise ValueError(f"{path}: t2d and counts are of different vocabularies; write it again")
        check_t2d(str(path), tensors["d2t"], tensors["t2d"], "write it again")
        return token_map

    def write_sglang(self, path: Path) -> None:
        """SGLang's --speculative-token-map: a 1-D int64 tensor, element i = target id of draft id i, ascending."""
        _save(self.ids.clone(), path)

    def write_fr_spec(self, path: Path) -> None:
        """FR-Spec's freq_{Vd}.pt: a Python list of target ids in the order of `ids_by_frequency`."""
        _save(self.ids_by_frequency().tolist(), path)


def read_token_map(path: Path, vocab_size: int) -> TokenMap:
    """The map in `path`, ours or one of the public files above, for a target of `vocab_size` tokens.

    Raises ValueError for a damaged file, another vocabulary, ids out of range, and duplicate ids.
    """
    is_safetensors = path.suffix == ".safetensors"
    content = _load_safetensors(path)[0] if is_safetensors else _load_pickle(path)
    if is_safetensors and "counts" in content:
        token_map = TokenMap.read(path)
        _check_vocab_size(path, token_map.vocab_size, vocab_size)
        return token_map
    ids = _listed_ids(path, content)
    _check_ids(path, ids, vocab_size)
    if isinstance(content, dict) and "t2d" in content:
        _check_t2d(path, ids, content["t2d"], vocab_size)
    ranked = not bool((ids[1:] > ids[:-1]).all())  # ascending ids carry no frequency
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    counts[ids] = torch.arange(len(ids), 0, -1) if ranked else 1
    return TokenMap(ids.sort().values, counts, {"kept_ids": [], "source": str(path), "ranked": ranked})


def _listed_ids(path: Path, content: Any) -> Tensor:
    """(n,) int64 target ids in the order of the file."""
    if isinstance(content, dict) and _is_integers(content.get("d2t")):
        return ids_of(content["d2t"].long())
    if isinstance(content, list) and content and all(type(token) is int for token in content):
        return torch.tensor(content)
    if _is_integers(content):
        return content.long()
    raise ValueError(f"{path} is not a token map: no list or 1-D tensor of token ids, no d2t; {REMEDY}")


def _is_integers(content: Any) -> bool:
    integers = (torch.int64, torch.int32)
    return isinstance(content, Tensor) and content.ndim == 1 and len(content) > 0 and content.dtype in integers


def _check_ids(path: Path, ids: Tensor, vocab_size: int) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        place = int(outside.nonzero()[0])
        raise ValueError(
            f"{path}: entry {place} is token id {int(ids[place])}, outside the target's vocabulary of {vocab_size}; it "
            f"was made for another target: {REMEDY}"
        )
    values, first, number = ids.unique(return_inverse=True, return_counts=True)
    if len(values) < len(ids):
        twice = int(values[number > 1][0])
        places = (ids == twice).nonzero().flatten().tolist()
        raise ValueError(
            f"{path}: token id {twice} appears at entries {places[0]} and {places[1]}, so draft ids are not distinct "
            f"({len(ids) - len(values)} duplicates); drop the later ones or {REMEDY}"
        )


def _check_vocab_size(path: Path, map_size: int, vocab_size: int) -> None:
    if map_size != vocab_size:
        raise ValueError(f"{path} was counted over {map_size} tokens, the target has {vocab_size}; {REMEDY}")


def _check_t2d(path: Path, ids: Tensor, t2d: Any, vocab_size: int) -> None:
    if not isinstance(t2d, Tensor) or t2d.ndim != 1:
        raise ValueError(f"{path}: t2d is not a 1-D tensor; {REMEDY}")
    _check_vocab_size(path, len(t2d), vocab_size)
    check_t2d(str(path), ids - torch.arange(len(ids)), t2d, REMEDY)


def ids_of(d2t: Tensor) -> Tensor:
    """(Vd,) int64 target id of each draft id."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def check_t2d(source: str, d2t: Tensor, t2d: Tensor, remedy: str) -> None:
    """Raises ValueError unless d2t (Vd,) and t2d (V,) name the same target tokens."""
    target_ids = t2d.bool().nonzero().flatten()
    if not torch.equal(target_ids, ids_of(d2t).sort().values):
        is_ids = torch.equal(target_ids, d2t.sort().values)
        cause = ", since d2t holds target ids where differences belong" if is_ids else ""
        raise ValueError(f"{source}: d2t and t2d name different tokens{cause}; {remedy}")


def is_token_map(path: Path) -> bool:
    """Whether `TokenMap.write` wrote this file."""
    try:
        TokenMap.read(path)
    except ValueError:
        return False
    return True


def is_listed(path: Path, kind: type) -> bool:
    """Whether this is a file as `TokenMap.write_sglang` (a Tensor) or `TokenMap.write_fr_spec` (a list) writes it."""
    try:
        content = _load_pickle(path)
        _listed_ids(path, content)
    except ValueError:
        return False
    return isinstance(content, kind)


def check_tokenizer(token_map: TokenMap, tokenizer_hash: str, source: str = "the token map") -> None:
    """Raises ValueError if `token_map`, called `source` in the message, was counted with another tokenizer than that of
    `tokenizer_hash` (models/files/checkpoint.py). Public files do not name their tokenizer and pass."""
    counted = token_map.metadata.get("tokenizer_hash", tokenizer_hash)
    if counted != tokenizer_hash:
        raise ValueError(
            f"{source} was counted with another tokenizer ({counted[:12]}; the target's is {tokenizer_hash[:12]}), so "
            "its ids mean other tokens here; make a map for this target with slipstream frequency-map"
        )


def check_stop_ids(token_map: TokenMap, stop_ids: Collection[int]) -> None:
    """Raises ValueError that names the `stop_ids` missing in `token_map`: a draft could never propose an end."""
    missing = sorted(set(stop_ids) - set(token_map.ids.tolist()))
    if missing:
        raise ValueError(
            f"the token map lacks the stop token{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}, so a draft "
            "could not end an answer; add them, or make a map for this target with slipstream frequency-map"
        )


def reported_sizes(vocab_size: int, size: int) -> list[int]:
    """The sizes to report coverage for: powers of two from 1,024, the chosen one and the whole vocabulary."""
    sizes = {size, vocab_size}
    power = SMALLEST_REPORTED_SIZE
    while power < vocab_size:
        sizes.add(power)
        power *= 2
    return sorted(sizes)


def coverage_curve(counts: Tensor, kept_ids: list[int]) -> np.ndarray:
    """(V + 1,) float64: entry n is the share of the tokens counted (V,) that the map of n tokens holds."""
    covered = np.cumsum(counts.numpy()[ranking(counts.numpy(), kept_ids)])
    return np.concatenate(([0.0], covered / covered[-1]))


def ranking(counts: np.ndarray, special_ids: list[int]) -> np.ndarray:
    """(V,) int64 all ids: first the kept ones, then by falling count, equal counts by rising id."""
    order = np.argsort(-counts, kind="stable")
    is_kept = np.zeros(len(counts), np.bool_)
    is_kept[special_ids] = True
    return np.concatenate((np.array(special_ids, np.int64), order[~is_kept[order]]))


def _load_pickle(path: Path) -> Any:
    """Plain data only."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is missing, damaged or holds more than token ids ({error}); {REMEDY}") from error


def _load_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The map's tensors and the metadata; a checkpoint's weights stay unread."""
    try:
        with safe_open(path, "pt") as file:
            names = {"d2t", "t2d", "counts"}.intersection(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except Exception as error:
        raise ValueError(f"{path} is missing, damaged or no safetensors file ({error}); {REMEDY}") from error


def _save(value: Any, path: Path) -> None:
    with atomic_file(path) as temporary, disk_errors(path):
        torch.save(value, temporary)
