#include "tokenizer/tokenizer_json.h"

#include <boost/json/basic_parser_impl.hpp>

#include <algorithm>

#include "base/check.h"
#include "tokenizer/tokenizer_json_parts.h"

namespace pianola {
namespace {

namespace json = boost::json;

// Counts values and string bytes while parsing, and stops at the first limit.
struct BoundsHandler {
  static constexpr std::size_t max_object_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_array_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_key_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_string_size = static_cast<std::size_t>(-1);
  // Real files stay below two million values.
  static constexpr std::size_t kMaxValues = 3'000'000;
  // Precompiled charsmaps in base64 have about 320 KB.
  static constexpr std::size_t kMaxString = std::size_t{1} << 19;

  std::size_t values = 0;
  std::string problem;

  bool value(json::error_code& ec) {
    if (++values <= kMaxValues) return true;
    problem = fmt::format("more than {} values", kMaxValues);
    ec = json::error::exception;
    return false;
  }
  bool string(std::size_t size, json::error_code& ec) {
    if (size <= kMaxString) return value(ec);
    problem = fmt::format("a string of {} bytes or more, at most {}", size, kMaxString);
    ec = json::error::exception;
    return false;
  }
  bool on_document_begin(json::error_code&) { return true; }
  bool on_document_end(json::error_code&) { return true; }
  bool on_array_begin(json::error_code& ec) { return value(ec); }
  bool on_array_end(std::size_t, json::error_code&) { return true; }
  bool on_object_begin(json::error_code& ec) { return value(ec); }
  bool on_object_end(std::size_t, json::error_code&) { return true; }
  bool on_string_part(json::string_view, std::size_t n, json::error_code& ec) {
    return n <= kMaxString || string(n, ec);
  }
  bool on_string(json::string_view, std::size_t n, json::error_code& ec) { return string(n, ec); }
  bool on_key_part(json::string_view, std::size_t n, json::error_code& ec) {
    return n <= kMaxString || string(n, ec);
  }
  bool on_key(json::string_view, std::size_t n, json::error_code& ec) { return string(n, ec); }
  bool on_number_part(json::string_view, json::error_code&) { return true; }
  bool on_int64(std::int64_t, json::string_view, json::error_code& ec) { return value(ec); }
  bool on_uint64(std::uint64_t, json::string_view, json::error_code& ec) { return value(ec); }
  bool on_double(double, json::string_view, json::error_code& ec) { return value(ec); }
  bool on_bool(bool, json::error_code& ec) { return value(ec); }
  bool on_null(json::error_code& ec) { return value(ec); }
  bool on_comment_part(json::string_view, json::error_code&) { return true; }
  bool on_comment(json::string_view, json::error_code&) { return true; }
};

std::string_view view(const json::string& text) { return {text.data(), text.size()}; }

void check_token_text(std::string_view text, const std::string& where) {
  if (text.size() > kMaxTokenBytes) {
    fail(ErrorCode::kInvalidModel, "{}: a token of {} bytes, at most {}", where, text.size(),
         kMaxTokenBytes);
  }
}

TokenId read_id(const json::value& value, const std::string& where) {
  const std::int64_t* id = value.if_int64();
  if (!id || *id < 0 || *id >= kMaxVocabulary) {
    fail(ErrorCode::kInvalidModel, "{}: expected a token id from 0 to {}, found {}", where,
         kMaxVocabulary - 1, json::serialize(value).substr(0, 40));
  }
  return static_cast<TokenId>(*id);
}

std::vector<AddedToken> read_added_tokens(const JsonObject& root) {
  std::vector<AddedToken> added;
  const json::array* list = root.find_array("added_tokens");
  std::size_t total = 0;
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    const JsonObject token((*list)[i], fmt::format("{}[{}]", root.field_path("added_tokens"), i));
    AddedToken one;
    one.content = token.get_string("content");
    one.id = static_cast<TokenId>(token.get_int("id", 0, kMaxVocabulary - 1));
    one.special = token.find_bool("special").value_or(false);
    one.lstrip = token.find_bool("lstrip").value_or(false);
    one.rstrip = token.find_bool("rstrip").value_or(false);
    one.single_word = token.find_bool("single_word").value_or(false);
    one.normalized = token.find_bool("normalized").value_or(!one.special);
    total += one.content.size();
    if (one.content.empty() || one.content.size() > kMaxAddedTokenBytes ||
        total > (std::size_t{1} << 24)) {
      fail(ErrorCode::kInvalidModel, "{}: {} bytes, expected 1 to {} and at most 16 MiB together",
           token.field_path("content"), one.content.size(), kMaxAddedTokenBytes);
    }
    added.push_back(std::move(one));
  }
  return added;
}

void set_token(Vocabulary& vocabulary, TokenId id, std::string_view text, TokenKind kind,
               const std::string& where) {
  if (vocabulary.kind(id) != TokenKind::kHole && vocabulary.text(id) != text) {
    fail(ErrorCode::kInvalidModel, "{}: id {} names both '{}' and '{}'", where, id,
         vocabulary.text(id).substr(0, 80), text.substr(0, 80));
  }
  vocabulary.set(id, text, kind);
}

struct VocabEntry {
  std::string_view text;
  TokenId id = 0;
};

// {"token": id}
std::vector<VocabEntry> read_bpe_vocab(const JsonObject& model) {
  const JsonObject vocab = model.get_object("vocab");
  std::vector<VocabEntry> entries;
  entries.reserve(vocab.object().size());
  for (const auto& entry : vocab.object()) {
    const std::string_view text(entry.key().data(), entry.key().size());
    check_token_text(text, vocab.path());
    entries.push_back({text, read_id(entry.value(), vocab.field_path(text.substr(0, 80)))});
  }
  return entries;
}

// [["piece", score]], in the order of ids.
std::vector<VocabEntry> read_unigram_vocab(const JsonObject& model, std::vector<double>& scores) {
  const json::array* vocab = model.find_array("vocab");
  const std::string where = model.field_path("vocab");
  if (!vocab) fail(ErrorCode::kInvalidModel, "{} is missing", where);
  if (vocab->size() > static_cast<std::size_t>(kMaxVocabulary)) {
    fail(ErrorCode::kInvalidModel, "{}: {} tokens, at most {}", where, vocab->size(),
         kMaxVocabulary);
  }
  std::vector<VocabEntry> entries;
  entries.reserve(vocab->size());
  for (const json::value& value : *vocab) {
    const json::array* pair = value.if_array();
    if (!pair || pair->size() != 2 || !(*pair)[0].is_string() || !(*pair)[1].is_number()) {
      fail(ErrorCode::kInvalidModel, "{}[{}]: expected a piece and its score", where,
           entries.size());
    }
    const std::string_view text = view((*pair)[0].get_string());
    check_token_text(text, where);
    entries.push_back({text, static_cast<TokenId>(entries.size())});
    scores.push_back((*pair)[1].to_number<double>());
  }
  return entries;
}

// The model's vocabulary and the added tokens, in one table.
void set_vocabulary(const std::vector<VocabEntry>& entries, const std::vector<AddedToken>& added,
                    const std::string& where, TokenizerData& data) {
  std::int64_t size = 0;
  for (const VocabEntry& entry : entries) size = std::max<std::int64_t>(size, entry.id + 1);
  for (const AddedToken& token : added) size = std::max<std::int64_t>(size, token.id + 1);
  const auto named = static_cast<std::int64_t>(entries.size() + added.size());
  if (size == 0 || size > 2 * named + 65536) {
    fail(ErrorCode::kInvalidModel, "{}: {} tokens with ids up to {}", where, named, size - 1);
  }
  data.vocabulary.resize(static_cast<std::int32_t>(size));
  for (const VocabEntry& entry : entries) {
    set_token(data.vocabulary, entry.id, entry.text, TokenKind::kNormal, where);
  }
  data.vocabulary.build_index();
  for (const AddedToken& token : added) {
    const auto known = data.vocabulary.find(token.content);
    if (known && *known != token.id) {
      fail(ErrorCode::kInvalidModel, "added_tokens: '{}' has id {}, and {} in the vocabulary",
           token.content.substr(0, 80), token.id, *known);
    }
    set_token(data.vocabulary, token.id, token.content,
              token.special ? TokenKind::kControl : TokenKind::kUserDefined, "added_tokens");
  }
  data.vocabulary.build_index();
}

void add_added_tokens(std::vector<AddedToken> added, TokenizerData& data) {
  TextArena arena;
  for (AddedToken& token : added) {
    if (token.normalized) {
      token.content = std::string(data.normalizer.apply(token.content, arena));
      data.normalized_added.add(std::move(token));
    } else {
      data.raw_added.add(std::move(token));
    }
  }
}

// "a b", or ["a", "b"].
std::pair<std::string_view, std::string_view> read_merge(const json::value& value,
                                                         const std::string& where, std::size_t i) {
  if (const json::string* text = value.if_string()) {
    const std::string_view merge = view(*text);
    const std::size_t space = merge.find(' ');
    if (space != std::string_view::npos && merge.find(' ', space + 1) == std::string_view::npos) {
      return {merge.substr(0, space), merge.substr(space + 1)};
    }
  } else if (const json::array* pair = value.if_array()) {
    if (pair->size() == 2 && (*pair)[0].is_string() && (*pair)[1].is_string()) {
      return {view((*pair)[0].get_string()), view((*pair)[1].get_string())};
    }
  }
  fail(ErrorCode::kInvalidModel, "{}[{}]: expected two tokens", where, i);
}

void read_merges(const JsonObject& model, TokenizerData& data) {
  const json::array* merges = model.find_array("merges");
  const std::string where = model.field_path("merges");
  if (!merges) fail(ErrorCode::kInvalidModel, "{} is missing", where);
  if (merges->size() > kMaxMerges) {
    fail(ErrorCode::kInvalidModel, "{}: {} merges, at most {}", where, merges->size(), kMaxMerges);
  }
  data.bpe.reserve_merges(merges->size());
  std::string joined;
  for (std::size_t i = 0; i < merges->size(); ++i) {
    const auto [left_text, right_text] = read_merge((*merges)[i], where, i);
    joined.assign(left_text).append(right_text);
    const auto left = data.vocabulary.find(left_text);
    const auto right = data.vocabulary.find(right_text);
    const auto merged = data.vocabulary.find(joined);
    if (!left || !right || !merged) {
      fail(ErrorCode::kInvalidModel, "{}[{}]: names '{}', no token", where, i,
           (!left    ? left_text
            : !right ? right_text
                     : std::string_view(joined))
               .substr(0, 80));
    }
    if (data.vocabulary.is_control(*merged)) continue;  // text never becomes a control token
    data.bpe.add_merge(*left, *right, static_cast<std::uint32_t>(i), *merged);
  }
}

void read_bpe(const JsonObject& model, bool byte_level, TokenizerData& data) {
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model.find_string(name).value_or("").empty()) {
      fail(ErrorCode::kUnsupported, "{} is not supported", model.field_path(name));
    }
  }
  if (model.find_float("dropout").value_or(0) != 0) {
    fail(ErrorCode::kUnsupported, "{} is not supported", model.field_path("dropout"));
  }
  BpeOptions options;
  options.byte_level = byte_level;
  options.byte_fallback = model.find_bool("byte_fallback").value_or(false);
  options.fuse_unk = model.find_bool("fuse_unk").value_or(false);
  options.ignore_merges = model.find_bool("ignore_merges").value_or(false);
  if (byte_level && options.byte_fallback) {
    fail(ErrorCode::kUnsupported, "{} together with ByteLevel is not supported",
         model.field_path("byte_fallback"));
  }
  if (const auto unk = model.find_string("unk_token")) {
    options.unk = data.vocabulary.find(*unk);
    if (!options.unk) {
      fail(ErrorCode::kInvalidModel, "{}: '{}' is no token", model.field_path("unk_token"),
           unk->substr(0, 80));
    }
    data.unk = options.unk;
  }
  data.bpe = Bpe(data.vocabulary, options);
  read_merges(model, data);
}

void read_unigram(const JsonObject& model, const std::vector<double>& scores, TokenizerData& data) {
  const std::string where = model.field_path("unk_id");
  const json::value* unk = model.find("unk_id");
  // The reference fails at the first unknown character of a text.
  if (!unk || unk->is_null()) {
    fail(ErrorCode::kUnsupported, "{}: a unigram model without an unknown token is not supported",
         where);
  }
  const TokenId id = read_id(*unk, where);
  if (static_cast<std::size_t>(id) >= scores.size()) {
    fail(ErrorCode::kInvalidModel, "{}: id {} of {} tokens", where, id, scores.size());
  }
  data.unk = id;
  data.vocabulary.set_kind(id, TokenKind::kUnknown);
  const bool byte_fallback = model.find_bool("byte_fallback").value_or(false);
  data.unigram.emplace(data.vocabulary, scores,
                       UnigramOptions{.unk = id, .byte_fallback = byte_fallback},
                       model.field_path("vocab"));
}

void read_model(const JsonObject& model, const std::string& type, bool byte_level,
                const std::vector<AddedToken>& added, TokenizerData& data) {
  const std::string where = model.field_path("vocab");
  if (type == "BPE") {
    data.kind = byte_level ? "byte-level BPE" : "SentencePiece BPE";
    set_vocabulary(read_bpe_vocab(model), added, where, data);
    return read_bpe(model, byte_level, data);
  }
  if (byte_level) {
    fail(ErrorCode::kUnsupported, "{}: a unigram model together with ByteLevel is not supported",
         model.path());
  }
  data.kind = "SentencePiece unigram";
  std::vector<double> scores;
  set_vocabulary(read_unigram_vocab(model, scores), added, where, data);
  read_unigram(model, scores, data);
}

void read_template(const JsonObject& step, TokenizerData& data) {
  const json::array* single = step.find_array("single");
  if (!single) fail(ErrorCode::kInvalidModel, "{} is missing", step.field_path("single"));
  const JsonObject specials = step.get_object("special_tokens");
  std::vector<TokenId> prefix;
  std::vector<TokenId> suffix;
  bool behind = false;
  for (const json::value& item : *single) {
    const JsonObject piece(item, step.field_path("single"));
    if (piece.find("Sequence")) {
      if (behind) fail(ErrorCode::kUnsupported, "{}: the text twice", step.field_path("single"));
      behind = true;
      continue;
    }
    const JsonObject special =
        specials.get_object(piece.get_object("SpecialToken").get_string("id"));
    const json::array* ids = special.find_array("ids");
    for (std::size_t i = 0; ids && i < ids->size(); ++i) {
      const TokenId id = read_id((*ids)[i], special.field_path("ids"));
      if (id >= data.vocabulary.size()) {
        fail(ErrorCode::kInvalidModel, "{}: id {} of {} tokens", special.field_path("ids"), id,
             data.vocabulary.size());
      }
      (behind ? suffix : prefix).push_back(id);
    }
    if (prefix.size() + suffix.size() > 64) {
      fail(ErrorCode::kInvalidModel, "{}: more than 64 tokens", step.field_path("single"));
    }
  }
  if (!behind) fail(ErrorCode::kUnsupported, "{}: without the text", step.field_path("single"));
  // In a sequence, a later template goes around what the earlier ones made.
  data.prefix.insert(data.prefix.begin(), prefix.begin(), prefix.end());
  data.suffix.insert(data.suffix.end(), suffix.begin(), suffix.end());
}

void read_post_processor(const JsonObject& step, TokenizerData& data) {
  const std::string type = step.get_string("type");
  if (type == "Sequence") {
    const json::array* steps = step.find_array("processors");
    if (!steps) fail(ErrorCode::kInvalidModel, "{} is missing", step.field_path("processors"));
    if (steps->size() > 16) {
      fail(ErrorCode::kInvalidModel, "{}: more than 16", step.field_path("processors"));
    }
    for (const json::value& next : *steps) {
      const JsonObject processor(next, step.field_path("processors"));
      if (processor.get_string("type") == "Sequence") {
        fail(ErrorCode::kUnsupported, "{}: a Sequence in a Sequence", processor.path());
      }
      read_post_processor(processor, data);
    }
  } else if (type == "TemplateProcessing") {
    read_template(step, data);
  } else if (type != "ByteLevel") {  // which only moves offsets
    fail(ErrorCode::kUnsupported, "{}: post-processor '{}' is not supported", step.path(),
         type.substr(0, 80));
  }
}

}  // namespace

void check_json_bounds(std::string_view text, std::string_view where) {
  if (text.size() > kMaxTokenizerJson) {
    fail(ErrorCode::kInvalidModel, "{}: {} bytes, at most {}", where, text.size(),
         kMaxTokenizerJson);
  }
  json::parse_options options;
  options.max_depth = 64;
  json::basic_parser<BoundsHandler> parser(options);
  json::error_code ec;
  parser.write_some(false, text.data(), text.size(), ec);
  // Other errors are for the real parser to tell.
  if (!parser.handler().problem.empty()) {
    fail(ErrorCode::kInvalidModel, "{}: {}", where, parser.handler().problem);
  }
}

std::unique_ptr<TokenizerData> read_tokenizer_json(std::string_view text, std::string_view where) {
  check_json_bounds(text, where);
  const json::value document = parse_json(text, where);
  const JsonObject root(document, std::string(where));
  const JsonObject model = root.get_object("model");
  // Files written before 2020 have no type: merges tell.
  const std::string type =
      model.find_string("type").value_or(model.find("merges") ? "BPE" : "(missing)");
  if (type != "BPE" && type != "Unigram") {
    fail(ErrorCode::kUnsupported, "{}: model '{}' is not supported, expected BPE or Unigram",
         root.path(), type.substr(0, 80));
  }
  auto data = std::make_unique<TokenizerData>();
  read_normalizer(root, *data);
  const bool byte_level = read_pre_tokenizer(root, *data);
  std::vector<AddedToken> added = read_added_tokens(root);
  read_model(model, type, byte_level, added, *data);
  read_decoder(root, byte_level, *data);
  add_added_tokens(std::move(added), *data);
  if (const auto post = root.find_object("post_processor")) read_post_processor(*post, *data);
  return data;
}

std::shared_ptr<const Tokenizer> tokenizer_from_json(std::string_view text,
                                                     std::string_view where) {
  std::unique_ptr<TokenizerData> data = read_tokenizer_json(text, where);
  finish_eog(*data);
  return std::make_shared<const Tokenizer>(std::move(data));
}

}  // namespace pianola
