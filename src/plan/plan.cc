#include "plan/plan.h"

#include <fmt/format.h>

#include <array>

namespace pianola {

const char* op_name(const Op& op) {
  static constexpr std::array<const char*, std::variant_size_v<Op>> kNames = {
      "rollback",    "embed",     "norm",       "linear",     "qkv",   "query",  "latent_qkv",
      "head_linear", "attention", "short_conv", "delta_rule", "ssm",   "gate",   "gated_norm",
      "gated_mlp",   "route",     "experts",    "lm_head",    "score", "sample", "advance"};
  return kNames[op.index()];
}

const char* activation_name(Activation activation) {
  static constexpr std::array kNames = {"silu", "gelu_tanh", "clamped_swish", "relu"};
  return kNames[static_cast<std::size_t>(activation)];
}

const char* route_score_name(RouteScore score) {
  static constexpr std::array kNames = {"softmax", "softmax_of_chosen", "sigmoid",
                                        "sigmoid_of_chosen"};
  return kNames[static_cast<std::size_t>(score)];
}

const char* step_variant_name(StepVariant variant) {
  switch (variant) {
    case StepVariant::kSample:
      return "sample";
    case StepVariant::kScore:
      return "score";
    case StepVariant::kLogits:
      return "logits";
    case StepVariant::kEncode:
      return "encode";
  }
  return "?";
}

std::string to_string(const StepShape& shape) {
  return fmt::format("tokens={} lanes={} logit_rows={} {}", shape.tokens, shape.lanes,
                     shape.logit_rows, step_variant_name(shape.variant));
}

std::int64_t Plan::rows(BufferId id) const {
  return buffer(id).extent == Extent::kTokens ? shape.tokens : shape.logit_rows;
}

std::size_t Plan::bytes(BufferId id) const {
  return static_cast<std::size_t>(rows(id) * buffer(id).width) * sizeof(float);
}

}  // namespace pianola
