"""Make the demo model, all of it or one stage.

Usage: python tools/demo_model [--stage all] [--output DIR] [--work DIR] [--scale S] [--threads N]
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from outrider.models.demo import demo_model_path
from outrider.tools.demo_model.config import Demo
from outrider.tools.demo_model.drafters import train_draft_weights, train_head
from outrider.tools.demo_model.evaluation import evaluate
from outrider.tools.demo_model.tokenizer import train_tokenizer
from outrider.tools.demo_model.training import train_adapters, train_base, train_draft_model

STAGES: dict[str, Callable[[Demo], None]] = {
    "tokenizer": train_tokenizer,
    "base": train_base,
    "draft": train_draft_model,
    "adapters": train_adapters,
    "eagle3": train_head,
    "draft-weights": train_draft_weights,
    "evaluate": evaluate,
}
"""The stages in order. Each reads what the earlier ones wrote below the output."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one stage, or all of them in order."""
    parser = argparse.ArgumentParser(prog="python tools/demo_model", description="Make the demo model.")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--output", type=Path, default=demo_model_path().parent, help="folder of the shipped files")
    parser.add_argument("--work", type=Path, default=Path("build/demo-model"), help="training states and measurements")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps and texts, to try it out: 0.002")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(options.threads)
    demo = Demo(options.output, options.work, options.scale)
    for name, stage in STAGES.items():
        if options.stage in (name, "all"):
            logging.info("stage %s", name)
            stage(demo)


if __name__ == "__main__":
    main()
