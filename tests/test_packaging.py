"""The package as pyproject.toml describes it, and file names that hide no installed module."""

import importlib
import importlib.machinery
import re
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.tests.sources import ROOT, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_INSTALLED = ("tests", "bench", "configs", "assets", "deploy", "docs")
SCRIPT_FOLDERS = ("train", "data_tools", "bench")  # `python train/eagle3.py` puts its folder first on sys.path
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("assets/*/README.md"))
PATH = re.compile(r"(?<![\w*])[\w/]+\.py\b")
# Files of other projects that comments name.
OF_OTHERS = {"encoder.py", "generation/utils.py", "prepare_data.py", "vllm/v1/sample/sampler.py"}
IDENTIFIER = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")


def test_the_package_list_is_the_tree():
    folders = {file.parent for file in python_files() if file.parts[0] not in NOT_INSTALLED}
    packages = {".".join(("slipstream", *folder.parts)) for folder in folders}
    assert PROJECT["tool"]["setuptools"]["packages"] == sorted(packages)
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"slipstream": "."}


def test_only_the_root_has_an_init_file():
    """With one in kernels/, `import kernels` from the root would hide the package that transformers looks for."""
    assert [file for file in python_files() if file.name == "__init__.py"] == [Path("__init__.py")]


def test_no_script_hides_an_installed_module():
    elsewhere = [entry for entry in sys.path if "site-packages" in entry or ROOT not in Path(entry or ".").parents]
    elsewhere = [entry for entry in elsewhere if Path(entry or ".").resolve() != ROOT]
    for file in python_files():
        if file.parts[0] in SCRIPT_FOLDERS:
            assert file.stem not in sys.stdlib_module_names, f"{file} hides a module of the standard library"
            spec = importlib.machinery.PathFinder.find_spec(file.stem, elsewhere)
            assert spec is None, f"{file} hides {spec.origin if spec else ''}"


def test_no_file_is_named_after_nothing():
    vague = {"utils", "util", "common", "helpers", "misc"}
    assert not [file for file in python_files() if vague & {*file.parent.parts, file.stem}]


@pytest.mark.parametrize("script", PROJECT["project"]["scripts"])
def test_console_scripts_lead_to_a_function(script):
    module, function = PROJECT["project"]["scripts"][script].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_version_is_the_packages():
    module = PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"].removesuffix(".__version__")
    assert importlib.import_module(module).__version__


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return text.strip().replace(" ", "-")


def test_links_of_documents_lead_somewhere():
    broken = []
    for page in PAGES:
        for link in LINK.findall(prose(page)):
            path, _, name = link.partition("#")
            if "://" in link:
                continue
            file = page.parent / path if path else page
            headings = HEADING.findall(file.read_text()) if name and file.suffix == ".md" and file.exists() else []
            if not file.exists() or (name and name not in map(anchor, headings)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_tables_of_documents_are_whole():
    """Each has a header and the line below it, and as many cells in every row; a `|` in code counts as text."""
    broken = []
    for page in PAGES:
        for table in TABLE.findall(prose(page)):
            header, *rows = re.sub(r"`[^`\n]*`", "", table).splitlines()
            if not rows or not set(rows[0]) <= set("|-") or {row.count("|") for row in rows} != {header.count("|")}:
                broken.append(f"{page.relative_to(ROOT)}: {table.splitlines()[0]}")
    assert not broken


def prose(page: Path) -> str:
    """Returns a page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def test_pages_about_the_code_name_what_is_there():
    """Their files exist, and every identifier in backticks is a word of the sources."""
    files = python_files()
    sources = [(ROOT / file).read_text() for file in files if file.parts[0] != "tests"]
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    unknown = []
    for page in (ROOT / "docs/architecture.md", ROOT / "docs/glossary.md", *ROOT.glob("docs/internals/*.md")):
        text = page.read_text()
        names = {name for name in IDENTIFIER.findall(text) if not words.issuperset(name.split("."))}
        unknown += [f"{page.relative_to(ROOT)}: {name}" for name in sorted(names | missing_files(text, files))]
    assert not unknown


def test_sources_name_files_that_exist():
    files = python_files()
    sources = [file for file in files if file.parts[0] != "tests"]
    unknown = {str(file): missing_files((ROOT / file).read_text(), files) - OF_OTHERS for file in sources}
    assert not {file: names for file, names in unknown.items() if names}


def missing_files(text: str, files: list[Path]) -> set[str]:
    """The names of Python files in a text, whole paths or their ends, that no file has."""
    ends = [f"/{file}" for file in files]
    return {path for path in PATH.findall(text) if not any(end.endswith(f"/{path}") for end in ends)}
