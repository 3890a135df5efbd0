"""Makes tests/unit/models/rope_golden.json: transformers' rope tables for each kind.

    python tools/golden/make_rope.py

Each case holds a config.json (model_type llama) and, for one or more cache lengths, the inverse
frequencies (float32, shortest decimal form) and the factor on cos and sin that transformers'
ROPE_INIT_FUNCTIONS, or for the default kind the model's own function, computes from it.
"""

import json
import pathlib
import platform

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "unit" / "models" / "rope_golden.json"

BASE = dict(
    model_type="llama", vocab_size=256, hidden_size=512, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA31 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
               high_freq_factor=4.0, original_max_position_embeddings=8192)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=4096)

# name: (max_position_embeddings, head_dim, rope_parameters, cache lengths)
CASES = {
    "default": (2048, 64, dict(rope_type="default", rope_theta=10000.0), [2048]),
    "default, smollm2": (8192, 64, dict(rope_type="default", rope_theta=100000.0), [8192]),
    "default, odd half": (2048, 6, dict(rope_type="default", rope_theta=1000000.0), [2048]),
    "linear": (2048, 128, dict(rope_type="linear", rope_theta=10000.0, factor=2.5), [2048]),
    "dynamic": (
        2048, 128, dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
        [512, 2048, 2049, 8192],
    ),
    "dynamic, narrow": (32, 16, dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0), [32, 48]),
    "yarn": (16384, 128, YARN, [16384]),
    "yarn, qwen": (32768, 128, {**YARN, "rope_theta": 1000000.0,
                                "original_max_position_embeddings": 32768}, [32768]),
    "yarn, narrow": (256, 16, {**YARN, "original_max_position_embeddings": 64}, [256]),
    "yarn, betas": (16384, 64, {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, [16384]),
    "yarn, no truncate": (16384, 64, {**YARN, "truncate": False}, [16384]),
    "yarn, mscale": (16384, 64, {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2}, [16384]),
    "yarn, attention factor": (16384, 64, {**YARN, "attention_factor": 1.25}, [16384]),
    "yarn, factor 1": (4096, 64, {**YARN, "factor": 1.0}, [4096]),
    "llama3.1": (131072, 128, LLAMA31, [131072]),
    "llama3.2": (131072, 64, {**LLAMA31, "factor": 32.0}, [131072]),
    "llama3, narrow": (
        256, 16,
        {**LLAMA31, "rope_theta": 10000.0, "original_max_position_embeddings": 32}, [256],
    ),
}  # fmt: skip


def main():
    cases = []
    for name, (positions, head_dim, parameters, lengths) in CASES.items():
        fields = {**BASE, "max_position_embeddings": positions, "head_dim": head_dim,
                  "rope_parameters": dict(parameters)}  # fmt: skip
        config = LlamaConfig(**{k: v for k, v in fields.items() if k != "model_type"})
        kind = parameters["rope_type"]
        if kind == "default":
            compute = LlamaRotaryEmbedding.compute_default_rope_parameters
        else:
            compute = ROPE_INIT_FUNCTIONS[kind]
        tables = []
        for length in lengths:
            inv_freq, scale = compute(config, torch.device("cpu"), seq_len=length)
            tables.append({
                "max_seq_len": length,
                "inv_freq": [float(str(x)) for x in inv_freq.numpy()],
                "attention_scale": float(scale),
            })  # fmt: skip
        fields["rope_parameters"] = parameters
        cases.append({"name": name, "config": fields, "tables": tables})
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(
        json.dumps({"script": "tools/golden/make_rope.py", "versions": versions, "cases": cases})
        + "\n"
    )


if __name__ == "__main__":
    main()
