"""The drafter interface."""

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from slipstream.kernels.gemm.low_rank import RowAdapters
from slipstream.kernels.speculation.draft_tree import join_chain
from slipstream.models.drafts.adapters import add_adapters, read_adapter
from slipstream.models.drafts.base import (
    Choices,
    DraftConfig,
    load_draft,
    read_draft_config,
    with_window,
)
from slipstream.models.drafts.source import DraftSource
from slipstream.models.files.checkpoint import resolve
from slipstream.models.files.weights import tensors_of
from slipstream.models.layers.formats.base import Tensors
from slipstream.models.layers.linear import remake_derived
from slipstream.models.targets.config import AttentionSpec, DecoderShape, TargetSpec
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters.vocabulary import DraftVocabulary, find_vocabulary
from slipstream.serve.request import Request
from slipstream.serve.runner.batch import DraftBatch, PassRows, Proposal
from slipstream.serve.runner.request_state import RequestState

PIECE = 2**22  # numbers that are pinned at once: 8 MiB in 16 bits


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The sizes of a drafter, known before its weights are read."""

    widths: tuple[int, ...] = (1,)  # supported values of N, always with 1, the largest last
    scratch: tuple[int, ...] = ()  # by N: KV tokens that drafting writes beyond the committed ones; empty: none
    chain_nodes: int = 0  # widths up to this one are chains, others trees; 0: all are alike
    branches: bool = False  # False: proposals are chains, which need neither tree mask nor KV moves
    lookahead: int = 0  # its KV at slot i depends on tokens up to i + lookahead
    layers: tuple[AttentionSpec, ...] = ()  # its layers, whose KV is kept beside the target's
    kv_cache_dtype: str = "auto"  # dtype of their KV: auto (the target's) or fp8
    reads_target: bool = False  # they keep no KV, and read that of the target's layers which their `kv_source` names
    network: DecoderShape | None = None  # its config
    adapters: tuple[str, ...] = ()  # names of LoRA adapters, from number 1
    shares: tuple[float, ...] = ()  # of the requests that name none, by adapter
    chooses_window: bool = False  # how much of a text its passes read is chosen while serving
    name: str = "none"  # of the drafter
    source: DraftSource = DraftSource("none")  # where it comes from
    host_widths: tuple[int, ...] = (1,)  # likewise, of host stages that draft


class Drafter(ABC):
    """Proposes tokens for the target to verify. The engine uses this interface only, whichever drafter it is."""

    aux_layers: tuple[int, ...] = ()  # target states it reads: 0..n-1 a layer's output, n after the final norm
    attends_to_context: bool = False  # `extend` attends, too, and needs rows.attention
    needs_first: bool = False  # `extend` needs rows.are_first
    group: int = 0  # KV group of batch.places

    @classmethod
    def plan(cls, source: DraftSource, options: Any, target: TargetSpec) -> DraftPlan:  # noqa: ARG003
        """Plans the drafter, before its weights are loaded. Raises ValueError if the draft does not fit the target or
        the options (options.py)."""
        return DraftPlan()

    @classmethod
    @abstractmethod
    def load(cls, source: DraftSource, options: Any, target: Target) -> "Drafter":
        """Builds the drafter on the target's device and in its dtype. Raises ValueError if the draft does not fit."""

    def attach(self, target: Target, state: RequestState, attention: Backend | None) -> None:
        """Receives the target, the request state, and attention over the KV of the plan's layers."""

    @property
    def fixed_tokens(self) -> frozenset[int] | None:
        """Tokens that it may propose whatever other requests use; None: all that it proposes."""
        return None

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that the drafter cannot serve as promised."""

    def forget(self) -> None:
        """Drops what passes before the first request, which are timed, have taught it."""

    def read_weights(self, source: DraftSource, options: Any, target: Target) -> "DraftWeights":  # noqa: ARG002
        """Reads other weights for its network into the host's memory; safe beside passes, on another thread. Raises
        ValueError for a draft whose network is another one."""
        raise ValueError(f"draft {source.name} cannot be loaded: no network drafts here; start an engine with it")

    def save_weights(self, fingerprint: str) -> "DraftWeights":
        """Copies the weights of its network, which are of files with this fingerprint, to the host's memory."""
        raise AssertionError("no network drafts")

    def load_weights(self, weights: "DraftWeights") -> None:
        """Copies weights into the storage of its own, and renews what it has derived of them, in place: captured passes
        that run later read them. KV and states of requests stay."""
        raise AssertionError("no network drafts")

    def propose(self, batch: DraftBatch, width: int) -> Proposal:
        """Proposes at most N = `width` nodes per request, after batch.lengths (B,) committed tokens and the
        roots batch.roots (B,). The default proposes the roots alone."""
        B = len(batch.roots)
        device = batch.roots.device
        return Proposal(batch.roots[:, None].int(), chain_parents(B, 1, device), root_scores(B, device))

    def observe(self, rows: PassRows) -> None:
        """Sees the rows of a target pass before `extend` does; not called without `aux_layers`."""

    def extend(self, rows: PassRows, aux_states: Tensor) -> None:
        """Extends the drafter's KV and state by rows of a target pass with the aux hidden states (C, K * H) that
        `aux_layers` names; not called without such layers."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftWeights:
    """Weights apart from a network, in the host's memory, on a GPU's host in pinned pages."""

    fingerprint: str  # of their files
    config: DraftConfig
    tensors: dict[str, list[Tensor]]  # by their names in the network: pieces of each, flat


class NetworkDrafter(Drafter):
    """A drafter with a network from a checkpoint."""

    Network: ClassVar[type[Any]]
    module: Any  # the network
    vocabulary: DraftVocabulary
    adapters: RowAdapters
    numbers: Tensor | None  # (R,) adapters of requests, if there are some

    @abstractmethod
    def __init__(self, module: Any, vocabulary: DraftVocabulary, options: Any) -> None: ...

    @classmethod
    @abstractmethod
    def plan_network(cls, options: Any, config: Any) -> DraftPlan:
        """Plans everything but the layers and what is the same for all networks."""

    @classmethod
    def plan(cls, source: DraftSource, options: Any, target: TargetSpec) -> DraftPlan:
        config = cls.read_config(source, options, target)
        layers = tuple(layer.attention for layer in config.layers)
        plan = cls.plan_network(options, config)
        if plan.reads_target:
            return replace(plan, layers=layers, network=config)
        if isinstance(options.window, int):
            layers = tuple(with_window(layer, options.window) for layer in layers)
        return replace(
            plan,
            layers=layers,
            kv_cache_dtype=options.kv_cache_dtype,
            network=config,
            adapters=tuple(options.adapters),
            shares=tuple(options.ab.get(name, 0.0) for name in options.adapters),
            chooses_window=options.window == "auto" and not any(layer.window for layer in layers),
        )

    @classmethod
    def load(cls, source: DraftSource, options: Any, target: Target) -> Self:
        drafter = cls.of(cls.read_network(source, options, target, target.device, target.shared), options, target)
        module = drafter.module
        adapters = [read_adapter(resolve(folder)) for folder in getattr(options, "adapters", {}).values()]
        for adapter in adapters if not source.is_in_target else ():
            adapter.warn_if_changed(source.folder())
        drafter.adapters = add_adapters(module, adapters)
        return drafter

    @classmethod
    def of(cls, module: Any, options: Any, target: Target) -> Self:
        """Builds the drafter of a network, as `load` does; also where `target` and network have no memory."""
        if isinstance(window := getattr(options, "window", None), int):
            module.limit_window(window)
        return cls(module, find_vocabulary(module, target, options), options)

    def take_adapters(self, requests: Tensor | None) -> None:
        """Lets each row, or as many for each, take the adapter of its request (n,)."""
        if self.numbers is not None and requests is not None:
            self.adapters.numbers = self.numbers[requests]

    @classmethod
    def read_config(cls, source: DraftSource, options: Any, target: TargetSpec) -> Any:
        """Returns the network's config. Raises ValueError if it does not fit the target or the options."""
        return read_draft_config(cls.Network, source.folder(), target, Choices.of(options))

    @classmethod
    def read_network(
        cls, source: DraftSource, options: Any, target: Target, device: torch.device, shared: Tensors | None
    ) -> Any:
        """Returns the network with its weights, in the target's dtype. `shared`: see load_draft."""
        return load_draft(
            cls.Network,
            source.folder(),
            target=target.config,
            dtype=target.dtype,
            device=device,
            shared=shared,
            choices=Choices.of(options),
        )

    def keep_tokens(self, module: Any) -> None:
        """Drops of a network that was read what its own has not kept."""

    def read_weights(self, source: DraftSource, options: Any, target: Target) -> DraftWeights:
        if getattr(options, "adapters", None):
            raise ValueError(
                f"draft {source.name} cannot be loaded: drafter.adapters change the weights that serve; start an "
                "engine with it, or one without adapters"
            )
        is_shared = target.ranks is not None  # embedding and head, of which a rank has a part
        if is_shared and self.module.embed_tokens is not None:
            raise ValueError(
                f"draft {source.name} cannot be loaded: the draft that is served has an embedding of its own, which "
                "ranks that share the target's cannot compare with that; start an engine with it"
            )
        module = self.read_network(source, options, target, torch.device("cpu"), None if is_shared else target.shared)
        network = asdict(self.module.config.network)
        values = asdict(module.config.network)
        self.keep_tokens(module)
        tensors = tensors_of(module)
        served = {name: shape_of(tensor) for name, tensor in tensors_of(self.module).items()}
        shapes = {name: shape_of(tensor) for name, tensor in tensors.items()}
        if (fault := first_difference(values, network) or first_difference(shapes, served)) is not None:
            raise ValueError(
                f"draft {source.name} is not of the network that is served: {fault}; start an engine with it"
            )
        return DraftWeights(source.fingerprint, module.config, on_host(tensors, target.device))

    def save_weights(self, fingerprint: str) -> DraftWeights:
        module = self.module
        return DraftWeights(fingerprint, module.config, on_host(tensors_of(module), next(module.parameters()).device))

    @torch.no_grad()
    def load_weights(self, weights: DraftWeights) -> None:
        for name, tensor in tensors_of(self.module).items():
            for part, piece in zip(tensor.view(-1).split(PIECE), weights.tensors[name], strict=True):
                part.copy_(piece, non_blocking=True)
        self.module.adopt(weights.config)
        remake_derived(self.module)

    @property
    def fixed_tokens(self) -> frozenset[int] | None:
        return self.vocabulary.fixed_ids

    def check(self, request: Request) -> None:
        self.vocabulary.check(request)

    def observe(self, rows: PassRows) -> None:
        self.vocabulary.observe(rows)

    def forget(self) -> None:
        if self.vocabulary.recent is not None:
            self.vocabulary.recent.forget()


def shape_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def first_difference(values: Mapping[str, Any], served: Mapping[str, Any]) -> str | None:
    """Names the first entry in which two mappings differ, with both values; None: they are equal."""
    name = next((name for name in (*served, *values) if values.get(name) != served.get(name)), None)
    return None if name is None else f"{name} is {values.get(name)} in it and {served.get(name)} here"


def on_host(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, list[Tensor]]:
    """Copies tensors to the host's memory, for `device` to read them."""
    is_pinned = device.type == "cuda"
    stream = torch.cuda.Stream(device) if is_pinned else None  # beside later passes
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))  # weights may be on their way
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
        return {
            name: [copy_of(piece, is_pinned=is_pinned) for piece in tensor.flatten().split(PIECE)]
            for name, tensor in tensors.items()
        }


def copy_of(piece: Tensor, *, is_pinned: bool) -> Tensor:
    """Copies a piece to the host's memory. While memory is being pinned, no thread launches kernels, so others get as
    much time afterwards."""
    began = time.perf_counter()
    copy = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=is_pinned)
    time.sleep(time.perf_counter() - began)
    return copy.copy_(piece)  # sync


def chain_proposal(chain: Sequence[Tensor], log_probs: Sequence[Tensor]) -> Proposal:
    """Proposes chains of tokens (B,), the roots first; log_probs (B, 1) of all others."""
    roots, *drafted = chain
    tokens, scores = join_chain(roots, tuple(drafted), tuple(log_probs))
    return Proposal(tokens, chain_parents(len(roots), len(chain), roots.device), scores)


def chain_parents(batch_size: int, width: int, device: torch.device) -> Tensor:
    """(B, N) int32 parents of a chain: -1, 0, 1, ..."""
    return _integers(-1, width - 1, torch.int32, device).expand(batch_size, width)


def root_scores(batch_size: int, device: torch.device) -> Tensor:
    """(B, 1) fp32 zeros."""
    return _integers(0, 1, torch.float32, device).expand(batch_size, 1)


@functools.cache
def _integers(start: int, end: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached: captured passes only read it."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capture"
    with torch.inference_mode(False):
        return torch.arange(start, end, dtype=dtype, device=device)
