"""Writes a tiny transformers checkpoint as GGUF, with llama.cpp's conventions.

Tensor names blk.N.*, rows of q and k interleaved for architecture llama, rope_freqs.weight for the
llama3 scaling, matrices in the asked type, vectors, routers and the taps of convolutions in F32, no
vocabulary.
"""

import math

import gguf
import numpy as np

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "nextn.eh_proj": "nextn.eh_proj",
    "nextn.enorm": "nextn.enorm",
    "nextn.hnorm": "nextn.hnorm",
    "nextn.shared_head_norm": "nextn.shared_head_norm",
}
# Parameters that are no weight or bias of a module.
PARAMETER_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
ARCHITECTURES = {
    "mistral": "llama",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
}
# Their norm before the MLP is named by its place.
NORM_BY_PLACE = ("gpt-oss", "qwen3next", "qwen35")
# Files of these are written with a layer of a draft.
WITH_DRAFT = ("qwen35",)
# Matrices that are written in F32, whatever the type of the others.
KEPT_WIDE = (".bias", ".mlp.gate.weight", ".mlp.router.weight", ".conv1d.weight")
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name, arch):
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    if rest in PARAMETER_NAMES:
        return f"blk.{layer}.{PARAMETER_NAMES[rest]}"
    stem, suffix = rest.rsplit(".", 1)
    if stem == "post_attention_layernorm" and arch in NORM_BY_PLACE:
        return f"blk.{layer}.post_attention_norm.{suffix}"
    return f"blk.{layer}.{LAYER_NAMES[stem]}.{suffix}"


def interleave_rows(weight, heads):
    """Row i of the first half of a head and row i of the second become neighbours."""
    width = weight.shape[0] // heads
    return (
        weight.reshape(heads, 2, width // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def split_experts(tensors, arch):
    """Gate and up as tensors [experts, rows, cols] of their own."""
    out = {}
    for name, array in tensors.items():
        stem = name.removesuffix("_bias")
        suffix = "weight" if stem == name else "bias"
        if ".mlp.experts." not in name:
            out[name] = array
            continue
        if arch == "gpt-oss" and suffix == "weight":
            array = array.swapaxes(1, 2)  # [experts, rows, cols]
        if not stem.endswith("gate_up_proj"):
            out[f"{stem}.{suffix}"] = array
            continue
        if arch == "gpt-oss":
            gate, up = array[:, ::2], array[:, 1::2]
        else:
            gate, up = np.split(array, 2, axis=1)
        out[f"{stem.replace('gate_up', 'gate')}.{suffix}"] = gate
        out[f"{stem.replace('gate_up', 'up')}.{suffix}"] = up
    return out


def split_latents(tensors, config):
    """Keys and values of a head as tensors of their own, the keys transposed."""
    out = {}
    for name, array in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            out[name] = array
            continue
        heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys = heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
        out[name.replace("kv_b_proj", "k_b_proj")] = keys
        out[name.replace("kv_b_proj", "v_b_proj")] = heads[:, config.qk_nope_head_dim :]
    return out


def add_latent_keys(writer, config, early):
    """`early`: as files were before llama.cpp kept latents in its cache."""
    rank, turned = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(turned)
    if early:
        writer.add_key_length(config.qk_nope_head_dim + turned)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_key_length(rank + turned)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + turned)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    v3 = config.model_type == "deepseek_v3"
    writer.add_expert_weights_norm(v3 and config.norm_topk_prob)
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SIGMOID if v3 else gguf.ExpertGatingFuncType.SOFTMAX
    )
    if v3:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def split_qkvz(array, config):
    """Queries, keys and values of all heads, and their gates, from what lies side by side in the
    rows of each key head."""
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    values *= config.linear_num_value_heads // config.linear_num_key_heads
    heads = array.reshape(config.linear_num_key_heads, -1, array.shape[-1])
    parts = np.split(heads, np.cumsum([keys, keys, values]), axis=1)
    q, k, v, z = (part.reshape(-1, array.shape[-1]) for part in parts)
    return np.concatenate([q, k, v]), z


def spread_value_heads(array, config, axis=0):
    """Value head i of key head j, which lies at j * count + i, comes to i * key heads + j."""
    keys = config.linear_num_key_heads
    count = config.linear_num_value_heads // keys
    shape = array.shape
    width = shape[axis] // (keys * count)
    apart = array.reshape(*shape[:axis], keys, count, width, *shape[axis + 1 :])
    return apart.swapaxes(axis, axis + 1).reshape(shape)


def convert_linear_attention(tensors, config, arch):
    out = {}
    values_begin = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    for name, array in tensors.items():
        kind = name.rpartition("linear_attn.")[2]
        if name.endswith("norm.weight") and kind != "norm.weight":
            array = array + 1
        elif kind == "A_log":
            array = -np.exp(array)
        elif kind == "conv1d.weight":
            array = array[:, 0]
        if arch == "qwen35" and kind in ("in_proj_qkv.weight", "conv1d.weight"):
            values = spread_value_heads(array[values_begin:], config)
            array = np.concatenate([array[:values_begin], values])
        elif arch == "qwen35" and kind == "out_proj.weight":
            array = spread_value_heads(array, config, axis=1)
        elif arch == "qwen35" and kind != name and kind != "norm.weight":
            array = spread_value_heads(array, config)
        if kind == "in_proj_qkvz.weight":
            qkv, z = split_qkvz(array, config)
            out[name.replace("qkvz", "qkv")], out[name.replace("qkvz", "z")] = qkv, z
        else:
            out[name] = array
    return out


def add_draft_layer(tensors, config):
    """A layer of a draft behind the others, as the published files have it: one that attends, and
    what joins it to the model. No logit depends on it."""
    source = max(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")
    draft = config.num_hidden_layers
    prefix, own = f"model.layers.{source}.", f"model.layers.{draft}."
    copies = {own + n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}
    width = config.hidden_size
    joints = {"eh_proj": np.zeros((width, 2 * width), dtype=np.float32)}
    joints |= {n: np.ones(width, dtype=np.float32) for n in ("enorm", "hnorm", "shared_head_norm")}
    return {**tensors, **copies, **{f"{own}nextn.{n}.weight": a for n, a in joints.items()}}


def add_linear_attention_keys(writer, config, arch):
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    kinds = [kind == "linear_attention" for kind in config.layer_types]
    if arch in WITH_DRAFT:
        kinds.append(False)
        writer.add_nextn_predict_layers(1)
    writer.add_array(f"{arch}.attention.recurrent_layers", kinds)
    writer.add_full_attention_interval(4)
    turned = config.head_dim * config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(turned))
    if arch == "qwen35":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def llama3_factors(rope, head_dim):
    """What the inverse frequencies are divided by."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        original = rope["original_max_position_embeddings"]
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            keep = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - keep) / factor + keep))
    return np.array(factors, dtype=np.float32)


def export(path, config, tensors, matrix_type, early=False):
    """config: a transformers config; tensors: name to float32 array; matrix_type: "F32", "Q8_0", ...;
    early: in the first form of its architecture."""
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(f"pianola golden {config.model_type}")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + (arch in WITH_DRAFT))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    latent = arch == "deepseek2"
    writer.add_head_count_kv(1 if latent and not early else config.num_key_value_heads)
    if latent:
        add_latent_keys(writer, config, early)
        tensors = {
            name.replace("correction_bias", "correction.bias"): array
            for name, array in split_experts(tensors, arch).items()
        }
        if not early:
            tensors = split_latents(tensors, config)
    elif head_dim * config.num_attention_heads != config.hidden_size or "qwen3" in arch:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "llama":
        writer.add_rope_dimension_count(head_dim)
    if arch in ("qwen3next", "qwen35"):
        add_linear_attention_keys(writer, config, arch)
        tensors = convert_linear_attention(tensors, config, arch)
        if arch in WITH_DRAFT:
            tensors = add_draft_layer(tensors, config)
    if arch in ("gpt-oss", "qwen2moe", "qwen3moe", "qwen3next"):
        named = "num_experts" if hasattr(config, "num_experts") else "num_local_experts"
        writer.add_expert_count(getattr(config, named))
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", config.intermediate_size)
        )
        tensors = split_experts(tensors, arch)
    if arch in ("qwen2moe", "qwen3next"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "dynamic":
        raise ValueError("GGUF has no dynamic rope")
    writer.add_tokenizer_model("no_vocab")
    quant = gguf.GGMLQuantizationType[matrix_type]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if matrix_type == "F32" else f"MOSTLY_{matrix_type}"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    for name, array in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            array = interleave_rows(array, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            array = interleave_rows(array, config.num_key_value_heads)
        if name.endswith(".mlp.shared_expert_gate.weight"):
            array = array[0]  # of one row: a vector
        array = np.ascontiguousarray(array, dtype=np.float32)
        if array.ndim == 1 or name.endswith(KEPT_WIDE):
            writer.add_tensor(gguf_name(name, arch), array)
            continue
        # Transposed weights do not lie on the grid of a block format.
        blocks = matrix_type.startswith("Q") and ".k_b_proj." in name
        kind = gguf.GGMLQuantizationType.F16 if blocks else quant
        data = gguf.quants.quantize(array, kind)
        if not np.array_equal(gguf.quants.dequantize(data, kind), array):
            raise ValueError(f"{name}: {kind.name} does not hold these weights exactly")
        writer.add_tensor(gguf_name(name, arch), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
