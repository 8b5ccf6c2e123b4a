"""Formats of weights: the members that each defines, and how a checkpoint's config assigns them to modules.

A format is one class in a file of this folder and a line of table.py. It reads its part of a config, knows its tensors
in files, and makes the layers that store, load and multiply them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.kernels.gemm.activation import Activation, activation_mul
from slipstream.kernels.gemm.choose import Kind
from slipstream.kernels.gemm.expert_weights import ExpertMatrix
from slipstream.kernels.gemm.fp8 import InputScales
from slipstream.kernels.kv.rope import Rotation
from slipstream.models.files.quantization import ignores, names_module
from slipstream.models.layers.linear import Linear, copy_converted
from slipstream.models.layers.moe import Experts

Tensors = Mapping[str, Tensor]  # by name
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


class FileTensor(NamedTuple):
    """Shapes and dtypes that a file's tensor may have."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    is_optional: bool = False


class FilePiece(NamedTuple):
    """A tensor in files, and the part of the experts that it belongs to."""

    part: str
    expected: FileTensor


class QuantizedLinear(Linear, ABC):
    """A Linear whose files hold other tensors than it stores."""

    is_plain = False
    storage: ClassVar[Mapping[str, torch.dtype]] = {}
    """Buffers and their dtypes."""
    format: "Format"
    quantize: Callable[[], InputScales] | None = None
    """Scales of what reads its gated outputs, where that is one layer that quantises them."""
    unsliced: tuple[str, ...] = ()
    """Tensors in files that a rank's part does without."""
    shared_scale: str | None = None
    """Buffer that is one for all experts, their largest."""
    fused_names: Mapping[str, str] = {}
    """Tensors that hold a projection of all experts: the ends of their names, and the layer's tensors that they
    stack. Empty where such files are not read."""

    def __init__(self, like: Linear) -> None:
        """Takes the place of `like`, a layer on the meta device."""
        nn.Module.__init__(self)
        self.in_features = like.in_features
        self.out_features = like.out_features
        self.parts = like.parts
        self.sections = like.sections
        self.shares_inputs = like.shares_inputs
        self.bias = like.bias
        self.dtypes = dict(self.storage)  # type: ignore[misc]

    def file_tensors(self, part: str | None) -> dict[str, FileTensor]:
        """Tensors of a part in files, or of all parts, by name."""
        tensors = self._file_tensors(self.size_of(part))
        if self.bias is not None:
            tensors["bias"] = FileTensor(((self.size_of(part),),))
        return tensors

    def forward(self, input: Tensor) -> Tensor:
        return self._add_leaves(input, input.dtype) if self.leaves else self._multiply(input, gated=False)

    def partial(self, x: Tensor) -> Tensor:
        return self._add_leaves(x, torch.float32) if self.leaves else super().partial(x)

    @abstractmethod
    def _multiply(self, x: Tensor, gated: bool) -> Tensor:
        """x (..., I) -> (..., O), or the `gated` product (..., O / 2)."""

    @abstractmethod
    def _add_leaves(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x (..., I) -> (..., O) in `dtype`, added along the tree of leaves."""

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor | None:
        return None

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        return activation_mul(self(x), activation)

    def gated_kind(self, num_rows: int, activation: Activation) -> Kind:
        return super().gated_kind(num_rows, activation) if activation == "silu" else "plain"

    @abstractmethod
    def _file_tensors(self, outputs: int) -> dict[str, FileTensor]: ...

    @abstractmethod
    def load_part(self, part: str | None, tensors: Tensors) -> None:
        """Stores all tensors of a part. Raises ValueError for values that the format does not allow."""

    @abstractmethod
    def dequantized(self) -> Tensor:
        """(O, I) fp32."""

    @abstractmethod
    def stored_in(self, buffers: Tensors) -> ExpertMatrix:
        """Weights in `buffers`, by the names of this layer's, as kernels take them. Those of experts have the experts
        in front."""

    def dequantized_bytes(self, dtype: torch.dtype) -> int:
        """Counts the bytes of the weights in `dtype`, where they multiply many rows."""
        return 0

    def rows_of(self, part: str | None) -> slice:
        return self.parts.get(part, slice(0, self.out_features))

    def size_of(self, part: str | None) -> int:
        rows = self.rows_of(part)
        return rows.stop - rows.start

    def check_order(self, rows: Iterable[int]) -> None:
        """Its kernels have one order."""

    def _load_bias(self, part: str | None, tensors: Tensors) -> None:
        if self.bias is not None:
            copy_converted(self.bias[self.rows_of(part)], tensors["bias"])


class QuantizedExperts(Experts, ABC):
    """Experts whose files hold other tensors than they store. Biases are stored as they are."""

    unsliced: tuple[str, ...] = ()
    """As of QuantizedLinear."""
    formats: Sequence["Format"] = ()

    def __init__(self, like: Experts) -> None:
        """Takes the place of `like`, on the meta device."""
        nn.Module.__init__(self)
        self.spec = like.spec
        self.activation = like.activation
        self.hidden_size = like.down_proj.shape[1]
        self.gate_up_proj_bias = like.gate_up_proj_bias
        self.down_proj_bias = like.down_proj_bias

    @abstractmethod
    def file_pieces(self, path: str, fused: Container[str]) -> dict[str, FilePiece]:
        """Maps names in files to pieces, for experts called `path`; `fused`: names of tensors that hold all experts."""

    @abstractmethod
    def load_part(self, part: str, tensors: Tensors) -> None:
        """Stores all tensors of a part, by the last part of their names. Raises ValueError for values that the format
        does not allow."""


@dataclass(frozen=True, slots=True)
class Format(ABC):
    """How weights are quantised. A class that derives from it is a frozen dataclass; configs set its fields."""

    title: ClassVar[str]
    """For messages."""
    variants: ClassVar[str]
    """Variants that can be read, for messages."""
    tensors: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {}
    """Tensors by which a quantised linear layer is known in files, with their dtypes."""
    scale_tensors: ClassVar[tuple[str, ...]] = ()
    """Tensors in files that its weights are multiplied by."""
    across_outputs: ClassVar[tuple[str, ...]] = ()
    """Tensors in files whose first axis is that of the inputs."""
    expert_tensors: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of tensors by which `experts` are known in files."""
    experts: ClassVar[type[QuantizedExperts] | None] = None
    """Experts in a format that linear layers do not have."""
    expert_capability: ClassVar[tuple[int, int]] = (0, 0)
    """Compute capability that experts need."""

    @classmethod
    @abstractmethod
    def read(cls, method: str, values: Mapping[str, object]) -> "Quantization | None":
        """Reads a config with this `quant_method`; None if that is another format's. Raises ValueError for what is not
        supported."""

    @classmethod
    def read_group(
        cls, kind: str, weights: Mapping[str, object], inputs: Mapping[str, object] | None
    ) -> "Format | None":
        """Reads a group of a compressed-tensors config, whose format is called `kind`; None if it is another one."""
        return None

    @property
    @abstractmethod
    def description(self) -> str:
        """A few words for names of a checkpoint's quantisation."""

    @property
    def is_fused(self) -> bool:
        """Whether tensors that hold all experts are read."""
        return False

    def joins(self, num_outputs: int, names: Sequence[str], tensors: Tensors) -> bool:
        """Whether projections of one input, `names` of files with `tensors`, keep their numbers in one layer;
        `num_outputs`: those of all but the last."""
        return False

    def layer(self, linear: Linear, names: Sequence[str], tensors: Tensors) -> QuantizedLinear:
        """Makes the layer that takes the place of `linear`, on the meta device. `names`: of its parts in files, whose
        `tensors` may tell more than the config."""
        raise NotImplementedError

    def stand_ins(self, num_inputs: int) -> dict[str, Tensor]:
        """Makes stand-ins for the tensors by which a layer is known in files, where none are read."""
        raise NotImplementedError

    @staticmethod
    def shape_in_file(tensors: Tensors) -> tuple[int, int] | None:
        """Returns O and I of a linear layer with these tensors; None if those that tell are missing."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a checkpoint."""

    name: str
    """For messages, fingerprints and times of steps."""
    groups: Sequence[tuple[Sequence[str], Format]]
    """Targets of a format: "Linear", names of modules or their ends, "re:" and a regular expression."""
    on_the_fly: bool = False
    ignored: Sequence[str] = ()
    """Modules of 16 bits: names, parts of names, wildcards, "re:" and a regular expression."""
    file_names: Mapping[str, str] = field(default_factory=dict)
    """How names of modules begin -> how they do in files, where these differ."""

    @classmethod
    def uniform(cls, name: str, format: Format) -> "Quantization":
        return cls(name, [(["Linear"], format)])

    def ignores(self, module: str) -> bool:
        """Whether the config says that this module, or what holds it, is not quantised."""
        name = self._file_name(module)
        return any(ignores(pattern, name) for pattern in self.ignored)

    def listed_format(self, module: str) -> Format | None:
        """Format of a linear layer by the config alone, for estimates without the file; None for 16 bits."""
        return None if self.ignores(module) else self._format(module)

    def format_of(self, module: str) -> Format:
        """Format of a quantised linear layer, by its name in files. Raises ValueError if no group names it."""
        format = self._format(module)
        if format is not None:
            return format
        raise ValueError(
            f"{module} is quantised, but the quantisation config ({self.name}) names no format for it; its targets are "
            f"{[target for targets, _ in self.groups for target in targets]}"
        )

    def _format(self, module: str) -> Format | None:
        name = self._file_name(module)
        formats = (format for targets, format in self.groups if any(names_module(target, name) for target in targets))
        return next(formats, None)

    def _file_name(self, module: str) -> str:
        path = f"{module}."
        begin = max((begin for begin in self.file_names if path.startswith(begin)), key=len, default="")
        return (self.file_names[begin] + path.removeprefix(begin))[:-1] if begin else module
