"""The kernels that Triton would compile for some launches, without a GPU: by the keys that it looks kernels up by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

_HOPPER = GPUTarget("cuda", 90, 32)


class Key(NamedTuple):
    """One compiled kernel."""

    constants: tuple[Any, ...]
    """Values of its `constexpr` parameters and options such as num_warps."""
    arguments: tuple[tuple[str, str, str | None], ...]
    """(name, type, property) of the others. An integer that is 1 has the type "constexpr", and one that 16 divides, or
    a pointer aligned to 16 bytes, has the property "D"."""


Keys = dict[str, set[Key]]


@contextmanager
def recorded_keys() -> Iterator[Keys]:
    """Keys of all launches from here on by the kernel's name; nothing is launched."""
    kernel_class = InterpretedFunction if _is_interpreted() else JITFunction
    launch, binders = kernel_class.run, {}
    keys: Keys = defaultdict(set)

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if kernel.fn not in binders:
            jitted = JITFunction(kernel.fn, **kernel.kwargs) if kernel_class is InterpretedFunction else kernel
            bind = create_function_from_signature(jitted.signature, jitted.params, make_backend(_HOPPER))
            binders[kernel.fn] = jitted.params, bind
        parameters, bind = binders[kernel.fn]
        _, specialised, options = bind(*args, **kwargs)
        pairs = list(zip(parameters, specialised, strict=True))
        constants = [value for parameter, (_, value) in pairs if parameter.is_constexpr]
        arguments = [(parameter.name, *kind) for parameter, kind in pairs if not parameter.is_constexpr]
        keys[kernel.fn.__name__].add(Key((*constants, *sorted(options.items())), tuple(arguments)))

    kernel_class.run = record
    try:
        yield keys
    finally:
        kernel_class.run = launch


def _is_interpreted() -> bool:
    from outrider.kernels.noise.triton import tile_argmax

    return isinstance(tile_argmax, InterpretedFunction)
