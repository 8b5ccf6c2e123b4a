"""Kernels compiled in parallel, for a GPU that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).with_name("compile_ahead_run.py")


def test_dry_passes_launch_nothing_and_compile_each_kernel_once(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, RUN], env=environment, check=True, capture_output=True, text=True)
    sums, skipped, compiled, num_launchers, failed, is_restored = json.loads(done.stdout)
    assert sums == [0] * 9  # zeros where the kernel would have written, compiled or not
    assert skipped == 0
    assert compiled == ["CompiledKernel"] * 3
    assert num_launchers == 3
    assert (failed, is_restored) == ("raised, said", True)
