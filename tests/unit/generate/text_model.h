// A tiny checkpoint with a tokenizer of bytes and a chat template, put together in a scratch
// folder.
//
//   const Model& model = text_model();
//   bytes_of("hi");                       // the ids of its bytes: the vocabulary has no merges
#pragma once

#include <unistd.h>

#include <boost/json.hpp>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"
#include "models/golden.h"
#include "pianola/model.h"

namespace pianola::test {

inline constexpr TokenId kBos = 0;
inline constexpr TokenId kStart = 1;
inline constexpr TokenId kEnd = 2;      // also the end of an answer
inline constexpr TokenId kSection = 3;  // a control token of one character
inline constexpr TokenId kClose = 4;    // a control token that others end with
inline constexpr TokenId kTool = 5;     // an added token that is not control
inline constexpr std::array<const char*, 6> kAdded = {"<|bos|>", "<|im_start|>", "<|im_end|>",
                                                      "☃",       "|>",           "<tool>"};
inline constexpr const char* kTemplate =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

// The bytes that occur in UTF-8, 0xF1 to 0xF4 left out: with the added tokens fewer than the 256
// of the model, whose last tokens therefore have no text.
inline bool has_token(int byte) { return byte <= 0xF0 && byte != 0xC0 && byte != 0xC1; }

inline TokenId token_of(unsigned char byte) {
  TokenId id = static_cast<TokenId>(kAdded.size());
  for (int b = 0; b < byte; ++b) id += has_token(b);
  return id;
}

inline std::vector<TokenId> bytes_of(std::string_view text) {
  std::vector<TokenId> ids;
  for (const char c : text) ids.push_back(token_of(static_cast<unsigned char>(c)));
  return ids;
}

// The printable character that stands for a byte in a byte-level vocabulary.
inline std::string symbol_of(int byte) {
  const auto prints = [](int b) {
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
  };
  int shift = 0;
  for (int b = 0; b < byte; ++b) shift += !prints(b);
  std::string symbol;
  append_utf8(symbol, static_cast<char32_t>(prints(byte) ? byte : 256 + shift));
  return symbol;
}

inline void write_tokenizer(const std::filesystem::path& folder) {
  boost::json::object vocab;
  boost::json::array added;
  for (std::size_t i = 0; i < kAdded.size(); ++i) {
    const bool special = static_cast<TokenId>(i) != kTool;
    added.push_back({{"id", i},
                     {"content", kAdded[i]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", special}});
    vocab[kAdded[i]] = i;
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (has_token(byte)) vocab[symbol_of(byte)] = token_of(static_cast<unsigned char>(byte));
  }
  const boost::json::object tokenizer{
      {"version", "1.0"},
      {"added_tokens", added},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", boost::json::array()}}}};
  std::ofstream(folder / "tokenizer.json") << boost::json::serialize(tokenizer);
  const boost::json::object config{
      {"bos_token", kAdded[kBos]}, {"eos_token", kAdded[kEnd]}, {"chat_template", kTemplate}};
  std::ofstream(folder / "tokenizer_config.json") << boost::json::serialize(config);
}

inline Model make_text_model() {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("pianola_text_" + std::to_string(getpid()));
  fs::create_directories(folder);
  for (const auto& entry : fs::directory_iterator(golden_folder() / "llama/tied/hf")) {
    fs::copy_file(entry.path(), folder / entry.path().filename(),
                  fs::copy_options::overwrite_existing);
  }
  write_tokenizer(folder);
  Model model = Model::open(folder.string());
  fs::remove_all(folder);  // what is mapped stays
  return model;
}

inline const Model& text_model() {
  static const Model model = make_text_model();
  return model;
}

}  // namespace pianola::test
