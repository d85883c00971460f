"""A server to which a client has a key, and an admin, who alone may load adapters."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from outrider.models.demo import demo_adapters

SIZE = 1 << 20
"""--max-lora-bytes."""


def copy_adapter(folder: Path, name: str = "sql") -> Path:
    """A copy of one of the demo's adapters."""
    shutil.copytree(demo_adapters()[name], folder)
    return folder


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """`root`, `dir` and `store` with an adapter each, and one that is in none of them. Tests' own folders may be in
    /dev/shm, all of which is a root of `guarded`."""
    with tempfile.TemporaryDirectory(prefix="outrider-adapters-", dir="/var/tmp") as folder:
        place = Path(folder).resolve()
        for name in ("root/good", "dir/first", "store/good", "outside"):
            copy_adapter(place / name)
        yield place


@pytest.fixture(scope="session")
def guarded(start_shared, fixed_drafts, place):
    """float32, so that texts are exact."""
    return start_shared(
        *("--api-key", "client", "--admin-api-key", "admin", "--dtype", "float32", "--log-level", "error"),
        *("--lora-root", str(place / "root"), "--lora-root", "/dev/shm", "--lora-dir", str(place / "dir")),
        *("--max-lora-bytes", str(SIZE), "--lora-upload-bytes", str(3 * SIZE)),
        *("--lora-resolver", "resolver_of_tests:Resolver", "--lora-remote", "slow,down", *fixed_drafts),
        PYTHONPATH=str(Path(__file__).parent), OUTRIDER_TEST_STORE=str(place / "store"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(guarded) -> Iterator[httpx.Client]:
    with guarded.http(headers={"Authorization": "Bearer client"}) as http:
        yield http


@pytest.fixture(scope="module")
def admin(guarded) -> Iterator[httpx.Client]:
    with guarded.http(headers={"Authorization": "Bearer admin"}) as http:
        yield http
