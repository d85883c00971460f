"""Options of a training run. Free of torch: the command line is built from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ...platform.core.errors import InvalidRequestError
from ...platform.core.option import declared_options, option

METHODS = ("eagle3", "eagle", "medusa", "dflash", "dspark", "uno", "draft-lora")
OPTIMIZERS = ("adamw", "muon")
DTYPES = ("float32", "bfloat16")
NO_EFFECT_ON_RESULT = frozenset(
    {"output", "resume", "overwrite", "save_minutes", "feature_cache", "progress", "trial", "device"}
)
"""Options that may differ when a run is resumed."""
_PATHS = ("model", "data", "output", "adapter", "draft", "eval_data", "base_name")
_EAGLE = ("eagle3", "eagle")
BLOCK_HEADS = ("dflash", "dspark")
_LAYERED = (*_EAGLE, *BLOCK_HEADS)
_LORA = ("draft-lora", "uno")
_MOST = 2**31 - 1


def _option(default: Any, text: str, group: str, **more: Any) -> Any:
    """An option in a group; integers have bounds of 1 and `_MOST` by default."""
    if not isinstance(default, float):
        more.setdefault("within", (1, _MOST))
    return option(default, text, group=group, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of one run; each is a flag of `outrider train-draft`."""

    method: str
    model: str
    data: str
    output: str
    adapter: str | None = _option(None, "PEFT adapter of the target: its outputs are what is learned", "What to train")
    draft: str | None = _option(
        None,
        "draft-lora: the draft model, EAGLE head or drafter of blocks that the weights are for; "
        "eagle3, eagle, dflash, dspark: a head to train further",
        "What to train",
        methods=(*_LAYERED, "draft-lora"),
    )
    rank: int = _option(8, "rank of the draft weights", "Draft-LoRA", methods=_LORA, within=(1, 1024))
    alpha: float | None = _option(
        None, "their alpha (default: twice the rank)", "Draft-LoRA", methods=_LORA, within=(1e-6, 1e6)
    )
    generate: bool = _option(False, "let the target write the completions, through the engine", "Data")
    temperature: float = _option(0.0, "of generated completions; 0 is greedy", "Data")
    max_tokens: int = _option(256, "longest generated completion, in tokens", "Data")
    max_length: int = _option(2048, "longer samples are cut, in tokens", "Data", within=(4, _MOST))
    eval_data: str | None = _option(None, "samples to measure acceptance on (default: some of the data)", "Data")
    held_out: int = _option(64, "without --eval-data: samples of the data to keep for measuring", "Data")
    steps: int | None = _option(None, "steps to train (default: what the epochs make)", "Training")
    epochs: int = _option(4, "passes over the data, when --steps is not given", "Training")
    batch_tokens: int = _option(2048, "tokens in a step, padding included", "Training", within=(8, _MOST))
    lr: float = _option(1e-3, "highest learning rate (of AdamW)", "Training", within=(1e-9, 10.0))
    optimizer: str = _option(
        "adamw", "muon: Muon for the matrices of layers, AdamW for the rest", "Training", choices=OPTIMIZERS
    )
    warmup: int = _option(
        50, "steps over which the rate rises; then it falls linearly to zero", "Training", within=(0, _MOST)
    )
    seed: int = _option(0, "of weights, order and generation", "Training", within=(0, _MOST))
    device: str = _option(
        "auto", "where to train; auto takes a GPU if there is one", "Training", choices=("auto", "cpu", "cuda")
    )
    dtype: str = _option(
        "bfloat16",
        "of the target, and of products unless a CPU is faster in float32; trained weights are kept in float32",
        "Training",
        choices=DTYPES,
    )
    eval_every: int = _option(200, "steps between measurements", "Training")
    save_minutes: float = _option(3.0, "minutes between checkpoints; Ctrl-C and SIGTERM write one too", "Training")
    feature_cache: float = _option(
        2.0, "GiB of memory in which the target's states are kept for the next epoch", "Training"
    )
    k: int = _option(4, "drafts a round when acceptance is measured", "Training", within=(1, 32))
    resume: bool = _option(False, "continue from the checkpoint in the output folder", "Output")
    overwrite: bool = _option(
        False, "delete an earlier run in the output folder; completions that would be the same are kept", "Output"
    )
    base_name: str | None = _option(
        None, "what the files name as their base (default: as on the command line)", "Output"
    )
    progress: bool = _option(True, "show a progress bar", "Output")
    trial: bool = _option(True, "at the end measure whether serving the drafter pays on this machine", "Output")
    unroll: int | None = _option(
        None,
        "steps of the head on its own output in training (default: eagle 1, others 4)",
        "Heads",
        methods=(*_EAGLE, "draft-lora"),
        within=(1, 32),
    )
    unroll_every: int = _option(
        1,
        "unroll in one of so many steps of training, and train the first draft alone in the others",
        "Heads",
        methods=_EAGLE,
    )
    hidden_size: int | None = _option(
        None, "hidden size of the head (default: the target's)", "Heads", methods=("eagle3",)
    )
    intermediate_size: int | None = _option(
        None, "of the head's MLP (default: the target's)", "Heads", methods=_LAYERED
    )
    num_heads: int | None = _option(None, "attention heads (default: the target's)", "Heads", methods=_LAYERED)
    num_kv_heads: int | None = _option(None, "KV heads (default: the target's)", "Heads", methods=_LAYERED)
    head_dim: int | None = _option(None, "size of an attention head (default: the target's)", "Heads", methods=_LAYERED)
    aux_layers: tuple[int, ...] | None = _option(
        None,
        "target layers whose inputs are read, as 2,16,29; of eagle3 three",
        "Heads",
        methods=("eagle3", *BLOCK_HEADS),
    )
    draft_vocab_size: int | None = _option(
        None,
        "the head knows only the most frequent tokens (default: 8192 to 32768 of a large vocabulary)",
        "Heads",
        methods=("eagle3",),
    )
    own_embeddings: bool = _option(False, "the head trains embeddings of its own", "Heads", methods=("eagle3",))
    own_lm_head: bool = _option(False, "the head trains an lm_head of its own", "Heads", methods=("eagle3",))
    medusa_heads: int = _option(4, "Medusa heads", "Heads", methods=("medusa",), within=(1, 32))
    medusa_layers: int = _option(1, "residual layers of each Medusa head", "Heads", methods=("medusa",), within=(1, 16))

    block_size: int = _option(
        8,
        "tokens of a block, the last one of the text among them",
        "Heads",
        methods=(*BLOCK_HEADS, "uno"),
        within=(2, 33),
    )
    draft_layers: int = _option(3, "layers of the drafter", "Heads", methods=BLOCK_HEADS, within=(1, 64))
    mask_token_id: int | None = _option(
        None,
        "token that stands for a draft (default: the last of the vocabulary)",
        "Heads",
        methods=BLOCK_HEADS,
        within=(0, _MOST),
    )
    markov_rank: int = _option(
        64, "rank of the bias by the token before", "Heads", methods=("dspark",), within=(1, 4096)
    )

    def check(self, given: Collection[str] | None = None) -> None:
        """Refuse invalid values; checks that depend on the model come when it is loaded.

        Args:
            given: names of the user's options; None for those that differ from their defaults.

        Raises:
            InvalidRequestError: names the option and the limit.
        """
        for name in _PATHS:
            text = getattr(self, name)
            if text is not None and "\0" in text:
                raise wrong(name, "holds a NUL character")
        # In Python, `data` may be empty: samples are passed.
        if empty := next((name for name in _PATHS if name != "data" and getattr(self, name) == ""), None):
            raise wrong(empty, "must not be empty")
        if self.method not in METHODS:
            raise wrong("method", f"must be one of {', '.join(METHODS)}; got {self.method!r}")
        declared = declared_options(TrainOptions)
        for name, one in declared.items():
            try:
                one.check(getattr(self, name))
            except InvalidRequestError as error:
                raise wrong(name, error.message.removeprefix(f"{name} ")) from None
        if self.resume and self.overwrite:
            raise wrong("resume", "and --overwrite exclude each other")
        if self.method == "draft-lora" and self.draft is None:
            raise wrong("draft", "names the drafter that --method draft-lora trains weights for; give it there")
        for name in ("hidden_size", "head_dim"):
            if (getattr(self, name) or 0) % 2:
                raise wrong(name, f"must be even, got {getattr(self, name)}")
        if given is None:
            given = {name for name, one in declared.items() if getattr(self, name) != one.default}
        self._check_used(given)

    def _check_used(self, given: Collection[str]) -> None:
        """Refuse options that would have no effect."""
        for name, one in declared_options(TrainOptions).items():
            if one.methods is not None and name in given and self.method not in one.methods:
                raise wrong(name, f"is for --method {' and '.join(one.methods)}, not for {self.method}")
            if self.draft is not None and name in given and one.group == "Heads" and "unroll" not in name:
                raise wrong(name, "is for a new head; --draft names one that has its sizes")
        if self.optimizer == "muon" and self.method in _LORA:
            raise wrong("optimizer", f"muon is for the matrices of heads, of which {self.method} trains none")
        if self.unroll_every > 1 and (self.unroll or (1 if self.method == "eagle" else 4)) == 1:
            raise wrong("unroll_every", "has no effect with an --unroll of 1, which is the default of eagle")
        if "held_out" in given and self.eval_data is not None:
            raise wrong("held_out", "has no effect with --eval-data, whose samples are all measured on")
        for name in ("temperature", "max_tokens"):
            if name in given and not self.generate:
                raise wrong(name, "is for --generate")

    def comparable(self) -> dict[str, Any]:
        """The options that determine the result, as JSON values; data are compared by content, in `run_folder`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["aux_layers"] = list(self.aux_layers) if self.aux_layers else None
        return {
            name: value for name, value in values.items() if name not in NO_EFFECT_ON_RESULT | {"data", "eval_data"}
        }

    def generation(self) -> dict[str, Any] | None:
        """The options that determine the output of --generate; None without it."""
        if not self.generate:
            return None
        names = ("model", "adapter", "dtype", "temperature", "max_tokens")
        return {name: getattr(self, name) for name in names} | {"seed": self.seed if self.temperature else None}


def wrong(name: str, message: str) -> InvalidRequestError:
    """The error about an option."""
    return InvalidRequestError(f"--{name.replace('_', '-')} {message}", param=name)


def reason(error: BaseException) -> str:
    """The first line of an error's message: libraries' messages are long, or empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
