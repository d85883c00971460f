"""The reader process of an engine in the process of a user's script."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from outrider.models.demo import demo_model_path

SCRIPT = """
import os, sys
os.sched_getaffinity = lambda pid: {0, 1}  # this machine may have one core
from outrider import LLM, LoRARequest, SamplingParams

print("script", flush=True)
llm = LLM(enable_lora=True)
reader = llm.llm_engine.engine_core._adapters._transfers.reader
texts = []
for index, path in enumerate(sys.argv[1:]):
    if index == 4:
        assert reader.wait_ready(60)
    lora = LoRARequest(f"adapter-{index}", path=path)
    (output,) = llm.generate(["select"], SamplingParams(max_tokens=4, temperature=0.0), lora_request=lora)
    texts.append(output.outputs[0].text)
assert texts[5] == texts[0], texts
print(reader.num_answers, reader.pid)
"""


def test_a_script_without_a_main_guard(tmp_path):
    """Its code runs once, adapters are read by the process from the fifth on, and it leaves with the script."""
    source = demo_model_path().parent / "adapters" / "sql"
    paths = [tmp_path / f"adapter-{index}" for index in range(6)]
    for index, path in enumerate(paths):
        shutil.copytree(source, path)
        file = path / "adapter_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] * (1 + index % 5)}))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, *paths], capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("\n")[:2]
    num_answers, pid = second.split()
    assert (first, num_answers) == ("script", "2")
    end = time.monotonic() + 20
    while (
        Path(f"/proc/{pid}/cmdline").exists()
        and b"lora.reader.reader_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ):
        assert time.monotonic() < end, "the reader outlives the script"
        time.sleep(0.05)
