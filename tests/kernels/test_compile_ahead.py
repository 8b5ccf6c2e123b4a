"""Kernels compiled in parallel, for a GPU that need not be there."""

import json

from slipstream.tests.kernels.triton_runs import compiled


def test_dry_passes_launch_nothing_and_compile_each_kernel_once(tmp_path):
    output = compiled("compile_ahead_run.py", TRITON_CACHE_DIR=str(tmp_path))
    sums, skipped, kernels, num_launchers, failed, is_restored = json.loads(output)
    assert sums == [0] * 9  # zeros where the kernel would have written, compiled or not
    assert skipped == 0
    assert kernels == ["CompiledKernel"] * 3
    assert num_launchers == 3
    assert (failed, is_restored) == ("raised, said", True)
