"""Configs of block drafts' heads, as files and options have them. Imports no torch: options have these types."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

Values = Mapping[str, Any]  # of config.json


class BlockSizes(NamedTuple):
    """Fields and properties of a block draft's config on which heads depend."""

    hidden_size: int
    vocab_size: int
    num_tokens: int  # that the draft can propose
    block_size: int
    num_proposals: int
    sample_from_anchor: bool
    rms_norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head's own fields, by the names that they have in dflash_config of config.json."""

    option: ClassVar[str]
    """The option of training that asks for the head."""
    field: ClassVar[str]
    """The field of dflash_config that is set in drafts with the head."""
    prefix: ClassVar[str] = ""
    """The beginning of its fields' names in config.json."""
    joins: ClassVar[bool] = False
    """Whether it scores candidates by the token before; a draft has one such head at most."""
    architecture: ClassVar[str]
    """The public name of drafts with the head."""
    projector: ClassVar[str]
    """The value of `projector_type` in their files."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Fields of other trainers -> ours of the same meaning."""
    foreign: ClassVar[tuple[str, ...]] = ()
    """Other fields of theirs, which are checked or say nothing of the network."""
    top_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that other servers read at the top level of config.json only."""

    @property
    def num_candidates(self) -> int:
        """Candidates of a slot that it scores."""
        return 1

    @property
    def uncalibrated(self) -> Self:
        """The config without numbers that say how to read the head's outputs."""
        return self

    def check(self, sizes: BlockSizes) -> None:
        """Raises ValueError for a draft in which the head cannot be."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Its fields of dflash_config."""
        return tuple(cls.prefix + field.name for field in fields(cls))

    @classmethod
    def from_options(cls, options: Values) -> Self | None:
        """Reads options of training; None: they do not ask for the head."""
        return cls._read(options) if options.get(cls.option) else None

    def to_options(self) -> dict[str, Any]:
        """The inverse."""
        return self._write()

    @classmethod
    def from_json(cls, values: Values) -> Self | None:
        """Reads dflash_config; None: the draft lacks the head."""
        return cls._read(values) if values.get(cls.field) else None

    def to_json(self, values: Values) -> dict[str, Any]:
        """The inverse; `values` are fields of the heads before it."""
        return self._write()

    @classmethod
    def refuse(cls, values: Values) -> None:
        """Raises ValueError for fields of another trainer's file that the network here does not obey."""

    @classmethod
    def _read(cls, values: Values) -> Self:
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[cls.prefix + name] for name in names if values.get(cls.prefix + name) is not None})

    def _write(self) -> dict[str, Any]:
        return {self.prefix + field.name: getattr(self, field.name) for field in fields(self)}


def check_rank(option: str, rank: int) -> None:
    if rank < 1:
        raise ValueError(f"{option} is {rank}; give 1 or more, or 0 for none")


def check_candidates(count: int, sizes: BlockSizes) -> None:
    if not 1 <= count <= sizes.num_tokens:
        raise ValueError(f"{count} candidates of a slot; give 1 to {sizes.num_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiLiCorrConfig(HeadConfig):
    """Sizes of LiLiCorr's scorer (lilicorr.py), which options name one by one; files prefix them with `lilicorr_`."""

    option = "lilicorr"
    field = "lilicorr_candidate_topk"
    prefix = "lilicorr_"
    joins = True
    architecture = "LiLiCorrDraftModel"
    projector = "lilicorr"
    foreign = ("lilicorr_enabled",)

    candidate_topk: int = 8
    hidden_size: int = 1024  # 0: the draft's
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 2.0
    factor_dim: int = 1024
    vector_eps: float = 1e-4
    logit_scale: float = 8.0

    def __post_init__(self) -> None:
        for name in ("candidate_topk", "num_layers", "num_heads", "factor_dim", "mlp_ratio", "logit_scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"lilicorr_{name} is {getattr(self, name)}; give a positive number")
        if self.candidate_topk > 16 or self.candidate_topk & (self.candidate_topk - 1):
            raise ValueError(f"lilicorr_candidate_topk is {self.candidate_topk}; give 1, 2, 4, 8 or 16")
        if self.hidden_size < 0 or self.hidden_size % self.num_heads:
            raise ValueError(
                f"lilicorr_hidden_size is {self.hidden_size}; give a multiple of lilicorr_num_heads {self.num_heads}, "
                "or 0 for the draft's hidden size"
            )
        if not 0 < self.vector_eps < 0.5:
            raise ValueError(f"lilicorr_vector_eps is {self.vector_eps}; give a number between 0 and 0.5")

    @property
    def num_candidates(self) -> int:
        return self.candidate_topk

    def check(self, sizes: BlockSizes) -> None:
        check_candidates(self.candidate_topk, sizes)
        if sizes.sample_from_anchor:
            raise ValueError("sample_from_anchor is true, which LiLiCorr drafts are not trained with; set it to false")

    @classmethod
    def from_options(cls, options: Values) -> Self | None:
        return options.get(cls.option)

    def to_options(self) -> dict[str, Any]:
        return {self.option: self}

    @classmethod
    def from_json(cls, values: Values) -> Self | None:
        """Raises ValueError for a file that has some of the fields and lacks others: a default would change scores, not
        shapes."""
        missing = [name for name in cls.names() if values.get(name) is None]
        if 0 < len(missing) < len(cls.names()):
            raise ValueError(f"draft config lacks {', '.join(missing)}; a LiLiCorr draft needs all lilicorr_ fields")
        return None if missing else cls._read(values)

    @classmethod
    def refuse(cls, values: Values) -> None:
        if values.get("lilicorr_enabled") is False and values.get(cls.field):
            raise ValueError(
                "draft config: lilicorr_enabled is false, but lilicorr_candidate_topk is set; delete either"
            )
