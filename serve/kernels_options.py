"""Options of `slipstream kernels`. Imports nothing that takes long, so that wrong ones are refused at once."""

from dataclasses import dataclass
from typing import Literal

from slipstream.models.files.names import check_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """Prints which kernel multiplies each layer's weights, by the number of rows of a pass. Reads config.json alone."""

    REQUIRED = {"target": "a target checkpoint, as a folder or a hub id"}

    target: str = ""
    """Target checkpoint, as a folder or a hub id, whose weights are not fetched."""
    draft: Literal["none", "mtp"] = "none"
    """mtp: the layers of the target's MTP head, too."""
    gpu: Literal["h100", "h200", "b200"] = "h100"
    """GPU to choose for. This machine need not have it."""
    rows: tuple[int, ...] = (1, 8, 32, 64, 256, 1024)
    """Rows of a pass: verified nodes and prompt tokens."""
    exact: bool | None = None
    """Whether the order of sums is fixed. Default: as the server does it, where GPU and target allow it."""
    quantization: Literal["fp8"] | None = None
    """fp8: as if 16-bit weights were quantised at load time."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """KV cache dtype: for few rows some products write keys and values themselves."""
    trust_remote_code: bool = False
    """Run the checkpoint's own Python code, if its config needs that."""

    def __post_init__(self) -> None:
        if not self.rows or not 1 <= min(self.rows) <= max(self.rows) < 2**31:
            raise ValueError(f"rows is {list(self.rows)}; give numbers from 1 to 2**31 - 1, such as [1, 8, 64]")

    def check_inputs(self) -> None:
        """Raises ValueError for a checkpoint that does not exist."""
        check_checkpoint("target", self.target)
