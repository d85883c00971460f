"""`outrider train-draft`: its flags, the output folder, and runs from prompts to files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from outrider.models.demo import DEMO_MODEL_NAME, demo_model_path
from outrider.platform.cli import train_draft
from outrider.platform.cli.main import build_parser, main
from outrider.platform.core.errors import InvalidRequestError

from ...gguf_files import write_gguf

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny Llama with the demo's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=2048, max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(demo_model_path() / name, folder / name)
    return folder


@pytest.fixture
def command(target, tmp_path):
    """Arguments of a small run; more are appended."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say {n}", "completion": f" {n} {n}"}) + "\n" for n in range(20)))

    def make(*more, data=data, output="out"):
        paths = ["--model", str(target), "--data", str(data), "--output", str(tmp_path / output)]
        sizes = "--steps 4 --eval-every 2 --batch-tokens 64 --dtype float32 --no-trial".split()
        sizes += [] if "--eval-data" in more else ["--held-out", "4"]
        return ["train-draft", "--method", "eagle3", *paths, *sizes, *map(str, more)]

    return make


def resolve_options(*arguments):
    return train_draft.resolve(build_parser().parse_args(arguments))


def test_flags_become_options(command):
    options = resolve_options(*command("--aux-layers", "0,1,2", "--no-progress", "--lr", "0.5", "--generate"))
    assert options.aux_layers == (0, 1, 2)
    assert (options.steps, options.lr, options.generate, options.progress) == (4, 0.5, True, False)
    assert options.own_lm_head is False
    demo = resolve_options(
        "train-draft", "--method", "medusa", "--model", DEMO_MODEL_NAME, "--data", "x", "--output", "y"
    )
    assert demo.model == str(demo_model_path())


@pytest.mark.parametrize(
    ("more", "words"), [(["--aux-layers", "a,b"], "not a list of values"), (["--optimizer", "sgd"], "invalid choice")]
)
def test_wrong_usage(command, capsys, more, words):
    with pytest.raises(SystemExit):
        build_parser().parse_args(command(*more))
    assert words in capsys.readouterr().err


def test_errors_are_one_line(command, tmp_path, capsys):
    for arguments, words in (
        (command("--steps", "0"), "--steps must be in"),
        (command(data=tmp_path / "none"), "cannot read"),
        (command("--overwrite", "--draft-vocab-size", "4000"), "4000 exceeds the target's vocabulary of 2048"),
        (command("--overwrite", "--held-out", "20"), "--held-out 20 leaves nothing of 20"),
        (command("--resume", output="nowhere"), "there is no run in"),
        (command("--overwrite", "--adapter", tmp_path / "none"), "there is no folder"),
    ):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert words in error
        assert [line for line in error.splitlines() if line.startswith("outrider: error:")] == error.splitlines()[-1:]


def test_training_writes_a_head_and_a_log_and_leaves_no_checkpoint(command, tmp_path, capsys):
    assert main(command("--intermediate-size", 24, "--draft-vocab-size", 40)) == 0
    out = tmp_path / "out"
    names = {"config.json", "model.safetensors", "run.json", "training_log.jsonl"}
    assert {path.name for path in out.iterdir()} == names
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 40
    tensors = load_file(out / "model.safetensors")
    assert tensors["midlayer.mlp.up_proj.weight"].shape == (24, 32)
    log = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 2, 4]
    assert all(1 <= line["acceptance_length"] <= 5 for line in log)
    printed = capsys.readouterr().out
    assert "16 samples to learn from, 4 to measure on" in printed
    assert "step 4/4: held-out loss" in printed

    # an earlier run is neither mixed with nor deleted unasked
    assert main(command()) == 1
    assert "--resume to continue or --overwrite" in capsys.readouterr().err
    assert main(command("--resume", "--intermediate-size", 20, "--draft-vocab-size", 40)) == 1
    assert "had intermediate_size 24, this one has 20" in capsys.readouterr().err
    assert load_file(out / "model.safetensors").keys() == tensors.keys()
    (out / "notes.txt").write_text("mine")
    assert main(command("--overwrite", "--method", "medusa", "--medusa-heads", "2")) == 0
    assert (out / "medusa_lm_head.pt").exists()
    assert not (out / "model.safetensors").exists()
    assert (out / "notes.txt").read_text() == "mine"


def test_a_gguf_file_is_a_target(command, target, tmp_path):
    write_gguf(target, tmp_path / "m.gguf")
    assert main(command("--model", tmp_path / "m.gguf", "--intermediate-size", 24)) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_generated_completions_are_the_engines_and_are_kept(command, target, tmp_path, monkeypatch, capsys):
    from outrider import LLM, SamplingParams

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell {n} of {n}"}) + "\n" for n in range(14)))
    arguments = command("--generate", "--max-tokens", 9, data=prompts)
    queued = []
    real = LLM.generate

    def generate(self, given, *rest, on_output, **more):
        queued.append(len(given))
        done = []

        def stop(number, output):
            on_output(number, output)
            done.append(number)
            if len(queued) == 1 and len(done) == 6:
                raise KeyboardInterrupt

        return real(self, given, *rest, on_output=stop, **more)

    monkeypatch.setattr(LLM, "generate", generate)
    assert main(arguments) == 130
    file = tmp_path / "out" / "generated.jsonl"
    kept = file.read_text()
    assert kept.count("\n") == 6  # each is written as soon as it ends
    assert "generating 14 answers of at most 9 tokens" in capsys.readouterr().out
    file.write_text(kept + '{"prompt_token_ids": [1, 2')  # as if it had been stopped while it wrote
    assert main([*arguments, "--resume"]) == 0
    assert queued == [14, 14 - kept.count("\n")]  # all at once: the engine's batch stays full
    monkeypatch.setattr(LLM, "generate", real)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 14
    for line in map(json.loads, kept.splitlines()):
        assert lines[line.pop("number")] == line  # in the order of the prompts, once all are there
    with LLM(str(target), dtype="float32") as llm:
        given = [{"prompt_token_ids": line["prompt_token_ids"]} for line in lines]
        outputs = llm.generate(given, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert [line["completion_token_ids"] for line in lines] == [list(o.outputs[0].token_ids) for o in outputs]
    assert main(command("--intermediate-size", 24, data=file, output="again")) == 0  # they are data too


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_generated(command, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "short"}) + "\n" + json.dumps({"prompt": "x y " * 200}) + "\n")
    assert main(command("--generate", "--held-out", 1, data=prompts)) == 1
    error = capsys.readouterr().err
    assert "prompt 2 of the data has" in error
    assert "the model takes 128" in error
    assert not (tmp_path / "out").exists()


def test_output_that_is_a_file(command, tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(InvalidRequestError, match="is not a folder"):
        train_draft.prepare_output(resolve_options(*command()))


# --- what is deleted, and when --------------------------------------------------------------------------------------


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(arguments, capsys):
    """The one line of a refusal."""
    assert main(list(map(str, arguments))) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "Loading weights" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("outrider: error: ")
    return lines[0]


@pytest.fixture
def run_folder(tmp_path):
    """A folder as a run leaves it; its files are not read."""
    out = tmp_path / "out"
    (out / "checkpoint").mkdir(parents=True)
    (out / "run.json").write_text(json.dumps({"method": "eagle3"}))
    for name in ("config.json", "model.safetensors", "generated.jsonl", "checkpoint/state.pt"):
        (out / name).write_text(name)
    return out


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("option", ["--model", "--adapter", "--draft", "--data", "--eval-data"])
def test_an_output_that_is_or_holds_an_input_is_left_alone(option, link, command, run_folder, tmp_path, capsys):
    given, folder = run_folder, run_folder
    if "data" in option:
        given = run_folder / "generated.jsonl"
    if link:
        folder = tmp_path / "link"
        folder.symlink_to(run_folder)
    more = ["--method", "draft-lora"] if option == "--draft" else []
    before = contents(run_folder)
    message = refused(command("--overwrite", *more, option, given, output=folder), capsys)
    assert f"what {option} names" in message
    assert contents(run_folder) == before


def test_overwrite_deletes_nothing_without_a_run(command, run_folder, capsys):
    (run_folder / "run.json").write_text('{"scripts": {}}')
    before = contents(run_folder)
    assert "without the run.json of one" in refused(command("--overwrite"), capsys)
    assert contents(run_folder) == before


def test_overwrite_deletes_no_folders(command, run_folder, capsys):
    (run_folder / "config.json").unlink()
    (run_folder / "config.json").mkdir()
    before = contents(run_folder)
    assert "config.json is one" in refused(command("--overwrite"), capsys)
    assert contents(run_folder) == before


@pytest.mark.parametrize("more", [["--data", "none"], ["--model", "/none"], ["--aux-layers", "0,1,9"]])
def test_overwrite_deletes_nothing_when_the_start_fails(more, command, run_folder, capsys):
    before = contents(run_folder)
    refused([*command("--overwrite"), *more], capsys)
    assert contents(run_folder) == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--num-heads", "3", "--num-kv-heads", "2"], "must divide"),
        (["--aux-layers", "0,1,9"], "--aux-layers names layers that must be"),
        (["--method", "draft-lora", "--draft", "/none"], "--draft: model '/none'"),
        (["--held-out", "20"], "leaves nothing of 20"),
        (["--adapter", "/none"], "there is no folder"),
        (["--output", ""], "--output must not be empty"),
        (["--hidden-size", "7"], "--hidden-size must be even"),
    ],
)
def test_a_start_that_fails_generates_nothing_and_locks_nothing(more, words, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_draft, "generate", lambda *_, **__: pytest.fail("it was generated"))
    assert words in refused([*command("--generate"), *more], capsys)
    assert not (tmp_path / "out").exists()


def test_generated_completions_outlive_other_options_of_the_head(command, tmp_path, monkeypatch, capsys):
    from outrider import LLM

    calls, real = [], LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda *args, **more: (calls.append(1), real(*args, **more))[1])
    base = ("--generate", "--max-tokens", 6, "--steps", 1)
    assert main(command(*base)) == 0
    assert calls == [1]
    kept = (tmp_path / "out" / "generated.jsonl").read_bytes()
    assert main(command(*base, "--overwrite", "--intermediate-size", 24)) == 0
    assert calls == [1]
    assert (tmp_path / "out" / "generated.jsonl").read_bytes() == kept
    # before anything has been trained, a resumed run may have other options too
    (tmp_path / "out" / "model.safetensors").unlink()
    assert main(command(*base, "--resume", "--intermediate-size", 20)) == 0
    assert calls == [1]
    assert main(command("--generate", "--max-tokens", 5, "--steps", 1, "--overwrite")) == 0
    assert calls == [1, 1]
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "other"}) + "\n" + json.dumps({"prompt": "more"}) + "\n")
    more = ("--held-out", 1, "--overwrite")
    assert main(command("--generate", "--max-tokens", 5, "--steps", 1, *more)) == 0
    assert calls == [1, 1, 1]
    assert (tmp_path / "out" / "generated.jsonl").read_text().count("\n") == 2


def test_resuming_with_other_data_is_refused(command, tmp_path, capsys):
    evaluated = tmp_path / "eval.jsonl"
    evaluated.write_text((tmp_path / "data.jsonl").read_text())
    arguments = command("--eval-data", evaluated, "--steps", 1)
    assert main(arguments) == 0
    log = tmp_path / "out" / "training_log.jsonl"
    lines = log.read_text()
    assert main([*arguments, "--resume"]) == 0
    assert log.read_text() == lines  # a run that is over gets no second last line
    for file, name in ((evaluated, "--eval-data"), (tmp_path / "data.jsonl", "--data")):
        file.write_text(file.read_text() + json.dumps({"text": "one more line"}) + "\n")
        capsys.readouterr()
        assert f"what {name} names is not what the run" in refused([*arguments, "--resume"], capsys)


def test_a_run_file_that_is_none(command, run_folder, capsys):
    for text in ("[]", "{", "[" * 9999, '{"method": 5}'):
        (run_folder / "run.json").write_text(text)
        assert "describes no run" in refused(command("--resume"), capsys)


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("eagle3", ["--rank", "8"], "--rank is for --method draft-lora and uno, not for eagle3"),
        ("eagle3", ["--alpha", "1"], "--alpha is for --method draft-lora"),
        ("eagle3", ["--medusa-heads", "4"], "--medusa-heads is for --method medusa"),
        ("medusa", ["--num-heads", "4"], "--num-heads is for --method eagle3 and eagle"),
        ("medusa", ["--unroll", "2"], "--unroll is for"),
        ("medusa", ["--no-own-lm-head"], "--own-lm-head is for --method eagle3"),
        ("eagle3", ["--temperature", "0"], "--temperature is for --generate"),
    ],
)
def test_options_without_a_meaning_are_refused(method, more, words, command, tmp_path, capsys):
    """Also if they equal the default."""
    assert words in refused([*command(), "--method", method, *more], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_target_is_a_one_line_error(file, command, target, tmp_path, capsys):
    shutil.copytree(target, tmp_path / "broken")
    (tmp_path / "broken" / file).write_bytes(b"[]")
    assert "--model" in refused([*command(), "--model", tmp_path / "broken"], capsys)
    assert not (tmp_path / "out").exists()


# --- of every method ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(target, tmp_path_factory):
    """One that changes the target's text, of a larger rank for some modules than it has for most."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    patterns = {"rank_pattern": {"down_proj": 80}, "alpha_pattern": {"down_proj": 160}}
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **patterns)
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(LlamaForCausalLM.from_pretrained(target), config).save_pretrained(folder)
    return folder


def greedy_texts(target, prompts, lora=None, **options):
    """Greedy texts of the engine as token ids, the adapters that it knows in the end, and drafts that it verified."""
    from outrider import LLM, SamplingParams

    with LLM(str(target), dtype="float32", enable_lora=True, max_lora_rank=80, **options) as llm:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, SamplingParams(temperature=0, max_tokens=9), lora, use_tqdm=False)
        num_drafts = sum(entry.counts.num_draft_tokens for entry in llm.stats().speculation)
        return [list(output.outputs[0].token_ids) for output in outputs], llm.list_lora_adapters(), num_drafts


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_draft_weights_are_trained_on_the_adapters_text(kind, command, target, adapter, tmp_path, capsys):
    from outrider import LoRARequest

    draft = target  # any model with its vocabulary
    if kind == "eagle3":
        draft = tmp_path / "head"
        assert main(command("--steps", 1, output="head")) == 0
    more = ("--method", "draft-lora", "--adapter", adapter, "--draft", draft, "--rank", 4)
    assert main(command(*more, "--generate", "--max-tokens", 9)) == 0
    out = tmp_path / "out"
    assert "draft-lora: 16 samples to learn from" in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "generated.jsonl").read_text().splitlines()]
    prompts, found = ([line[f"{part}_token_ids"] for line in lines] for part in ("prompt", "completion"))
    assert found != greedy_texts(target, prompts)[0], "the base says something else"
    lora = LoRARequest("own", path=str(adapter), draft_path=str(out))
    config = {"method": kind, "model": str(draft), "num_speculative_tokens": 3}
    texts, known, _ = greedy_texts(target, prompts, lora, speculative_config=config)
    assert found == texts
    assert [(info.name, info.draft) for info in known] == [("own", "loaded")]
    weights = load_file(out / "adapter_model.safetensors")
    assert {len(tensor) for name, tensor in weights.items() if "lora_A" in name} == {4}
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name), "nothing was learned"


def test_an_eagle_head_of_the_command_drafts(command, target, tmp_path):
    own = ("--intermediate-size", 24)
    assert main(command("--method", "eagle", *own)) == 0
    out = tmp_path / "out"
    assert load_file(out / "model.safetensors")["layers.0.mlp.up_proj.weight"].shape == (24, 32)
    config = {"method": "eagle", "model": str(out), "num_speculative_tokens": 3}
    prompts = [[5, 6, 7], [9, 8]]
    texts, _, num_drafts = greedy_texts(target, prompts, speculative_config=config | {"adaptive": False})
    assert texts == greedy_texts(target, prompts)[0]
    assert num_drafts > 0
