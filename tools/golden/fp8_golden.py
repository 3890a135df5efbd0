#!/usr/bin/env python3
"""Makes tests/unit/tensor/golden/fp8.bin: e4m3 as PyTorch's float8_e4m3fn has it.

    python tools/golden/fp8_golden.py tests/unit/tensor/golden/fp8.bin

The file, little endian: 256 f32, the values of all codes; then records of f32 and u8, a number and
its code. Numbers are at most 464 in magnitude: beyond, PyTorch makes NaN where a cache saturates.
Made with torch 2.11.0 (the version is printed), seed 20261130.
"""

import struct
import sys

import numpy as np
import torch

SEED = 20261130


def main():
    rng = np.random.default_rng(SEED)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    finite = np.sort(values[np.isfinite(values)])
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    numbers = np.concatenate([
        finite,
        middles,
        np.nextafter(middles, np.float32(np.inf)),
        np.nextafter(middles, np.float32(-np.inf)),
        rng.normal(0, 1, 500),
        rng.uniform(-464, 464, 500),
        rng.choice([-1, 1], 500) * 2.0 ** rng.uniform(-40, 8.8, 500),
        [464, -464, 1e-45, -1e-45, np.nan],
    ]).astype(np.float32)
    codes = torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    with open(sys.argv[1], "wb") as out:
        out.write(values.astype("<f4").tobytes())
        for number, code in zip(numbers, codes, strict=True):
            out.write(struct.pack("<fB", number, code))
    print(f"{len(numbers)} numbers, torch {torch.__version__}")


if __name__ == "__main__":
    main()
