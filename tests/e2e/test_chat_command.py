"""`outrider chat` against a real server, through pipes."""

import io
import os
import subprocess
import sys

import pytest

from outrider.platform.cli.main import main


def chat(server, text: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "outrider.platform.cli.main", "chat", "--url", server.url, *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "OUTRIDER_API_KEY"}
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_conversation(server):
    done = chat(server, "Hello!\n/model sql\nList all customers.\n", "--temperature", "0", "--max-tokens", "20")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) >= 2
    assert "now talking to sql" in done.stderr
    assert done.stderr.count("tokens/s") == 2
    assert "acceptance length" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nobody"), "there is no model 'nobody'; there are outrider-demo"),
        (("--url", "http://127.0.0.1:9"), "is the server running?"),
    ],
)
def test_unknown_model_and_wrong_address(server, monkeypatch, capsys, arguments, message):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(["chat", "--url", server.url, *arguments]) == 1
    assert message in capsys.readouterr().err
