"""The check of file lengths: its findings, and the folders that it skips."""

import runpy


def test_long_files_are_named_except_in_ignored_folders(repo_root, tmp_path):
    for name, count in (
        ("long.py", 401),
        ("short.py", 400),
        ("tests/long.py", 402),
        (".venv/a.py", 500),
        ("build/a.py", 500),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * count)
    check = runpy.run_path(str(repo_root / "tools" / "check_sizes.py"))["check"]
    assert check(tmp_path) == ["long.py: 401 lines, at most 400", "tests/long.py: 402 lines, at most 400"]
