"""Triton's interpreter without work that changes nothing: two to three times as fast, and the same results."""

from dataclasses import replace
from types import FunctionType

from triton.runtime import interpreter


def hasten() -> None:
    """For this process, before kernels are launched."""
    check_no_overflows()
    patch_once_per_launch()


def check_no_overflows() -> None:
    """Each product, sum and difference of integers is computed again to see whether it overflows; what is found counts
    in the interpreter's debug mode alone, which nothing switches on."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def patch_once_per_launch() -> None:
    """A launch replaces the functions of triton.language, and so does each call of a device function in it, which takes
    longer than what the function computes. The first time is enough until the launch ends."""
    patch, patched = interpreter._patch_lang, set[int]()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_unless_done(fn: FunctionType) -> Scope:
        if id(fn.__globals__) in patched:
            return Scope()
        patched.add(id(fn.__globals__))
        return patch(fn)

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch_unless_done
