"""A rank above 0 of a target with random weights: python -m ... (bench/random_targets.py has it started)."""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from slipstream.bench.random_targets import make_target
from slipstream.serve.engine import build, follower

if __name__ == "__main__":
    build.load_target = make_target
    follower.main()
