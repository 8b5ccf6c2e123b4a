"""Options of `slipstream deploy`: those of `serve`, and how many servers there are. Imports neither torch nor Ray."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any, Self

from slipstream.serve.options import LearnOptions, ServeConfig, check_at_least, check_checkpoints

# What answers and tokens depend on. Servers that differ in these belong to different answers.
OF_TARGET = (
    *("target", "revision", "dtype", "quantization", "kv_cache_dtype", "exact", "tp_exact", "max_model_len"),
    "logprobs_mode",
)
# What neither ingresses nor replicas read.
OF_CLUSTER = ("cluster", "name", "surge")
# What only replicas read: a change leaves ingresses as they are.
OF_REPLICAS = ("draft", "drafter", "replicas", "max_replicas", "requests_per_replica", "second", "second_replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig(ServeConfig):
    """Serves a target with many replicas behind one address, on a Ray cluster."""

    FIRST = "config"
    HIDDEN = ServeConfig.HIDDEN - {"device"} | {"draft_folder", "dry_run", "learn", "states"}

    replicas: int = 1
    """Number of servers, each on `tp` GPUs, or on a CPU; with max_replicas the fewest."""
    max_replicas: int | None = None
    """Most servers. If given, their number follows the open requests and, with --objective itl=20ms, the times of
    steps."""
    requests_per_replica: int | None = None
    """Open requests of a replica that scaling aims at. Default: half of max_running."""
    ingresses: int = 1
    """Number of processes that check requests and turn text to tokens and back."""
    cpus: float = 1.0
    """CPU cores that Ray sets aside for a replica."""
    second_draft: str | None = None
    """Another draft to try on a share of the calls."""
    second_drafter: dict[str, Any] = field(default_factory=dict)
    """Options of its drafter, by name."""
    second_share: float = 0.1
    """Share of the calls that get it."""
    second_replicas: int = 1
    """Number of servers with it."""
    surge: bool = True
    """During an update start new replicas before old ones end, which takes room for one more of each four, at least
    one. Off: first end, then start, for clusters without room."""
    cluster: str = "auto"
    """Ray cluster: its address; auto, the one that runs on this machine, or else a new one; or local, a new one."""
    name: str = "slipstream"
    """Name of the application on the cluster."""

    def __post_init__(self) -> None:
        ServeConfig.__post_init__(self)
        check_at_least(self, 1, "replicas", "ingresses", "requests_per_replica", "second_replicas")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas} and replicas {self.replicas}; give at least as many as replicas"
            )
        if not 0 < self.second_share < 1:
            raise ValueError(f"second_share is {self.second_share}; it must be between 0 and 1, without both")
        if not 0 < self.cpus < math.inf:
            raise ValueError(f"cpus is {self.cpus}; it must be a number above 0")
        if self.dry_run:
            raise ValueError("dry_run is an option of `serve`; run `serve --dry-run` with the same target and draft")
        if self.draft_folder is not None or self.learn.device:
            name = "draft_folder" if self.draft_folder is not None else "learn.device"
            raise ValueError(f"{name} changes the draft of one server; change a deployment's by `slipstream deploy`")
        if self.states is not None:
            raise ValueError(f"states is {self.states}, the place of one server; capture from a `serve` of its own")

    def check_inputs(self) -> None:
        ServeConfig.check_inputs(self)
        if self.second_draft is not None:
            check_checkpoints(self.target, self.second_draft)

    @property
    def places(self) -> int:
        """Open requests that a replica takes, running and waiting."""
        return self.max_running + self.max_waiting

    @property
    def aim(self) -> int:
        """Open requests of a replica that scaling aims at."""
        return self.requests_per_replica or max(self.max_running // 2, 1)

    @property
    def most_replicas(self) -> int:
        second = self.second_replicas if self.second_draft is not None else 0
        return max(self.replicas, self.max_replicas or 0) + second

    def drafts(self) -> list[Self]:
        """Returns the options of the replicas of each draft."""
        if self.second_draft is None:
            return [self]
        second = replace(
            self,
            draft=self.second_draft,
            drafter=self.second_drafter,
            replicas=self.second_replicas,
            max_replicas=None,
            second_draft=None,
            target=self.target or self.source.find_target(self.revision, trust_remote_code=False, weights=False)[0],
        )
        return [self, second]

    def values(self) -> dict[str, Any]:
        """Returns the options without keys, as plain data that make them again."""
        return {name: value for name, value in asdict(self).items() if name != "api_key"}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Returns the options of plain data, as `values` and a file have them. Raises ValueError."""
        try:
            return cls(**{**values, "learn": LearnOptions(**values.get("learn", {}))})
        except TypeError as error:
            raise ValueError(f"the options cannot be used: {error}") from error

    @property
    def target_version(self) -> str:
        """A name for what answers depend on."""
        return digest([getattr(self, name) for name in OF_TARGET])

    def ingress_version(self, key_digests: list[bytes]) -> str:
        """A name for what ingresses depend on."""
        values = {name: value for name, value in self.values().items() if not name.startswith(OF_REPLICAS + OF_CLUSTER)}
        return digest([values, [key.hex() for key in key_digests], self.second_draft is None, self.second_share])

    @property
    def replica_version(self) -> str:
        """A name for what a replica depends on."""
        unrelated = ("replicas", "max_replicas", "second", "ingresses", "requests_per_replica", *OF_CLUSTER)
        return digest({name: value for name, value in self.values().items() if not name.startswith(unrelated)})


def digest(values: Any) -> str:
    return blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
