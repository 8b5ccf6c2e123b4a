"""Two rules that `make lint` checks: code does not grow unnoticed, and subjects of commits have one form.

python tests/house.py          checks both
python tests/house.py --write  notes today's size of the code in tests/code_size.json

Size is Python tokens without comments and docstrings, so that plain names and short lines cost nothing. A commit that
raises a number says why. Subjects are checked from the commit on that brought this file.
"""

import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = ROOT / "tests" / "code_size.json"
AREAS = {
    "packages": ("serve", "models", "kernels", "train", "data_tools", "doctor"),
    "bench": ("bench",),
    "tests": ("tests",),
}
SLACK = 2000  # tokens by which an area may be smaller than its number
SUBJECT = re.compile(r"(?=.{1,72}$)[a-z][a-z_0-9/]*(, [a-z][a-z_0-9/]*)*: \S.*")
LAYOUT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)  # before a statement
IGNORED = (*LAYOUT, tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)


def num_tokens(source: str) -> int:
    """Tokens of a file, without layout, comments and docstrings, which are strings at the beginning of a statement."""
    count = 0
    is_beginning = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IGNORED:
            count += not (is_beginning and token.type == tokenize.STRING)
            is_beginning = False
        elif token.type in LAYOUT:
            is_beginning = True
    return count


def sizes() -> dict[str, int]:
    return {
        area: sum(num_tokens(file.read_text()) for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
        for area, folders in AREAS.items()
    }


def size_faults() -> list[str]:
    numbers = json.loads(SIZES.read_text())
    faults = []
    for area, size in sizes().items():
        if size > numbers[area]:
            faults.append(f"{area} has {size:,} tokens of code; {SIZES.name} allows {numbers[area]:,}")
        elif size < numbers[area] - SLACK:
            faults.append(f"{area} has {size:,} tokens of code; lower its number in {SIZES.name}, {numbers[area]:,}")
    return faults


def subject_faults() -> list[str]:
    """Faults of new commits. Empty outside a git repository."""
    try:
        first = git("log", "--diff-filter=A", "--format=%H", "--", "tests/house.py").split()
        subjects = git("log", "--no-merges", "--format=%s", f"{first[-1]}..HEAD").splitlines() if first else []
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    form = "must be 'area: what the commit does', of at most 72 characters"
    return [f"the subject {subject!r} {form}" for subject in subjects if not SUBJECT.fullmatch(subject)]


def git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main():
    if "--write" in sys.argv[1:]:
        SIZES.write_text(json.dumps(sizes(), indent=1) + "\n")
    sys.exit("\n".join([*size_faults(), *subject_faults()]) or 0)


if __name__ == "__main__":
    main()
