"""Syntax trees of all Python files, read once in each process."""

import ast
import gc
from functools import cache
from pathlib import Path

from slipstream.tests.test_packaging import ROOT, python_files


@cache
def trees() -> dict[Path, ast.Module]:
    """Looks for no garbage meanwhile, and never among the nodes, a million: that takes longer than to read them."""
    gc.disable()
    files = {file: ast.parse((ROOT / file).read_text()) for file in sorted(python_files())}
    gc.freeze()
    gc.enable()
    return files


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(trees()[file]))
