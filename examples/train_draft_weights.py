"""Train draft weights for an adapter, for a few steps, and serve the adapter with them.

A real run takes thousands of samples; see the guide on speculation. This one shows the way, not the gain.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_eagle3_path

CITIES = ("Lisbon", "Berlin", "Oslo", "Rome", "Paris", "Vienna", "Madrid", "Dublin")


def main() -> None:
    """Copy the adapter `sql`, train its draft weights for the EAGLE-3 head, and generate with both."""
    with tempfile.TemporaryDirectory() as folder:
        adapter, data = Path(folder) / "sql", Path(folder) / "prompts.jsonl"
        shutil.copytree(demo_adapters()["sql"], adapter, ignore=shutil.ignore_patterns("draft"))
        chats = [[{"role": "user", "content": f"How many customers are from {city}?"}] for city in CITIES]
        data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        command = [sys.executable, "-m", "outrider.platform.cli.main", "train-draft", "--method", "draft-lora"]
        command += ["--model", "outrider-demo", "--adapter", str(adapter), "--draft", str(demo_eagle3_path())]
        command += ["--data", str(data), "--generate", "--max-tokens", "32", "--held-out", "2", "--steps", "4"]
        command += ["--output", str(adapter / "draft" / "eagle3"), "--no-progress"]
        subprocess.run(command, check=True)
        speculation = {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": 4}
        with LLM(enable_lora=True, speculative_config=speculation) as llm:
            request = LoRARequest("my-sql", path=str(adapter))
            params = SamplingParams(temperature=0, max_tokens=48)
            (output,) = llm.chat(chats[0], params, lora_request=request, use_tqdm=False)
            print(output.outputs[0].text)
            print(f"{output.metrics.acceptance_length:.2f} tokens a verification")


if __name__ == "__main__":
    main()
