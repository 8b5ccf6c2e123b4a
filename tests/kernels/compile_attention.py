"""Compiles the attention kernel for a GPU that need not be there and prints the bytes of shared memory that it takes,
how often it converts two e4m3 codes at once, and how often it loads single bytes from shared memory.

Arguments: compute capability (89), rows, tokens, warps and stages of the blocks, head dim, window (0: none), whether
the cache holds codes (0, 1). A process of its own, since tests on the CPU interpret kernels.
"""

import re
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.kernels.attention.paged import Blocks
from slipstream.kernels.attention.tree import Parts, attend_kernel, choose_shares

POINTERS = dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), "*bf16")
POINTERS |= dict.fromkeys(("pages_ptr", "rows_ptr", "lengths_ptr", "starts_ptr", "ancestors_ptr"), "*i64")
POINTERS |= {"partial_ptr": "*fp32", "partial_lse_ptr": "*fp32", "counters_ptr": "*i32"}
NUMBERS = {"scale": "fp32", "N": "i32", "first_node": "i32", "table_width": "i32", "min_part": "i32"}


def compile_attention(capability: int, blocks: Blocks, head_dim: int, window: int | None, has_codes: bool) -> Any:
    block_dim = triton.next_power_of_2(head_dim)
    parts = Parts(8)
    constants = {
        "G": 8, "D": head_dim, "BLOCK_D": block_dim, "GROUP": 4, "PAGE": 16, "ROWS": blocks.rows,
        "TOKENS": blocks.tokens, **choose_shares(blocks, parts, block_dim), "WAIT": True, "MASK": "tree",
        "WINDOW": window, "PREFIX": True, "PRECISION": "tf32", "WORD": tl.int64, "OFFSET": tl.int32, "PDL": False,
        "lse_ptr": None, "sinks_ptr": None, "squash": None, **({} if has_codes else {"scales_ptr": None}),
    }  # fmt: skip
    pointers = POINTERS | ({"keys_ptr": "*i16", "values_ptr": "*i16", "scales_ptr": "*fp32"} if has_codes else {})
    types = pointers | NUMBERS | dict.fromkeys(constants, "constexpr")
    names = attend_kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(attend_kernel, {name: types[name] for name in names}, values, aligned)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    capability, *sizes, head_dim, window, has_codes = map(int, sys.argv[1:])
    compiled = compile_attention(capability, Blocks(*sizes), head_dim, window or None, bool(has_codes))
    ptx = compiled.asm["ptx"]
    print(compiled.metadata.shared, ptx.count("cvt.rn.f16x2.e4m3x2"), len(re.findall(r"ld\.shared\.[bus]8", ptx)))
