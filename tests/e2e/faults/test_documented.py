"""docs/guides/reliability.md names every fault that is tested, and no other."""

import ast
import re

from fault_helpers import FAULTS


def test_the_table_is_that_of_the_tests(repo_root):
    tested = {
        node.name
        for file in FAULTS.glob("test_*.py")
        if file.name != "test_documented.py"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    table = (repo_root / "docs/guides/reliability.md").read_text()
    assert set(re.findall(r"`(test_\w+)(?:\[\w+\])?` \|", table)) == tested


def test_names_in_the_threat_model_exist(repo_root):
    """SECURITY.md: each threat's tests, by their files."""
    named = re.findall(r"`(tests/[\w/.]+)`", (repo_root / "SECURITY.md").read_text())
    assert len(named) > 15
    for name in named:
        assert (repo_root / name).exists(), name
