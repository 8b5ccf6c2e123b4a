"""Kernels in Gluon, which no interpreter runs, compile for a Hopper GPU by the installed Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = Path(__file__).with_name("compile_gluon.py")
SHARED_MEMORY = 227 << 10  # bytes of a program, at most


@pytest.mark.slow
def test_they_compile_and_fit(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout)
    assert len(sizes) == 10
    assert all(0 < size <= SHARED_MEMORY for size in sizes.values()), sizes
