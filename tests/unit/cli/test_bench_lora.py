"""`outrider bench lora`: the arithmetic of its figures, and the command from options to files."""

import json
import os
from collections import Counter

import numpy as np
import pytest

from outrider.models.checkpoint.json_files import read_json
from outrider.models.config import DTYPES, config_from_hf
from outrider.models.demo import demo_adapters, demo_model_path
from outrider.platform.cli.bench.bench_options import write_json
from outrider.platform.cli.bench.lora import cold_adapters as cold
from outrider.platform.cli.bench.lora.cases import Case, make_cases, rows
from outrider.platform.cli.bench.popularity import POPULARITIES, ZIPF_EXPONENT, choose
from outrider.platform.cli.bench.random_adapters import FILES_PER_RANK, AdapterWriter, linear_shapes
from outrider.platform.cli.bench.request_figures import RequestRecord, Round, row_figures
from outrider.platform.cli.main import main
from outrider.platform.core.config import EngineArgs
from outrider.platform.engine.engine_core import EngineCore

pytestmark = pytest.mark.slow

# --- cases ----------------------------------------------------------------------------------------------------------


def test_identical_uses_one_adapter_per_round():
    assert [choose("identical", 3, 4, number, 0) for number in (0, 1, 5)] == [[0] * 3, [1] * 3, [1] * 3]


def test_distinct_continues_after_the_last_round():
    asked = [index for number in range(4) for index in choose("distinct", 8, 32, number, 0)]
    assert asked == list(range(32))
    assert choose("distinct", 5, 3, 0, 0) == [0, 1, 2, 0, 1]  # more requests than adapters


def test_random_popularities_depend_on_the_seed():
    for name in ("uniform", "skewed"):
        first = choose(name, 50, 1000, 2, 7)
        assert first == choose(name, 50, 1000, 2, 7)
        assert first not in (choose(name, 50, 1000, 3, 7), choose(name, 50, 1000, 2, 8))


def test_uniform_and_skewed_have_their_frequencies():
    count, number = 20_000, 6
    for name, exponent in (("uniform", 0.0), ("skewed", ZIPF_EXPONENT)):
        weights = np.arange(1, number + 1) ** -exponent
        seen = Counter(choose(name, count, number, 0, 0))
        shares = [seen[index] / count for index in range(number)]
        assert shares == pytest.approx(weights / weights.sum(), abs=0.015)  # 4 standard deviations


def test_cases_are_all_combinations_that_differ():
    cases = make_cases([1, 8, 1], [0, 1, 8], ["uniform", "distinct", "uniform"])
    expected = [(0, ""), (1, "identical"), (8, "uniform"), (8, "distinct")]
    assert cases == [Case(batch, *rest) for batch in (1, 8) for rest in expected]


# --- figures --------------------------------------------------------------------------------------------------------


def make_rounds(*seconds, tokens=100, gap=0.01):
    """Rounds of four requests with 75 prompt tokens, each for one of two adapters."""
    return [
        Round(s, [RequestRecord(i, 0.0, [0.5, 0.5 + gap], 0.0, 75, tokens // 4, f"a{i % 2}") for i in range(4)])
        for s in seconds
    ]


def test_a_request_has_the_times_that_users_of_vllm_know():
    times = RequestRecord(0, 10.0, [10.5, 10.7, 11.1], num_prompt_tokens=20, num_output_tokens=5)
    single = RequestRecord(1, 10.0, [10.3], num_prompt_tokens=10, num_output_tokens=1)
    found = row_figures([Round(2.0, [times, single])])
    assert found["ttft_ms"]["mean"] == pytest.approx(400)
    assert found["itl_ms"]["mean"] == pytest.approx(300), "two tokens came with the last two arrivals"
    assert found["tpot_ms"]["mean"] == pytest.approx(150), "without the first token; a single token has none"
    assert found["e2el_ms"]["mean"] == pytest.approx(700)
    assert (found["requests"], found["output_throughput"], found["total_token_throughput"]) == (2, 3, 18)


def test_ratios_compare_a_round_with_the_bases():
    case = Case(4, 8, "uniform")
    found = rows({Case(4, None): make_rounds(1.0, 0.9, 1.0), case: make_rounds(2.0, 1.0, 4.0)})
    base, row = found
    assert "ratio" not in base
    assert row["ratio"] == pytest.approx(0.5)  # the median of 0.5, 0.9 and 0.25
    assert row["output_throughput"] == pytest.approx(50)
    assert row["request_throughput"] == pytest.approx(2)
    assert row["total_token_throughput"] == pytest.approx(200)
    assert row["distinct_adapters"] == 2
    assert row["ratio_to_one_adapter"] is None
    assert [entry["ratio"] for entry in row["rounds"]] == pytest.approx([0.5, 0.9, 0.25])
    assert [entry["output_throughput"] for entry in base["rounds"]] == pytest.approx([100, 111.111, 100])


def test_the_ratio_to_one_adapter_is_of_the_same_rounds():
    one, many = Case(4, 1, "identical"), Case(4, 8, "uniform")
    found = rows({Case(4, None): make_rounds(1.0, 1.0), one: make_rounds(1.0, 2.0), many: make_rounds(2.0, 2.5)})
    # The median of 1.0 / 2.0 and 2.0 / 2.5.
    assert [row.get("ratio_to_one_adapter") for row in found] == [None, 1.0, 0.65]


def test_latencies_are_percentiles_over_all_rounds():
    row = row_figures([*make_rounds(1.0, gap=0.001), *make_rounds(1.0, gap=0.003)])
    assert row["itl_ms"] == {"mean": 2.0, "median": 2.0, "std": 1.0, "p99": 3.0}


def cold_run(*itl):
    return cold.ColdRun(list(itl), [0.2], [0.01, 0.03])


def test_figures_of_cold_adapters():
    runs = {
        cold.QUIET: [cold_run(0.01), cold_run(0.01)],
        cold.LOADED: [cold_run(0.02), cold_run(0.02)],
        cold.COLD: [cold_run(0.03), cold_run(0.02)],
    }
    found = cold.cold_figures(runs)
    assert found["itl_p99_ratio"] == pytest.approx(1.25)
    assert found["itl_p99_ratio_to_quiet"] == pytest.approx(2.5)
    loaded = found["kinds"][cold.LOADED]
    assert loaded["itl_ms"]["mean"] == pytest.approx(20)
    assert loaded["load_ms"] == {"mean": 20.0, "median": 20.0, "std": 10.0, "p99": pytest.approx(30)}
    assert [entry["loads"] for entry in loaded["rounds"]] == [2, 2]


def test_only_gaps_inside_the_window_count():
    arrivals = [0.5, 1.0, 1.5, 2.5, 4.0]
    assert cold.gaps_within(arrivals, (1.0, 3.0)) == [0.5, 1.0]
    assert cold.gaps_within(arrivals, (3.0, 5.0)) == []


# --- adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shape():
    return config_from_hf(read_json(demo_model_path() / "config.json"), DTYPES["bfloat16"])


def test_no_two_adapters_are_the_same_though_they_share_files(tmp_path, shape):
    writer = AdapterWriter(tmp_path, shape, seed=3)
    count = 3 * FILES_PER_RANK
    loras = [writer.write(f"a{index}", (2, 4)[index % 2]) for index in range(count)]
    inodes = {os.stat(f"{lora.path}/adapter_model.safetensors").st_ino for lora in loras}
    assert len(inodes) <= 2 * FILES_PER_RANK < count
    engine = EngineCore(EngineArgs(enable_lora=True, max_loras=2, max_lora_rank=4, max_cpu_loras=count))
    try:
        infos = [engine.adapters.load(lora) for lora in loras]
    finally:
        engine.shutdown()
    assert len({info.digest for info in infos}) == count
    assert [info.rank for info in infos] == [2, 4] * (count // 2)


def test_a_seed_gives_the_same_adapters(tmp_path, shape):
    def weights(folder, seed):
        (tmp_path / folder).mkdir()
        lora = AdapterWriter(tmp_path / folder, shape, seed).write("a", 2)
        return open(f"{lora.path}/adapter_model.safetensors", "rb").read()

    assert weights("one", 1) == weights("again", 1) != weights("two", 2)


def test_adapters_are_on_all_projections_of_the_checkpoint(shape):
    from safetensors import safe_open

    shapes = {}
    for file in demo_model_path().glob("*.safetensors"):
        with safe_open(str(file), "pt") as opened:
            shapes |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    for module, (in_features, out_features) in linear_shapes(shape).items():
        assert shapes[f"{module}.weight"] == (out_features, in_features)


# --- the command ----------------------------------------------------------------------------------------------------

TINY = "bench lora --input-len 6 --output-len 5 --ranks 2,4 --num-adapters 0,1,3 --dtype float32".split()
SHORT = [*TINY, *"--batch-sizes 2 --rounds 2 --popularity distinct --cold-adapters 0".split()]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The demo with everything that is measured and written."""
    folder = tmp_path_factory.mktemp("bench")
    more = f"--batch-sizes 1,3 --rounds 2 --cold-adapters 5 --cold-rate 60 --warm-requests 2 --max-loras 4 \
        --max-cpu-loras 6 --lora-memory 4MiB --plot {folder}/a.png --output-json {folder}/a.json"
    assert main([*TINY, *more.split()]) == 0
    return json.loads((folder / "a.json").read_text()), folder


def test_every_case_has_a_row(result):
    report, _ = result
    found = [(row["batch_size"], row["num_adapters"], row["popularity"]) for row in report["rows"]]
    cases = [(None, ""), (0, ""), (1, "identical"), *[(3, name) for name in POPULARITIES]]
    assert sorted(found, key=str) == sorted([(batch, *case) for batch in (1, 3) for case in cases], key=str)
    assert report["labels"] == ["RANDOM ADAPTERS: the text is meaningless"]
    assert report["model"]["name"] == "outrider-demo"
    assert (report["settings"]["ranks"], report["settings"]["max_lora_rank"]) == ([2, 4], 4)
    assert "/tmp" not in str(report)  # a result may be published: nothing of the machine's folders


def test_rounds_and_their_medians_hang_together(result):
    for row in result[0]["rows"]:
        assert row["requests"] == row["batch_size"]
        assert len(row["rounds"]) == 2
        assert all(entry["output_tokens"] == row["requests"] * 5 for entry in row["rounds"])
        median = float(np.median([entry["output_throughput"] for entry in row["rounds"]]))
        assert row["output_throughput"] == pytest.approx(median, rel=1e-3)
        assert row["total_token_throughput"] == pytest.approx(median * 11 / 5, rel=1e-3)  # prompts of 6
        assert row["ttft_ms"]["median"] <= row["ttft_ms"]["p99"] <= row["e2el_ms"]["p99"]
        if row["num_adapters"] is not None:
            base = next(
                r for r in result[0]["rows"] if (r["batch_size"], r["num_adapters"]) == (row["batch_size"], None)
            )
            pairs = zip(row["rounds"], base["rounds"], strict=True)
            ratios = [mine["output_throughput"] / other["output_throughput"] for mine, other in pairs]
            assert row["ratio"] == pytest.approx(float(np.median(ratios)), rel=1e-3)
        if row["num_adapters"] == 1:
            assert row["ratio_to_one_adapter"] == 1.0
        if row["popularity"] == "distinct":
            assert row["distinct_adapters"] == min(3, row["requests"])


def test_cold_adapters_are_cold_in_every_round_and_loaded_ones_are_not(result):
    found = result[0]["cold"]
    loads = {name: [entry["loads"] for entry in kind["rounds"]] for name, kind in found["kinds"].items()}
    assert loads == {cold.QUIET: [0, 0], cold.LOADED: [0, 0], cold.COLD: [5, 5]}
    assert found["kinds"][cold.QUIET]["stream_ttft_ms"] is None
    assert found["kinds"][cold.COLD]["stream_ttft_ms"]["median"] > 0
    assert (found["warm_requests"], found["cold_adapters"], found["cold_rate"]) == (2, 5, 60.0)
    assert found["itl_p99_ratio"] > 0 < found["itl_p99_ratio_to_quiet"]


def test_the_registered_adapters_and_their_memory_are_in_the_result(result):
    adapters, memory = result[0]["adapters"], result[0]["peak_memory_mib"]
    assert adapters["registered"] == sum(adapters["adapters_by_level"].values()) == 3  # the cold ones are gone
    assert list(memory) == ["engines loaded", "adapters registered", "measured"]
    assert 0 < memory["engines loaded"] <= memory["measured"]


def test_the_picture_is_one(result):
    image = pytest.importorskip("matplotlib.image").imread(result[1] / "a.png")
    assert min(image.shape[:2]) > 800
    assert image[..., :3].std() > 0.05  # not blank


def test_only_the_result_is_left(result):
    assert sorted(os.listdir(result[1])) == ["a.json", "a.png"]


def test_own_adapters_and_weights_that_are_random(tmp_path, capsys):
    file = tmp_path / "a.json"
    given = [f"--lora={name}={path}" for name, path in demo_adapters().items()]
    more = f"--num-adapters 2 --load-format dummy --output-json {file}"
    assert main([*SHORT, *more.split(), *given]) == 0
    assert capsys.readouterr().out.startswith("RANDOM WEIGHTS")
    report = json.loads(file.read_text())
    assert report["adapters"]["registered"] == 2
    assert len([row for row in report["rows"] if row["num_adapters"] == 2]) == 1
    assert report["settings"]["ranks"] == sorted(
        {read_json(path / "adapter_config.json")["r"] for path in demo_adapters().values()}
    )


def test_only_used_fields_are_requested(tmp_path):
    file = tmp_path / "a.json"
    more = f"--num-adapters 3 --adapters-in-use 2 --batch-sizes 3 --rounds 1 --output-json {file}"
    assert main([*SHORT, *more.split()]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["distinct_adapters"] for row in rows if row["num_adapters"]] == [2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--popularity popular", "unknown popularity 'popular'; known are identical, uniform"),
        ("--lora a=/x --num-adapters 2", "only 1 are given with --lora"),
        ("--lora a=/x --lora a=/y", "two adapters called 'a'"),
        ("--output-len 20000", "exceed the model's 16384"),
        ("--max-loras 4 --max-cpu-loras 2", "max_cpu_loras must be at least max_loras"),
        ("--lora-memory much", "lora_memory must be a number of bytes"),
        ("--lora a=/does/not/exist --num-adapters 1", "does not exist"),
        ("--output-json /does/not/exist/x.json", "there is no folder"),
        ("--plot .", "--plot: . cannot be written as a file"),
    ],
)
def test_wrong_options_are_one_line_errors(more, message, capsys):
    assert main([*SHORT, *more.split()]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message in line


@pytest.mark.parametrize("more", ["--cold-rate 0", "--rounds 0", "--num-adapters -1", "--ranks 0"])
def test_numbers_out_of_range_are_wrong_usage(more, capsys):
    with pytest.raises(SystemExit):
        main([*SHORT, *more.split()])
    assert more.split()[0] in capsys.readouterr().err


def test_a_result_is_replaced_atomically_except_links_and_devices(tmp_path):
    file, link = tmp_path / "a.json", tmp_path / "link.json"
    write_json({"a": 1}, file)
    link.symlink_to(file)
    write_json({"a": 2}, link)
    assert link.is_symlink()
    assert json.loads(file.read_text()) == {"a": 2}
    write_json({"a": 3}, tmp_path / os.devnull)
    assert sorted(os.listdir(tmp_path)) == ["a.json", "link.json"]
