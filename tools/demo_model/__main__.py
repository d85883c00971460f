"""Make the demo model, all of it or one stage.

Usage: python tools/demo_model [--stage all] [--output DIR] [--work DIR] [--threads N]
"""

import argparse
import logging
from pathlib import Path

import torch

from outrider.models.demo import demo_model_path
from outrider.tools.demo_model.folders import DemoFolders
from outrider.tools.demo_model.stages import STAGES


def main() -> None:
    """Run one stage, or all of them in order."""
    parser = argparse.ArgumentParser(prog="python tools/demo_model", description="Make the demo model.")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--output", type=Path, default=demo_model_path().parent, help="folder of the shipped files")
    parser.add_argument("--work", type=Path, default=Path("build/demo-model"), help="training states and logs")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    folders = DemoFolders(args.output, args.work)
    for name, stage in STAGES.items():
        if args.stage in (name, "all"):
            logging.info("stage %s", name)
            stage(folders)


if __name__ == "__main__":
    main()
