"""Cases of the compile check: every `kernels/<op>/triton.py` lists its kernels with representative constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class CompileCase(NamedTuple):
    """One kernel with one set of constants, as `triton.compile` takes it without a GPU."""

    name: str
    """Unique name: the op, the kernel and its special constants."""
    kernel: Any
    """The `triton.jit` function."""
    signature: dict[str, str]
    """Types of all arguments by name: "*bf16", "*fp32", "*i64", "i32", "fp32", and "constexpr" for constants."""
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    archs: tuple[int, ...] = (80, 90, 100)
    """Compute capabilities, times ten, for which these constants are meant."""
    ones: tuple[str, ...] = ()
    """Integer arguments that are 1: Triton compiles them as constants unless they are not specialised."""


def make_case(
    name: str, kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str], **launch: Any
) -> CompileCase:
    """Case of a kernel; `launch` are further fields of the case.

    Args:
        constants: Constants by their names.
        types: Types of the other arguments, by one or several names between spaces; arguments without a type are "i32".
    """
    kinds = {argument: kind for names, kind in types.items() for argument in names.split()}
    kinds |= dict.fromkeys(constants, "constexpr")
    assert set(kinds) <= set(kernel.arg_names), (name, set(kinds) - set(kernel.arg_names))
    signature = {argument: kinds.get(argument, "i32") for argument in kernel.arg_names}
    return CompileCase(name, kernel, signature, dict(constants), **launch)
