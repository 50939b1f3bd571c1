"""A GGUF file with its matrices de-quantised to bf16 and all else as it was: ``dequantise_gguf.py IN OUT``."""

from __future__ import annotations

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize, quantize

KEPT_BY_THE_WRITER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")
FILE_TYPE = "general.file_type"


def main(source: str, goal: str) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(goal, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name in KEPT_BY_THE_WRITER:
            continue
        value = int(LlamaFileType.MOSTLY_BF16) if name == FILE_TYPE else field.contents()
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:  # norms stay in fp32, as llama.cpp wants them
            writer.add_tensor(tensor.name, values)
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=sys.stderr.isatty())
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
