"""Compiling the native kernels: cached, rebuilt after a change, and skipped if it is impossible."""

import logging
import os
import platform
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.kernels import native
from outrider.kernels.native import compiler as building

COMPILER = next((name for name in building.COMPILERS if shutil.which(name)), None)

SOURCE = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder with one small kernel in place of the real ones."""
    monkeypatch.setattr(building, "KERNELS", tmp_path / "kernels")
    for folder in ("native", "op"):
        (tmp_path / "kernels" / folder).mkdir(parents=True)
    (tmp_path / "kernels" / "op" / "native.cpp").write_text(SOURCE % 1)
    return tmp_path / "kernels"


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")
class TestBuild:
    def test_a_library_is_made_once(self, kernels, tmp_path):
        first = building.build(tmp_path / "cache")
        assert native.ctypes.PyDLL(str(first)).answer() == 1
        stamp = first.stat().st_mtime_ns
        assert building.build(tmp_path / "cache") == first
        assert first.stat().st_mtime_ns == stamp

    def test_concurrent_builds_compile_once(self, kernels, tmp_path, caplog):
        with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as pool:
            made = list(pool.map(building.build, [tmp_path / "cache"] * 4))
        assert len(set(made)) == 1
        assert caplog.text.count("compiling") == 1

    def test_a_changed_source_is_another_library(self, kernels, tmp_path):
        first = building.build(tmp_path / "cache")
        (kernels / "op" / "native.cpp").write_text(SOURCE % 2)
        second = building.build(tmp_path / "cache")
        assert second != first
        assert native.ctypes.PyDLL(str(second)).answer() == 2

    def test_a_changed_header_is_another_library(self, kernels, tmp_path):
        first = building.build(tmp_path / "cache")
        (kernels / "native" / "simd.h").write_text("// new\n")
        assert building.build(tmp_path / "cache") != first

    def test_a_build_error_has_the_compilers_message(self, kernels, tmp_path):
        (kernels / "op" / "native.cpp").write_text("int broken(")
        with pytest.raises(building.BuildError, match="error"):
            building.build(tmp_path / "cache")
        assert not any((tmp_path / "cache").iterdir()), "nothing half made is left"

    def test_one_openmp_runtime_is_loaded(self):
        library = native.library()
        if library is None:
            pytest.skip("switched off")
        with open("/proc/self/maps") as maps:
            # A tokenizer's library has one of its own, under a name that no other library asks for.
            runtimes = {line.split()[-1] for line in maps if "libgomp" in line and "sentencepiece" not in line}
        assert len(runtimes) == 1


def test_without_a_compiler_the_error_names_it(kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(building.BuildError, match="no-such-compiler"):
        building.build(tmp_path / "cache")


@pytest.fixture
def fresh():
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_it_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.library() is None


def test_without_a_compiler_the_torch_paths_serve(fresh, kernels, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
        assert native.library() is None
    assert caplog.text.count("no-such-compiler") == 1


def test_a_user_without_a_home(fresh, kernels, monkeypatch, caplog):
    """As in a container that runs under an id of its own."""
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(building, "_compiler", lambda: ["c++"])

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(building.Path, "home", home)
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "home directory" in caplog.text


@pytest.mark.skipif(shutil.which("g++") is None or platform.machine() != "x86_64", reason="no g++, or no x86")
@pytest.mark.parametrize("processor", ["x86-64", "bdver2", "haswell", "skylake-avx512", "sapphirerapids"])
def test_the_products_compile_for_other_processors(processor):
    """bdver2 has fused multiply-adds without AVX2."""
    flags = [flag for flag in building.FLAGS if not flag.startswith("-march")]
    include, source = f"-I{building.KERNELS / 'native'}", building.KERNELS / "quantized_linear" / "native.cpp"
    command = ["g++", *flags, f"-march={processor}", "-O0", "-fopenmp", "-fsyntax-only", include, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(native.library() is None, reason="there are no kernels")
def test_a_thread_has_little_memory_of_its_own():
    """Each thread of the process may get a copy of all variables of threads."""
    with open(native.library()._name, "rb") as file:
        content = file.read()
    (first,), (size, count) = struct.unpack_from("<Q", content, 0x20), struct.unpack_from("<HH", content, 0x36)
    headers = [first + index * size for index in range(count)]
    (of_threads,) = [at for at in headers if struct.unpack_from("<I", content, at) == (7,)]  # PT_TLS
    assert struct.unpack_from("<Q", content, of_threads + 0x28)[0] < 512 << 10
