"""Triton's interpreter, made faster, and with what kernels need in every supported version.

The interpreter runs where the environment has TRITON_INTERPRET=1 when Triton is first imported.
"""

import contextlib
import dataclasses
import functools
import types


@functools.cache
def prepare():
    """Patch the interpreter of this process, if Triton is installed."""
    with contextlib.suppress(ImportError):
        patch_triton_once()
        compute_no_unused_checks()
        look_up_dtypes_once()
        describe_shapes_once()
        pass_operands_quickly()
        keep_splatted_masks_boolean()
        take_scalars_as_indices()


def patch_triton_once():
    """Patch triton.language once per kernel module. The interpreter patches and restores it at every launch
    and device function call, half of the time of a small kernel; nothing is compiled here that needs it back.
    """
    from triton.runtime import interpreter

    patch_lang, patched = interpreter._patch_lang, set()

    def patch(function):
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch_lang(function)
        return types.SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch


def compute_no_unused_checks():
    """Leave out the checks of integers for overflow, up to 40% of the time of a kernel. The interpreter
    asserts their results only under `debug`, which it does not set.
    """
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    if not options.debug:
        interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def look_up_dtypes_once():
    """Keep NumPy's dtype of each Triton dtype. The interpreter makes a table of all at every lookup."""
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype
    of_scalar = functools.cache(look_up)
    interpreter._get_np_dtype = lambda dtype: (look_up if dtype.scalar.is_ptr() else of_scalar)(dtype.scalar)


def describe_shapes_once():
    """Keep the lists of sizes that types of blocks and tensors have, a seventh of the time of a kernel. The
    interpreter makes them for every result of every operation. Operands of one shape need no broadcast.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    types, of_scalars = {}, {}

    def init_type(self, element_ty, shape):
        shape = shape.value if type(shape) is core.constexpr else shape
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        key = type(element_ty), element_ty.name, sizes
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            shape = types.setdefault(sizes, self.shape)  # one object for all types of this shape
            known = types[key] = {**vars(self), "shape": shape, "of_tensors": {}}
        self.__dict__.update(known, element_ty=element_ty)

    def init_tensor(self, handle, type):
        known = type.of_tensors if type.is_block() else of_scalars
        if not known:
            make_tensor(self, handle, type)
            own = ("handle", "type", "dtype")
            known |= {name: value for name, value in vars(self).items() if name not in own}
        self.__dict__.update(known, handle=handle, type=type, dtype=type.scalar)

    def broadcast_if_needed(self, left, right):
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape is other.shape:
            return left, right
        return broadcast(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_if_needed


def pass_operands_quickly():
    """Shorten the ways of operands into and out of operations: calls with the interpreter's semantics,
    operands that are no constants, types compared with themselves, and checks of its own arrays.
    """
    from triton.language import core
    from triton.runtime import interpreter

    unwrap, equal, semantic = core._unwrap_if_constexpr, core.dtype.__eq__, interpreter.interpreter_semantic
    plain = {core.tensor, int, float, bool, str, type(None), core.dtype}

    def unwrap_quickly(value):
        kind = type(value)
        return value.value if kind is core.constexpr else value if kind in plain else unwrap(value)

    def patch(obj, name, member, builder, scope):
        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, call)

    core._unwrap_if_constexpr = unwrap_quickly
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    interpreter._patch_attr = patch
    interpreter.TensorHandle.__post_init__ = lambda self: None


def keep_splatted_masks_boolean():
    """Splat a scalar comparison as booleans. Triton 3.9's interpreter makes integers of it, and then refuses
    `mask & (row < rows)` as a mask; the compiler, as the language says, takes it.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    create_splat = InterpreterBuilder.create_splat

    def splat(self, block_type, scalar):
        if scalar.data.dtype == bool:
            scalar = TensorHandle(scalar.data, tl.int1)
        return create_splat(self, block_type, scalar)

    InterpreterBuilder.create_splat = splat


def take_scalars_as_indices():
    """Let kernels loop up to a scalar. Triton 3.6's interpreter converts its array of one element by `int`,
    which NumPy 2.4 refuses.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch
