"""Options of `slipstream capture-features`."""

import shlex
from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """Options of `slipstream capture-features`."""

    data: str = ""
    """Prepared dataset (slipstream prepare)."""
    target: str = ""
    """Target model: folder or hub id."""
    output: str = ""
    """Folder for the index and the shards."""
    revision: str | None = None
    """Hub revision of the target."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target."""
    drafters: tuple[Literal["eagle", "eagle3", "dflash"], ...] = ("eagle3",)
    """Drafts that will be trained from the features; decides which states are kept. Several share what they can."""
    layers: tuple[int, ...] = ()
    """States to keep instead: 0..n-1 is the output of that layer, n the state after the final norm."""
    last_hidden: bool = False
    """Keep the state after the final norm of supervised tokens even if no named draft reads it."""
    dtype: Literal["bf16", "fp8", "fp32"] = "bf16"
    """fp8: half the size, a scale per token and layer. fp32: for tests."""
    max_length: int = 2048
    """Longer documents are cut; training may use this data.max_length or a smaller one."""
    train_documents: int | None = None
    """Take the first of the training split only."""
    heldout_documents: int | None = 200
    """Take the first of the heldout split only; as many as evaluation.documents in training."""
    batch_tokens: int = 16384
    """Tokens in a pass of the target, padding included."""
    shard_gb: float = 2.0
    """Size of a file, and of what a process may lose when it is killed. Memory holds two."""
    shards: str = ""
    """Capture these shards anew and no others: numbers such as 3,7."""
    verify: bool = False
    """Read all shards, compare their checksums, and write nothing."""
    yes: bool = False
    """Do not ask before writing."""

    def __post_init__(self) -> None:
        for name in ("data", "target", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; name a folder" + (" or a hub id" if name == "target" else ""))
        least = {"max_length": 2, "batch_tokens": 1, "train_documents": 1, "heldout_documents": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name} is {value}; give at least {minimum}")
        if self.shard_gb <= 0:
            raise ValueError(f"shard_gb is {self.shard_gb}; give a positive number such as 2")
        if not all(number.strip().isdecimal() for number in self.shards.split(",") if self.shards):
            raise ValueError(f"shards is {self.shards!r}; write numbers with commas, such as 3,7")

    @property
    def chosen_shards(self) -> list[int]:
        return sorted({int(number) for number in self.shards.split(",")}) if self.shards else []

    def command(self) -> str:
        """The command line of this capture, without what may differ between two runs of it."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name in ("shards", "verify", "yes"):
                continue
            words += [f"--{field.name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
        return shlex.join(["slipstream", "capture-features", *words])
