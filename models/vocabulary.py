"""The vocabulary of a draft, which may leave out target tokens: as two buffers in a network and in its files.

d2t (Vd,) int64 are offsets, target id = draft id + d2t[draft id]; t2d (V,) bool says which target ids a draft has.
"""

from pathlib import Path

import torch
from torch import Tensor


def vocabulary_buffers(vocab_size: int, draft_vocab_size: int) -> tuple[Tensor, Tensor]:
    """d2t and t2d of the first `draft_vocab_size` target ids."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[:draft_vocab_size] = True
    return torch.zeros(draft_vocab_size, dtype=torch.int64), t2d


def enter_vocabulary(ids: Tensor, d2t: Tensor, t2d: Tensor) -> None:
    """Writes d2t and t2d. Raises ValueError unless ids (Vd,) are distinct, ascending and the target's."""
    if ids.shape != d2t.shape or not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0:
        raise ValueError(f"draft vocabulary: need {len(d2t)} distinct ascending ids")
    if int(ids[-1]) >= len(t2d):
        raise ValueError(f"draft vocabulary: id {int(ids[-1])} is outside the target's {len(t2d)} tokens")
    d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    t2d.zero_()[ids.to(t2d.device)] = True


def ids_of(d2t: Tensor) -> Tensor:
    """(Vd,) int64 target id of each draft id."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def complete_vocabulary(tensors: dict[str, Tensor], vocab_size: int, path: Path) -> None:
    """Makes t2d of a file's d2t, which others leave out. Raises ValueError for a d2t that is no map into the target."""
    if "d2t" not in tensors:
        return
    ids = ids_of(tensors["d2t"])
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(ids.unique()) != len(ids):
        raise ValueError(f"{path}: d2t maps outside the target's {vocab_size} tokens or twice to one")
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
