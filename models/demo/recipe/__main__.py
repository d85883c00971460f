"""The command line of the recipe: ``python -m outrider.models.demo.recipe [--stage all] [--output DIR]``."""

import argparse
import logging
from pathlib import Path

import torch

from .stages import STAGES
from .workshop import Workshop


def main() -> None:
    """Run one stage, or all of them in order."""
    parser = argparse.ArgumentParser(prog="python -m outrider.models.demo.recipe", description="Make the demo model.")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1], help="what is shipped")
    parser.add_argument("--work", type=Path, default=Path("build/demo-model"), help="training states and logs")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    shop = Workshop(args.output, args.work)
    for name, stage in STAGES.items():
        if args.stage in (name, "all"):
            logging.info("stage %s", name)
            stage(shop)


if __name__ == "__main__":
    main()
