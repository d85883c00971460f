#!/usr/bin/env bash
# Type-check the package and tools/. The checkout is the package `outrider` whatever its folder is called, so mypy
# finds it through a link of that name. The link lives inside mypy's cache folder: paths stay the same from run to
# run, and the cache stays warm.
set -euo pipefail
cd "$(dirname "$0")/.."

mypy=${MYPY:-.venv/bin/mypy}
link_folder=.mypy_cache/link
mkdir -p "$link_folder"
ln -sfn ../.. "$link_folder/outrider"

MYPYPATH=$link_folder "$mypy" -p outrider "$@" | sed "s|^$link_folder/outrider/||"
