"""The command line imports nothing heavy before it must."""

import subprocess
import sys

import pytest

HEAVY = (
    "torch", "transformers", "numpy", "fastapi", "pydantic", "sqlalchemy", "alembic", "uvicorn", "zmq", "httpx", "rich",
    "prompt_toolkit",
)  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "from outrider.platform.cli.main import build_parser; build_parser()",
        "from outrider.platform.cli import main, serve; serve.resolve(main.build_parser().parse_args(['serve']))",
        "import outrider.platform.http.server",
    ],
)
def test_imports(code, tmp_path):
    check = f"{code}; import sys; print(*sorted(sys.modules.keys() & {set(HEAVY)}))"
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_server_without_a_database_loads_no_database(tmp_path):
    code = (
        "from outrider.platform.http.app import create_app; "
        "from outrider.platform.http.server_config import ServerConfig; "
        "create_app(None, ServerConfig()).openapi(); import sys; print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "outrider.platform.http.app" in loaded
    assert not loaded & {"sqlalchemy", "alembic", "psycopg", "sqlite3", "outrider.platform.http.admin.admin_routes"}
