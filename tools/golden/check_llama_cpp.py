"""Compares llama.cpp with the goldens of tests/models: is our GGUF what llama.cpp expects?

    python tools/golden/check_llama_cpp.py [FOLDER of F32 files from make_checkpoints.py --f32-gguf]

A local check (needs llama-cpp-python), not part of CI. Prints, for each GGUF file, the largest
difference of a logit. With F32 matrices and an F32 cache it should be float noise; with quantised
matrices llama.cpp also quantises activations.
"""

import argparse
import json
import pathlib

import llama_cpp
import numpy as np

from llama_cpp_model import open_model

ROOT = pathlib.Path(__file__).resolve().parents[2]


def logits_of(path, rows, max_seq_len):
    f32 = llama_cpp.GGML_TYPE_F32
    model = open_model(path, n_ctx=max_seq_len, type_k=f32, type_v=f32)
    out = []
    for row in rows:
        model.reset()
        model.eval(row)
        out.append(np.array(model.scores[: len(row)], dtype=np.float64))
    return np.concatenate(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("f32", nargs="?", type=pathlib.Path)
    folder = parser.parse_args().f32
    for path in sorted((ROOT / "tests" / "models").glob("*/*/golden.json")):
        golden = json.loads(path.read_text())
        want = np.fromfile(path.parent / golden["logits"], dtype="<f4").astype(np.float64)
        files = [path.parent / name for name in golden["gguf"]]
        extra = folder and folder / f"{golden['case'].replace('/', '-')}-f32.gguf"
        if extra and extra.exists():
            files.append(extra)
        for file in files:
            got = logits_of(file, golden["rows"], golden["max_seq_len"])
            difference = np.abs(got - want.reshape(got.shape)).max()
            print(f"{golden['case']:16} {file.name:24} largest difference {difference:.2e}")


if __name__ == "__main__":
    main()
