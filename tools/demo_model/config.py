"""Sizes, seeds and lengths of every stage, in one place."""

from dataclasses import dataclass, replace

SEED = 20
VOCAB_SIZE = 2048
MAX_POSITION = 2048

PAD, BOS, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT)  # their ids are their places: 0, 1, 2, ...

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class ModelShape:
    """The shape of a Llama model."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 32


@dataclass(frozen=True)
class Schedule:
    """Length and learning rates of a stage's training.

    The learning rates rise over ``warmup`` steps and then fall linearly to zero. Among the last ``long_steps`` steps
    every other one uses rows of a length of ``long_lengths`` in turn, with as many tokens in all: without them the
    model is lost beyond the distances it was trained on.
    """

    steps: int
    matrix_rate: float  # Muon, for the matrices of the layers
    other_rate: float  # AdamW, for everything else
    rows: int = 16
    length: int = 256
    warmup: int = 50
    long_steps: int = 0
    long_lengths: tuple[int, ...] = (1024, 2048)


@dataclass(frozen=True)
class AdapterPlan:
    """The rank of an adapter and how it is trained."""

    rank: int
    schedule: Schedule


@dataclass(frozen=True)
class HeadPlan:
    """Options of `outrider train-draft` for an EAGLE-3 head, or for a LoRA of a drafter."""

    prompts: int
    steps: int
    warmup: int
    batch_tokens: int
    rate: float
    optimizer: str
    seed: int
    eval_every: int
    intermediate: int = 0  # of a new head
    rank: int = 0  # of a LoRA


BASE_SHAPE = ModelShape(hidden=256, layers=5, intermediate=512, heads=8, kv_heads=4)
DRAFT_SHAPE = ModelShape(hidden=128, layers=2, intermediate=256, heads=4, kv_heads=2)
BASE_SCHEDULE = Schedule(steps=3000, matrix_rate=0.02, other_rate=4e-3, long_steps=1080)
DRAFT_SCHEDULE = Schedule(steps=1200, matrix_rate=0.02, other_rate=4e-3, long_steps=500)
_ADAPTER_SCHEDULE = Schedule(steps=150, matrix_rate=0.0, other_rate=4e-3, warmup=20)
ADAPTER_PLANS = {
    "json": AdapterPlan(rank=16, schedule=replace(_ADAPTER_SCHEDULE, steps=400)),
    "sql": AdapterPlan(rank=8, schedule=_ADAPTER_SCHEDULE),
    "support": AdapterPlan(rank=8, schedule=_ADAPTER_SCHEDULE),
}
HEAD_PLAN = HeadPlan(
    prompts=8000,
    steps=1000,
    warmup=50,
    batch_tokens=1536,
    rate=4e-3,
    optimizer="muon",
    seed=SEED,
    eval_every=250,
    intermediate=384,
)
_DRAFT_LORA_PLAN = HeadPlan(
    prompts=6000,
    steps=1500,
    warmup=20,
    batch_tokens=1536,
    rate=4e-3,
    optimizer="adamw",
    seed=SEED,
    eval_every=300,
    rank=8,
)
DRAFT_LORA_PLANS = dict.fromkeys(("json", "sql", "support"), _DRAFT_LORA_PLAN)
HEAD_PROMPT_SEED = SEED * 1_000_003 + 77  # of the prompts that the target answers for the head; no held-out ones

# how much the loss counts what the user writes, which the model need not predict well
PROMPT_WEIGHT = 0.1
