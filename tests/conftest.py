"""Shared test setup: no network, fixed seeds, one torch thread; set before any test module imports a library."""

import os
import random
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: a second thread costs more than it saves

REPO_ROOT = Path(__file__).resolve().parent.parent


def _has_cuda() -> bool:
    """Whether kernels can run on a GPU. Without the driver's device files torch, whose import is slow, is not asked."""
    if not any(Path(file).exists() for file in ("/dev/nvidiactl", "/dev/dxg")):
        return False
    import torch

    return torch.cuda.is_available()


HAS_CUDA = _has_cuda()
if not HAS_CUDA:
    # Before any kernel is defined: `triton.jit` decides then whether the interpreter runs it.
    os.environ.setdefault("TRITON_INTERPRET", "1")


class RootIsNoTestPackage:
    """Collects the repository root as a plain folder.

    Its `__init__.py` is the package `outrider`; pytest would import it a second time, under the checkout's folder name.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == REPO_ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RootIsNoTestPackage())


@pytest.fixture(autouse=True)
def _seed_everything() -> None:
    """Same random numbers in every test, whatever ran before; torch and numpy only where a test has loaded them."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The repository root, which is also the package's folder."""
    return REPO_ROOT


@pytest.fixture(scope="session")
def device() -> str:
    """Where tests of Triton kernels put their tensors: "cuda", or "cpu" for Triton's interpreter."""
    return "cuda" if HAS_CUDA else "cpu"
