"""Shared test setup: no network, fixed seeds, one torch thread; set before any test module imports a library."""

import atexit
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: a second thread costs more than it saves
# What steps take matters little to tests: an adaptive engine does not measure for two seconds before its first request.
os.environ.setdefault("OUTRIDER_WARM_UP_SECONDS", "0.1")
# Which products use AMX tiles depends on a timed trial. tests/kernels/test_tiles.py asks for them, engines included.
os.environ.setdefault("OUTRIDER_AMX", "0")

# An example that takes long says that the machine is busy. The rest is Hypothesis' own, which under CI is the same
# examples each time.
try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a machine with a GPU runs the kernels' tests without it
    pass
else:
    slow = [HealthCheck.too_slow]
    settings.register_profile("outrider", parent=settings(), deadline=None, suppress_health_check=slow)
    settings.load_profile("outrider")

REPO_ROOT = Path(__file__).resolve().parent.parent


def _has_cuda() -> bool:
    """True if kernels can run on a GPU. Without the driver's device files torch, whose import is slow, is not asked."""
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """`-n auto`: one process more than cores. A quarter of the time a process waits: for servers, browsers, deadlines.

    The variable PYTEST_XDIST_AUTO_NUM_WORKERS says otherwise.
    """
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Hardly anything that is made while modules are imported is garbage: to look for it is a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


SERVER_FILES = {f"tests/e2e/test_{name}.py" for name in (
    "anthropic_client", "beam_search", "bench_serve", "chat_command", "demo_forms", "embeddings", "mixes",
    "openai_client", "responses", "server_bad_input", "server_life", "token_routes",
)}  # fmt: skip
"""Files whose tests use a server of the whole session."""
SERVER_FOLDERS = ("tests/e2e/adapters", "tests/e2e/console", "tests/e2e/tenants")
"""Folders with a server each for all of their files."""


def server_group(file: str) -> str:
    """The same name for all files that share a server."""
    folder = file.rpartition("/")[0]
    return "servers" if file in SERVER_FILES else folder if folder in SERVER_FOLDERS else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` that runs files with a common server in one process: every other one would start it again."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return server_group(super()._split_scope(nodeid))

    return Scheduling(config, log)


LONG_FILES = (
    "test_families.py",
    "test_speculation.py",
    "test_gpu_check.py",
    "test_adaptive_overlap.py",
    "test_adaptive_engine.py",
    "test_graphs_engine.py",
    "test_reader_process.py",
    "test_demo_recipe.py",
)
"""Files outside e2e of more than 50 s. They start first, so that no process computes one when all else is done."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files that start servers, and wait for them, among the first four fifths of the others: two at once
    would compete for the cores while they start, and leave them idle while they wait; the last one would wait alone."""
    groups = {item.path: server_group(item.nodeid.partition("::")[0]) for item in items}
    waiting = {groups[item.path]: "e2e" in item.path.parts for item in items}
    place: dict[str, float] = {}
    for waits, share in ((True, 0.8), (False, 1.0)):
        alike = [group for group in waiting if waiting[group] is waits]
        names = {group: group.rpartition("/")[2] for group in alike}
        alike.sort(key=lambda group: LONG_FILES.index(names[group]) if names[group] in LONG_FILES else len(LONG_FILES))
        place |= {group: share * index / len(alike) for index, group in enumerate(alike)}
    items.sort(key=lambda item: (place[groups[item.path]], str(item.path)))


class SeldomCollecting:
    """The module `gc` for engines, of which every `COLLECTING`th collects garbage when it shuts down: a collection
    takes longer than most requests of a test. Those that look for what an engine leaves use `engines_collect`."""

    COLLECTING = 8

    def __init__(self) -> None:
        self.num_engines = 0
        self.collects_always = False

    def collect(self) -> None:
        self.num_engines += 1
        if self.collects_always or self.num_engines % self.COLLECTING == 0:
            gc.collect()

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)


_SELDOM = SeldomCollecting()


@pytest.fixture
def engines_collect() -> Iterator[None]:
    """Engines collect garbage whenever they shut down, as they do outside of tests."""
    gc.collect()
    _SELDOM.collects_always = True
    yield
    _SELDOM.collects_always = False


def pytest_collection_finish() -> None:
    """Freeze what has been imported and collected: no collection of garbage need look at all these objects again.

    Many tests collect garbage, and so does every engine when it shuts down. Python's own collections were a twentieth
    of the time: here there are far fewer.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    if engine_core := sys.modules.get("outrider.platform.engine.engine_core"):
        vars(engine_core)["gc"] = _SELDOM


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze a finished file's modules and caches: no later collection looks at them. A collection takes up to 40 times
    as long otherwise, which was a quarter of the time of the tests that make engines."""
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def pytest_unconfigure() -> None:
    """Freeze what is left before pytest collects garbage three times. The interpreter's last collection frees it all:
    libraries that look for their own leaks at exit would find those objects."""
    gc.freeze()
    atexit.register(gc.unfreeze)


_FOLDERS: list[list[Path]] = []
"""Folders made by each of the fixtures that are being set up, the innermost last."""


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    """Delete the folders that a fixture makes with `mktemp` when it ends: the models of all modules together would fill
    a small disk. Those of e2e stay, since servers use them that end with the session."""
    folders: list[Path] = []
    if fixturedef.scope == "module" and "e2e" not in request.node.path.parts:
        fixturedef.addfinalizer(lambda: [shutil.rmtree(folder, ignore_errors=True) for folder in folders])
    _FOLDERS.append(folders)
    try:
        return (yield)
    finally:
        _FOLDERS.pop()


class NotedFolders:
    """pytest's factory of folders, which notes each for the fixture that makes it."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def mktemp(self, basename: str, numbered: bool = True) -> Path:
        folder = self._factory.mktemp(basename, numbered)
        if _FOLDERS:
            _FOLDERS[-1].append(folder)
        return folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._factory, name)


@pytest.fixture(scope="session")
def tmp_path_factory(tmp_path_factory: pytest.TempPathFactory) -> NotedFolders:
    """In the place of pytest's."""
    return NotedFolders(tmp_path_factory)


@pytest.fixture(autouse=True)
def _seed_everything() -> None:
    """Same random numbers in every test, whatever ran before; torch and numpy only if a test has loaded them."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:  # without a GPU its own function takes a hundred times as long to find none
        torch = sys.modules["torch"]
        (torch if HAS_CUDA else torch.default_generator).manual_seed(0)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The repository root, which is also the package's folder."""
    return REPO_ROOT


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the tensors in tests of Triton kernels: "cuda", or "cpu" for Triton's interpreter."""
    return "cuda" if HAS_CUDA else "cpu"


def tethered_command(
    command: Iterable[object], number: signal.Signals = signal.SIGKILL, user: str | None = None
) -> list[str]:
    """`command` for a process that gets a signal when this one ends, even by SIGKILL: no server of a test run that was
    killed stays. To be started from the main thread."""
    script = REPO_ROOT / "tests" / "tethered.py"
    return [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(int(number)), user or "", *map(str, command)]


@pytest.fixture(scope="session")
def tethered() -> Callable[..., list[str]]:
    return tethered_command


class PostgreSQL:
    """A server of PostgreSQL with its own data, reached through a socket in its folder."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        # As root it refuses to run, and the tests' own folders are closed to others. A socket's path must be short.
        self._user = "nobody" if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="outrider-pg-", dir="/tmp"))
        if self._user:
            shutil.chown(self.folder, self._user)
        command = [binaries / "initdb", "-D", self._data, *"-U outrider -A trust -E UTF8 --locale=C -N".split()]
        done = subprocess.run(command, user=self._user, cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        self._process: subprocess.Popen | None = None
        self._databases = 0

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        options = {
            "unix_socket_directories": self.folder,
            "listen_addresses": "",
            "fsync": "off",
            "shared_buffers": "16MB",
            "max_connections": "60",
        }
        command = [self._binaries / "postgres", "-D", self._data]
        command += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            command = tethered_command(command, signal.SIGQUIT, self._user)  # at once, with all of its own processes
            self._process = subprocess.Popen(command, cwd="/", stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while subprocess.run([self._binaries / "pg_isready", "-q", "-h", self.folder], cwd="/", check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL did not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """At once, with clients connected or not; `start` begins again with the same data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)
            self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def url(self, database: str) -> str:
        return f"postgresql://outrider@/{database}?host={self.folder}"

    def new_database(self) -> str:
        """The address of an empty one."""
        import psycopg

        self._databases += 1
        name = f"test{self._databases}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)


def _postgresql_binaries() -> Path | None:
    """Debian keeps them off the path, a folder a version."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    on_path = shutil.which("initdb")
    if not folders and on_path is not None:
        return Path(on_path).parent
    return max(folders, key=lambda folder: int(folder.parent.name), default=None)


@pytest.fixture(scope="session")
def make_postgresql() -> Iterator:
    """Makes servers that a test may stop; they end with the session at the latest."""
    binaries = _postgresql_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    servers: list[PostgreSQL] = []

    def make() -> PostgreSQL:
        servers.append(PostgreSQL(binaries))
        servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def postgresql(make_postgresql) -> PostgreSQL:
    """A running server for all tests: leave it running."""
    return make_postgresql()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, of each kind in turn."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql").new_database()
    return f"sqlite:///{tmp_path / 'outrider.db'}"
