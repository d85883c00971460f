"""Triton's interpreter, made quicker."""

import os
import types

import pytest


@pytest.fixture(scope="session", autouse=True)
def _do_things_once():
    """The interpreter does two things again and again that need to be done once; they were half of its time.

    For every call of a jitted function, by the host or by another, it replaces hundreds of attributes of
    `triton.language`, most of them replaced already: here, in both modules that jitted functions and Triton's own
    library use, for the session. And whenever it asks for the numpy type of a tensor it makes a table of all.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = interpreter.tl
    scope = interpreter._patch_lang(
        types.FunctionType((lambda: None).__code__, {"tl": language, "core": language.core})
    )
    look_up, known = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype):
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        yield
    scope.restore()
