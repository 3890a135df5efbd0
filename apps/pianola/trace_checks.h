// How the checks of `pianola check` are judged: what rows have said, compared bit for bit or within
// a bar.
//
//   ModelCheck check = compare_bits("a run of rounds = its steps", by_run, by_steps);
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model_checks.h"

namespace pianola::cli {

// What a row has said.
struct Trace {
  std::vector<std::int32_t> tokens;
  std::vector<float> logprobs;
  bool finite = true;
};

ModelCheck compare_bits(std::string name, std::span<const Trace> got, std::span<const Trace> want);

// The largest difference of log-probabilities, which may be up to `bar`.
ModelCheck compare_within(std::string name, std::span<const float> got, std::span<const float> want,
                          double bar);

// How far a log-probability may be from that of another backend, which has the same weights and the
// same type of cache: what is left is how activations are rounded on their way into a product.
//   floats, and cuda      f32, or 16 bits of mantissa
//   bf16 on the cpu       8 bits of mantissa, as transformers in bfloat16
//   blocks on the cpu     8 bits in blocks of 32 with a scale, as llama.cpp
double bar_of(std::string_view backend, const std::string& weight_types);

// Of prompts that cuda computes with cuBLASLt: activations in bfloat16.
double chunk_bar(std::string_view backend);

}  // namespace pianola::cli
