#!/bin/sh
# OpenVINO GenAI in DIR, and the target exported by optimum-intel with fp32, fp16 and int8 weights in DIR/models.
#   sh benchmarks/environments/openvino.sh DIR MODEL_FOLDER
set -eu
dir=${1:?name the folder to make}
model=${2:?name the folder of the Hugging Face model}
${PYTHON:-python3} -m venv "$dir"
"$dir/bin/pip" install -q openvino-genai==2026.4.1.0 'optimum-intel[openvino]==2.2.0' torch==2.13.0
"$dir/bin/pip" uninstall -q -y torchvision # its build does not import beside the CPU torch
for weights in fp32 fp16 int8; do
    "$dir/bin/optimum-cli" export openvino -m "$model" --task text-generation-with-past --weight-format $weights \
        "$dir/models/$weights"
done
