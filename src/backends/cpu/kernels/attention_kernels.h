// What one instruction set provides for attention: the arithmetic of one block of 64 positions for
// some rows (a row is one query head of one token), and the two steps that join partial results.
// attention.cc drives them; nobody else needs this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace pianola::cpu {

inline constexpr int kBlockPositions = 64;

// A row accumulates its weighted values and, behind them, the sum of its weights, spread over lanes
// that are added up at the very end: [value_dim + kSumLanes].
inline constexpr int kSumLanes = 16;

// One block for rows that share its keys and values. A row attends to its positions from skips[row]
// (0 without skips) up to counts[row]; one whose count is 0 is left alone; nothing at or beyond
// `max_count` is read, and no value that a row does not attend to reaches it. Scores are in units
// of log 2: queries come multiplied by log2(e).
struct AttentionBlock {
  DType dtype = DType::kF32;     // of keys and values
  const void* keys = nullptr;    // [64, head_dim]
  const void* values = nullptr;  // [64, head_dim], of which the first value_dim are taken
  // [64], of int8: what elements are multiplied by; else null.
  const float* key_scales = nullptr;
  const float* value_scales = nullptr;
  // Bytes from this block to the one that is read next, which is fetched meanwhile; 0: none.
  std::ptrdiff_t ahead = 0;
  int head_dim = 0;
  int value_dim = 0;
  int rows = 0;
  int max_count = 0;            // the largest of counts
  const int* counts = nullptr;  // [rows]: where the row's positions end; 0: it has none here
  const int* skips = nullptr;   // [rows]: where they begin, below the count, or null: at 0
  // [rows, 64] added to scores, in units of log 2 like them; null: nothing is.
  const float* biases = nullptr;
  const float* queries = nullptr;  // [rows, head_dim], scale applied
  float* m = nullptr;              // [rows] the largest score so far
  float* acc = nullptr;            // [rows, value_dim + kSumLanes] relative to 2^m
  float* scores = nullptr;         // [rows, 64], work space
  float* tile = nullptr;           // [head_dim, 64], work space
};

struct AttentionKernels {
  int lanes = 0;  // head_dim and value_dim must be multiples
  void (*block)(const AttentionBlock& block) = nullptr;
  // Joins one row's split to the splits before it.
  void (*merge)(int value_dim, float m, const float* acc, float* total_m,
                float* total_acc) = nullptr;
  // output [value_dim] = weighted values / sum of weights
  void (*finish)(int value_dim, const float* acc, float* output) = nullptr;
  void (*scale)(int n, const float* x, float scale, float* y) = nullptr;
  // n elements, a multiple of `lanes`, to f32, f16 or bf16.
  void (*store)(DType dtype, int n, const float* x, void* y) = nullptr;
  // To int8, with the scale as layer_cache.h says.
  void (*store_int8)(int n, const float* x, std::int8_t* y, float* scale) = nullptr;
};

const AttentionKernels& attention_kernels_portable();
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();

}  // namespace pianola::cpu
