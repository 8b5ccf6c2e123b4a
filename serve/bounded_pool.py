"""Threads for work that would hold the event loop, with a queue that has an end."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slipstream.serve.scheduler import QueueFull

Result = TypeVar("Result")


class BoundedPool:
    """Belongs to the event loop. Work waits on the loop, not in the executor: who leaves takes its data along."""

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self._executor = ThreadPoolExecutor(num_threads, "tokenizer")
        self._free = asyncio.Semaphore(num_threads)

    async def run(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Raises QueueFull. Cancelled before a thread is free, the work never starts; after that its result is lost."""
        if self.num_waiting >= self.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests wait to be tokenised; try again later")
        self.num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.num_waiting -= 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        future.add_done_callback(self._release)
        return await asyncio.shield(future)  # the thread is busy to the end, whoever waits

    def _release(self, future: asyncio.Future) -> None:
        self._free.release()
        future.exception()  # looked at: of work that nobody waits for any more asyncio would complain
