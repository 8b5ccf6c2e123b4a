"""Compiles the attention kernel for a GPU that need not be there and prints the bytes of shared memory that it takes.

Arguments: compute capability (89), rows, tokens, warps and stages of the blocks, head dim, window (0: none). A process
of its own, since tests on the CPU interpret kernels.
"""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.kernels.attention.tree import Blocks, Parts, attend_kernel, choose_shares

POINTERS = dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), "*bf16")
POINTERS |= dict.fromkeys(("pages_ptr", "rows_ptr", "lengths_ptr", "ancestors_ptr"), "*i64")
POINTERS |= {"partial_ptr": "*fp32", "partial_lse_ptr": "*fp32", "counters_ptr": "*i32"}
NUMBERS = {"scale": "fp32", "N": "i32", "first_node": "i32", "table_width": "i32", "min_part": "i32"}


def shared_bytes(capability: int, blocks: Blocks, head_dim: int, window: int | None) -> int:
    block_dim, parts = triton.next_power_of_2(head_dim), Parts(8)
    constants = {
        "G": 8, "D": head_dim, "BLOCK_D": block_dim, "GROUP": 4, "PAGE": 16, "ROWS": blocks.rows,
        "TOKENS": blocks.tokens, **choose_shares(blocks, parts, block_dim), "WAIT": True, "MASK": "tree",
        "WINDOW": window, "PREFIX": True, "PRECISION": "tf32", "WORD": tl.int64, "OFFSET": tl.int32, "PDL": False,
        "lse_ptr": None, "sinks_ptr": None, "scales_ptr": None, "squash": None,
    }  # fmt: skip
    types = POINTERS | NUMBERS | dict.fromkeys(constants, "constexpr")
    names = attend_kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in POINTERS}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(attend_kernel, {name: types[name] for name in names}, values, aligned)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


if __name__ == "__main__":
    capability, *sizes, head_dim, window = map(int, sys.argv[1:])
    print(shared_bytes(capability, Blocks(*sizes), head_dim, window or None))
