"""Numbers that vary from pass to pass: a kernel that Triton specialises by them is compiled anew while it serves, since
1, multiples of 16 and other numbers each have a kernel of their own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "kernels"
VARYING = {"num_rows", "num_tokens", "num_requests", "num_segments", "num_decoding", "num_chunks", "num_blocks"}
VARYING |= {"B", "M", "N", "P", "T", "count"}
# Packed rows of training have one size; chains have a count by width.
FIXED = {("_extend_forward", "N"), ("_extend_backward", "N"), ("_chain_slots", "count")}


def kernels(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, ast.expr]]:
    """Yields the kernels that are launched, and how they are decorated."""
    launched = {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in launched:
            for decorator in node.decorator_list:
                if ast.unparse(decorator).startswith("triton.jit"):
                    yield node, decorator


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_kernel_is_compiled_anew_for_another_number_of_rows(path):
    tree = ast.parse(path.read_text())
    for kernel, decorator in kernels(tree):
        names = ast.unparse(decorator)
        for argument in kernel.args.args:
            is_constant = argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)
            varies = argument.arg in VARYING or (
                is_constant and argument.arg.lower() in VARYING - {"B", "M", "N", "P", "T"}
            )
            if varies and (kernel.name, argument.arg) not in FIXED:
                message = f"{kernel.name} takes {argument.arg}, which varies; name it in do_not_specialize"
                assert not is_constant, message
                assert f"'{argument.arg}'" in names or "SIZES" in names, message
