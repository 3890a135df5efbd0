"""Compares llama.cpp with the goldens of tests/models: is our GGUF what llama.cpp expects?

    python tools/golden/check_llama_cpp.py [--write] [FOLDER of make_checkpoints.py --f32-gguf]

A local check (needs llama-cpp-python), not part of CI. Files that llama.cpp refuses are named: it knows
DeepSeek-V2-Lite by its 27 layers alone. It cuts the ramp of gpt-oss's YaRN to whole dimensions, which
these goldens do not. Prints, for each GGUF file, the largest and
the root mean square difference of a logit. With F32 matrices and an F32 cache it should be float
noise; with quantised matrices llama.cpp also quantises activations.

--write puts the root mean squares of the committed files into tests/models/llama_cpp.json: the bar
for backends that quantise activations as well.
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
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.f32
    rms = {}
    for path in sorted((ROOT / "tests" / "models").glob("*/*/golden.json")):
        golden = json.loads(path.read_text())
        if "logits" not in golden:  # behind an encoder: rows are of another form
            continue
        want = np.fromfile(path.parent / golden["logits"], dtype="<f4").astype(np.float64)
        files = [path.parent / name for name in golden["gguf"]]
        extra = folder and folder / f"{golden['case'].replace('/', '-')}-f32.gguf"
        if extra and extra.exists():
            files.append(extra)
        for file in files:
            try:
                got = logits_of(file, golden["rows"], golden["max_seq_len"])
            except ValueError as error:
                print(f"{golden['case']:16} {file.name:24} refused: {error}")
                continue
            difference = got - want.reshape(got.shape)
            largest, mean = np.abs(difference).max(), float(np.sqrt(np.mean(difference**2)))
            if file != extra:
                rms[f"{golden['case']}/{file.name}"] = float(f"{mean:.4g}")
            print(f"{golden['case']:16} {file.name:24} largest {largest:.2e} rms {mean:.2e}")
    if arguments.write:
        result = {
            "script": "tools/golden/check_llama_cpp.py",
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "rms": rms,
        }
        path = ROOT / "tests" / "models" / "llama_cpp.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
