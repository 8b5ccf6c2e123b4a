"""Counts the package's files that a chat request enters in the HTTP process, and a decode step in the engine.

python tests/serve/count_files.py [--list]

A file is entered if a function of it is called. Both are counted after one like it, so that nothing is loaded.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from slipstream.serve.engine.build import build_engine
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.request import Request, SamplingParams
from slipstream.tests.serve.fake_server import CHAT, client_of, serving

ROOT = Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "assets" / "tiny-target")
NUM_TOKENS = 8


class CallCounter:
    """Counts calls by the file of the called function, on all threads that start after it was made."""

    def __init__(self):
        self.calls = Counter()
        self._is_on = False
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, _: Any):
        path = frame.f_code.co_filename
        if self._is_on and event == "call" and path.startswith(str(ROOT)) and "site-packages" not in path:
            self.calls[path.removeprefix(f"{ROOT}/")] += 1

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Yields the calls of the block: {file: calls}."""
        self.calls.clear()
        self._is_on = True
        yield self.calls
        self._is_on = False
        for path in [path for path in self.calls if path.startswith("tests/")]:
            del self.calls[path]


def chat_request(counter: CallCounter) -> Counter[str]:
    """Counts a streamed chat of NUM_TOKENS tokens."""
    body = {"messages": [{"role": "user", "content": "How many eggs are in a box?"}], "max_tokens": NUM_TOKENS}
    with (
        serving(ServeConfig(target=TARGET, port=0)) as server,
        client_of(server) as client,
    ):
        client.post(CHAT, json={**body, "stream": True}).raise_for_status()
        with counter.counting() as calls:
            client.post(CHAT, json={**body, "stream": True}).raise_for_status()
        return Counter(calls)


def decode_step(counter: CallCounter) -> Counter[str]:
    """Counts a step of one request without a draft, in the middle of its answer."""
    engine = build_engine(EngineConfig(target=TARGET, device="cpu", kv_cache_tokens=1024))
    params = SamplingParams(max_tokens=99, ignore_eos=True, seed=1)
    engine.add(Request(id="r", prompt=[5, 6, 7], params=params))
    for _ in range(NUM_TOKENS):
        engine.step()
    with counter.counting() as calls:
        engine.step()
    return Counter(calls)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files, with their calls")
    options = parser.parse_args()
    counter = CallCounter()
    for name, count in (("chat request, HTTP process", chat_request), ("decode step, engine", decode_step)):
        calls = count(counter)
        print(f"{name}: {len(calls)} files, {calls.total()} calls")
        for path, number in calls.most_common() if options.list else ():
            print(f"    {number:5} {path}")


if __name__ == "__main__":
    main()
