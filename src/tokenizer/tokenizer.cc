#include "pianola/tokenizer.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/utf8.h"
#include "tokenizer/tokenizer_data.h"

namespace pianola {
namespace {

constexpr std::size_t kMaxText = (std::size_t{1} << 31) - 1;

// One call of encode(): takes the words of the pre-tokenizer and appends their ids. Words repeat,
// so a table of fixed size remembers where in the output the ids of a word already stand.
class Encoder final : public WordSink {
 public:
  Encoder(const TokenizerData& data, std::size_t text_size, std::vector<TokenId>& out)
      : data_(data),
        out_(out),
        cache_(std::bit_ceil(std::clamp<std::size_t>(text_size / 8, 16, 1U << 14))) {}

  void run(std::string_view text, bool parse_special) {
    data_.raw_added.split(text, parse_special,
                          [&](std::string_view piece, std::optional<TokenId> id) {
                            if (id) {
                              out_.push_back(*id);
                            } else {
                              encode_text(piece, piece.data() == text.data(), parse_special);
                            }
                          });
  }

  void word(std::string_view text) override {
    constexpr std::size_t kMaxCached = 64;
    if (text.size() > kMaxCached) return encode_word(text);
    const std::uint64_t hash = hash_bytes(text, salt_);
    Entry& entry = cache_[static_cast<std::size_t>(hash) & (cache_.size() - 1)];
    if (entry.word == text) {
      // resize() and not insert(): the source lies in the same vector.
      const std::size_t end = out_.size();
      out_.resize(end + entry.count);
      std::copy_n(out_.begin() + static_cast<std::ptrdiff_t>(entry.first), entry.count,
                  out_.begin() + static_cast<std::ptrdiff_t>(end));
      return;
    }
    const std::size_t first = out_.size();
    encode_word(text);
    entry = {text, first, out_.size() - first};
  }

 private:
  struct Entry {
    std::string_view word;
    std::size_t first = 0;
    std::size_t count = 0;
  };

  void encode_word(std::string_view text) {
    if (data_.unigram) {
      data_.unigram->encode_word(text, unigram_scratch_, out_);
    } else {
      data_.bpe.encode_word(text, bpe_scratch_, out_);
    }
  }

  void encode_text(std::string_view piece, bool at_text_start, bool parse_special) {
    const std::string_view text = data_.normalizer.apply(piece, arena_);
    data_.normalized_added.split(
        text, parse_special, [&](std::string_view part, std::optional<TokenId> id) {
          if (id) {
            out_.push_back(*id);
          } else {
            data_.pre_tokenizer.split(part, at_text_start && part.data() == text.data(), arena_,
                                      *this);
          }
        });
  }

  const TokenizerData& data_;
  std::vector<TokenId>& out_;
  TextArena arena_;
  Bpe::Scratch bpe_scratch_;
  Unigram::Scratch unigram_scratch_;
  std::vector<Entry> cache_;
  std::uint64_t salt_ = hash_salt();
};

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<const TokenizerData> data) : data_(std::move(data)) {}
Tokenizer::~Tokenizer() = default;

std::int32_t Tokenizer::vocab_size() const { return data_->vocabulary.size(); }

std::vector<TokenId> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  if (text.size() > kMaxText) {
    fail(ErrorCode::kInvalidArgument, "encode: a text of {} bytes, at most {}", text.size(),
         kMaxText);
  }
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 3 + 8);
  if (options.add_special) ids = data_->prefix;
  Encoder(*data_, text.size(), ids).run(text, options.parse_special);
  if (options.add_special) ids.insert(ids.end(), data_->suffix.begin(), data_->suffix.end());
  return ids;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string out;
  DecodeState state = start_decode();
  for (const TokenId id : ids) {
    if (skip_special && is_special(id)) continue;
    append_decoded(id, state, out);
  }
  return out;
}

Tokenizer::DecodeState Tokenizer::start_decode() const { return {true, data_->strip_spaces}; }

void Tokenizer::append_decoded(TokenId id, DecodeState& state, std::string& out) const {
  std::string_view bytes = token_bytes(id);
  const bool first = std::exchange(state.first, false);
  if (first && data_->strip_first_token) {
    out += replace_all(token_text(id), "▁", "");
    return;
  }
  while (state.strip > 0 && !bytes.empty()) {
    if (bytes[0] != ' ') {
      state.strip = 0;
      break;
    }
    bytes.remove_prefix(1);
    --state.strip;
  }
  out += bytes;
}

void Tokenizer::check_id(TokenId id) const {
  if (id < 0 || id >= vocab_size()) {
    fail(ErrorCode::kInvalidArgument, "tokenizer: token id {}, expected 0 to {}", id,
         vocab_size() - 1);
  }
}

std::string_view Tokenizer::token_bytes(TokenId id) const {
  check_id(id);
  return data_->vocabulary.bytes(id);
}

std::string_view Tokenizer::token_text(TokenId id) const {
  check_id(id);
  return data_->vocabulary.text(id);
}

bool Tokenizer::is_special(TokenId id) const {
  check_id(id);
  return data_->vocabulary.is_control(id);
}

std::optional<TokenId> Tokenizer::find_token(std::string_view text) const {
  return data_->vocabulary.find(text);
}

std::optional<TokenId> Tokenizer::bos_id() const { return data_->bos; }
std::optional<TokenId> Tokenizer::eos_id() const { return data_->eos; }
std::optional<TokenId> Tokenizer::unk_id() const { return data_->unk; }
std::optional<TokenId> Tokenizer::pad_id() const { return data_->pad; }
const std::vector<TokenId>& Tokenizer::eog_ids() const { return data_->eog; }

bool Tokenizer::is_eog(TokenId id) const {
  return std::binary_search(data_->eog.begin(), data_->eog.end(), id);
}

bool Tokenizer::add_bos() const {
  return !data_->prefix.empty() && data_->prefix.front() == data_->bos;
}

bool Tokenizer::add_eos() const {
  return !data_->suffix.empty() && data_->suffix.back() == data_->eos;
}

const std::string& Tokenizer::kind() const { return data_->kind; }
const std::string& Tokenizer::pre() const { return data_->pre; }

bool is_end_of_generation_text(std::string_view text) {
  static constexpr std::string_view kTexts[] = {"<|eot_id|>",
                                                "<|im_end|>",
                                                "<|end|>",
                                                "<|return|>",
                                                "<|call|>",
                                                "<end_of_turn>",
                                                "<|endoftext|>",
                                                "</s>",
                                                "<|eom_id|>",
                                                "<EOT>",
                                                "_<EOT>",
                                                "[EOT]",
                                                "[EOS]",
                                                "<|end_of_text|>",
                                                "<end_of_utterance>",
                                                "<eos>",
                                                "<｜end▁of▁sentence｜>"};
  return std::find(std::begin(kTexts), std::end(kTexts), text) != std::end(kTexts);
}

void finish_eog(TokenizerData& data) {
  for (TokenId id = 0; id < data.vocabulary.size(); ++id) {
    if (data.vocabulary.is_control(id) && is_end_of_generation_text(data.vocabulary.text(id))) {
      data.eog.push_back(id);
    }
  }
  std::sort(data.eog.begin(), data.eog.end());
  data.eog.erase(std::unique(data.eog.begin(), data.eog.end()), data.eog.end());
}

}  // namespace pianola
