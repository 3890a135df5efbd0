#include "models/tensor_names.h"

#include <fmt/format.h>

#include <array>
#include <string_view>

#include "base/check.h"

namespace pianola {
namespace {

struct Names {
  bool in_layer;
  std::string_view own;
  std::string_view gguf;
  std::string_view hugging_face;
};

// In the order of Part.
constexpr std::array<Names, 83> kNames = {{
    {false, "embed_tokens", "token_embd.weight", "model.embed_tokens.weight"},
    {false, "norm", "output_norm.weight", "model.norm.weight"},
    {false, "lm_head", "output.weight", "lm_head.weight"},
    {false, "rope_factors", "rope_freqs.weight", ""},
    {true, "input_norm", "attn_norm.weight", "input_layernorm.weight"},
    {true, "q_proj", "attn_q.weight", "self_attn.q_proj.weight"},
    {true, "k_proj", "attn_k.weight", "self_attn.k_proj.weight"},
    {true, "v_proj", "attn_v.weight", "self_attn.v_proj.weight"},
    {true, "o_proj", "attn_output.weight", "self_attn.o_proj.weight"},
    {true, "q_bias", "attn_q.bias", "self_attn.q_proj.bias"},
    {true, "k_bias", "attn_k.bias", "self_attn.k_proj.bias"},
    {true, "v_bias", "attn_v.bias", "self_attn.v_proj.bias"},
    {true, "o_bias", "attn_output.bias", "self_attn.o_proj.bias"},
    {true, "q_norm", "attn_q_norm.weight", "self_attn.q_norm.weight"},
    {true, "k_norm", "attn_k_norm.weight", "self_attn.k_norm.weight"},
    {true, "mlp_norm", "ffn_norm.weight", "post_attention_layernorm.weight"},
    {true, "post_attention_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"},
    {true, "mlp_norm", "ffn_norm.weight", "pre_feedforward_layernorm.weight"},
    {true, "post_mlp_norm", "post_ffw_norm.weight", "post_feedforward_layernorm.weight"},
    {true, "gate_proj", "ffn_gate.weight", "mlp.gate_proj.weight"},
    {true, "up_proj", "ffn_up.weight", "mlp.up_proj.weight"},
    {true, "down_proj", "ffn_down.weight", "mlp.down_proj.weight"},
    {true, "gate_bias", "ffn_gate.bias", "mlp.gate_proj.bias"},
    {true, "up_bias", "ffn_up.bias", "mlp.up_proj.bias"},
    {true, "down_bias", "ffn_down.bias", "mlp.down_proj.bias"},
    {true, "sinks", "attn_sinks.weight", "self_attn.sinks"},
    {true, "router", "ffn_gate_inp.weight", "mlp.gate.weight"},
    {true, "router_bias", "ffn_gate_inp.bias", "mlp.router.bias"},
    {true, "experts.gate_proj", "ffn_gate_exps.weight", "mlp.experts.{}.gate_proj.weight"},
    {true, "experts.up_proj", "ffn_up_exps.weight", "mlp.experts.{}.up_proj.weight"},
    {true, "experts.down_proj", "ffn_down_exps.weight", "mlp.experts.{}.down_proj.weight"},
    {true, "experts.gate_bias", "ffn_gate_exps.bias", ""},
    {true, "experts.up_bias", "ffn_up_exps.bias", ""},
    {true, "experts.down_bias", "ffn_down_exps.bias", ""},
    {true, "shared_expert.router", "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"},
    {true, "shared_expert.gate_proj", "ffn_gate_shexp.weight",
     "mlp.shared_expert.gate_proj.weight"},
    {true, "shared_expert.up_proj", "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"},
    {true, "shared_expert.down_proj", "ffn_down_shexp.weight",
     "mlp.shared_expert.down_proj.weight"},
    {true, "router", "", "mlp.router.weight"},
    {true, "experts.gate_up_proj", "", "mlp.experts.gate_up_proj"},
    {true, "experts.down_proj", "", "mlp.experts.down_proj"},
    {true, "experts.gate_up_bias", "", "mlp.experts.gate_up_proj_bias"},
    {true, "experts.down_bias", "", "mlp.experts.down_proj_bias"},
    {true, "attention_gate", "", ""},
    {true, "linear.qkv_proj", "attn_qkv.weight", "linear_attn.in_proj_qkv.weight"},
    {true, "linear.z_proj", "attn_gate.weight", "linear_attn.in_proj_z.weight"},
    {true, "linear.beta_proj", "ssm_beta.weight", "linear_attn.in_proj_b.weight"},
    {true, "linear.decay_proj", "ssm_alpha.weight", "linear_attn.in_proj_a.weight"},
    {true, "linear.qkvz_proj", "ssm_in.weight", "linear_attn.in_proj_qkvz.weight"},
    {true, "linear.beta_decay_proj", "ssm_ba.weight", "linear_attn.in_proj_ba.weight"},
    {true, "linear.conv", "ssm_conv1d.weight", "linear_attn.conv1d.weight"},
    {true, "linear.a_log", "ssm_a", "linear_attn.A_log"},
    {true, "linear.dt_bias", "ssm_dt.bias", "linear_attn.dt_bias"},
    {true, "linear.norm", "ssm_norm.weight", "linear_attn.norm.weight"},
    {true, "linear.out_proj", "ssm_out.weight", "linear_attn.out_proj.weight"},
    {true, "ssm.xbc_proj", "", ""},
    {true, "ssm.z_proj", "", ""},
    {true, "ssm.dt_proj", "", ""},
    {true, "ssm.in_proj", "", "mamba.in_proj.weight"},
    {true, "ssm.conv", "", "mamba.conv1d.weight"},
    {true, "ssm.conv_bias", "", "mamba.conv1d.bias"},
    {true, "ssm.a_log", "", "mamba.A_log"},
    {true, "ssm.dt_bias", "", "mamba.dt_bias"},
    {true, "ssm.skip", "", "mamba.D"},
    {true, "ssm.norm", "", "mamba.norm.weight"},
    {true, "ssm.out_proj", "", "mamba.out_proj.weight"},
    {false, "embed_tokens", "", ""},
    {true, "relative_bias", "", ""},
    {true, "up_proj", "", ""},
    {true, "cross.norm", "", ""},
    {true, "cross.q_proj", "", ""},
    {true, "cross.k_proj", "", ""},
    {true, "cross.v_proj", "", ""},
    {true, "cross.o_proj", "", ""},
    {true, "q_a_proj", "attn_q_a.weight", "self_attn.q_a_proj.weight"},
    {true, "q_a_norm", "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"},
    {true, "q_b_proj", "attn_q_b.weight", "self_attn.q_b_proj.weight"},
    {true, "kv_a_proj", "attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"},
    {true, "kv_a_norm", "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"},
    {true, "kv_b_proj", "attn_kv_b.weight", "self_attn.kv_b_proj.weight"},
    {true, "k_b_proj", "attn_k_b.weight", ""},
    {true, "v_b_proj", "attn_v_b.weight", ""},
    {true, "router_choice_bias", "exp_probs_b.bias", "mlp.gate.e_score_correction_bias"},
}};

// Of a naming of its own; "" where GGUF has none.
struct OtherName {
  TensorNaming naming;
  Part part;
  std::string_view gguf;
  std::string_view hugging_face;
};

constexpr std::array<OtherName, 43> kOtherNames = {{
    {TensorNaming::kBamba, Part::kFinalNorm, "", "model.final_layernorm.weight"},
    {TensorNaming::kBamba, Part::kMlpNorm, "", "pre_ff_layernorm.weight"},
    {TensorNaming::kBamba, Part::kGate, "", "feed_forward.gate_proj.weight"},
    {TensorNaming::kBamba, Part::kUp, "", "feed_forward.up_proj.weight"},
    {TensorNaming::kBamba, Part::kDown, "", "feed_forward.down_proj.weight"},
    {TensorNaming::kBamba, Part::kGateBias, "", "feed_forward.gate_proj.bias"},
    {TensorNaming::kBamba, Part::kUpBias, "", "feed_forward.up_proj.bias"},
    {TensorNaming::kBamba, Part::kDownBias, "", "feed_forward.down_proj.bias"},
    {TensorNaming::kDeepseek, Part::kSharedGate, "ffn_gate_shexp.weight",
     "mlp.shared_experts.gate_proj.weight"},
    {TensorNaming::kDeepseek, Part::kSharedUp, "ffn_up_shexp.weight",
     "mlp.shared_experts.up_proj.weight"},
    {TensorNaming::kDeepseek, Part::kSharedDown, "ffn_down_shexp.weight",
     "mlp.shared_experts.down_proj.weight"},
    {TensorNaming::kT5, Part::kEmbedding, "token_embd.weight", "decoder.embed_tokens.weight"},
    {TensorNaming::kT5, Part::kSharedEmbedding, "", "shared.weight"},
    {TensorNaming::kT5, Part::kFinalNorm, "dec.output_norm.weight",
     "decoder.final_layer_norm.weight"},
    {TensorNaming::kT5, Part::kAttentionNorm, "attn_norm.weight", "layer.0.layer_norm.weight"},
    {TensorNaming::kT5, Part::kQ, "attn_q.weight", "layer.0.SelfAttention.q.weight"},
    {TensorNaming::kT5, Part::kK, "attn_k.weight", "layer.0.SelfAttention.k.weight"},
    {TensorNaming::kT5, Part::kV, "attn_v.weight", "layer.0.SelfAttention.v.weight"},
    {TensorNaming::kT5, Part::kO, "attn_o.weight", "layer.0.SelfAttention.o.weight"},
    {TensorNaming::kT5, Part::kRelativeBias, "attn_rel_b.weight",
     "layer.0.SelfAttention.relative_attention_bias.weight"},
    {TensorNaming::kT5, Part::kCrossNorm, "cross_attn_norm.weight", "layer.1.layer_norm.weight"},
    {TensorNaming::kT5, Part::kCrossQ, "cross_attn_q.weight", "layer.1.EncDecAttention.q.weight"},
    {TensorNaming::kT5, Part::kCrossK, "cross_attn_k.weight", "layer.1.EncDecAttention.k.weight"},
    {TensorNaming::kT5, Part::kCrossV, "cross_attn_v.weight", "layer.1.EncDecAttention.v.weight"},
    {TensorNaming::kT5, Part::kCrossO, "cross_attn_o.weight", "layer.1.EncDecAttention.o.weight"},
    {TensorNaming::kT5, Part::kMlpNorm, "ffn_norm.weight", "layer.2.layer_norm.weight"},
    {TensorNaming::kT5, Part::kGate, "ffn_gate.weight", "layer.2.DenseReluDense.wi_0.weight"},
    {TensorNaming::kT5, Part::kUp, "ffn_up.weight", "layer.2.DenseReluDense.wi_1.weight"},
    {TensorNaming::kT5, Part::kPlainUp, "ffn_up.weight", "layer.2.DenseReluDense.wi.weight"},
    {TensorNaming::kT5, Part::kDown, "ffn_down.weight", "layer.2.DenseReluDense.wo.weight"},
    {TensorNaming::kT5Encoder, Part::kEmbedding, "", "encoder.embed_tokens.weight"},
    {TensorNaming::kT5Encoder, Part::kFinalNorm, "enc.output_norm.weight",
     "encoder.final_layer_norm.weight"},
    {TensorNaming::kT5Encoder, Part::kAttentionNorm, "attn_norm.weight",
     "layer.0.layer_norm.weight"},
    {TensorNaming::kT5Encoder, Part::kQ, "attn_q.weight", "layer.0.SelfAttention.q.weight"},
    {TensorNaming::kT5Encoder, Part::kK, "attn_k.weight", "layer.0.SelfAttention.k.weight"},
    {TensorNaming::kT5Encoder, Part::kV, "attn_v.weight", "layer.0.SelfAttention.v.weight"},
    {TensorNaming::kT5Encoder, Part::kO, "attn_o.weight", "layer.0.SelfAttention.o.weight"},
    {TensorNaming::kT5Encoder, Part::kRelativeBias, "attn_rel_b.weight",
     "layer.0.SelfAttention.relative_attention_bias.weight"},
    {TensorNaming::kT5Encoder, Part::kMlpNorm, "ffn_norm.weight", "layer.1.layer_norm.weight"},
    {TensorNaming::kT5Encoder, Part::kGate, "ffn_gate.weight",
     "layer.1.DenseReluDense.wi_0.weight"},
    {TensorNaming::kT5Encoder, Part::kUp, "ffn_up.weight", "layer.1.DenseReluDense.wi_1.weight"},
    {TensorNaming::kT5Encoder, Part::kPlainUp, "ffn_up.weight", "layer.1.DenseReluDense.wi.weight"},
    {TensorNaming::kT5Encoder, Part::kDown, "ffn_down.weight", "layer.1.DenseReluDense.wo.weight"},
}};

const Names& names_of(Part part) { return kNames[static_cast<std::size_t>(part)]; }

std::string_view name_in(Checkpoint::Format format, Part part, TensorNaming naming) {
  const bool gguf = format == Checkpoint::Format::kGguf;
  for (const OtherName& other : kOtherNames) {
    if (other.naming == naming && other.part == part) {
      return gguf ? other.gguf : other.hugging_face;
    }
  }
  return gguf ? names_of(part).gguf : names_of(part).hugging_face;
}

// What stands in front of the number of a layer.
std::string_view layers_of(Checkpoint::Format format, TensorNaming naming) {
  const bool gguf = format == Checkpoint::Format::kGguf;
  if (naming == TensorNaming::kT5) return gguf ? "dec.blk" : "decoder.block";
  if (naming == TensorNaming::kT5Encoder) return gguf ? "enc.blk" : "encoder.block";
  return gguf ? "blk" : "model.layers";
}

}  // namespace

std::string tensor_name(Checkpoint::Format format, Part part, std::int64_t layer,
                        TensorNaming naming) {
  const std::string_view name = name_in(format, part, naming);
  if (!names_of(part).in_layer || name.empty()) return std::string(name);
  return fmt::format("{}.{}.{}", layers_of(format, naming), layer, name);
}

std::string expert_tensor_name(Checkpoint::Format format, Part part, std::int64_t layer,
                               std::int64_t expert) {
  std::string name = tensor_name(format, part, layer);
  constexpr std::string_view kPlace = "{}";
  const std::size_t at = name.find(kPlace);
  PIANOLA_CHECK(at != std::string::npos, "{} is no name for each expert", name);
  return name.replace(at, kPlace.size(), std::to_string(expert));
}

std::string weight_name(Part part, std::int64_t layer, TensorNaming naming) {
  const Names& names = names_of(part);
  const char* stack = naming == TensorNaming::kT5Encoder ? "encoder." : "";
  return names.in_layer ? fmt::format("{}layers.{}.{}", stack, layer, names.own)
                        : fmt::format("{}{}", stack, names.own);
}

bool is_of_layer(Checkpoint::Format format, std::string_view name, std::int64_t layer) {
  return name.starts_with(fmt::format("{}.{}.", layers_of(format, TensorNaming::kCommon), layer));
}

bool is_ignored_tensor(std::string_view name) {
  constexpr std::string_view kRotaryBuffer = ".rotary_emb.inv_freq";
  // T5 was first written with it, and nothing ever read it.
  constexpr std::string_view kCrossBias = ".EncDecAttention.relative_attention_bias.weight";
  constexpr std::string_view kGgufCrossBias = ".cross_attn_rel_b.weight";
  return name.ends_with(kRotaryBuffer) || name.ends_with(kCrossBias) ||
         name.ends_with(kGgufCrossBias);
}

}  // namespace pianola
