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
