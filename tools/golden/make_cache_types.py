#!/usr/bin/env python3
"""Makes the logits of models whose caches hold 8-bit numbers, as transformers computes them.

    python tools/golden/make_cache_types.py

For each of CASES, which make_checkpoints.py made, writes tests/models/<case>/logits_<type>.f32 beside
logits.f32, in the same order: every key (rotated) and value passes through its 8-bit type on its way
into the cache, and attention reads what the cache holds; a latent and the part that turns pass as one
head. int8 is rounded by PyTorch's own
fake_quantize_per_channel_affine with a scale of (largest magnitude / 127) for each position and head;
fp8 by its cast to float8_e4m3fn. Prints how far the logits are from those of a float32 cache.
Made with torch 2.11.0 and transformers 5 (versions are printed).
"""

import json

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache

import make_checkpoints

CASES = {
    "llama/untied": ["int8", "fp8"],
    "mistral/window": ["int8"],
    "deepseek/q8": ["int8"],
}


def int8(x):
    heads = x.reshape(-1, x.shape[-1])
    scale = heads.abs().amax(dim=1) / 127
    zero = torch.zeros(len(heads), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(heads, scale, zero, 0, -127, 127).reshape(x.shape)


def fp8(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


class RoundedCache(DynamicCache):
    def __init__(self, config, rounded):
        super().__init__(config=config)
        self.rounded = rounded
        self.latent = hasattr(config, "kv_lora_rank")

    def update(self, key_states, value_states, *arguments, **more):
        if self.latent:  # transformers hands over the latent and the part that turns
            both = self.rounded(torch.cat((key_states, value_states), dim=-1))
            parts = both.split((key_states.shape[-1], value_states.shape[-1]), dim=-1)
        else:
            parts = self.rounded(key_states), self.rounded(value_states)
        return super().update(*parts, *arguments, **more)


def load(case):
    config_class, fields, store, _ = make_checkpoints.CASES[case]
    model = transformers.AutoModelForCausalLM.from_config(
        config_class(**fields), attn_implementation="eager", dtype=torch.float32
    ).eval()
    tensors = make_checkpoints.make_weights(
        model, store.get("weights_from", case), store.get("grid", 8)
    )
    make_checkpoints.load_weights(model, tensors)
    return model


@torch.no_grad()
def logits_of(model, rows, rounded):
    return np.concatenate([
        model(torch.tensor([row]), past_key_values=RoundedCache(model.config, rounded)).logits[0]
        for row in rows
    ])  # fmt: skip


def main():
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for case, types in CASES.items():
        folder = make_checkpoints.OUT / case
        rows = json.loads((folder / "golden.json").read_text())["rows"]
        model = load(case)
        exact = np.fromfile(folder / "logits.f32", "<f4").reshape(-1, model.config.vocab_size)
        same = logits_of(model, rows, lambda x: x)
        assert np.abs(same - exact).max() < 1e-5, "this is not the model of the golden"
        for name in types:
            logits = logits_of(model, rows, {"int8": int8, "fp8": fp8}[name])
            logits.astype("<f4").tofile(folder / f"logits_{name}.f32")
            difference = logits - exact
            print(f"{case:16} {name} largest {np.abs(difference).max():.3g} "
                  f"rms {np.sqrt(np.mean(difference**2)):.3g}")  # fmt: skip


if __name__ == "__main__":
    main()
