// The products behind experts.h: what a launch is told, and the launches by form of the weights,
// one translation unit each.
#pragma once

#include "backends/cuda/kernels/experts.h"

namespace pianola::cuda::products {

enum class ExpertProduct {
  kGated,  // hidden[route] = act(gate, up), as operand words
  kPart,   // parts[route] = W x + bias
  kSum,    // a single token: out = the sum over its experts, + residual
};

// Routes [first, first + count) of the sorted ones, all of one expert.
struct Segment {
  int expert = 0;
  int first = 0;
  int count = 0;
  int unused = 0;
};

struct ExpertMatrix {
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
  const float* bias = nullptr;
  std::int64_t stride = 0;
};

struct ExpertParams {
  ExpertMatrix matrix[2];
  int rows = 0;
  int cols = 0;
  int top_k = 1;
  int steps = 0;          // 16-byte loads along a row, padding included
  int slices = 1;         // warps that share the columns of a tile: 1, 2, 4 or 8
  int code_row = 0;       // bytes
  int scale_row = 0;      // bytes
  int segment_units = 0;  // units of one segment, or of the whole launch for kSum
  Activation activation = Activation::kSilu;
  const std::int32_t* count = nullptr;  // live tokens of the step
  int first = 0;                        // token of the step that token 0 of this launch is
  const float* routing = nullptr;       // [tokens, 2 * top_k]

  // Activations as operand words, four columns each in order, [rows, cols / 4].
  const uint4* words = nullptr;
  bool words_by_route = false;         // else by token
  const float* inverse_rms = nullptr;  // [tokens], or null: not normed

  const std::int32_t* segment_count = nullptr;
  const Segment* segments = nullptr;
  const std::int32_t* routes = nullptr;  // sorted by expert

  // Of a direct launch: the one token's activations, not prepared by anyone.
  const float* in = nullptr;
  const float* norm = nullptr;
  float eps = 0;

  std::uint16_t* hidden = nullptr;  // words of [routes, rows]
  float* parts = nullptr;           // [routes, rows]
  const float* residual = nullptr;  // [rows]
  float* out = nullptr;             // [rows]
};

// A direct launch serves a single token, whose routes are its ranks: nothing was sorted. Others
// have segments of up to 8 * groups routes, groups 1 or 4.
struct ExpertLaunch {
  ExpertProduct product = ExpertProduct::kPart;
  int groups = 1;
  bool direct = false;
};

inline constexpr int kMostDirectRoutes = 32;
// Activations that a block of a direct launch holds.
inline constexpr std::size_t kMostDirectBytes = 96 * 1024;

void experts_float(const PackedWeight& form, const ExpertParams& p, const ExpertLaunch& kind,
                   const Launch& launch);
void experts_bf16(const PackedWeight& form, const ExpertParams& p, const ExpertLaunch& kind,
                  const Launch& launch);
void experts_int4(const PackedWeight& form, const ExpertParams& p, const ExpertLaunch& kind,
                  const Launch& launch);
void experts_int8(const PackedWeight& form, const ExpertParams& p, const ExpertLaunch& kind,
                  const Launch& launch);

// Sorts routes by expert into segments and prepares the normed activations of every token.
struct ExpertOrder {
  const float* routing = nullptr;
  const std::int32_t* count = nullptr;
  int first = 0;
  int tokens = 1;
  int top_k = 1;
  int experts = 1;
  int segment_routes = 8;  // the most of one segment
  std::int32_t* segment_count = nullptr;
  Segment* segments = nullptr;
  std::int32_t* routes = nullptr;

  const float* in = nullptr;  // [tokens, cols]
  const float* norm = nullptr;
  float eps = 0;
  int cols = 0;
  uint4* words = nullptr;
  float* inverse_rms = nullptr;
};
void order_experts(const ExpertOrder& order, Codes codes, const Launch& launch);

// hidden = act(gate, up) where gate and up were apart, biases included; [tokens * top_k, width].
struct ActivateArgs {
  const float* gate = nullptr;
  const float* up = nullptr;
  const float* routing = nullptr;
  const std::int32_t* count = nullptr;
  int first = 0;
  Activation activation = Activation::kSilu;
  std::uint16_t* hidden = nullptr;
  int width = 0;
  int top_k = 1;
  int tokens = 1;
};
void activate_experts(const ActivateArgs& args, const Launch& launch);

}  // namespace pianola::cuda::products
