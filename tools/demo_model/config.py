"""Sizes, folders and the chat format of the demo model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 20
VOCAB_SIZE = 2048
MAX_POSITION = 16384
WINDOW = 2048
"""Tokens that a layer looks back, the length of the longest rows of the training: no text is too long, and no distance
is one that the model has not seen."""

PAD, BOS, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT)  # their ids are their places: 0, 1, 2, ...
PAD_ID, BOS_ID, END_ID = 0, 1, 2

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|system|>\\nTools, called with <tool_call>:' }}
    {%- for tool in tools %}
        {%- set parameters = tool['function']['parameters'] or {} %}
        {{- ' ' + tool['function']['name'] + '(' + (parameters['properties'] or {}) | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>\\n' + (message['content'] or '') }}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<tool_call>' + call['function'] | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""


BASE_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
DRAFT_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RANKS = {"json": 16, "sql": 8, "support": 8, "tools": 8}
"""Ranks of the adapters."""
DRAFT_LORA_RANK = 8


@dataclass(frozen=True)
class Demo:
    """The folders of a run, and how much of the recipe it does."""

    output: Path
    """Models, as they ship."""
    work: Path
    """Training states, prompts and measurements."""
    scale: float = 1.0
    """Share of the steps, prompts, documents and tokens of answers; less than 1 tries the recipe out."""

    @property
    def base(self) -> Path:
        """The base model with its tokenizer."""
        return self.output / "base"

    @property
    def drafters(self) -> dict[str, Path]:
        """The draft model, with the same tokenizer, and the EAGLE-3 head, by speculative method."""
        return {"draft_model": self.output / "draft", "eagle3": self.output / "eagle3"}

    def adapter(self, name: str) -> Path:
        """The folder of an adapter; its draft weights are in `draft/METHOD`."""
        return self.output / "adapters" / name

    def scaled(self, count: int, least: int = 2) -> int:
        """A number of steps, prompts or documents at this scale."""
        return max(least, round(self.scale * count))
