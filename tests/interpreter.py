"""Triton's interpreter, two to four times as fast, and with products whose bits do not depend on the processor."""

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

UNWRAPPED = {tl.tensor, int, float, bool, str, type(None)}


def prepare():
    """Patches the interpreter of this process, before kernels are launched."""
    check_no_overflows()
    patch_once_per_launch()
    call_directly()
    make_handles_unchecked()
    know_types()
    leave_equal_types()
    know_constants()
    add_products_in_order()


def add_products_in_order():
    """Multiplies matrices term by term along the depth. NumPy's BLAS adds in an order of its own, which depends on the
    processor and on the sizes of a tile, so kernels that differ in their tiling would not give equal bits."""

    def create_dot(_, a, b, d, *__):
        left, right = (widened(operand) for operand in (a, b))
        return interpreter.TensorHandle(matmul_in_order(left, right, d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def widened(operand: Any) -> NDArray[Any]:
    """Returns the operand's numbers, those of FP8 as fp16, and of bf16, which the interpreter has as bits, as fp32."""
    if operand.dtype == tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    if operand.dtype.primitive_bitwidth > 8 or not operand.dtype.is_floating():
        return operand.data
    return interpreter._convert_float(operand.data, operand.dtype, tl.float16, None).view(np.float16)


def matmul_in_order(left: NDArray[Any], right: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns left (..., M, K) @ right (..., K, N), added in `dtype` from the first term to the last."""
    left = left.astype(dtype)
    right = right.astype(dtype)
    total = left[..., :, 0, None] * right[..., 0, None, :]
    term = np.empty_like(total)
    for k in range(1, left.shape[-1]):
        np.multiply(left[..., :, k, None], right[..., k, None, :], out=term)
        np.add(total, term, out=total)
    return total


def check_no_overflows():
    """Each product, sum and difference of integers is computed again to see whether it overflows; what is found counts
    in the interpreter's debug mode alone, which nothing switches on."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def patch_once_per_launch():
    """A launch replaces the functions of triton.language, and so does each call of a device function in it, which takes
    longer than what the function computes. The first time is enough until the launch ends."""
    patch = interpreter._patch_lang
    patched = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self):
            patched.clear()
            super().restore()

    def patch_unless_done(fn):
        if id(fn.__globals__) in patched:
            return Scope()
        patched.add(id(fn.__globals__))
        return patch(fn)

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_unless_done


def call_directly():
    """Functions of triton.language look at their keywords twice, and at the kinds of all arguments."""
    semantic = {"_semantic": interpreter.interpreter_semantic}
    unwrap = tl.core._unwrap_if_constexpr

    def patch_function(module, name, function, _, scope):
        function = getattr(function, "__wrapped__", function)
        scope.set_attr(module, name, lambda *args, **options: function(*args, **options | semantic))

    def unwrap_others(value):
        return value if type(value) in UNWRAPPED else unwrap(value)

    interpreter._patch_attr = patch_function
    tl.core._unwrap_if_constexpr = unwrap_others


def make_handles_unchecked():
    """The interpreter compares the sizes of numbers with their type whenever it holds an array."""

    def init_handle(self, data, dtype, attr=None):
        self.data = data
        self.dtype = dtype
        self.attr = attr or {}

    interpreter.TensorHandle.__init__ = init_handle


def know_types():
    """Each operation makes the type and the shape of its tile anew, and checks them; few are different."""
    find_dtype = interpreter._get_np_dtype
    init_type = tl.block_type.__init__
    init_tensor = tl.tensor.__init__
    dtypes = {}
    types = {}
    sizes = {}
    shapes = {}

    def known_dtype(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(dtype)
        return dtypes[name]

    def known_type(self, element_ty, shape):
        key = (element_ty.name, *[length.value if isinstance(length, tl.constexpr) else length for length in shape])
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = vars(self) | {"shape": sizes.setdefault(key[1:], self.shape)}
        vars(self).update(types[key], element_ty=element_ty)

    def known_shape(self, handle, type):
        key = id(shape_of(type))
        if key not in shapes:
            init_tensor(self, handle, type)
            shapes[key] = dict(vars(self))
        vars(self).update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    interpreter._get_np_dtype = known_dtype
    tl.block_type.__init__ = known_type
    tl.tensor.__init__ = known_shape


def leave_equal_types():
    """Operands of one type, or of one shape (see `know_types`), are mostly converted to it with a type made anew."""
    cast = TritonSemantic.cast
    broadcast = TritonSemantic.broadcast_impl_value
    shapes = {}

    def cast_others(self, operand, dtype, *rounding, **options):
        if operand.type.scalar is dtype and not rounding and not options:
            return operand
        return cast(self, operand, dtype, *rounding, **options)

    def broadcast_others(self, left, right):
        key = (id(shape_of(left.type)), id(shape_of(right.type)))
        if key[0] == key[1]:
            return left, right
        if key not in shapes:
            operands = broadcast(self, left, right)
            shapes[key] = shape_of(operands[0].type)
            return operands
        return stretched(left, shapes[key]), stretched(right, shapes[key])

    TritonSemantic.cast = cast_others
    TritonSemantic.broadcast_impl_value = broadcast_others


def shape_of(type: Any) -> Any:
    """Returns the shape of a tile's type, of which there is one object (see `know_types`), and None of a number's."""
    return getattr(type, "shape", None)


def stretched(operand: Any, shape: Any) -> Any:
    """Returns the operand, or a tile of `shape` that repeats it."""
    if shape_of(operand.type) is shape:
        return operand
    data = operand.handle.data
    if shape_of(operand.type) is None:
        data = np.full(shape.values, data)
    else:
        data = np.broadcast_to(data, shape.values)
    handle = interpreter.TensorHandle(data, operand.handle.dtype.scalar)
    return tl.tensor(handle, tl.block_type(operand.dtype, shape))


def know_constants():
    """Operands of one type need no promotion, and a number becomes the same tile in each step of a loop."""
    check = TritonSemantic.binary_op_type_checking_impl
    constants = {}

    def check_others(self, left, right, *flags, **options):
        first = isinstance(left, tl.tensor)
        tile = left if first else right
        divides = len(flags) == 4
        if options or not isinstance(tile, tl.tensor):
            return check(self, left, right, *flags, **options)
        if first and isinstance(right, tl.tensor):
            if left.dtype is not right.dtype or divides or left.dtype.is_ptr():
                return check(self, left, right, *flags)
            return self.broadcast_impl_value(left, right)
        key = (repr(right if first else left), first, tile.dtype.name, id(shape_of(tile.type)), flags)
        if key not in constants:
            operands = check(self, left, right, *flags)
            if operands[1 - first] is not tile:
                return operands
            constants[key] = operands[first]
        return (tile, constants[key]) if first else (constants[key], tile)

    TritonSemantic.binary_op_type_checking_impl = check_others
