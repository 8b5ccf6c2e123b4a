"""Names are nouns, assignments stand one to a line, arguments have names, docstrings say who does what."""

import ast
from collections.abc import Callable, Iterator

import pytest

from slipstream.tests.sources import nodes_of, trees

PRONOUNS = "both each here mine one ones others own theirs there those what where"
PARTICIPLES = """
asked begun behind chosen drawn found given held kept known least made meant most named said seen sent shown taken told
used wanted whole written
"""
NOT_NOUNS = frozenset(f"{PRONOUNS} {PARTICIPLES}".split())
PUBLIC_OPTIONS = {"where"}  # fields that users know by these names
NOT_SENTENCES = ("Of", "That", "Those", "What", "Whose")  # beginnings of a docstring
Function = ast.FunctionDef | ast.AsyncFunctionDef
Fault = tuple[int, str]  # line and text
Rule = Callable[[list[ast.AST]], Iterator[Fault]]


def names(nodes: list[ast.AST]) -> Iterator[Fault]:
    """Variables and parameters that are pronouns or participles."""
    fields = {id(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.lstrip("_") in NOT_NOUNS:
            if id(node) not in fields or node.id not in PUBLIC_OPTIONS:
                yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg.lstrip("_") in NOT_NOUNS:
            yield node.lineno, node.arg


def assignments(nodes: list[ast.AST]) -> Iterator[Fault]:
    """Lines that assign several values, but for shapes and swaps."""
    for node in nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
        values = {ast.unparse(value) for value in node.value.elts}
        is_shape = all(".shape" in value for value in values)
        if any({ast.unparse(element) for element in target.elts} != values for target in targets) and not is_shape:
            yield node.lineno, ast.unparse(targets[0])


def splats(nodes: list[ast.AST]) -> Iterator[Fault]:
    """Arguments that a function packs into a tuple and spreads again."""
    for function in nodes:
        if not isinstance(function, Function):
            continue
        inner_nodes = list(ast.walk(function))
        packed = {
            target.id
            for node in inner_nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in inner_nodes:
            if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name) and node.value.id in packed:
                yield node.lineno, f"*{node.value.id}"


def docstrings(nodes: list[ast.AST]) -> Iterator[Fault]:
    """Docstrings that begin with a genitive or a relative clause."""
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            words = (ast.get_docstring(node) or " ").split()
            if words and words[0] in NOT_SENTENCES:
                yield getattr(node, "lineno", 1), " ".join(words[:4])


RULES: dict[str, Rule] = {rule.__name__: rule for rule in (names, assignments, splats, docstrings)}


def faults_of(rule: Rule) -> dict[str, list[Fault]]:
    """Faults by file, for files that have any."""
    faults = {str(file): list(rule(nodes_of(file))) for file in trees()}
    return {file: places for file, places in faults.items() if places}


@pytest.mark.parametrize("name", RULES)
def test_files_keep_the_rule(name):
    assert not faults_of(RULES[name])
