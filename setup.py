"""The C++ core of the n-gram drafter. Everything else about the package is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import CompileError

CORE = "serve/drafters/ngram/csrc"


class BuildCore(build_ext):
    """Says in one sentence what is missing where there is no compiler."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        try:
            super().build_extension(ext)
        except CompileError as error:
            raise SystemExit(
                f"slipstream: cannot compile {ext.name} ({error}); a C++17 compiler is needed: install g++ or clang "
                "(Debian: apt-get install g++; macOS: xcode-select --install) or set CXX, then install again"
            ) from error


setup(
    ext_modules=[
        Pybind11Extension(
            "slipstream.serve.drafters.ngram.ngram_core",
            sorted(str(path) for path in Path(CORE).glob("*.cpp")),
            include_dirs=[CORE],
            depends=sorted(str(path) for path in Path(CORE).glob("*.h")),
            cxx_std=17,
            extra_compile_args=["-O3"],
        )
    ],
    cmdclass={"build_ext": BuildCore},
)
