// Rows that an engine on a GPU computes, what they leave behind, and models to compute them with.
//
//   RowPlan plan{prompt(7, 60), sampled(7, 200)};      // 60 tokens, then up to 200 in all
//   std::vector<RowTrace> traces = play(engine, {plan}, Drive::kLoop);
#pragma once

#include <unistd.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "backends/cuda/cuda_error.h"
#include "base/check.h"
#include "engine_test_access.h"
#include "models/golden.h"
#include "models/model.h"

namespace pianola::cuda {

inline std::size_t free_memory() {
  std::size_t available = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&available, &total), "free memory");
  return available;
}

inline constexpr int kVocab = 256;  // of the llama goldens that are used here

// A tiny llama in one form: "f16", "q8_0", ...
inline std::shared_ptr<const CausalModel> tiny_llama(const std::string& form) {
  for (const ModelGolden& golden : read_all_goldens()) {
    if (!golden.name.starts_with("llama/") || golden.vocab_size != kVocab) continue;
    for (const GoldenFile& file : golden.files) {
      if (file.form == form && file.weights_from.empty()) return CausalModel::open(file.path);
    }
  }
  fail(ErrorCode::kNotFound, "no llama golden in form {}", form);
}

// A tiny T5: "gated" or "relu".
inline std::shared_ptr<const CausalModel> tiny_t5(const std::string& name) {
  return CausalModel::open(golden_folder() / "t5" / name / "hf");
}

// A tiny DeepSeek: "v2", "v2_lite" or "v3".
inline std::shared_ptr<const CausalModel> tiny_deepseek(const std::string& name) {
  return CausalModel::open(golden_folder() / "deepseek" / name / "hf");
}

inline std::vector<TokenId> prompt(int seed, int length, int vocab = kVocab) {
  std::vector<TokenId> tokens;
  std::uint32_t state = static_cast<std::uint32_t>(seed) * 2654435761U + 1;
  for (int i = 0; i < length; ++i) {
    state = state * 1664525U + 1013904223U;
    tokens.push_back(static_cast<TokenId>((state >> 8) % static_cast<std::uint32_t>(vocab)));
  }
  return tokens;
}

// Every way to choose a token, by seed.
inline RowOptions sampled(int seed, int max_length) {
  RowOptions o;
  o.max_length = max_length;
  SamplingParams& s = o.sampling;
  s.seed = static_cast<std::uint64_t>(seed) * 7919 + 1;
  s.logprobs = true;
  switch (seed % 4) {
    case 0:
      s.temperature = 0.8F;
      s.top_k = 40;
      s.top_p = 0.95F;
      break;
    case 1:
      s.temperature = 1.1F;
      s.min_p = 0.02F;
      s.repeat_penalty = 1.1F;
      s.presence_penalty = 0.2F;
      s.frequency_penalty = 0.1F;
      break;
    case 2:  // greedy, kept from repeating itself
      s.frequency_penalty = 0.5F;
      s.penalty_window = -1;
      break;
    default:
      s.temperature = 0.7F;
      s.logit_bias = {{5, 1.5F}, {9, -std::numeric_limits<float>::infinity()}};
  }
  return o;
}

struct RowPlan {
  std::vector<TokenId> prompt;
  RowOptions options;
  std::vector<TokenId> input = {};  // of an encoder, where the model has one
};

// What a row has left behind: its tokens, the bits of their log-probabilities, and the bytes that
// the caches hold of it and of its input.
struct RowTrace {
  std::vector<TokenId> tokens;
  std::vector<std::uint32_t> logprobs;
  RowStatus status = RowStatus::kIdle;
  std::vector<std::byte> cache;  // of every layer: [length, kv_heads, dim] of keys, then of values
};

// Where two rows differ first, or "".
inline std::string difference(const RowTrace& a, const RowTrace& b) {
  for (std::size_t i = 0; i < std::min(a.tokens.size(), b.tokens.size()); ++i) {
    if (a.tokens[i] != b.tokens[i])
      return fmt::format("token {}: {} and {}", i, a.tokens[i], b.tokens[i]);
    if (a.logprobs[i] != b.logprobs[i]) {
      return fmt::format("log-probability {}: {:08x} and {:08x}", i, a.logprobs[i], b.logprobs[i]);
    }
  }
  if (a.tokens.size() != b.tokens.size()) {
    return fmt::format("{} tokens and {}", a.tokens.size(), b.tokens.size());
  }
  if (a.status != b.status) {
    return fmt::format("status {} and {}", static_cast<int>(a.status), static_cast<int>(b.status));
  }
  if (a.cache.size() != b.cache.size()) {
    return fmt::format("{} bytes in the caches and {}", a.cache.size(), b.cache.size());
  }
  const auto at = std::mismatch(a.cache.begin(), a.cache.end(), b.cache.begin()).first;
  return at == a.cache.end() ? "" : fmt::format("byte {} of the caches", at - a.cache.begin());
}

inline std::vector<std::byte> stored(Engine& engine, int row) {
  std::vector<std::byte> bytes;
  for (int layer = 0; layer < EngineTestAccess::layers(engine); ++layer) {
    const LayerCacheView& view =
        EngineTestAccess::impl(engine).caches[static_cast<std::size_t>(layer)];
    if (view.holds == CacheHolds::kStep) continue;
    const bool of_input = view.holds == CacheHolds::kInput;
    const int length = of_input ? engine.input_length(row) : engine.length(row);
    const int slot = of_input ? EngineTestAccess::impl(engine).rows->row(row).input_slot : row;
    const auto add = [&](const std::vector<std::byte>& held, int dim) {
      const auto element = dtype_info(view.dtype).bytes;
      const auto size = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(dim) * element);
      for (int p = 0; p < length; ++p) {
        for (int h = 0; h < view.kv_heads; ++h) {
          const auto at =
              static_cast<std::ptrdiff_t>(cache_index(p, h, view.kv_heads, dim) * element);
          bytes.insert(bytes.end(), held.begin() + at, held.begin() + at + size);
        }
      }
    };
    add(EngineTestAccess::keys(engine, layer, slot), view.key_dim);
    add(EngineTestAccess::values(engine, layer, slot), view.value_dim);
  }
  return bytes;
}

enum class Drive { kStep, kLoop, kStream };

// Every way to execute a Program.
struct Executor {
  const char* name;
  bool eager;
  bool dependent;
  Drive drive;
};

inline constexpr Executor kExecutors[] = {
    {"op by op", true, false, Drive::kStep},
    {"op by op, dependent launch", true, true, Drive::kStep},
    {"a graph a step", false, false, Drive::kStep},
    {"a graph a step, dependent launch", false, true, Drive::kStep},
    {"loop", false, false, Drive::kLoop},
    {"loop, dependent launch", false, true, Drive::kLoop},
    {"streamed loop, dependent launch", false, true, Drive::kStream},
};

inline std::span<const TokenEvent> compute(Engine& engine, Drive drive) {
  if (drive == Drive::kStep) return engine.step();
  return drive == Drive::kLoop ? engine.run(1 << 20) : engine.stream();
}

// Some rows in the engine's first slots, and what becomes of them.
class Session {
 public:
  // Computes the prompts, one at a time: every round of decode() is then a decode step.
  Session(Engine& engine, const std::vector<RowPlan>& plans) : engine_(engine) {
    for (const RowPlan& plan : plans) {
      const int row = engine.open_row(plan.options);
      PIANOLA_CHECK(row == static_cast<int>(traces_.size()), "rows that are not the first");
      traces_.emplace_back();
      if (!plan.input.empty()) engine.encode(row, plan.input);
      engine.append(row, plan.prompt);
      while (engine.length(row) < static_cast<int>(plan.prompt.size())) {
        record(engine.step({&row, 1}));
      }
    }
  }

  void decode(Drive drive) {
    const EngineCounters before = engine_.counters();
    while (engine_.has_work()) record(compute(engine_, drive));
    engine_.step();  // nothing is left to do, but a run that streamed counts its rounds
    rounds_ = engine_.counters().steps - before.steps;
    launches_ = engine_.counters().launches - before.launches;
  }

  std::vector<RowTrace> close() {
    for (int row = 0; row < static_cast<int>(traces_.size()); ++row) {
      RowTrace& trace = traces_[static_cast<std::size_t>(row)];
      trace.status = engine_.status(row);
      trace.cache = stored(engine_, row);
      engine_.close_row(row);
    }
    return std::move(traces_);
  }

  // Of decode().
  std::uint64_t rounds() const { return rounds_; }
  std::uint64_t launches() const { return launches_; }

 private:
  void record(std::span<const TokenEvent> events) {
    for (const TokenEvent& event : events) {
      RowTrace& trace = traces_[static_cast<std::size_t>(event.row)];
      trace.tokens.push_back(event.token);
      trace.logprobs.push_back(std::bit_cast<std::uint32_t>(event.logprob));
    }
  }

  Engine& engine_;
  std::vector<RowTrace> traces_;
  std::uint64_t rounds_ = 0;
  std::uint64_t launches_ = 0;
};

inline std::vector<RowTrace> play(Engine& engine, const std::vector<RowPlan>& plans, Drive drive) {
  Session session(engine, plans);
  session.decode(drive);
  return session.close();
}

// A random llama with so many layers that a round takes a good part of a millisecond, as those of
// real models do: a folder that lives as long as this.
class DeepModel {
 public:
  DeepModel()
      : folder_(std::filesystem::temp_directory_path() /
                fmt::format("pianola_deep_{}", ::getpid())) {
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ / "config.json") << fmt::format(
        R"({{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu",
"bos_token_id":1,"eos_token_id":2,"vocab_size":{},"hidden_size":{},"intermediate_size":{},
"num_hidden_layers":{},"num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,
"max_position_embeddings":4096,"rms_norm_eps":1e-05,"rope_theta":10000.0,
"tie_word_embeddings":true,"attention_bias":false,"mlp_bias":false}})",
        kVocab, kWidth, kInner, kLayers);
    add("model.embed_tokens.weight", kVocab, kWidth);
    add("model.norm.weight", kWidth);
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string at = fmt::format("model.layers.{}.", layer);
      add(at + "input_layernorm.weight", kWidth);
      add(at + "self_attn.q_proj.weight", kWidth, kWidth);
      add(at + "self_attn.k_proj.weight", kWidth / 2, kWidth);
      add(at + "self_attn.v_proj.weight", kWidth / 2, kWidth);
      add(at + "self_attn.o_proj.weight", kWidth, kWidth);
      add(at + "post_attention_layernorm.weight", kWidth);
      add(at + "mlp.gate_proj.weight", kInner, kWidth);
      add(at + "mlp.up_proj.weight", kInner, kWidth);
      add(at + "mlp.down_proj.weight", kWidth, kInner);
    }
    write();
    model_ = CausalModel::open(folder_);
  }
  ~DeepModel() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  DeepModel(const DeepModel&) = delete;
  DeepModel& operator=(const DeepModel&) = delete;

  const std::shared_ptr<const CausalModel>& model() const { return model_; }

 private:
  static constexpr int kWidth = 256;
  static constexpr int kInner = 512;
  static constexpr int kLayers = 64;

  // A matrix of small random numbers, or a vector of ones.
  void add(const std::string& name, int rows, int cols = 0) {
    const std::size_t begin = values_.size() * sizeof(std::uint16_t);
    for (int i = 0; i < rows * std::max(cols, 1); ++i) {
      random_ = random_ * 1664525U + 1013904223U;
      const float value = (static_cast<float>(random_ >> 8) * 0x1p-24F - 0.5F) * 0.2F;
      const float kept = cols == 0 ? 1.0F : value;
      values_.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(kept) >> 16));
    }
    header_ += fmt::format(R"({}"{}":{{"dtype":"BF16","shape":[{}],"data_offsets":[{},{}]}})",
                           header_.empty() ? "" : ",", name,
                           cols == 0 ? fmt::format("{}", rows) : fmt::format("{},{}", rows, cols),
                           begin, values_.size() * sizeof(std::uint16_t));
  }

  void write() {
    std::string header = "{" + header_ + "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const std::uint64_t size = header.size();
    std::ofstream file(folder_ / "model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), sizeof(size));
    file.write(header.data(), static_cast<std::streamsize>(header.size()));
    file.write(reinterpret_cast<const char*>(values_.data()),
               static_cast<std::streamsize>(values_.size() * sizeof(std::uint16_t)));
    PIANOLA_CHECK(file.good(), "writing a random model to {}", folder_.string());
    values_ = {};
  }

  std::filesystem::path folder_;
  std::uint32_t random_ = 12345;
  std::string header_;
  std::vector<std::uint16_t> values_;  // bfloat16
  std::shared_ptr<const CausalModel> model_;
};

}  // namespace pianola::cuda
