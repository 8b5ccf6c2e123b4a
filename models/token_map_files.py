"""Token maps in the files of other programs, for drafters that gather rows of the target's head.

    FR-Spec           .pt, a list of target ids, most frequent first: entry i is draft id i
    SGLang            .pt, a 1-D tensor of the same, or ascending; its --speculative-token-map reads both
    SpecForge         .pt, a dict of d2t, offsets of ascending ids, and t2d
    EAGLE3 drafts     .safetensors with d2t, as in a checkpoint

Only plain data is read: `torch.load(weights_only=True)`. These files do not say which tokenizer they belong to.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.models.token_map import TokenMap

REMEDY = "make a map with slipstream frequency-map"


def read_token_map(path: Path, vocab_size: int) -> TokenMap:
    """The map in `path`, ours or one of the public files above, for a target of `vocab_size` tokens.

    Raises ValueError for a damaged file, another vocabulary, ids out of range, and ids that stand there twice.
    """
    is_safetensors = path.suffix == ".safetensors"
    content = _load_safetensors(path) if is_safetensors else _load_pickle(path)
    if is_safetensors and "counts" in content:
        token_map = TokenMap.read(path)
        _check_vocab_size(path, token_map.vocab_size, vocab_size)
        return token_map
    ids = _listed_ids(path, content)
    _check_ids(path, ids, vocab_size)
    if isinstance(content, dict) and "t2d" in content:
        _check_t2d(path, ids, content["t2d"], vocab_size)
    return from_listed(ids, vocab_size, path)


def from_listed(ids: Tensor, vocab_size: int, source: Path) -> TokenMap:
    """A map of distinct ids (n,) int64 in a file's order. Ascending ids say nothing about frequency."""
    ranked = not bool((ids[1:] > ids[:-1]).all())
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    counts[ids] = torch.arange(len(ids), 0, -1) if ranked else 1
    return TokenMap(ids.sort().values, counts, {"kept_ids": [], "source": str(source), "ranked": ranked})


def _listed_ids(path: Path, content: Any) -> Tensor:
    """(n,) int64 target ids in the order of the file."""
    if isinstance(content, dict) and _is_integers(content.get("d2t")):
        return content["d2t"].long() + torch.arange(len(content["d2t"]))
    if isinstance(content, list) and content and all(type(token) is int for token in content):
        return torch.tensor(content)
    if _is_integers(content):
        return content.long()
    raise ValueError(f"{path} holds no token map: no list or 1-D tensor of token ids, no d2t; {REMEDY}")


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
            f"{path}: token id {twice} stands at entries {places[0]} and {places[1]}, so draft ids are not distinct "
            f"({len(ids) - len(values)} entries too many); drop the later ones or {REMEDY}"
        )


def _check_vocab_size(path: Path, found: int, vocab_size: int) -> None:
    if found != vocab_size:
        raise ValueError(f"{path} was counted over {found} tokens, the target has {vocab_size}; {REMEDY}")


def _check_t2d(path: Path, ids: Tensor, t2d: Any, vocab_size: int) -> None:
    if not isinstance(t2d, Tensor) or t2d.ndim != 1:
        raise ValueError(f"{path}: t2d is no 1-D tensor; {REMEDY}")
    _check_vocab_size(path, len(t2d), vocab_size)
    if not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values):
        raise ValueError(f"{path}: d2t and t2d name different tokens; {REMEDY}")


def _load_pickle(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is missing, damaged or holds more than token ids ({error}); {REMEDY}") from error


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys()) & {"d2t", "t2d", "counts"}  # a checkpoint's weights stay unread
            return {name: file.get_tensor(name) for name in names}
    except Exception as error:
        raise ValueError(f"{path} is missing, damaged or no safetensors file ({error}); {REMEDY}") from error
