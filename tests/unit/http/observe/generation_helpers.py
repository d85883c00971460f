"""Recorders of generations that no engine runs."""

from types import SimpleNamespace
from typing import Any

from outrider.platform.client.prepared import ParsedPrompt, Prepared
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.outputs import RequestOutput
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.http.observe.generations import Generation
from outrider.platform.http.observe.prometheus_metrics import Metrics


class Recorded:
    """A prompt of two tokens, its generation and its recorder."""

    def __init__(self, metrics: Metrics, adapter: str, tenant: str) -> None:
        inputs: Any = SimpleNamespace(tokenizer=None)
        lora = LoRARequest(adapter, path="/p") if adapter else None
        self.generation = Generation(Prepared("r", inputs, ParsedPrompt([1, 2]), SamplingParams(), lora))
        self.recorder = metrics.recorder(self.generation, tenant)

    def on_output(self, output: RequestOutput) -> None:
        self.generation.update(output)
        self.recorder.on_output(output)

    def on_end(self, reason: str) -> None:
        self.recorder.on_end(reason)
