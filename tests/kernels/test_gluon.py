"""Kernels in Gluon, which no interpreter runs, compile for a Hopper GPU by the installed Triton."""

import json

import pytest

from slipstream.tests.kernels.triton_runs import compiled

SHARED_MEMORY = 227 << 10  # bytes of a program, at most


@pytest.mark.slow
def test_they_compile_and_fit(tmp_path):
    sizes = json.loads(compiled("compile_gluon.py", TRITON_CACHE_DIR=str(tmp_path)))
    assert len(sizes) == 10
    assert all(0 < size <= SHARED_MEMORY for size in sizes.values()), sizes
