"""Tensors written as they come into a sharded safetensors checkpoint: no more than a few shards are ever held."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from safetensors.torch import save_file
from torch import Tensor

NUM_WRITERS = 4


class ShardWriter:
    """Use as a context manager: on leaving it the shards get their final names and the index is written.

    Shards hold about `shard_bytes` (at least one tensor each); up to NUM_WRITERS are written at a time.
    """

    def __init__(self, folder: Path, shard_bytes: int = 2**30) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shard_bytes = folder, shard_bytes
        self.num_bytes = 0
        self._shard: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []  # names by shard
        self._pool = ThreadPoolExecutor(NUM_WRITERS)
        self._writing: list[Future[None]] = []

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes over `tensor`, which may lie on any device."""
        self._shard[name] = tensor.cpu().contiguous()
        self.num_bytes += tensor.nbytes
        if sum(held.nbytes for held in self._shard.values()) >= self.shard_bytes:
            self._write()

    def _write(self) -> None:
        while len(self._writing) >= NUM_WRITERS:
            self._writing.pop(0).result()
        path = self.folder / f"shard-{len(self._shards)}.safetensors"
        self._writing.append(self._pool.submit(save_file, self._shard, path, {"format": "pt"}))
        self._shards.append(list(self._shard))
        self._shard = {}

    def _finish(self) -> None:
        if self._shard:
            self._write()
        for writing in self._writing:
            writing.result()
        places: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05}-of-{len(self._shards):05}.safetensors"
            (self.folder / f"shard-{index}.safetensors").rename(self.folder / file)
            places |= dict.fromkeys(names, file)
        index_file = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2) + "\n")
