"""`outrider bench speculation`: the arithmetic of its figures, and the command from options to files."""

import json
import signal
from pathlib import Path

import pytest

from outrider.platform.cli.bench.machine import command_line
from outrider.platform.cli.bench.prompt_files import Prompt, read_prompts
from outrider.platform.cli.bench.speculation import speculation_session
from outrider.platform.cli.bench.speculation.modes import MODES, available_modes, make_modes
from outrider.platform.cli.bench.speculation.tasks import Task, without_draft_weights
from outrider.platform.cli.main import main
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.speculative_config import MODEL_METHODS
from outrider.platform.engine.engine_core import EngineCore

pytestmark = pytest.mark.slow

# --- modes ----------------------------------------------------------------------------------------------------------


def test_off_is_always_there_and_first():
    assert [mode.name for mode in make_modes(["ngram"], {}, 4)] == ["off", "ngram"]


@pytest.mark.parametrize(
    ("models", "base"),
    [({}, "ngram"), ({"draft_model": "d"}, "draft_model"), ({"draft_model": "d", "eagle3": "e"}, "eagle3")],
)
def test_adaptive_has_one_of_the_drafters_that_are_there(models, base):
    mode = make_modes(["adaptive"], models, 5)[1]
    assert (mode.name, mode.method) == ("adaptive", base)
    assert mode.config["adaptive"] is True
    assert mode.config["num_speculative_tokens"] == 5
    assert mode.config.get("model") == models.get(base)


def test_adaptive_may_be_over_any_drafter():
    models = {"draft_model": "d", "eagle3": "e"}
    modes = make_modes(["adaptive:draft_model", "adaptive:ngram"], models, 4)[1:]
    assert [(mode.method, mode.config.get("model")) for mode in modes] == [("draft_model", "d"), ("ngram", None)]
    assert make_modes(["mtp"], {}, 4)[1].config == {"method": "mtp", "num_speculative_tokens": 4}
    assert all(mode.config["adaptive"] for mode in modes)


def test_a_mode_may_name_its_number_of_drafts():
    modes = make_modes(["eagle3:2", "eagle3", "adaptive:eagle3:7"], {"eagle3": "e"}, 4)[1:]
    assert [(mode.name, mode.method, mode.config["num_speculative_tokens"]) for mode in modes] == [
        ("eagle3:2", "eagle3", 2),
        ("eagle3", "eagle3", 4),
        ("adaptive:eagle3:7", "eagle3", 7),
    ]
    assert [mode.config.get("adaptive", False) for mode in modes] == [False, False, True]


def test_methods_depend_on_the_weights():
    without = available_modes({})
    assert {"off", "ngram", "suffix", "adaptive"} <= {*without}
    assert not {*without} & {*MODEL_METHODS, "control", "oracle"}
    assert {*available_modes({"eagle3": "x"})} == {*without, "eagle3"}
    assert set(available_modes(dict.fromkeys(MODES, "x"))) == {*MODES} - {"control", "oracle"}


def test_the_control_is_another_engine_like_off():
    off, control = make_modes(["control"], {}, 4, [0.5])
    assert (control.name, control.method, control.config) == ("control", off.method, off.config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle3", "needs --eagle3 PATH"),
        ("draft_model", "--draft-model"),
        ("adaptive:eagle3", "mode adaptive:eagle3 needs --eagle3 PATH"),
        ("magic", "unknown mode"),
        ("adaptive:off", "unknown mode"),
        ("adaptive:", "unknown mode"),
        ("adaptive:ngram:0", "unknown mode"),
        ("ngram:0", "unknown mode"),
        ("ngram:many", "unknown mode"),
    ],
)
def test_modes_that_cannot_run_are_refused(name, message):
    with pytest.raises(InvalidRequestError, match=message):
        make_modes([name], {}, 4)


def test_synthetic_rates_reach_every_drafter_and_not_off():
    modes = make_modes(["ngram", "adaptive"], {}, 2, [0.5, 0.2])
    assert "synthetic_acceptance_rates" not in modes[0].config
    assert all(mode.config["synthetic_acceptance_rates"] == [0.5, 0.2] for mode in modes[1:])


# --- the command ----------------------------------------------------------------------------------------------------

QUICK = "bench speculation --batch-sizes 1,3 --rounds 1 --max-tokens 12 --dtype float32".split()


@pytest.fixture(scope="module")
def demo_result(tmp_path_factory):
    """The demo in three modes, with everything that is written."""
    folder = tmp_path_factory.mktemp("bench")
    more = f"--modes off,ngram,draft_model,oracle --tasks base,json --random-text --plot {folder}/a.png"
    assert main([*QUICK, *more.split(), "--output-json", str(folder / "a.json")]) == 0
    return json.loads((folder / "a.json").read_text()), folder / "a.png"


def test_every_combination_has_a_row(demo_result):
    report, _ = demo_result
    found = {(row["batch_size"], row["task"], row["kind"], row["mode"]) for row in report["rows"]}
    expected = {("base", "base model"), ("json", "without draft weights"), ("random text", "random")}
    modes = ("off", "ngram", "draft_model", "oracle")
    want = {(batch, *pair, mode) for batch in (1, 3) for pair in expected for mode in modes}
    want |= {(batch, "json", "with draft weights", "draft_model") for batch in (1, 3)}
    assert found == want
    assert report["labels"] == []
    assert report["model"]["name"] == "outrider-demo"
    assert report["machine"].keys() >= {"commit", "command", "cpu", "outrider", "torch"}
    assert str(report).find("/tmp") == -1  # a result may be published: nothing of the machine's folders


def test_the_text_is_offs_in_float32(demo_result):
    for row in demo_result[0]["rows"]:
        assert row["same_text_as_off"]["same"] == row["same_text_as_off"]["of"] > 0, row["mode"]


def test_the_oracle_is_always_right(demo_result):
    """Its steps end only with their number of drafts or with the answer, so no drafter needs fewer."""
    for row in demo_result[0]["rows"]:
        same = [r for r in demo_result[0]["rows"] if (r["task"], r["batch_size"]) == (row["task"], row["batch_size"])]
        oracle = next(r for r in same if r["mode"] == "oracle")
        assert row["of_oracle"] == pytest.approx(row["speedup"] / oracle["speedup"], rel=1e-3)
        assert row["tokens_per_step"] is None or row["tokens_per_step"] <= oracle["tokens_per_step"]
    assert all(row["acceptance_per_position"][0] == 1.0 for row in demo_result[0]["rows"] if row["mode"] == "oracle")


def test_figures_hang_together(demo_result):
    for row in demo_result[0]["rows"]:
        assert row["output_tokens"] <= 12 * row["requests"]
        assert row["ttft_ms"]["median"] <= row["ttft_ms"]["p99"] <= row["e2el_ms"]["p99"]
        assert row["output_throughput"] == pytest.approx(row["output_tokens"] / row["seconds"], rel=0.01)
        if row["mode"] == "off":
            assert row["drafts_verified"] == {}
            assert row["speedup"] == row["cpu_speedup"] == 1.0
            assert row["acceptance_length"] is None
            continue
        assert set(row["drafts_verified"]) <= set("01234")
        assert sum(row["drafts_verified"].values()) == pytest.approx(1, abs=1e-3)
        if row["mode"] == "draft_model":
            shares = row["acceptance_per_position"]
            assert shares == sorted(shares, reverse=True)
            assert 1 + sum(shares) == pytest.approx(row["acceptance_length"], abs=1e-3)


def test_random_text_runs_to_its_end_and_is_hard_to_draft(demo_result):
    rows = [row for row in demo_result[0]["rows"] if row["mode"] == "draft_model" and row["batch_size"] == 1]
    lengths = {row["kind"]: row["acceptance_length"] for row in rows}
    assert lengths["random"] < lengths["base model"]
    random = next(row for row in rows if row["kind"] == "random")
    assert random["output_tokens"] == 12 * random["requests"]


def test_the_picture_is_one(demo_result):
    matplotlib_image = pytest.importorskip("matplotlib.image")
    image = matplotlib_image.imread(demo_result[1])
    assert image.shape[0] > 400
    assert image.shape[1] > 800
    assert image[..., :3].std() > 0.05  # not blank


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_engines_are_built_ends_the_command_and_shuts_them_down(monkeypatch, number):
    built, shut_down = [], []

    class Core(EngineCore):
        def __init__(self, args):
            super().__init__(args)
            built.append(self)
            signal.raise_signal(number)

        def shutdown(self):
            shut_down.append(self)
            super().shutdown()

    monkeypatch.setattr(speculation_session, "EngineCore", Core)
    try:
        status = main([*QUICK, "--modes", "ngram", "--tasks", "base"])
    except SystemExit as ended:
        status = ended.code
    assert status == 128 + number
    assert len(built) == 1
    assert shut_down == built


def test_synthetic_acceptance_is_announced_first(capsys, tmp_path):
    file = tmp_path / "s.json"
    modes = ["--modes", "draft_model,adaptive:draft_model"]
    more = "--tasks base --synthetic-acceptance 1,0.999,0 --batch-sizes 4 --max-tokens 60"
    assert main([*QUICK, *modes, *more.split(), "--output-json", str(file)]) == 0
    assert capsys.readouterr().out.startswith("SYNTHETIC ACCEPTANCE (1, 0.999, 0)")
    report = json.loads(file.read_text())
    assert "meaningless" in report["labels"][0]
    fixed = next(row for row in report["rows"] if row["mode"] == "draft_model")
    assert fixed["acceptance_per_position"] == pytest.approx([1, 0.999, 0], abs=0.1)  # the last round is cut
    assert fixed["same_text_as_off"]["same"] < fixed["same_text_as_off"]["of"]


def test_dummy_weights_are_announced_first(capsys):
    more = "--modes ngram --tasks base --load-format dummy --batch-sizes 1"
    assert main([*QUICK, *more.split()]) == 0
    assert capsys.readouterr().out.startswith("RANDOM WEIGHTS")


def test_a_filled_queue_has_more_requests_than_seats(tmp_path):
    out = tmp_path / "a.json"
    more = f"--modes off --tasks base --batch-sizes 3 --queue 4 --output-json {out}"
    assert main([*QUICK, *more.split()]) == 0
    report = json.loads(out.read_text())
    assert [(row["batch_size"], row["requests"]) for row in report["rows"]] == [(3, 12)]
    assert report["settings"]["queue"] == 4


def test_a_result_names_its_command_without_folders():
    given = ["/x/bin/outrider", "bench", "--model", "/home/me/models/a", "--lora", "a=/y/z", "--modes", "off,a/b"]
    assert command_line(given) == "outrider bench --model a --lora a=z --modes off,a/b"


def test_own_prompts_go_to_their_adapters(tmp_path):
    from outrider.models.demo import demo_adapters

    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "What is 2 plus 2?"}, {"prompt_token_ids": [5, 6, 7], "adapter": "json"}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    out = tmp_path / "a.json"
    adapter = demo_adapters()["json"]
    more = f"--modes off --prompts {file} --lora json={adapter} --lora sql={demo_adapters()['sql']} --output-json {out}"
    assert main([*QUICK, *more.split()]) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["batch_size"] == 1]
    assert [(row["task"], row["requests"]) for row in rows] == [("base", 1), ("json", 1), ("sql", 1)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--modes off --tasks nothing", "unknown task 'nothing'"),
        ("--modes eagle", "mode eagle needs --eagle PATH"),
        ("--modes off --prompts /does/not/exist", "prompts file"),
        ("--modes off --output-json /does/not/exist/x.json", "there is no folder"),
        ("--modes ngram --synthetic-acceptance 0.2,0.9", "never rise"),
        ("--modes off --max-tokens 20000", "exceeds the model's 16384"),
        ("--modes off --output-json .", "--output-json: . cannot be written as a file"),
        ("--modes off --plot .", "--plot: . cannot be written as a file"),
        ("--modes off --lora base=x", "no adapter can be called 'base'"),
        ("--modes off --lora a=x --lora a=y", "two adapters called 'a'"),
        ("--modes off --lora a=x --lora a-without-draft=y", "'a-without-draft'"),
    ],
)
def test_wrong_options_are_one_line_errors(more, message, capsys):
    assert main([*QUICK, *more.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        b"[1, 2]",
        b'{"text": "x"}',
        b"{",
        b'{"prompt": "x", "messages": []}',
        b'{"prompt": 5}',
        b'{"prompt": "a\\ud800b"}',
        b'{"prompt": "x", "adapter": ["x"]}',
        b'{"prompt": "\xff"}',
        b"[" * 99999,
        b'{"prompt_token_ids": [true]}',
    ],
)
def test_wrong_prompt_lines_are_refused(line, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(line)
    assert main([*QUICK, "--modes", "off", "--prompts", str(file)]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert "prompt" in error


def test_lines_of_prompts_end_at_newlines_alone(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\u2028two"}\r\n{"prompt": "three", "adapter": "a"}', encoding="utf-8")
    assert read_prompts(file, "prompts") == [Prompt("one\u2028two", None), Prompt("three", "a")]


def test_the_random_tasks_name_is_no_adapters(capsys):
    assert main([*QUICK, "--lora", "random text=x"]) == 1
    assert "'random text', which is a task's name" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tasks", "--batch-sizes", "--modes"])
def test_lists_without_a_value_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        main([*QUICK, option, " , "])
    assert "there is no value in" in capsys.readouterr().err


def test_copies_without_draft_weights_stay_inside_their_folder(tmp_path):
    source, scratch = tmp_path / "adapter", tmp_path / "deep" / "scratch"
    (source / "draft").mkdir(parents=True)
    (source / "adapter_config.json").write_text("{}")
    scratch.mkdir(parents=True)
    task = Task("../../x", [[1]], LoRARequest("../../x", path=str(source)))
    copy = Path(without_draft_weights(task, scratch).bare.path)
    assert copy.is_relative_to(scratch)
    assert [file.name for file in copy.iterdir()] == ["adapter_config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "deep"]


def test_no_run_teaches_another_its_answers(tmp_path):
    """The suffix drafter remembers outputs: those of the same requests, in an earlier run, must not be among them."""
    out = tmp_path / "a.json"
    more = f"--modes suffix --tasks base --random-text --batch-sizes 1,8 --max-tokens 24 --output-json {out}"
    assert main([*QUICK, *more.split()]) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["mode"] == "suffix" and row["kind"] == "random"]
    assert [row["batch_size"] for row in rows] == [1, 8]
    # Had it seen them, nearly all tokens would be accepted drafts.
    assert all(row["acceptance_length"] is None or row["acceptance_length"] < 2.5 for row in rows)
