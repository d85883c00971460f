"""Clients that are programs of their own: Node's client, lm-eval, and vLLM's benchmark client."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import drivers
import pytest

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "models/demo/base"
MODULES = Path(sys.prefix) / "js/node_modules"


class JavaScript(drivers.Client):
    title = "openai (JavaScript)"

    def _run(self, feature: str, model: str) -> Any:
        if shutil.which("node") is None or not MODULES.is_dir():
            pytest.fail("this client needs node and npm: install them, then remove .venv-clients/.stamp")
        job = {
            "url": self.url,
            "feature": feature,
            "model": model,
            "question": drivers.QUESTION,
            "prompt": drivers.PROMPT,
            "tool": drivers.TOOL,
        }
        job["schema"] = drivers.Order.model_json_schema() | {"additionalProperties": False}
        done = subprocess.run(
            ["node", str(HERE / "client.cjs"), json.dumps(job)],
            env=os.environ | {"NODE_PATH": str(MODULES)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def chat(self, model: str) -> str:
        return self._run("chat", model)

    def stream(self, model: str) -> list[str]:
        return self._run("stream", model)

    def tools(self, model: str) -> tuple[str, dict]:
        function = self._run("tools", model)
        return function["name"], json.loads(function["arguments"])

    def schema(self, model: str) -> drivers.Order:
        return drivers.Order.model_validate(self._run("schema", model))

    def completion(self, model: str) -> str:
        return self._run("completion", model)

    def logprobs(self, model: str) -> tuple[float, str | list[int], int]:
        return self._run("logprobs", model), drivers.QUESTION, 1

    def embeddings(self, model: str) -> list[float]:
        return self._run("embeddings", model)


TASK = """
task: probe_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: {output}
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["@@"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: {metric}}}]
"""


class LmEval(drivers.Client):
    title = "lm-eval (local-completions)"

    def _run(
        self, model: str, kind: str, output: str, metric: str, row: dict[str, str], tokenizer: str
    ) -> dict[str, Any]:
        """Logged sample of one question. `tokenizer`: options that say who tokenizes."""
        data, results = self.folder / f"{kind}.jsonl", self.folder / f"{kind}-of-{model}"
        data.write_text(json.dumps(row) + "\n")
        task = TASK.format(kind=kind, data=data, output=output, metric=metric)
        (self.folder / f"{kind}.yaml").write_text(task)
        where = f"model={model},base_url={self.url}/completions,max_length=512,add_bos_token=True,{tokenizer}"
        command = [sys.executable, "-I", "-m", "lm_eval", "--model", "local-completions", "--tasks", f"probe_{kind}"]
        command += ["--model_args", where]
        command += ["--include_path", str(self.folder), "--output_path", str(results), "--log_samples"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder), "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        (samples,) = results.rglob("samples_*.jsonl")
        return json.loads(samples.read_text().splitlines()[0])

    def completion(self, model: str) -> str:
        row, remote = {"q": drivers.PROMPT, "a": "x"}, "tokenizer_backend=remote,tokenized_requests=False"
        return self._run(model, "text", "generate_until", "exact_match", row, remote)["resps"][0][0]

    def logprobs(self, model: str) -> tuple[float, str | list[int], int]:
        """It sends the tokens of its own tokenizer. The server's would leave out the beginning of a text."""
        from tokenizers import Tokenizer

        first, rest = drivers.QUESTION.split(" ", 1)
        row, local = {"q": first, "a": f" {rest}"}, f"tokenizer={MODEL}"
        sample = self._run(model, "likelihood", "loglikelihood", "perplexity", row, local)
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        ids, context = (tokenizer.encode(text, add_special_tokens=True).ids for text in (drivers.QUESTION, first))
        return float(sample["resps"][0][0][0]), ids, len(context)


class VllmBench(drivers.Client):
    """It needs vLLM, half a gigabyte: `OUTRIDER_VLLM_PYTHON` names the Python of an environment that has it."""

    title = "vLLM's bench serve"
    python = os.environ.get("OUTRIDER_VLLM_PYTHON", "")

    def _run(self, model: str, backend: str, path: str, prompt: str) -> dict[str, Any]:
        """Detailed result of one request, by the adapter's name where it is not the base model."""
        program = "import argparse; from vllm.benchmarks.serve import *; parser = argparse.ArgumentParser(); "
        program += "add_cli_args(parser); main(parser.parse_args())"
        data = self.folder / "prompts.jsonl"
        data.write_text(json.dumps({"prompt": prompt}) + "\n")
        options = {"backend": backend, "base-url": self.url.removesuffix("/v1"), "endpoint": path}
        options |= {"model": "outrider-demo", "tokenizer": str(MODEL), "num-prompts": "1", "temperature": "0"}
        options |= {"dataset-name": "custom", "dataset-path": str(data), "custom-output-len": "24"}
        options |= {"result-dir": str(self.folder), "result-filename": f"{backend}-{model}.json"}
        command = [self.python, "-c", program, "--save-result", "--save-detailed", "--skip-chat-template"]
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        command += [] if model == options["model"] else ["--lora-modules", model]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((self.folder / options["result-filename"]).read_text())

    def chat(self, model: str) -> str:
        return self._run(model, "openai-chat", "/v1/chat/completions", drivers.QUESTION)["generated_texts"][0]

    def stream(self, model: str) -> list[str]:
        found = self._run(model, "openai-chat", "/v1/chat/completions", drivers.QUESTION)
        return [found["generated_texts"][0], *("" for _ in found["itls"][0])]

    def completion(self, model: str) -> str:
        return self._run(model, "openai", "/v1/completions", drivers.PROMPT)["generated_texts"][0]
