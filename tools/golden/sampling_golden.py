#!/usr/bin/env python3
"""Makes tests/ops/golden/sampling.json: what transformers keeps of random logits, and how likely.

    python tools/golden/sampling_golden.py tests/ops/golden/sampling.json

Every case runs transformers' own processors in its own order (sequence bias of one token,
repetition penalty, temperature, top-k, top-p, min-p) over one of the logits of the file, and stores
the ids that are left with their probabilities (softmax in float64). Logits are multiples of 1/64,
so the text is exact; null is -infinity. Two kinds of case are not made, because the answer is not
the processors': a cut between equal logits (transformers keeps all of them for top-k, and whichever
its sort leaves for top-p; pianola keeps the lower ids, which a test of its own covers), and a
threshold nearer than 1e-5.
"""

import json
import sys

import torch
import transformers
from transformers.generation.logits_process import (
    MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

SEED = 20261130
VOCAB = 200
CASES = 96
MARGIN = 1e-5


def make_logits(random):
    normal = torch.randn(6, VOCAB, generator=random)
    logits = [normal[0] * 3, normal[1] * 8, normal[2] * 0.5, (normal[3] * 4).round() / 2,
              normal[4] * 2 - 30, normal[5] * 4]
    logits = [(x * 64).round() / 64 for x in logits]
    logits[5][torch.rand(VOCAB, generator=random) < 0.6] = -torch.inf
    return logits


def choose(random, values):
    return values[int(torch.randint(len(values), (1,), generator=random))]


def make_case(random, logits):
    case = {
        "logits": int(torch.randint(len(logits), (1,), generator=random)),
        "history": [], "bias": [],
        "repeat_penalty": choose(random, [1.0, 1.0, 1.25, 2.0, 0.75]),
        "temperature": choose(random, [0.25, 0.75, 1.0, 1.0, 1.5, 4.0]),
        "top_k": choose(random, [0, 0, 1, 2, 5, 40, 64, 65, 100, 199, 200, 1000]),
        "top_p": choose(random, [1.0, 1.0, 0.99, 0.9, 0.5, 0.1, 0.001]),
        "min_p": choose(random, [0.0, 0.0, 0.01, 0.125, 0.5, 1.0]),
    }
    if case["repeat_penalty"] != 1:
        case["history"] = torch.randint(VOCAB, (30,), generator=random).tolist()
    for _ in range(choose(random, [0, 0, 1, 5])):
        token = int(torch.randint(VOCAB, (1,), generator=random))
        if token not in [t for t, _ in case["bias"]]:
            case["bias"].append([token, choose(random, [-4.0, 2.5, 6.0, None])])
    return case


def processors(case):
    if case["bias"]:
        bias = {(t,): float("-inf") if b is None else b for t, b in case["bias"]}
        yield "bias", SequenceBiasLogitsProcessor(bias)
    if case["repeat_penalty"] != 1:
        yield "penalty", RepetitionPenaltyLogitsProcessor(case["repeat_penalty"])
    if case["temperature"] != 1:
        yield "temperature", TemperatureLogitsWarper(case["temperature"])
    if case["top_k"] > 0:
        yield "top_k", TopKLogitsWarper(case["top_k"])
    if case["top_p"] < 1:
        yield "top_p", TopPLogitsWarper(case["top_p"])
    if case["min_p"] > 0:
        yield "min_p", MinPLogitsWarper(case["min_p"])


def is_ambiguous(name, case, before, after):
    kept = after > -torch.inf
    cut = (before > -torch.inf) & ~kept
    if not cut.any():
        return name == "top_k" and kept.sum() > case["top_k"]
    if before[kept].min() <= before[cut].max():
        return True
    if name == "top_k":
        return int(kept.sum()) != case["top_k"]
    p = torch.softmax(before.double(), 0)
    if name == "top_p":
        mass, last = p[kept].sum(), p[kept].min()
        return bool(abs(mass - case["top_p"]) < MARGIN or abs(mass - last - case["top_p"]) < MARGIN)
    ratio = p / p.max()
    return bool(((ratio - case["min_p"]).abs() < MARGIN).any() and case["min_p"] < 1)


def run(case, logits):
    ids = torch.tensor([case["history"] or [0]])
    scores = logits[case["logits"]].clone()
    for name, processor in processors(case):
        after = processor(ids, scores[None].clone())[0]
        if name in ("top_k", "top_p", "min_p") and is_ambiguous(name, case, scores, after):
            return False
        scores = after
    if not torch.isfinite(scores).any():
        return False
    p = torch.softmax(scores.double(), 0)
    case["kept"] = [i for i in range(VOCAB) if scores[i] > -torch.inf]
    case["probabilities"] = [float(f"{p[i]:.9g}") for i in case["kept"]]
    return True


def main():
    random = torch.Generator().manual_seed(SEED)
    logits = make_logits(random)
    cases = []
    while len(cases) < CASES:
        case = make_case(random, logits)
        if run(case, logits):
            cases.append(case)
    with open(sys.argv[1], "w") as out:
        head = {"script": "tools/golden/sampling_golden.py", "seed": SEED,
                "transformers": transformers.__version__, "torch": torch.__version__}
        out.write("{" + json.dumps(head)[1:-1] + ',\n"logits": [\n')
        rows = [[None if v == -torch.inf else float(v) for v in x] for x in logits]
        out.write(",\n".join(json.dumps(r, separators=(",", ":")) for r in rows))
        out.write('],\n"cases": [\n')
        out.write(",\n".join(json.dumps(c, separators=(",", ":")) for c in cases))
        out.write("]}\n")


if __name__ == "__main__":
    main()
