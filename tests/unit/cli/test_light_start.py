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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_servers_process_tokenizes_without_torch(tmp_path):
    """Which would make each start a second longer, and the process 200 MB larger."""
    code = (
        "import sys; from types import SimpleNamespace; from outrider.models.demo import demo_model_path; "
        "from outrider.platform.client import async_llm; from outrider.platform.core.config import EngineArgs; "
        "from outrider.platform.client.engine_factory import load_text_side; "
        "tokenizer, _ = load_text_side(EngineArgs(), SimpleNamespace(model=str(demo_model_path()))); "
        "print(tokenizer.decode(tokenizer.encode('torch', add_special_tokens=False)), *{'torch'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch"
