"""Makes tests/models/<family>/<case>/: tiny checkpoints and what transformers computes with them.

    python tools/golden/make_checkpoints.py [--only llama/yarn] [--f32-gguf DIR]

Each case folder holds
    golden.json   tokens of each row, cache length, formats, versions, seed (see write_golden)
    logits.f32    little-endian float32 [positions of all rows in order, vocab_size]
    hf/           the Hugging Face folder; only config.json when "weights_from" names another case
    *.gguf        the same weights as GGUF, named by the type of their matrices

Weights are small integers times a power of two, chosen so that F32, BF16, F16 and Q8_0 (case q4:
Q4_0 and Q4_1) hold them exactly: all files of a case share one golden, and a difference is an error
of the reader or of the arithmetic, never rounding of the weights. They are large enough that no
part of the model can be left out unseen; check_sensitivity() measures it.

Everything follows from the seed; torch runs on one thread in float32 with eager attention.
"""

import argparse
import contextlib
import copy
import json
import pathlib
import platform
import shutil
import zlib

import numpy as np
import torch
import transformers
from transformers import (
    BambaConfig, DeepseekV2Config, DeepseekV3Config, Gemma3TextConfig, GptOssConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen2MoeConfig,
    Qwen3Config, Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)  # fmt: skip

import gguf_export

torch.set_num_threads(1)
ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "models"
SEED = 20261130

# As the model is written down, not as it is fast.
PLAIN = dict(attn_implementation="eager", experts_implementation="eager")

SMALL = dict(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-5,
)  # fmt: skip

HYBRID = dict(
    num_hidden_layers=4, head_dim=32, rms_norm_eps=1e-6, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
)  # fmt: skip

MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=24, mamba_d_conv=4,
    mamba_expand=2, mamba_chunk_size=32,
)  # fmt: skip


LATENT = dict(
    num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=24,
    qk_rope_head_dim=16, v_head_dim=40, moe_intermediate_size=32,
)  # fmt: skip


def rope(kind="default", theta=10000.0, **fields):
    return {"rope_type": kind, "rope_theta": theta, **fields}


# name: (config class, fields, how to store it, GGUF types).
# store: dtype; shards; legacy: config.json as transformers 4 wrote it; weights_from; rows; grid;
# early: GGUF in the first form of its architecture; int8: also measure rounded activations (for block formats that check_llama_cpp.py has not run on).
CASES = {
    "gemma3/mixed": (
        Gemma3TextConfig,
        {**SMALL, "num_hidden_layers": 3, "head_dim": 32, "query_pre_attn_scalar": 20,
         "sliding_window": 16,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "rope_parameters": {
             "sliding_attention": rope(theta=10000.0),
             "full_attention": rope("linear", theta=1000000.0, factor=8.0)}},
        dict(dtype="bfloat16", rows=(200, 17), max_seq_len=256),
        [],
    ),
    # The last two layers attend to the keys and values of the first two.
    "gemma3/shared": (
        Gemma3TextConfig,
        {**SMALL, "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 20,
         "sliding_window": 16, "num_kv_shared_layers": 2, "use_cache": False,
         "layer_types": ["sliding_attention", "full_attention"] * 2,
         "rope_parameters": {
             "sliding_attention": rope(theta=10000.0),
             "full_attention": rope(theta=1000000.0)}},
        dict(dtype="bfloat16", rows=(200, 70, 17), max_seq_len=256),
        [],
    ),
    # Three of eight experts, in rows that pass the window many times.
    "gpt_oss/mixed": (
        GptOssConfig,
        {**SMALL, "num_hidden_layers": 3, "head_dim": 32, "sliding_window": 16,
         "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3,
         "rope_parameters": rope("yarn", theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
                                 original_max_position_embeddings=32, truncate=False)},
        dict(dtype="float32", rows=(200, 70, 17), max_seq_len=256),
        ["F16"],
    ),
    "gpt_oss/bfloat16": (
        GptOssConfig,
        {**SMALL, "head_dim": 16, "sliding_window": 16, "num_local_experts": 4,
         "num_experts_per_tok": 2,
         "rope_parameters": rope("yarn", theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
                                 original_max_position_embeddings=32, truncate=False)},
        dict(dtype="bfloat16"),
        [],
    ),
    "qwen3_moe/all": (
        Qwen3MoeConfig,
        {**SMALL, "rms_norm_eps": 1e-6, "head_dim": 32, "tie_word_embeddings": True,
         "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
         "norm_topk_prob": True, "rope_parameters": rope(theta=1000000.0)},
        dict(dtype="float16"),
        ["F16"],
    ),
    # A layer of three has experts, whose weights are not divided by their sum.
    "qwen3_moe/some": (
        Qwen3MoeConfig,
        {**SMALL, "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "head_dim": 32,
         "num_experts": 6, "num_experts_per_tok": 5, "moe_intermediate_size": 40,
         "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [3],
         "rope_parameters": rope(theta=1000000.0)},
        dict(dtype="float16"),
        [],
    ),
    "qwen2_moe/shared": (
        Qwen2MoeConfig,
        {**SMALL, "rms_norm_eps": 1e-6, "num_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 56,
         "norm_topk_prob": False, "rope_parameters": rope(theta=1000000.0)},
        dict(dtype="float16"),
        ["F16"],
    ),
    # Experts in block formats. Three of four: rounding of activations changes no choice.
    "qwen2_moe/q8": (
        Qwen2MoeConfig,
        {**SMALL, "rms_norm_eps": 1e-6, "num_experts": 4, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
         "norm_topk_prob": False, "rope_parameters": rope(theta=1000000.0)},
        dict(dtype="float16", keep_hf=False, int8=True),
        ["Q8_0"],
    ),
    "qwen2_moe/q4": (
        Qwen2MoeConfig,
        {**SMALL, "rms_norm_eps": 1e-6, "num_experts": 4, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
         "norm_topk_prob": False, "rope_parameters": rope(theta=1000000.0)},
        dict(dtype="float16", grid=4, keep_hf=False, int8=True),
        ["Q4_0", "Q4_1"],
    ),
    "llama/untied": (
        LlamaConfig,
        {**SMALL, "hidden_size": 32, "head_dim": 16, "tie_word_embeddings": False,
         "rope_parameters": rope(theta=500.0)},
        dict(dtype="float32"),
        ["F32"],
    ),
    "llama/tied": (
        LlamaConfig,
        {**SMALL, "tie_word_embeddings": True, "rope_parameters": rope()},
        dict(dtype="float16"),
        ["F16", "Q8_0"],
    ),
    "llama/bias": (
        LlamaConfig,
        {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
         "rope_parameters": rope()},
        dict(dtype="bfloat16", shards="60KB"),
        ["Q8_0"],
    ),
    "llama/linear": (
        LlamaConfig,
        {**SMALL, "tie_word_embeddings": True, "rope_parameters": rope("linear", factor=4.0)},
        dict(weights_from="llama/tied", legacy=True),
        ["Q8_0"],
    ),
    "llama/dynamic": (
        LlamaConfig,
        {**SMALL, "tie_word_embeddings": True, "max_position_embeddings": 32,
         "rope_parameters": rope("dynamic", factor=2.0)},
        # Both rows are longer than the 32 positions, and the longer one comes first: transformers
        # then keeps its base for the second, as an engine with max_seq_len 48 does from the start.
        dict(weights_from="llama/tied", rows=(48, 40), max_seq_len=48),
        [],
    ),
    "llama/yarn": (
        LlamaConfig,
        {**SMALL, "tie_word_embeddings": True,
         "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=64)},
        dict(weights_from="llama/tied"),
        ["Q8_0"],
    ),
    "llama/llama3": (
        LlamaConfig,
        {**SMALL, "tie_word_embeddings": True,
         "rope_parameters": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=32)},
        dict(weights_from="llama/tied", legacy=True),
        ["Q8_0"],
    ),
    "llama/q4": (
        LlamaConfig,
        {**SMALL, "tie_word_embeddings": False, "rope_parameters": rope()},
        dict(dtype="float16", grid=4, keep_hf=False),
        ["Q4_0", "Q4_1"],
    ),
    "llama/smollm2": (
        LlamaConfig,
        {**SMALL, "vocab_size": 192, "hidden_size": 96, "intermediate_size": 64,
         "num_attention_heads": 6, "tie_word_embeddings": True,
         "rope_parameters": rope(theta=100000.0)},
        dict(dtype="bfloat16", legacy=True),
        ["Q8_0"],
    ),
    "mistral/full": (
        MistralConfig,
        {**SMALL, "sliding_window": None, "tie_word_embeddings": False,
         "rope_parameters": rope(theta=1000000.0)},
        dict(dtype="bfloat16"),
        ["Q8_0"],
    ),
    # The longer rows pass their window many times, and the ring that holds it as well.
    "mistral/window": (
        MistralConfig,
        {**SMALL, "sliding_window": 16, "tie_word_embeddings": False,
         "rope_parameters": rope(theta=1000000.0)},
        dict(weights_from="mistral/full", rows=(200, 70, 17), max_seq_len=256),
        [],
    ),
    "qwen2/window": (
        Qwen2Config,
        {**SMALL, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "use_sliding_window": True,
         "sliding_window": 65, "max_window_layers": 1, "rope_parameters": rope(theta=1000000.0)},
        dict(weights_from="qwen2/tied", rows=(220, 66), max_seq_len=256),
        [],
    ),
    # Heads of the widths that real models have.
    "llama/heads64": (
        LlamaConfig,
        {**SMALL, "head_dim": 64, "tie_word_embeddings": True, "rope_parameters": rope()},
        dict(dtype="float16", keep_hf=False),
        ["F16"],
    ),
    "qwen3/heads128": (
        Qwen3Config,
        {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
         "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
         "rope_parameters": rope(theta=1000000.0)},
        dict(dtype="bfloat16"),
        [],
    ),
    "qwen2/tied": (
        Qwen2Config,
        {**SMALL, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "use_sliding_window": False,
         "rope_parameters": rope(theta=1000000.0)},
        dict(dtype="float16"),
        ["Q8_0"],
    ),
    "qwen3/tied": (
        Qwen3Config,
        {**SMALL, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "head_dim": 32,
         "rope_parameters": rope(theta=1000000.0)},
        dict(dtype="bfloat16"),
        ["Q8_0"],
    ),
    # As DeepSeek-V2-Lite: queries in one product, YaRN that also scales the scores, one plain layer.
    "deepseek/v2_lite": (
        DeepseekV2Config,
        {**SMALL, **LATENT, "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "q_lora_rank": None,
         "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2,
         "num_experts_per_tok": 3, "routed_scaling_factor": 1.0, "topk_method": "greedy",
         "rope_parameters": rope("yarn", factor=8.0, beta_fast=32, beta_slow=1, mscale=0.707,
                                 mscale_all_dim=0.707, original_max_position_embeddings=32)},
        dict(dtype="bfloat16", rows=(200, 70, 17), max_seq_len=256),
        ["F16"],
    ),
    # All of four experts: there is no choice that rounding of activations could change.
    "deepseek/q8": (
        DeepseekV2Config,
        {**SMALL, **LATENT, "rms_norm_eps": 1e-6, "q_lora_rank": 32, "qk_nope_head_dim": 32,
         "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 4,
         "rope_parameters": rope()},
        dict(dtype="float16", keep_hf=False, int8=True),
        ["Q8_0"],
    ),
    # As DeepSeek-V2: queries of a rank, experts of the best groups only, weights that are scaled.
    "deepseek/v2": (
        DeepseekV2Config,
        {**SMALL, **LATENT, "rms_norm_eps": 1e-5, "q_lora_rank": 48,
         "n_routed_experts": 12, "n_shared_experts": 1, "num_experts_per_tok": 3,
         "routed_scaling_factor": 4.0, "topk_method": "group_limited_greedy", "n_group": 4,
         "topk_group": 2, "rope_parameters": rope("yarn", factor=8.0, mscale=1.0,
             mscale_all_dim=0.5, original_max_position_embeddings=32)},
        dict(dtype="float16", rows=(70, 17)),
        [],
    ),
    "deepseek/v3": (
        DeepseekV3Config,
        {**SMALL, **LATENT, "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "q_lora_rank": 48,
         "first_k_dense_replace": 1, "n_routed_experts": 12, "n_shared_experts": 1,
         "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2,
         "norm_topk_prob": True, "num_mtp_layers": 0,
         "rope_parameters": rope(theta=10000.0)},
        dict(dtype="bfloat16", rows=(70, 17), early=True),
        ["F16"],
    ),
    # Heads that share B and C in groups, in rows of several of transformers' chunks.
    "bamba/hybrid": (
        BambaConfig,
        {**SMALL, **MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [2]},
        dict(dtype="float16", rows=(150, 70, 17), max_seq_len=256, float64=True),
        [],
    ),
    # Step sizes that reach their limits; every bias but that of the convolution.
    "bamba/limits": (
        BambaConfig,
        {**SMALL, **MAMBA, "tie_word_embeddings": True, "attn_layer_indices": [0],
         "mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_conv": 3, "mamba_d_state": 32,
         "time_step_limit": (0.25, 1.5), "mamba_conv_bias": False, "attention_bias": True,
         "mlp_bias": True},
        dict(dtype="float16", rows=(70, 17), max_seq_len=128, float64=True),
        [],
    ),
    # Three layers of linear attention to one that attends; widths of keys and values that differ.
    "qwen3_5/hybrid": (
        Qwen3_5TextConfig,
        {**SMALL, **HYBRID, "tie_word_embeddings": True},
        dict(dtype="float16", rows=(150, 70, 17), max_seq_len=256, float64=True),
        [],
    ),
    "qwen3_next/experts": (
        Qwen3NextConfig,
        {**SMALL, **HYBRID, "tie_word_embeddings": False, "num_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
        dict(dtype="bfloat16", rows=(150, 17), max_seq_len=256, float64=True),
        [],
    ),
    # What GGUF files can say: keys and values of one width, experts in every layer.
    "qwen3_5/gguf": (
        Qwen3_5TextConfig,
        {**SMALL, **HYBRID, "linear_value_head_dim": 16, "tie_word_embeddings": False},
        dict(dtype="float16", rows=(70, 17), float64=True),
        ["F16"],
    ),
    "qwen3_next/gguf": (
        Qwen3NextConfig,
        {**SMALL, **HYBRID, "linear_value_head_dim": 16, "tie_word_embeddings": True,
         "num_hidden_layers": 3,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 64},
        dict(dtype="float16", rows=(70, 17), float64=True),
        ["F16"],
    ),
}  # fmt: skip


def rng_for(*names):
    return np.random.default_rng([SEED, *(zlib.crc32(name.encode()) for name in names)])


def grid_weight(rng, shape, bits):
    """Integers times a power of two; each block of 32 spans the whole range, so that its scale in
    Q8_0 (or Q4_0 and Q4_1) is that power."""
    low, high, spread, exponent = (-127, 127, 40.0, -8) if bits == 8 else (-8, 7, 3.0, -5)
    values = np.clip(np.rint(rng.normal(0.0, spread, size=shape)), low, high)
    blocks = values.reshape(-1, 32)
    places = np.argsort(rng.random(blocks.shape), axis=1)
    rows = np.arange(len(blocks))
    signs = rng.integers(0, 2, size=len(blocks))
    blocks[rows, places[:, 0]] = np.where(signs == 0, low, high)
    if bits == 4:
        blocks[rows, places[:, 0]] = low
        blocks[rows, places[:, 1]] = high
    return (blocks.reshape(shape) * 2.0**exponent).astype(np.float32)


def make_weights(model, case, bits):
    """name: float32 array, for each parameter that the checkpoint stores."""
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        rng = rng_for(case, name)
        shape = tuple(parameter.shape)
        if len(shape) >= 2 and not name.endswith("bias"):
            tensors[name] = grid_weight(rng, shape, bits)
        elif name.endswith("norm.weight"):
            tensors[name] = (rng.integers(64, 192, size=shape) / 128.0).astype(np.float32)
        else:  # biases
            tensors[name] = (rng.integers(-127, 128, size=shape) / 128.0).astype(np.float32)
    return tensors


def load_weights(model, tensors):
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    if sorted(missing) != tied or unexpected:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    model.tie_weights()


class Recall(torch.nn.Module):
    """Gives what a module of another layer gave last."""

    def __init__(self, source):
        super().__init__()
        self.source = [source]  # in a list: no part of this layer's parameters

    def forward(self, _):
        return self.source[0].last


def remember(module, _, output):
    module.last = output


def share_keys_and_values(model):
    """Lets the last num_kv_shared_layers layers attend to the keys and values of the last layer of
    their kind before them. Gemma 3n and Gemma 4 of transformers do so; here it is the only
    difference from a family that has no such layers."""
    shared = getattr(model.config, "num_kv_shared_layers", None) or 0
    if shared == 0:
        return model
    layers, types = model.model.layers, model.config.layer_types
    own = len(layers) - shared
    for i in range(own, len(layers)):
        source = max(j for j in range(own) if types[j] == types[i])
        for name in ("k_proj", "v_proj", "k_norm"):
            module = getattr(layers[source].self_attn, name)
            module.register_forward_hook(remember)
            setattr(layers[i].self_attn, name, Recall(module))
    return model


def make_rows(case, vocab_size, lengths):
    rng = rng_for(case, "tokens")
    return [rng.integers(0, vocab_size, size=n).tolist() for n in lengths]


@torch.no_grad()
def logits_of(model, rows):
    return [model(torch.tensor([row])).logits[0].double().numpy() for row in rows]


@contextlib.contextmanager
def float64_throughout():
    """Keeps what is float64 from being rounded to float32 on the way, as transformers does in norms,
    routers and the delta rule."""
    to, to_float, softmax = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax

    def keep(x, *args, **kwargs):
        narrows = torch.float32 in args or kwargs.get("dtype") is torch.float32
        return x if x.dtype is torch.float64 and narrows else to(x, *args, **kwargs)

    def wide_softmax(x, *args, **kwargs):
        if x.dtype is torch.float64:
            kwargs.pop("dtype", None)
        return softmax(x, *args, **kwargs)

    torch.Tensor.to = keep
    torch.Tensor.float = lambda x: x if x.dtype is torch.float64 else to_float(x)
    torch.nn.functional.softmax = wide_softmax
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax = to, to_float, softmax


@contextlib.contextmanager
def int8_activations():
    """Rounds what matrices are multiplied with to 8 bits in blocks of 32, as llama.cpp does with
    block formats; not for routers, which stay in F32. For llama/tied, qwen2/tied and qwen3/tied in Q8_0
    and llama/q4 it costs within 4 percent of what tests/models/llama_cpp.json says of llama.cpp."""
    linear = torch.nn.functional.linear

    def rounded(x, weight, bias=None):
        if weight.shape[0] >= 32:
            blocks = x.reshape(*x.shape[:-1], -1, 32)
            scale = blocks.abs().amax(-1, keepdim=True) / 127
            scale = torch.where(scale == 0, 1.0, scale)
            x = (torch.round(blocks / scale) * scale).reshape(x.shape)
        return linear(x, weight, bias)

    torch.nn.functional.linear = rounded
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def legacy_config(folder):
    """Rewrites config.json as transformers 4 did: rope_theta, rope_scaling, torch_dtype."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None
    if kind != "default":
        # Early files say "type"; those of Llama 3 say "rope_type".
        config["rope_scaling"] = {"rope_type" if kind == "llama3" else "type": kind, **parameters}
    config["torch_dtype"] = config.pop("dtype", "float32")
    config.pop("transformers_version", None)
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")


def write_hf(folder, model, store):
    shutil.rmtree(folder, ignore_errors=True)
    kept = copy.deepcopy(model).to(getattr(torch, store.get("dtype", "float32")))
    kept.save_pretrained(folder, max_shard_size=store.get("shards", "5GB"))
    if store.get("legacy"):
        legacy_config(folder)
    config = json.loads((folder / "config.json").read_text())
    if "weights_from" in store:
        for path in folder.iterdir():
            if path.name != "config.json":
                path.unlink()
    return config


def reload(folder, model, store, tensors):
    """The model as transformers reads it back from the folder, in float32."""
    if "weights_from" in store:
        config = transformers.AutoConfig.from_pretrained(folder)
        again = type(model)._from_config(config, **PLAIN, dtype=torch.float32)
        load_weights(again, tensors)
        return again.eval()
    return share_keys_and_values(
        type(model).from_pretrained(folder, dtype=torch.float32, **PLAIN)
    ).eval()


def check_sensitivity(model, tensors, rows, reference):
    """The least change of the largest logit difference, over taking each kind of tensor away
    (zeros for matrices and biases, ones for norms). Guards against tests that cannot fail."""
    least = (np.inf, "")
    for suffix in sorted({name.split(".", 3)[-1] if "layers" in name else name for name in tensors}):
        changed = {}
        for name, array in tensors.items():
            hit = name.endswith(suffix)
            neutral = np.ones_like(array) if "norm" in name else np.zeros_like(array)
            changed[name] = neutral if hit else array
        load_weights(model, changed)
        difference = max(
            np.abs(a - b).max() for a, b in zip(logits_of(model, rows), reference, strict=True)
        )
        least = min(least, (float(difference), suffix))
    load_weights(model, tensors)
    return least


def rms_difference(a, b):
    return float(np.sqrt(np.mean((np.concatenate(a) - np.concatenate(b)) ** 2)))


def write_golden(folder, case, model, store, rows, kept, exact, logits, rounded, gguf_types):
    np.concatenate(kept).astype("<f4").tofile(folder / "logits.f32")
    golden = {
        "script": "tools/golden/make_checkpoints.py",
        "seed": SEED,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "case": case,
        "model_type": model.config.model_type,
        "vocab_size": model.config.vocab_size,
        # The cache length the goldens hold for: the dynamic rope depends on it.
        "max_seq_len": store.get("max_seq_len", 128),
        "rows": rows,
        "logits": "logits.f32",
        # |float32 - float64| of transformers itself: the noise of the oracle.
        "oracle_noise": float(max(np.abs(a - b).max() for a, b in zip(logits, exact, strict=True))),
        # Root mean square of what transformers in bfloat16 differs by: the bar for backends that
        # round activations to it.
        "bfloat16_rms": rms_difference(rounded, kept),
        "largest_logit": float(max(np.abs(a).max() for a in logits)),
        "hf": store.get("keep_hf", True),
        "weights_from": store.get("weights_from"),
        "gguf": [f"{kind.lower()}.gguf" for kind in gguf_types],
    }
    if store.get("int8"):
        with int8_activations():
            golden["int8_rms"] = rms_difference(logits_of(model, rows), kept)
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    return golden


def make_case(case, extra_gguf=None):
    config_class, fields, store, gguf_types = CASES[case]
    config = config_class(**fields)
    model = share_keys_and_values(
        transformers.AutoModelForCausalLM.from_config(config, **PLAIN, dtype=torch.float32)
    ).eval()
    tensors = make_weights(model, store.get("weights_from", case), store.get("grid", 8))
    load_weights(model, tensors)

    folder = OUT / case
    folder.mkdir(parents=True, exist_ok=True)
    write_hf(folder / "hf", model, store)
    model = reload(folder / "hf", model, store, tensors)
    if not store.get("keep_hf", True):
        shutil.rmtree(folder / "hf")
    rows = make_rows(case, config.vocab_size, store.get("rows", (48, 17)))
    logits = logits_of(model, rows)
    wide = copy.deepcopy(model).double()
    if store.get("float64"):
        # The angles of rope are float32 in every precision, as models were trained.
        wide.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq
        with float64_throughout():
            exact = logits_of(wide, rows)
    else:
        exact = logits_of(wide, rows)
    rounded = logits_of(copy.deepcopy(model).bfloat16(), rows)
    sensitivity = check_sensitivity(model, tensors, rows, logits)
    for kind in gguf_types:
        gguf_export.export(
            folder / f"{kind.lower()}.gguf", config, tensors, kind, early=store.get("early", False)
        )
    if extra_gguf and config.rope_parameters.get("rope_type", "dynamic") != "dynamic":
        gguf_export.export(extra_gguf / f"{case.replace('/', '-')}-f32.gguf", config, tensors, "F32")
    # Where float32 itself is far from exact, the golden is the exact one.
    kept = exact if store.get("float64") else logits
    golden = write_golden(folder, case, model, store, rows, kept, exact, logits, rounded, gguf_types)
    print(
        f"{case:16} noise {golden['oracle_noise']:.1e} bf16 {golden['bfloat16_rms']:.1e} largest {golden['largest_logit']:.2f} "
        f"least sensitive {sensitivity[1]} {sensitivity[0]:.2f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one case")
    parser.add_argument("--f32-gguf", type=pathlib.Path, help="also write F32 GGUF files there")
    arguments = parser.parse_args()
    if arguments.f32_gguf:
        arguments.f32_gguf.mkdir(parents=True, exist_ok=True)
    for case in [arguments.only] if arguments.only else CASES:
        make_case(case, arguments.f32_gguf)


if __name__ == "__main__":
    main()
