#include "engine/support_matrix.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>

#include "base/check.h"
#include "cache/cache_type.h"
#include "engine/engine_layout.h"

namespace pianola {
namespace {

constexpr const char* kBackends[] = {"reference", "cpu", "cuda"};
// More tokens than any decode step, so that a chunk is recorded.
constexpr int kChunk = 128;
constexpr int kLength = 256;

// What a caller can ask for, and the kind of step that it takes. Verbs without one move numbers in
// the host's tables, or copy the bytes of a slot.
enum class Takes : std::uint8_t {
  kNothing,
  kChunkStep,
  kDecodeStep,
  kManyDecodeSteps,
  kScoreStep,
  kLogitsStep,
  kEncodeStep,  // of a model with an encoder
};
struct Verb {
  const char* name;
  Takes takes;
};
constexpr Verb kVerbs[] = {{"open_row, append", Takes::kNothing},
                           {"encode", Takes::kEncodeStep},
                           {"keep_first, drop_last, reset", Takes::kNothing},
                           {"rollback, with the next step", Takes::kDecodeStep},
                           {"fork, swap, snapshot, restore", Takes::kNothing},
                           {"step: a prompt", Takes::kChunkStep},
                           {"step: a token a row", Takes::kDecodeStep},
                           {"run, stream", Takes::kManyDecodeSteps},
                           {"score", Takes::kScoreStep},
                           {"logits", Takes::kLogitsStep}};

// A backend, or why there is none.
struct Candidate {
  std::string name;
  std::unique_ptr<Backend> backend;
  std::string refused;
};

std::vector<Candidate> candidates(const EngineOptions& options) {
  std::vector<Candidate> all;
  for (const char* name : kBackends) {
    Candidate& c = all.emplace_back(Candidate{name, nullptr, ""});
    try {
      const bool cpu = c.name == "cpu";
      c.backend = make_backend(
          name, {.threads = 1, .isa = cpu ? options.isa : "", .device = options.device});
    } catch (const Error& error) {
      c.refused = error.what();
    }
  }
  return all;
}

bool has_step(const std::vector<Plan>& plans, Takes takes) {
  return std::any_of(plans.begin(), plans.end(), [takes](const Plan& plan) {
    switch (takes) {
      case Takes::kNothing:
        return true;
      case Takes::kChunkStep:
        return plan.shape.variant == StepVariant::kSample && plan.shape.tokens > plan.shape.lanes;
      case Takes::kDecodeStep:
      case Takes::kManyDecodeSteps:
        return plan.shape.feeds_itself() && plan.shape.lanes > 1;
      case Takes::kScoreStep:
        return plan.shape.variant == StepVariant::kScore;
      case Takes::kLogitsStep:
        return plan.shape.variant == StepVariant::kLogits;
      case Takes::kEncodeStep:
        return plan.shape.variant == StepVariant::kEncode;
    }
    return false;
  });
}

// Why an engine that could do this would not be made; nothing when it would.
std::optional<std::string> refusal(const CausalModel& model, EngineOptions options,
                                   const Backend& backend, Takes takes) {
  options.score = takes == Takes::kScoreStep;
  options.logits = takes == Takes::kLogitsStep;
  if (takes == Takes::kScoreStep && model.config().encoder.num_layers > 0) {
    return "score() has no input for the encoder";
  }
  try {
    const EngineLayout layout(model, options, backend);
    if (has_step(layout.plans(), takes)) return std::nullopt;
    return "no such step is recorded";
  } catch (const Error& error) {
    return error.what();
  }
}

const char* how_it_runs(bool on_gpu, bool captured, Takes takes) {
  if (takes == Takes::kNothing) return "between rounds, on the host";
  if (!on_gpu) return "the host walks the ops";
  if (!captured) return "the host launches op by op";
  return takes == Takes::kManyDecodeSteps ? "one graph for all rounds" : "one graph a step";
}

struct LayerKind {
  std::string name;
  int max_seq_len = 0;
  bool exact_rollback = false;
};

// The kinds of layer that the model has: a window counts as one only beyond its size, and state
// layers once for each way to go back.
std::vector<LayerKind> layer_kinds(const ModelConfig& config) {
  const std::int64_t longest = std::min<std::int64_t>(kLength, config.max_position_embeddings);
  const std::optional<std::int64_t> smallest = config.smallest_window();
  if (!config.state.mixers.empty()) {
    const int length = static_cast<int>(longest);
    return {{"attention and state layers, compact rollback", length, false},
            {"attention and state layers, exact rollback", length, true}};
  }
  if (config.encoder.num_layers > 0) {
    return {{"full attention, and cross attention", static_cast<int>(longest)}};
  }
  if (config.latent.present()) {
    return {{"multi-head latent attention", static_cast<int>(longest)}};
  }
  if (!smallest) return {{"full attention", static_cast<int>(longest)}};
  return {{"full attention", static_cast<int>(std::min(longest, *smallest))},
          {"sliding window", static_cast<int>(*smallest + 1)}};
}

}  // namespace

std::vector<SupportEntry> support_matrix(const CausalModel& model, const EngineOptions& options) {
  std::vector<SupportEntry> entries;
  const std::vector<Candidate> backends = candidates(options);
  for (const LayerKind& kind : layer_kinds(model.config())) {
    for (const DType cache_type : kCacheTypes) {
      for (const Verb& verb : kVerbs) {
        if (verb.takes == Takes::kEncodeStep && model.config().encoder.num_layers == 0) continue;
        for (const Candidate& candidate : backends) {
          const bool on_gpu = candidate.name == "cuda";
          std::optional<std::string> refused = candidate.refused;
          if (candidate.backend) {
            refused = refusal(model,
                              {.max_seq_len = kind.max_seq_len,
                               .slots = 2,
                               .chunk = kChunk,
                               .cache_type = dtype_name(cache_type),
                               .exact_rollback = kind.exact_rollback,
                               .memory_limit = std::numeric_limits<std::size_t>::max()},
                              *candidate.backend, verb.takes);
          }
          for (const bool captured : {false, true}) {
            SupportEntry& e = entries.emplace_back(SupportEntry{
                kind.name, dtype_name(cache_type), verb.name, candidate.name, captured, "", ""});
            if (refused) {
              e.refused = *refused;
            } else if (captured && !on_gpu) {
              e.refused = "there are no graphs on a CPU: the recorded Plan is walked by the host";
            } else {
              e.how = how_it_runs(on_gpu, captured, verb.takes);
            }
          }
        }
      }
    }
  }
  return entries;
}

std::vector<WeightSupport> weight_support(const EngineOptions& options) {
  std::vector<WeightSupport> all;
  const std::vector<Candidate> backends = candidates(options);
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kQ4_0, DType::kQ4_1, DType::kQ5_0,
        DType::kQ5_1, DType::kQ8_0, DType::kQ4_K, DType::kQ5_K, DType::kQ6_K}) {
    for (const Candidate& candidate : backends) {
      WeightSupport& w = all.emplace_back(WeightSupport{dtype, candidate.name, candidate.refused});
      if (!candidate.backend) continue;
      try {
        candidate.backend->weight_layout({.name = "a matrix",
                                          .role = WeightRole::kLinear,
                                          .dtype = dtype,
                                          .rows = 256,
                                          .cols = 256});
      } catch (const Error& error) {
        w.refused = error.what();
      }
    }
  }
  return all;
}

}  // namespace pianola
