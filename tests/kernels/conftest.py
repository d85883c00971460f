"""Triton's interpreter, made quicker."""

import os
import types

import numpy as np
import pytest
import torch

from outrider.kernels.threads import use_pool


@pytest.fixture(params=[False, True], ids=["openmp", "pool"])
def team(request):
    """Both kinds of threads that share the work of a kernel; restores the number of threads that a test sets."""
    before = torch.get_num_threads()
    use_pool(request.param)
    yield
    use_pool(False)
    torch.set_num_threads(before)


@pytest.fixture
def row_products(monkeypatch):
    """Products of Triton's interpreter whose rows do not depend on their index, as those of a GPU: numpy's library
    rounds a row differently elsewhere in a matrix."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.einsum("mk,kn->mn", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(scope="session", autouse=True)
def _do_things_once():
    """The interpreter does things again and again that need to be done once; they were three quarters of its time.

    For every call of a jitted function, by the host or by another, it replaces hundreds of attributes of
    `triton.language`, most of them replaced already: here, in both modules that jitted functions and Triton's own
    library use, for the session. Whenever it asks for the numpy type of a tensor it makes a table of all. Every block
    and every tensor gets a tuple of constants for its shape: here, one for each shape. And sums of integers are made a
    second time to find overflows, of which nothing is said while `debug` is off. Operands that are alike already are
    compared, cast and broadcast all the same: here, they are returned as they are.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = interpreter.tl
    scope = interpreter._patch_lang(
        types.FunctionType((lambda: None).__code__, {"tl": language, "core": language.core})
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        quiet = interpreter.InterpreterOptions(sanitize_overflow=False)
        assert not quiet.debug
        monkeypatch.setattr(interpreter.interpreter_builder, "options", quiet)
        _share_numpy_types(monkeypatch, interpreter)
        _share_shapes(monkeypatch, language.core, type(interpreter.interpreter_semantic))
        _leave_alike_operands(monkeypatch, interpreter, language.core)
        _call_builtins_directly(scope, interpreter.interpreter_semantic, language.core)
        yield
    scope.restore()


def _share_numpy_types(monkeypatch, interpreter):
    look_up, known = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype):
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)


def _share_shapes(monkeypatch, core, semantic):
    make_block, make_tensor, broadcast = core.block_type.__init__, core.tensor.__init__, semantic.broadcast_impl_value
    blocks, shapes, constants = {}, {}, {}

    def init_block(self, element_ty, shape):
        sizes = tuple(shape)
        key = element_ty.name, sizes
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            blocks[key] = dict(vars(self))
        self.__dict__.update(blocks[key])

    def init_tensor(self, handle, type):
        shape = type.shape if type.is_block() else None
        if id(shape) not in constants:
            make_tensor(self, handle, type)
            constants[id(shape)] = self.shape, self.numel, shape  # kept, so that no other gets its address
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel, _ = constants[id(shape)]

    def broadcast_other_shapes(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    monkeypatch.setattr(core.block_type, "__init__", init_block)
    monkeypatch.setattr(core.tensor, "__init__", init_tensor)
    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast_other_shapes)


def _leave_alike_operands(monkeypatch, interpreter, core):
    semantic, tensor, unwrap = type(interpreter.interpreter_semantic), core.tensor, core._unwrap_if_constexpr
    check, cast = semantic.binary_op_type_checking_impl, semantic.cast
    plain = {tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}
    # By the name of a tensor's type, the Python numbers that take that type whatever the operation.
    adapting = {"int32": (int,), "int64": (int,), "fp32": (int, float)}

    def check_others(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if type(lhs) is tensor:
            if type(rhs) is tensor:
                if lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and not div_or_mod and not lhs.dtype.is_ptr():
                    return lhs, rhs
            elif arithmetic_check and type(rhs) in adapting.get(lhs.dtype.name, ()):
                return self.broadcast_impl_value(lhs, self._cast_to_computation_type(rhs, lhs.dtype))
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def cast_others(self, input, dst_ty, fp_downcast_rounding=None):
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, fp_downcast_rounding)

    def init_handle(self, data, dtype, attr=None):  # without a look at the width of each array
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    monkeypatch.setattr(core, "_unwrap_if_constexpr", lambda o: o if type(o) in plain else unwrap(o))
    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", check_others)
    monkeypatch.setattr(semantic, "cast", cast_others)
    monkeypatch.setattr(interpreter.TensorHandle, "__init__", init_handle)


def _call_builtins_directly(scope, semantic, core):
    """Each function of the language has two wrappers, which copy its arguments: here, one that does not."""
    marked = core.builtin(lambda: None).__code__

    def direct(function):
        return lambda *args, _semantic=None, **kwargs: function(*args, _semantic=semantic, **kwargs)

    for owner, name, original in scope._changes:
        (member, *_) = (getattr(getattr(owner, name), "__kwdefaults__", None) or {}).values() or [None]
        if member is original and getattr(original, "__code__", None) is marked:
            setattr(owner, name, direct(original.__wrapped__))
