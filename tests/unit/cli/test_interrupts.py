"""Ctrl-C while the command is imported and its options are read."""

import pytest

from outrider.platform.cli import main as main_module


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "build_parser", interrupted)
    assert main_module.main(["serve"]) == 130
    assert capsys.readouterr().err == "outrider: interrupted\n"


@pytest.mark.parametrize("name", ["deploy", "serve", "run_batch", "train_draft"])
def test_the_entry_point_imports_no_command(name):
    assert not hasattr(main_module, name)
