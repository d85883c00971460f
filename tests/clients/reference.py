"""Answers of the Python API, greedy and without drafts, as JSON. Run by the server's Python.

Usage: python reference.py '{"question": "...", "prompt": "...", "models": ["outrider-demo", "sql"], "max_tokens": 24}'
"""

import json
import sys

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_model_path

job = json.loads(sys.argv[1])
llm = LLM(str(demo_model_path()), enable_lora=True)
params = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
answers: dict[str, dict[str, str]] = {"chat": {}, "completion": {}}
for number, model in enumerate(job["models"]):
    folder = demo_adapters().get(model)
    options = {"lora_request": LoRARequest(model, number + 1, str(folder)) if folder else None, "use_tqdm": False}
    (chat,) = llm.chat([{"role": "user", "content": job["question"]}], params, **options)
    (text,) = llm.generate([job["prompt"]], params, **options)
    answers["chat"][model], answers["completion"][model] = chat.outputs[0].text, text.outputs[0].text
print(json.dumps(answers))
