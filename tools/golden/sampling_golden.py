#!/usr/bin/env python3
"""Distributions after transformers' logits processors and warpers, for tests/ops/sampling_golden.json.

    python tools/golden/sampling_golden.py > tests/ops/sampling_golden.json

Needs torch and transformers (2.11.0 and 5.17.0 were used). Order as GenerationMixin builds it:
repetition penalty, temperature, top-k, top-p, min-p.
"""
import json

import torch
import transformers
from transformers.generation import logits_process as lp

VOCAB = 40
SEED = 11


def main():
    generator = torch.Generator().manual_seed(SEED)
    cases = []
    settings = [
        {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 1}, {"top_k": 5}, {"top_k": 39},
        {"top_p": 0.1}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.05}, {"min_p": 0.5},
        {"repeat_penalty": 1.3}, {"repeat_penalty": 0.7}, {"top_k": 10, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
        {"temperature": 0.7, "repeat_penalty": 1.2, "top_p": 0.9},
    ]
    for setting in settings:
        for _ in range(2):
            logits = torch.randn(1, VOCAB, generator=generator) * 2.5
            history = torch.randint(0, VOCAB, (1, 12), generator=generator)
            chain = []
            if "repeat_penalty" in setting:
                chain.append(lp.RepetitionPenaltyLogitsProcessor(setting["repeat_penalty"]))
            if "temperature" in setting:
                chain.append(lp.TemperatureLogitsWarper(setting["temperature"]))
            if "top_k" in setting:
                chain.append(lp.TopKLogitsWarper(setting["top_k"]))
            if "top_p" in setting:
                chain.append(lp.TopPLogitsWarper(setting["top_p"]))
            if "min_p" in setting:
                chain.append(lp.MinPLogitsWarper(setting["min_p"]))
            scores = logits.clone()
            for processor in chain:
                scores = processor(history, scores)
            cases.append({"params": setting, "logits": [round(x, 6) for x in logits[0].tolist()],
                          "history": history[0].tolist(),
                          "probabilities": [round(p, 7) for p in torch.softmax(scores[0].double(), -1).tolist()]})
    print(json.dumps({"script": "tools/golden/sampling_golden.py", "seed": SEED, "torch": torch.__version__,
                      "transformers": transformers.__version__, "cases": cases}))


if __name__ == "__main__":
    main()
