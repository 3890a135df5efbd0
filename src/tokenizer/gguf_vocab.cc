#include "tokenizer/gguf_vocab.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/utf8.h"
#include "tokenizer/score_merges.h"
#include "tokenizer/tokenizer_data.h"

namespace pianola {
namespace {

constexpr const char* kPrefix = "tokenizer.ggml.";

std::string key(std::string_view name) { return std::string(kPrefix).append(name); }

void read_tokens(const Metadata& metadata, TokenizerData& data) {
  const auto* tokens = metadata.find_strings(key("tokens"));
  if (!tokens || tokens->empty()) {
    fail(ErrorCode::kInvalidModel, "tokenizer.ggml.tokens: missing or empty");
  }
  const std::size_t count = tokens->size();
  if (count > static_cast<std::size_t>(kMaxVocabulary)) {
    fail(ErrorCode::kInvalidModel, "tokenizer.ggml.tokens: {} tokens, at most {}", count,
         kMaxVocabulary);
  }
  const auto* types = metadata.find_ints(key("token_type"));
  if (types && types->size() != count) {
    fail(ErrorCode::kInvalidModel, "tokenizer.ggml.token_type: {} entries for {} tokens",
         types->size(), count);
  }
  data.vocabulary.resize(static_cast<std::int32_t>(count));
  for (std::size_t i = 0; i < count; ++i) {
    const std::string& text = (*tokens)[i];
    const std::int64_t type = types ? (*types)[i] : 1;
    if (text.size() > kMaxTokenBytes) {
      fail(ErrorCode::kInvalidModel, "tokenizer.ggml.tokens: token {} has {} bytes, at most {}", i,
           text.size(), kMaxTokenBytes);
    }
    // Type 0 ("undefined") is written by some converters for ordinary tokens.
    if (type < 0 || type > 6) {
      fail(ErrorCode::kInvalidModel, "tokenizer.ggml.token_type: {} for token {}, expected 1 to 6",
           type, i);
    }
    data.vocabulary.set(static_cast<TokenId>(i), text,
                        type == 0 ? TokenKind::kNormal : static_cast<TokenKind>(type));
  }
  data.vocabulary.build_index();
}

std::optional<TokenId> read_id(const Metadata& metadata, const Vocabulary& vocabulary,
                               std::string_view name) {
  const std::optional<std::int64_t> id = metadata.find_int(key(name));
  // Writers say "none" as -1, in either width.
  if (!id || *id == -1 || *id == 0xFFFFFFFF) return std::nullopt;
  if (*id < 0 || *id >= vocabulary.size()) {
    fail(ErrorCode::kInvalidModel, "{}{}: {}, expected 0 to {}", kPrefix, name, *id,
         vocabulary.size() - 1);
  }
  return static_cast<TokenId>(*id);
}

void read_special_ids(const Metadata& metadata, TokenizerData& data) {
  data.bos = read_id(metadata, data.vocabulary, "bos_token_id");
  data.eos = read_id(metadata, data.vocabulary, "eos_token_id");
  data.unk = read_id(metadata, data.vocabulary, "unknown_token_id");
  data.pad = read_id(metadata, data.vocabulary, "padding_token_id");
  for (const auto id : {data.eos, read_id(metadata, data.vocabulary, "eot_token_id"),
                        read_id(metadata, data.vocabulary, "eom_token_id")}) {
    if (id) data.eog.push_back(*id);
  }
}

void read_surroundings(const Metadata& metadata, bool bos_default, bool eos_default,
                       TokenizerData& data) {
  const bool add_bos = metadata.find_bool(key("add_bos_token")).value_or(bos_default);
  const bool add_eos = metadata.find_bool(key("add_eos_token")).value_or(eos_default);
  if (add_bos && !data.bos) {
    fail(ErrorCode::kInvalidModel, "tokenizer.ggml.bos_token_id: missing, and texts start with it");
  }
  if (add_eos && !data.eos) {
    fail(ErrorCode::kInvalidModel, "tokenizer.ggml.eos_token_id: missing, and texts end with it");
  }
  if (add_bos) data.prefix.push_back(*data.bos);
  if (add_eos) data.suffix.push_back(*data.eos);
}

void add_added_tokens(TokenizerData& data) {
  const Vocabulary& vocabulary = data.vocabulary;
  std::size_t total = 0;
  for (TokenId id = 0; id < vocabulary.size(); ++id) {
    const std::string_view text = vocabulary.text(id);
    const bool special = vocabulary.is_control(id);
    if ((!special && vocabulary.kind(id) != TokenKind::kUserDefined) || text.empty()) continue;
    total += text.size();
    if (text.size() > kMaxAddedTokenBytes || total > (std::size_t{1} << 24)) {
      fail(ErrorCode::kInvalidModel,
           "tokenizer.ggml.tokens: control or user-defined token {} has {} bytes, at most {} each "
           "and 16 MiB together",
           id, text.size(), kMaxAddedTokenBytes);
    }
    data.raw_added.add({.content = std::string(text), .id = id, .special = special});
  }
}

void read_merges(const Metadata& metadata, TokenizerData& data) {
  const auto* merges = metadata.find_strings(key("merges"));
  if (!merges) fail(ErrorCode::kInvalidModel, "tokenizer.ggml.merges: missing");
  if (merges->size() > kMaxMerges) {
    fail(ErrorCode::kInvalidModel, "tokenizer.ggml.merges: {} merges, at most {}", merges->size(),
         kMaxMerges);
  }
  data.bpe.reserve_merges(merges->size());
  std::string joined;
  for (std::size_t i = 0; i < merges->size(); ++i) {
    const std::string_view merge = (*merges)[i];
    const std::size_t space = merge.find(' ', 1);
    if (merge.empty() || space == std::string_view::npos || space + 1 == merge.size()) {
      fail(ErrorCode::kInvalidModel, "tokenizer.ggml.merges: merge {} is not two tokens", i);
    }
    const std::string_view left_text = merge.substr(0, space);
    const std::string_view right_text = merge.substr(space + 1);
    joined.assign(left_text).append(right_text);
    const auto left = data.vocabulary.find(left_text);
    const auto right = data.vocabulary.find(right_text);
    const auto merged = data.vocabulary.find(joined);
    if (!left || !right || !merged) {
      fail(ErrorCode::kInvalidModel, "tokenizer.ggml.merges: merge {} names '{}', no token", i,
           (!left    ? left_text
            : !right ? right_text
                     : std::string_view(joined))
               .substr(0, 80));
    }
    if (data.vocabulary.is_control(*merged)) continue;  // text never becomes a control token
    data.bpe.add_merge(*left, *right, static_cast<std::uint32_t>(i), *merged);
  }
}

struct PreName {
  const char* name;
  const char* canonical;
};
constexpr PreName kPreNames[] = {
    {"smollm", "smollm"},    {"gpt-2", "gpt-2"},
    {"phi-2", "gpt-2"},      {"llama-bpe", "llama-bpe"},
    {"llama3", "llama-bpe"}, {"llama-v3", "llama-bpe"},
    {"qwen2", "qwen2"},      {"deepseek-r1-qwen", "qwen2"},
    {"qwen35", "qwen35"},    {"gpt-4o", "gpt-4o"},
};

void build_byte_level(const Metadata& metadata, TokenizerData& data) {
  const std::string* pre = metadata.find_string(key("pre"));
  const auto* name = std::find_if(std::begin(kPreNames), std::end(kPreNames),
                                  [&](const PreName& n) { return pre && *pre == n.name; });
  if (name == std::end(kPreNames)) {
    fail(ErrorCode::kUnsupported,
         "tokenizer.ggml.pre: '{}', expected smollm, gpt-2, gpt-4o, llama-bpe, qwen2 or qwen35 (or "
         "an "
         "alias)",
         pre ? pre->substr(0, 80) : "(missing)");
  }
  data.kind = "byte-level BPE";
  data.pre = name->canonical;
  BpeOptions options{.byte_level = true};
  if (data.pre == "llama-bpe") {
    options.ignore_merges = true;
    data.pre_tokenizer.add({PreStep::Kind::kPattern, WordPattern::kLlama3});
  } else if (data.pre == "qwen2" || data.pre == "qwen35") {
    data.normalizer.add({Normalizer::Step::Kind::kNfc}, "tokenizer.ggml.pre");
    const bool marks = data.pre == "qwen35";
    data.pre_tokenizer.add(
        {PreStep::Kind::kPattern, marks ? WordPattern::kQwen35 : WordPattern::kQwen2});
  } else if (data.pre == "gpt-4o") {
    data.pre_tokenizer.add({PreStep::Kind::kPattern, WordPattern::kO200k});
  } else {
    if (data.pre == "smollm") data.pre_tokenizer.add({.kind = PreStep::Kind::kDigits});
    data.pre_tokenizer.add({PreStep::Kind::kPattern, WordPattern::kGpt2});
  }
  for (TokenId id = 0; id < data.vocabulary.size(); ++id) {
    const std::string_view text = data.vocabulary.text(id);
    std::string bytes;
    if (data.vocabulary.kind(id) != TokenKind::kNormal || !append_alphabet_bytes(text, bytes)) {
      bytes = text;
    }
    data.vocabulary.set_bytes(id, std::move(bytes));
  }
  data.bpe = Bpe(data.vocabulary, options);
  read_merges(metadata, data);
  read_surroundings(metadata, data.pre == "llama-bpe", false, data);
}

const std::vector<double>& read_scores(const Metadata& metadata, const Vocabulary& vocabulary) {
  const auto* scores = metadata.find_floats(key("scores"));
  if (!scores || scores->size() != static_cast<std::size_t>(vocabulary.size())) {
    fail(ErrorCode::kInvalidModel, "tokenizer.ggml.scores: {} entries for {} tokens",
         scores ? scores->size() : 0, vocabulary.size());
  }
  return *scores;
}

void add_space_steps(const Metadata& metadata, TokenizerData& data) {
  const bool space_prefix = metadata.find_bool(key("add_space_prefix")).value_or(true);
  if (space_prefix) {
    data.normalizer.add({.kind = Normalizer::Step::Kind::kPrepend, .content = " "}, kPrefix);
    data.strip_spaces = 1;
  }
  data.normalizer.add({.kind = Normalizer::Step::Kind::kReplace, .from = " ", .content = "▁"},
                      kPrefix);
}

void set_sentencepiece_bytes(Vocabulary& vocabulary) {
  for (TokenId id = 0; id < vocabulary.size(); ++id) {
    const std::string_view text = vocabulary.text(id);
    std::string bytes(text);
    switch (vocabulary.kind(id)) {
      case TokenKind::kByte: {
        const auto byte = parse_byte_token(text);
        if (!byte) {
          fail(ErrorCode::kInvalidModel,
               "tokenizer.ggml.tokens: token {} of type 6 (byte) is '{}', expected <0xNN>", id,
               text.substr(0, 80));
        }
        bytes.assign(1, static_cast<char>(*byte));
        break;
      }
      case TokenKind::kControl:
      case TokenKind::kUnknown:
        break;
      default:
        bytes = replace_all(text, "▁", " ");
    }
    vocabulary.set_bytes(id, std::move(bytes));
  }
}

struct DefaultIds {
  TokenId unk = 0;
  std::optional<TokenId> bos = {};
  TokenId eos = 0;
};

// For ids that the file does not speak of, where those tokens are control tokens.
void set_defaults(const Metadata& metadata, const DefaultIds& defaults, TokenizerData& data) {
  const auto set = [&](std::optional<TokenId>& id, TokenId value, const char* name) {
    const bool usable = value < data.vocabulary.size() && data.vocabulary.is_control(value);
    if (!id && usable && !metadata.contains(key(name))) id = value;
  };
  set(data.unk, defaults.unk, "unknown_token_id");
  if (defaults.bos) set(data.bos, *defaults.bos, "bos_token_id");
  if (!data.eos) {
    set(data.eos, defaults.eos, "eos_token_id");
    if (data.eos) data.eog.push_back(*data.eos);
  }
}

void build_sentencepiece(const Metadata& metadata, TokenizerData& data) {
  Vocabulary& vocabulary = data.vocabulary;
  const std::vector<double>& scores = read_scores(metadata, vocabulary);
  data.kind = "SentencePiece BPE";
  data.pre = "default";
  add_space_steps(metadata, data);
  set_sentencepiece_bytes(vocabulary);
  // SentencePiece's own defaults.
  set_defaults(metadata, {.unk = 0, .bos = 1, .eos = 2}, data);
  data.bpe = Bpe(vocabulary, {.byte_fallback = true, .unk = data.unk});
  add_score_merges(vocabulary, scores, data.bpe);
  read_surroundings(metadata, data.bos.has_value(), false, data);
}

// The bytes of an array of numbers of one byte, signed or not.
std::string read_bytes(const std::vector<std::int64_t>& numbers, const std::string& where) {
  std::string bytes;
  bytes.reserve(numbers.size());
  for (const std::int64_t number : numbers) {
    if (number < -128 || number > 255) {
      fail(ErrorCode::kInvalidModel, "{}: {}, expected a byte", where, number);
    }
    bytes += static_cast<char>(number & 0xFF);
  }
  return bytes;
}

void build_unigram(const Metadata& metadata, TokenizerData& data) {
  using Kind = Normalizer::Step::Kind;
  Vocabulary& vocabulary = data.vocabulary;
  const std::vector<double>& scores = read_scores(metadata, vocabulary);
  data.kind = "SentencePiece unigram";
  data.pre = "default";
  const std::string map_key = key("precompiled_charsmap");
  if (const auto* map = metadata.find_ints(map_key); map && !map->empty()) {
    data.normalizer.add({.kind = Kind::kCharsmap,
                         .charsmap = std::make_shared<const Charsmap>(
                             read_bytes(*map, map_key), Charsmap::Matching::kLongest, map_key)},
                        map_key);
  }
  if (metadata.find_bool(key("remove_extra_whitespaces")).value_or(true)) {
    data.normalizer.add({Kind::kSqueezeSpaces}, kPrefix);
  }
  add_space_steps(metadata, data);
  set_sentencepiece_bytes(vocabulary);
  set_defaults(metadata, {.unk = 2, .eos = 1}, data);  // T5's
  if (!data.unk) {
    fail(ErrorCode::kInvalidModel, "tokenizer.ggml.unknown_token_id: missing in a unigram model");
  }
  bool has_bytes = false;
  for (TokenId id = 0; id < vocabulary.size(); ++id) {
    has_bytes = has_bytes || vocabulary.kind(id) == TokenKind::kByte;
  }
  data.unigram.emplace(vocabulary, scores,
                       UnigramOptions{.unk = *data.unk, .byte_fallback = has_bytes},
                       "tokenizer.ggml.tokens");
  read_surroundings(metadata, false, data.eos.has_value(), data);
}

}  // namespace

std::shared_ptr<const Tokenizer> tokenizer_from_gguf(const Metadata& metadata) {
  const std::string& model = metadata.get_string(key("model"));
  if (model != "gpt2" && model != "llama" && model != "t5") {
    fail(ErrorCode::kUnsupported,
         "tokenizer.ggml.model: '{}', expected gpt2 (byte-level BPE), llama (SentencePiece BPE) or "
         "t5 (SentencePiece unigram)",
         model.substr(0, 80));
  }
  auto data = std::make_unique<TokenizerData>();
  read_tokens(metadata, *data);
  read_special_ids(metadata, *data);
  if (model == "gpt2") {
    build_byte_level(metadata, *data);
  } else if (model == "t5") {
    build_unigram(metadata, *data);
  } else {
    build_sentencepiece(metadata, *data);
  }
  add_added_tokens(*data);
  finish_eog(*data);
  return std::make_shared<const Tokenizer>(std::move(data));
}

}  // namespace pianola
