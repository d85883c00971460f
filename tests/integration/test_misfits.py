"""A draft that does not fit the target is refused when an engine starts, and by the commands, with both figures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from outrider.models.demo import demo_draft_path, demo_eagle3_path
from outrider.platform.cli.main import main
from outrider.platform.core.errors import InvalidRequestError

# method, fields of its config.json, and what the message has to name: the draft's figure and the target's.
MISFITS = {
    "another vocabulary": ("draft_model", {"vocab_size": 170}, ("170 tokens", "160")),
    "a head of another hidden size": ("eagle3", {"hidden_size": 64}, ("is 64", "48")),
    "a head of another vocabulary": ("eagle3", {"vocab_size": 170}, ("170 tokens", "160")),
    "layers that do not exist": (
        "eagle3",
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]},
        ("[0, 1, 7]", "the target has 3 layers"),
    ),
    "a plain head of another hidden size": ("eagle", {"hidden_size": 64}, ("is 64", "48")),
    "Medusa heads of another hidden size": ("medusa", {"hidden_size": 64}, ("is 64", "48")),
}


def write_config(folder, method, models, **changes):
    """The config.json of a drafter for the tiny target, but for `changes`. A misfit is found before any weights."""
    raw = json.loads((models.draft / "config.json").read_text())
    if method == "medusa":
        raw = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    elif method == "eagle3":
        raw |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    if method in ("eagle", "eagle3"):
        raw |= {"num_hidden_layers": 1}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("case", MISFITS)
def test_engine_start_refuses_a_mismatched_draft(models, make_engine, tmp_path, case, adaptive):
    method, changes, figures = MISFITS[case]
    path = write_config(tmp_path / "misfit", method, models, **changes)
    config = {"method": method, "model": str(path), "num_speculative_tokens": 3, "adaptive": adaptive}
    with pytest.raises(InvalidRequestError) as caught:
        make_engine(speculative_config=config)
    assert caught.value.param == "speculative_config"
    for words in (str(path), *figures):
        assert words in caught.value.message


@pytest.fixture
def demo_misfit(tmp_path):
    """demo_misfit(method, changes) -> a drafter of the demo's, with another config.json."""

    def make(method, **changes):
        folder = demo_draft_path() if method == "draft_model" else demo_eagle3_path()
        raw = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        return tmp_path

    return make


def check_refusal(error: str, path, figures) -> None:
    """One line of standard error names the draft and both figures."""
    (line,) = [line for line in error.splitlines() if "error:" in line]
    assert line.startswith("outrider: error: ")
    assert "Traceback" not in error
    for words in (str(path), *figures):
        assert words in line


@pytest.mark.parametrize(
    ("method", "changes", "figures"),
    [
        ("draft_model", {"vocab_size": 2000}, ("2000 tokens", "2048")),
        ("eagle3", {"target_hidden_size": 320}, ("is 320", "256")),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}, ("[2, 3, 6]", "5 layers")),
    ],
)
def test_bench_reports_a_mismatch_in_one_line(demo_misfit, capsys, method, changes, figures):
    path = demo_misfit(method, **changes)
    option = "--" + method.replace("_", "-")
    words = f"bench speculation --modes {method} {option} {path} --tasks base --batch-sizes 1 --rounds 1"
    assert main(words.split()) == 1
    check_refusal(capsys.readouterr().err, path, figures)


def test_serve_reports_a_mismatch_in_one_line(demo_misfit):
    """In a process of its own: a server sets up the logging of its process."""
    path = demo_misfit("draft_model", vocab_size=2000)
    config = json.dumps({"method": "draft_model", "model": str(path), "num_speculative_tokens": 3})
    command = [sys.executable, "-m", "outrider.platform.cli.main", "serve", "--port", "0"]
    done = subprocess.run(
        [*command, "--speculative-config", config], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    check_refusal(done.stderr, path, ("argument --speculative-config", "2000 tokens", "2048"))
