"""What the loaders of all drafts ask of a file's tensors before they enter the network."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # the target's, of which some files hold copies
ROWS = 4096  # compared at once: bounds the copies that conversions between dtypes make


def pop_own(tensors: dict[str, Tensor], key: str, shared: Mapping[str, Tensor] | None) -> Tensor | None:
    """Takes `key` out of a draft's tensors, and returns it if it is not a copy of the target's, `shared` (V, H).

    A head is compared at the rows that the draft's t2d (V,) names. Without `shared` whatever is there counts as a copy.
    """
    own = tensors.pop(key, None)
    if own is None or shared is None:
        return None
    ids = tensors["t2d"].nonzero().flatten() if key == HEAD and "t2d" in tensors else None
    return None if is_copy(own, shared[key], ids) else own


def refuse_own(tensors: dict[str, Tensor], key: str, shared: Mapping[str, Tensor] | None, path: Path) -> None:
    """As `pop_own`, for drafts that can only use the target's. Raises ValueError for one that differs."""
    if pop_own(tensors, key, shared) is not None:
        raise ValueError(f"{path}: {key} is not the target's; a draft with one of its own is not supported")


def is_copy(own: Tensor, expected: Tensor, ids: Tensor | None = None) -> bool:
    """Whether `own` (N, H) is `expected` (V, H), at its rows `ids` (N,) where given, but for rounding.

    Rounding: all rows are equal in the dtype of one of them, or in bf16, from which a file in fp32 may come.
    """
    count = len(expected) if ids is None else len(ids)
    if own.shape != (count, expected.shape[1]):
        return False
    dtypes = {own.dtype, expected.dtype, torch.bfloat16}
    for start in range(0, count, ROWS):
        rows = slice(start, start + ROWS)
        theirs = expected[rows] if ids is None else expected[ids[rows].to(expected.device)]
        mine = own[rows].to(expected.device)
        dtypes = {dtype for dtype in dtypes if torch.equal(mine.to(dtype), theirs.to(dtype))}  # sync
        if not dtypes:
            return False
    return True


def check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises ValueError that names the first tensor with a value that is NaN or infinite."""
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        if not torch.stack(tensor.aminmax()).isfinite().all():  # sync
            raise ValueError(f"{path}: {key} holds NaN or infinite values; fetch the draft again or train it again")


def check_fc(tensors: Mapping[str, Tensor], size: int, layers: Sequence[int], field: str, path: Path) -> None:
    """Raises ValueError unless fc.weight reads the states of `layers`, each of `size` numbers; `field` names them."""
    columns = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else len(layers) * size
    if columns % size:
        raise ValueError(
            f"{path}: fc.weight has {columns} columns, not a multiple of the target's hidden size {size}; serve the "
            "target that the draft was trained for"
        )
    if columns != len(layers) * size:
        raise ValueError(
            f"{path}: fc.weight has {columns} columns, for {columns // size} target states of {size}, and the config "
            f"means {len(layers)}, those of layers {list(layers)}; name the layers that it was trained on in {field}"
        )
