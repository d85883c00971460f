"""Triton's interpreter, made quicker."""

import os
import types

import pytest


@pytest.fixture(scope="session", autouse=True)
def _patch_the_language_once():
    """For every call of a jitted function, by the host or by another, the interpreter replaces hundreds of attributes
    of `triton.language`, most of them replaced already: a third of its time. Here it does so once, in both modules that
    jitted functions and Triton's own library use."""
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
        yield
    scope.restore()
