#!/usr/bin/env python3
"""Random checkpoints in the shapes of well-known models, as Hugging Face folders in bfloat16.

    bench/gpu_checkpoints.py llama-3.2-1b /tmp/llama-1b

Weights are drawn with the sizes that keep activations near one through the whole stack, so that
logits are finite and differ. Needs torch and safetensors.
"""
import argparse
import json
import math
import pathlib

import torch
from safetensors.torch import save_file

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

SHAPES = {
    "llama-3.2-1b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=2048,
        intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-3.1-8b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096,
        intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0,
        rope_scaling=dict(LLAMA3_ROPE, factor=8.0), tie_word_embeddings=False),
    "qwen3-0.6b": dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024,
        intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True),
}
# Families whose layers differ in kind: made by transformers itself, with its own first weights.
TRANSFORMERS_SHAPES = {
    "gemma-3-1b": ("Gemma3TextConfig", "Gemma3ForCausalLM", dict(
        hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, sliding_window=512,
        vocab_size=262144, max_position_embeddings=32768)),
    # The layers of Qwen3-Next-80B-A3B, twelve of them, with 64 experts instead of 512.
    "qwen3-next-like": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(
        hidden_size=2048, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, partial_rotary_factor=0.25, linear_num_value_heads=32,
        linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, num_experts=64, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, vocab_size=151936,
        max_position_embeddings=262144)),
}
COMMON = dict(torch_dtype="bfloat16", hidden_act="silu", attention_bias=False, mlp_bias=False,
              bos_token_id=1, eos_token_id=2)


def tensors(config):
    """Names, shapes and standard deviations of every tensor."""
    width, ff = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layers = config["num_hidden_layers"]
    out = 1 / math.sqrt(2 * layers)  # residual branches stay small beside the stream
    yield "model.embed_tokens.weight", (config["vocab_size"], width), 1 / math.sqrt(width)
    for i in range(layers):
        name = f"model.layers.{i}."
        yield name + "input_layernorm.weight", (width,), None
        yield name + "post_attention_layernorm.weight", (width,), None
        yield name + "self_attn.q_proj.weight", (q, width), 1 / math.sqrt(width)
        yield name + "self_attn.k_proj.weight", (kv, width), 1 / math.sqrt(width)
        yield name + "self_attn.v_proj.weight", (kv, width), 1 / math.sqrt(width)
        yield name + "self_attn.o_proj.weight", (width, q), out / math.sqrt(q)
        if config["model_type"] == "qwen3":
            yield name + "self_attn.q_norm.weight", (config["head_dim"],), None
            yield name + "self_attn.k_norm.weight", (config["head_dim"],), None
        yield name + "mlp.gate_proj.weight", (ff, width), 1 / math.sqrt(width)
        yield name + "mlp.up_proj.weight", (ff, width), 1 / math.sqrt(width)
        yield name + "mlp.down_proj.weight", (width, ff), 2 * out / math.sqrt(ff)
    yield "model.norm.weight", (width,), None
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width), 1 / math.sqrt(width)


def make_with_transformers(shape, folder, seed, layers):
    import transformers
    config, model, sizes = TRANSFORMERS_SHAPES[shape]
    sizes = dict(sizes, **({"num_hidden_layers": layers} if layers else {}))
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    torch.set_default_dtype(torch.float32)
    made.save_pretrained(folder, max_shard_size="100GB")
    return sum(p.numel() * p.element_size() for p in made.parameters())


def make(shape, folder, seed=1, layers=None):
    """Writes config.json and model.safetensors; returns the bytes of weights."""
    if shape in TRANSFORMERS_SHAPES:
        return make_with_transformers(shape, folder, seed, layers)
    config = dict(COMMON, **SHAPES[shape])
    if layers:
        config["num_hidden_layers"] = layers
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(seed)
    weights, total = {}, 0
    for name, size, deviation in tensors(config):
        t = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        t = 1 + 0.1 * t if deviation is None else deviation * t
        weights[name] = t.to(torch.bfloat16).cpu()
        total += weights[name].numel() * 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=[*SHAPES, *TRANSFORMERS_SHAPES])
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick check")
    arguments = parser.parse_args()
    print(f"{make(arguments.shape, arguments.folder, layers=arguments.layers) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
