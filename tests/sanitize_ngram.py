"""Builds the n-gram core with sanitizers and drives it hard. Linux with g++; not part of the test suite.

python tests/sanitize_ngram.py --seconds 60

Three runs of that length: random operations against the plain model under the address and undefined-behaviour
sanitizers; then threads that use everything at once, under the same two and under the thread sanitizer.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pybind11

TESTS = Path(__file__).resolve().parent
CORE = TESTS.parent / "serve" / "drafters" / "ngram" / "csrc"
FLAGS = ("-std=c++17", "-O1", "-g", "-UNDEBUG", "-Wall", "-Wextra", "-Werror", "-fno-omit-frame-pointer", f"-I{CORE}")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-fsanitize=thread",)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--compiler", default="g++")
    options = parser.parse_args()
    seconds = str(options.seconds)
    with TemporaryDirectory() as name:
        folder = Path(name)
        extension = build_extension(options.compiler, folder)
        fuzz = [sys.executable, str(TESTS / "serve" / "ngram_fuzz.py"), "--seconds", seconds, "--core", str(extension)]
        print("address, undefined; random operations:", flush=True)
        subprocess.run(fuzz, check=True, env=with_address_sanitizer(options.compiler))
        for title, flags in (("address, undefined; threads:", ADDRESS), ("thread; threads:", THREAD)):
            stress = build_stress(options.compiler, folder, flags)
            print(title, flush=True)
            subprocess.run([stress, seconds, folder / "trie"], check=True)


def build_extension(compiler: str, folder: Path) -> Path:
    path = folder / f"ngram_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = ["-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"]]
    sources = sorted(CORE.glob("*.cpp"))
    compile_(compiler, [*ADDRESS, "-fPIC", "-shared", "-fvisibility=hidden", *headers], sources, path)
    return path


def build_stress(compiler: str, folder: Path, flags: Sequence[str]) -> Path:
    sources = [path for path in sorted(CORE.glob("*.cpp")) if path.stem != "bindings"]
    path = folder / "ngram_stress"
    compile_(compiler, [*flags, "-pthread"], [*sources, TESTS / "serve" / "ngram_stress.cpp"], path)
    return path


def compile_(compiler: str, flags: Sequence[str], sources: Sequence[Path], output: Path):
    subprocess.run([compiler, *FLAGS, *flags, *map(str, sources), "-o", str(output)], check=True)


def with_address_sanitizer(compiler: str) -> dict[str, str]:
    """Python itself is built without it, so its library comes first; Python's own leaks at exit are not ours."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    command = [[compiler, f"-print-file-name={name}"] for name in names]
    libraries = [subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip() for line in command]
    return {**os.environ, "LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
