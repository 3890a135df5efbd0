// Reads the goldens below tests/models: what transformers computes with tiny checkpoints.
//
//   for (const ModelGolden& golden : read_all_goldens()) {
//     golden.rows[0].tokens;                 // ids of the first row
//     golden.rows[0].logits(3);              // [vocab_size] after tokens 0..3
//     golden.files;                          // every form of the checkpoint: folders and GGUF
//     files
//   }
//
// Format, written by tools/golden/make_checkpoints.py: golden.json holds the rows' tokens and the
// names of everything else; llama_cpp.json what tools/golden/check_llama_cpp.py measured;
// logits.f32 is little-endian float32 [tokens of all rows, vocab_size], and logits_int8.f32 and
// logits_fp8.f32, of tools/golden/make_cache_types.py, where there are any, are the same with keys
// and values rounded. A case may take the weights of another ("weights_from"): it has only a
// config.json of its own.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/json_reader.h"
#include "base/mapped_file.h"

namespace pianola {

struct GoldenRow {
  std::vector<std::int32_t> tokens;
  std::vector<float> values;  // [tokens, vocab_size]

  std::span<const float> logits(std::size_t position) const {
    const std::size_t vocab = values.size() / tokens.size();
    return std::span(values).subspan(position * vocab, vocab);
  }
};

struct GoldenFile {
  std::string form;            // "hf", "f32", "f16", "q8_0", ...
  std::filesystem::path path;  // a GGUF file, or a folder that holds config.json
  // The folder to take everything but config.json from; empty when `path` is complete.
  std::filesystem::path weights_from;
  // Root mean square of what llama.cpp differs by on this file; 0 when it was not measured.
  double llama_cpp_rms = 0;
};

struct ModelGolden {
  std::string name;         // "llama/yarn"
  double bfloat16_rms = 0;  // root mean square of what transformers in bfloat16 differs by
  // And with activations rounded to 8 bits in blocks of 32; 0 when it was not measured.
  double int8_rms = 0;
  std::int64_t vocab_size = 0;
  int max_seq_len = 0;
  std::vector<GoldenRow> rows;
  std::map<std::string, std::vector<GoldenRow>> rounded_rows;  // by type of cache
  std::vector<GoldenFile> files;
};

inline std::filesystem::path golden_folder() {
  return std::filesystem::path(PIANOLA_SOURCE_DIR) / "tests" / "models";
}

inline std::vector<float> read_floats(const std::filesystem::path& path) {
  const std::string bytes = read_text_file(path, std::size_t{64} << 20);
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

inline std::vector<std::int32_t> read_ids(const boost::json::value& value) {
  std::vector<std::int32_t> ids;
  for (const boost::json::value& id : value.as_array()) ids.push_back(id.to_number<std::int32_t>());
  return ids;
}

inline ModelGolden read_golden(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "golden.json";
  const boost::json::value root = parse_json(read_text_file(path, 1 << 20), path.string());
  ModelGolden golden;
  golden.name = root.at("case").as_string();
  golden.vocab_size = root.at("vocab_size").as_int64();
  golden.bfloat16_rms = root.at("bfloat16_rms").to_number<double>();
  if (const boost::json::value* rms = root.as_object().if_contains("int8_rms")) {
    golden.int8_rms = rms->to_number<double>();
  }
  golden.max_seq_len = root.at("max_seq_len").to_number<int>();
  const auto read_rows = [&](const std::filesystem::path& file) {
    const std::vector<float> logits = read_floats(file);
    auto next = logits.begin();
    std::vector<GoldenRow> rows;
    for (const boost::json::value& ids : root.at("rows").as_array()) {
      GoldenRow& row = rows.emplace_back();
      row.tokens = read_ids(ids);
      const auto size = static_cast<std::ptrdiff_t>(row.tokens.size()) * golden.vocab_size;
      row.values.assign(next, next + size);
      next += size;
    }
    return rows;
  };
  golden.rows = read_rows(folder / root.at("logits").as_string().c_str());
  for (const char* type : {"int8", "fp8"}) {
    const std::filesystem::path file = folder / (std::string("logits_") + type + ".f32");
    if (std::filesystem::exists(file)) golden.rounded_rows[type] = read_rows(file);
  }
  if (root.at("hf").as_bool()) {
    GoldenFile& file = golden.files.emplace_back(GoldenFile{"hf", folder / "hf", {}, 0});
    const boost::json::value& other = root.at("weights_from");
    if (other.is_string()) file.weights_from = golden_folder() / other.as_string().c_str() / "hf";
  }
  const boost::json::value measured =
      parse_json(read_text_file(golden_folder() / "llama_cpp.json", 1 << 20), "llama_cpp.json");
  for (const boost::json::value& name : root.at("gguf").as_array()) {
    const std::filesystem::path file = folder / name.as_string().c_str();
    const boost::json::value* rms =
        measured.at("rms").as_object().if_contains(golden.name + "/" + file.filename().string());
    golden.files.push_back({file.stem().string(), file, {}, rms ? rms->to_number<double>() : 0.0});
  }
  return golden;
}

// All of them, by name.
inline std::vector<ModelGolden> read_all_goldens() {
  std::vector<ModelGolden> goldens;
  for (const char* name :
       {"gemma3/mixed",   "gpt_oss/mixed",    "gpt_oss/bfloat16",   "qwen3_moe/all",
        "qwen3_moe/some", "qwen2_moe/shared", "qwen2_moe/q8",       "qwen2_moe/q4",
        "llama/untied",   "llama/tied",       "llama/bias",         "llama/linear",
        "llama/dynamic",  "llama/yarn",       "llama/llama3",       "llama/q4",
        "llama/smollm2",  "llama/heads64",    "mistral/full",       "mistral/window",
        "qwen2/tied",     "qwen2/window",     "qwen3/tied",         "qwen3/heads128",
        "qwen3_5/hybrid", "qwen3_5/gguf",     "qwen3_next/experts", "qwen3_next/gguf",
        "bamba/hybrid",   "bamba/limits",     "gemma3/shared",      "deepseek/v2_lite",
        "deepseek/v2",    "deepseek/v3",      "deepseek/q8"}) {
    goldens.push_back(read_golden(golden_folder() / name));
  }
  return goldens;
}

// A path that can be opened: the file itself, or a folder below `scratch` put together from two.
inline std::filesystem::path prepare_golden_file(const GoldenFile& file,
                                                 const std::filesystem::path& scratch) {
  if (file.weights_from.empty()) return file.path;
  std::filesystem::create_directories(scratch);
  const auto replace = std::filesystem::copy_options::overwrite_existing;
  for (const auto& entry : std::filesystem::directory_iterator(file.weights_from)) {
    std::filesystem::copy_file(entry.path(), scratch / entry.path().filename(), replace);
  }
  std::filesystem::copy_file(file.path / "config.json", scratch / "config.json", replace);
  return scratch;
}

// log softmax of logits, at one place.
inline double log_probability(std::span<const float> logits, std::int32_t token) {
  double largest = -INFINITY;
  for (const float logit : logits) largest = std::fmax(largest, logit);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return logits[static_cast<std::size_t>(token)] - largest - std::log(sum);
}

inline std::int32_t best_token(std::span<const float> logits) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < logits.size(); ++i) {
    if (logits[i] > logits[best]) best = i;
  }
  return static_cast<std::int32_t>(best);
}

}  // namespace pianola
