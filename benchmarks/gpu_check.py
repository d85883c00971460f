"""Everything worth checking where there is a GPU, in one run: parity with the CPU, losslessness, and speed.

    python benchmarks/gpu_check.py OUTPUT_DIR [--device cuda] [--quick]

Needs torch, transformers, safetensors and pytest. Random weights, but for the demo's: fine for speed and for parity,
meaningless for text and for acceptance. Prints a short table last and writes OUTPUT_DIR/gpu_check.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from outrider import LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_draft_path, demo_eagle3_path, demo_model_path
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
    "0.5B": {"hidden_size": 1024, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 16},
}
SIZES = ((1, 32, 64), (8, 128, 64), (32, 128, 64))


def write_config(root: Path, name: str) -> str:
    """A model folder with a config.json alone, for load_format="dummy"."""
    folder = root / name
    folder.mkdir()
    shape = SHAPES[name]
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": shape["num_attention_heads"] // 2,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_engine(path: str, device: str, dtype: str, **options: Any) -> EngineCore:
    """An engine with random weights from a fixed seed: the same on every device."""
    values = {"max_model_len": 1024, "max_num_seqs": 32, "enable_prefix_caching": False, "seed": 0} | options
    return EngineCore(EngineArgs(model=path, device=device, dtype=dtype, load_format="dummy", **values))


def run(
    engine: EngineCore, prompts: list[list[int]], params: SamplingParams, adapters: Sequence[LoRARequest | None] = ()
) -> list[list[int]]:
    """Generate, the prompts' adapters in turn; token ids in the order of the prompts."""
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        lora = adapters[index % len(adapters)] if adapters else None
        engine.add_request(EngineRequest(str(index), prompt, params, lora=lora))
    while engine.has_work():
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
    return list(outputs.values())


def make_prompts(count: int, length: int) -> list[list[int]]:
    """Random token ids."""
    generator = random.Random(count * 1000 + length)
    return [[generator.randrange(10, 4000) for _ in range(length)] for _ in range(count)]


def check_kernels(output_dir: Path) -> dict[str, bool]:
    """The tests of the Triton kernels, on the GPU where there is one; their output goes to output_dir."""
    root = Path(__file__).resolve().parent.parent
    files = sorted(map(str, (root / "tests" / "kernels").glob("test_triton_*.py")))
    # The project's own options want plug-ins that a bare GPU machine lacks.
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    (output_dir / "kernel_tests.txt").write_text(done.stdout + done.stderr)
    return {"tests of the Triton kernels": done.returncode == 0}


def check_parity(path: str, device: str) -> dict[str, bool]:
    """float32 text on the device: equal to the CPU's, and the same with speculation."""
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [*make_prompts(3, 40), [5, 6, 7, 8] * 12]
    greedy = SamplingParams(temperature=0, max_tokens=48)
    seeded = SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=48)
    engine, cpu = make_engine(path, device, "float32"), make_engine(path, "cpu", "float32")
    speculative = {"method": "draft_model", "model": path, "num_speculative_tokens": 3}
    drafted = make_engine(path, device, "float32", speculative_config=speculative)
    ngram = make_engine(path, device, "float32", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    results = {}
    for name, params in (("greedy", greedy), ("seeded", seeded)):
        want = run(engine, prompts, params)
        results[f"{name} equals cpu"] = want == run(cpu, prompts, params)
        results[f"{name} equals draft_model"] = want == run(drafted, prompts, params)
        results[f"{name} equals ngram"] = want == run(ngram, prompts, params)
    return results


def check_demo(device: str) -> dict[str, bool]:
    """float32 text of the embedded demo model and its adapters on the device: the same with every drafter."""
    heads = {"draft_model": demo_draft_path(), "eagle3": demo_eagle3_path()}
    modes: dict[str, dict[str, Any]] = {name: {"method": name, "model": str(path)} for name, path in heads.items()}
    modes |= {"ngram": {"method": "ngram"}, "suffix": {"method": "suffix"}}
    modes |= {f"{name} k=4": mode | {"num_speculative_tokens": 4} for name, mode in modes.items()}
    adapters = [None, *(LoRARequest(name, path=str(path)) for name, path in demo_adapters().items())]
    prompts = [[token % 2000 + 10 for token in prompt] for prompt in make_prompts(8, 24)]
    params = {
        "greedy": SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
        "seeded": SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=48, ignore_eos=True),
    }
    options = {"device": device, "dtype": "float32", "enable_lora": True, "max_model_len": 512, "max_num_seqs": 8}
    plain = EngineCore(EngineArgs(model=str(demo_model_path()), **options))
    want = {name: run(plain, prompts, p, adapters) for name, p in params.items()}
    plain.shutdown()
    results = {}
    for mode, config in modes.items():
        engine = EngineCore(EngineArgs(model=str(demo_model_path()), speculative_config=config, **options))
        for name, p in params.items():
            results[f"demo {name} equals {mode}"] = run(engine, prompts, p, adapters) == want[name]
        engine.shutdown()
    return results


def measure_speed(path: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """Output tokens/s in bfloat16, best of `rounds` after a warm-up."""
    engine = make_engine(path, device, "bfloat16")
    rows = []
    run(engine, make_prompts(8, 64), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for count, length, out in SIZES:
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        best = float("inf")
        for _ in range(rounds):
            started = time.perf_counter()
            run(engine, make_prompts(count, length), params)
            best = min(best, time.perf_counter() - started)
        rows.append(
            {"requests": count, "prompt": length, "output": out, "tokens_per_second": round(count * out / best, 1)}
        )
    return rows


def main() -> None:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, without the tests of the kernels")
    args = parser.parse_args()
    weights = "random, but for the demo model's"
    report: dict[str, Any] = {"machine": describe_machine(), "device": args.device, "weights": weights}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    report["kernels"] = {} if args.quick else check_kernels(args.output_dir)
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: write_config(Path(folder), name) for name in SHAPES}
        report["parity"] = check_parity(paths["tiny"], args.device) | check_demo(args.device)
        names = ["tiny"] if args.quick else ["30M", "0.5B"]
        report["speed"] = {name: measure_speed(paths[name], args.device, 1 if args.quick else 3) for name in names}
    (args.output_dir / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"weights: {weights}")
    checks = report["kernels"] | report["parity"]
    for check, passed in checks.items():
        print(f"{'ok' if passed else 'FAILED':8}{check}")
    for name, rows in report["speed"].items():
        for row in rows:
            print(f"{name:8}{row['requests']:>4} requests{row['tokens_per_second']:>12} tokens/s")
    if not all(checks.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
