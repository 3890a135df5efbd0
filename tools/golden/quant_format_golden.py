#!/usr/bin/env python3
"""Makes tests/unit/tensor/golden/quant_format.bin: block formats as the `gguf` package codes them.

    python tools/golden/quant_format_golden.py tests/unit/tensor/golden/quant_format.bin

The file is a list of records, little endian:
    8 bytes   name of the type, zero-padded ("q4_1")
    u32       1: decode this (bytes -> floats), 2: encode this (floats -> bytes)
    u32, u32  number of floats n, number of bytes b
    n * f32, b * u8
Made with gguf 0.19.0 and numpy 2 (versions are printed), seed 20261130.
"""

import struct
import sys
from importlib.metadata import version

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

SEED = 20261130
DECODE, ENCODE = 1, 2
TYPES = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
# Byte offsets of the f16 scales in a block: kept finite, so that values can be compared as bits.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
SPECIAL = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00]


def random_blocks(rng, name, count):
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for row in range(count):
        for k, at in enumerate(SCALES.get(name, [])):
            bits = SPECIAL[row] if row < len(SPECIAL) and k == 0 else rng.integers(0, 0x7C00)
            blocks[row, at:at + 2] = np.frombuffer(struct.pack("<H", bits), np.uint8)
    return blocks


def plain_values(name):
    """All exponents, both signs, several mantissas, and no NaN."""
    step = 37 if name == "F16" else 149
    bits = np.arange(0, 0x10000, step, dtype=np.uint32).astype(np.uint16)
    limit = 0x7C00 if name == "F16" else 0x7F80
    return bits[(bits & 0x7FFF) <= limit]


def encode_input(rng, name):
    elements = max(GGML_QUANT_SIZES[GGMLQuantizationType[name]][0], 32)
    rows = [rng.normal(0, scale, elements) for scale in (1e-6, 0.02, 1.0, 300.0)]
    rows.append(np.zeros(elements))
    rows.append(np.full(elements, -2.5))
    rows.append(np.where(np.arange(elements) % 2 == 0, 7.0, -7.0))  # ties for the extreme
    rows.append(np.arange(elements) / 4.0)
    rows.append(rng.normal(5, 0.1, elements))
    return np.concatenate(rows).astype(np.float32)


def main():
    rng = np.random.default_rng(SEED)
    out = bytearray()

    def record(name, kind, floats, data):
        out.extend(struct.pack("<8sIII", name.lower().encode(), kind, floats.size, len(data)))
        out.extend(floats.astype("<f4").tobytes())
        out.extend(data)

    for name in TYPES:
        kind = GGMLQuantizationType[name]
        if name in ("F16", "BF16"):
            values = plain_values(name)
            floats = quants.dequantize(values.view(np.uint8) if name == "BF16" else values, kind)
            record(name, DECODE, floats.ravel(), values.tobytes())
        else:
            blocks = random_blocks(rng, name, 12 if GGML_QUANT_SIZES[kind][0] == 32 else 9)
            record(name, DECODE, quants.dequantize(blocks.ravel(), kind).ravel(), blocks.tobytes())
        if not name.endswith("_K"):
            floats = encode_input(rng, name)
            record(name, ENCODE, floats, quants.quantize(floats, kind).tobytes())
    with open(sys.argv[1], "wb") as f:
        f.write(out)
    print(f"{len(out)} bytes, gguf {version('gguf')}, numpy {np.__version__}, seed {SEED}")


if __name__ == "__main__":
    main()
