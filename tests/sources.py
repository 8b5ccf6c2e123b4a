"""The files of this repository, and syntax trees of all Python files, read once in each process."""

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = ROOT / "assets" / "tiny-target"
HYBRID = ROOT / "assets" / "tiny-hybrid-target"


def python_files() -> list[Path]:
    """Python files relative to the root, without virtual environments and the products of a build."""
    skipped = {path.parent.name for path in ROOT.glob("*/pyvenv.cfg")} | {"build", "dist"}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in skipped]
    files = [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    return [file.relative_to(ROOT) for file in files]


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
