#!/usr/bin/env python3
"""Writes a GGUF file of a real model's shape with seeded random weights and no vocabulary.

    python bench/make_random_gguf.py qwen3-0.6b q8_0 /tmp/qwen3-0.6b-q8_0.gguf

For benchmarks: llama.cpp and pianola both open it. Needs the `gguf` package and numpy.
"""
import argparse

import gguf
import numpy as np

SHAPES = {  # width, layers, ff, heads, kv heads, head width, vocabulary, tied, architecture
    "qwen3-0.6b": (1024, 28, 3072, 16, 8, 128, 151936, True, "qwen3"),
    "llama-3.2-1b": (2048, 16, 8192, 32, 8, 64, 128256, True, "llama"),
    "llama-3.1-8b": (4096, 32, 14336, 32, 8, 128, 128256, False, "llama"),
    "smollm2-135m": (576, 30, 1536, 9, 3, 64, 49152, True, "llama"),
}
TYPES = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0,
         "q4_1": gguf.GGMLQuantizationType.Q4_1, "f16": gguf.GGMLQuantizationType.F16}


def random_matrix(rng, rows, cols, dtype):
    """Random rows with a standard deviation of about 0.02, as bytes of the block format."""
    if dtype == gguf.GGMLQuantizationType.F16:
        return (rng.standard_normal((rows, cols), dtype=np.float32) * 0.02).astype(np.float16)
    block, size = gguf.GGML_QUANT_SIZES[dtype]
    blocks = rows * cols // block
    data = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
    scale = {gguf.GGMLQuantizationType.Q8_0: 0.02 / 74, gguf.GGMLQuantizationType.Q4_0: 0.02 / 4.6,
             gguf.GGMLQuantizationType.Q4_1: 0.02 / 4.6}[dtype]
    data[:, 0:2] = np.float16(scale).reshape(1).view(np.uint8)
    if dtype == gguf.GGMLQuantizationType.Q4_1:
        data[:, 2:4] = np.float16(-7.5 * scale).reshape(1).view(np.uint8)
    return data.reshape(rows, cols // block * size)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("output")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    width, layers, ff, heads, kv_heads, head, vocab, tied, arch = SHAPES[args.shape]
    dtype = TYPES[args.type]
    rng = np.random.default_rng(args.seed)

    writer = gguf.GGUFWriter(args.output, arch)
    writer.add_name(f"random {args.shape} {args.type}")
    writer.add_block_count(layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name, rows, cols):
        data = random_matrix(rng, rows, cols, dtype)
        writer.add_tensor(name, data, raw_dtype=dtype)

    def vector(name, size):
        writer.add_tensor(name, np.ones(size, dtype=np.float32))

    matrix("token_embd.weight", vocab, width)
    vector("output_norm.weight", width)
    if not tied:
        matrix("output.weight", vocab, width)
    for i in range(layers):
        p = f"blk.{i}."
        vector(p + "attn_norm.weight", width)
        matrix(p + "attn_q.weight", heads * head, width)
        matrix(p + "attn_k.weight", kv_heads * head, width)
        matrix(p + "attn_v.weight", kv_heads * head, width)
        if arch == "qwen3":
            vector(p + "attn_q_norm.weight", head)
            vector(p + "attn_k_norm.weight", head)
        matrix(p + "attn_output.weight", width, heads * head)
        vector(p + "ffn_norm.weight", width)
        matrix(p + "ffn_gate.weight", ff, width)
        matrix(p + "ffn_up.weight", ff, width)
        matrix(p + "ffn_down.weight", width, ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()


if __name__ == "__main__":
    main()
