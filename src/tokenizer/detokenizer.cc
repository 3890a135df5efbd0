#include <utility>

#include "base/check.h"
#include "base/utf8.h"
#include "pianola/tokenizer.h"

namespace pianola {

Detokenizer::Detokenizer(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special)
    : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {
  PIANOLA_CHECK(tokenizer_ != nullptr, "a Detokenizer needs a tokenizer");
  state_ = tokenizer_->start_decode();
}

std::string Detokenizer::push(TokenId id) {
  if (skip_special_ && tokenizer_->is_special(id)) return {};
  tokenizer_->append_decoded(id, state_, pending_);
  const std::size_t complete = complete_utf8_prefix(pending_);
  std::string text = sanitize_utf8(std::string_view(pending_).substr(0, complete));
  pending_.erase(0, complete);
  return text;
}

std::string Detokenizer::flush() {
  std::string text = sanitize_utf8(pending_);
  pending_.clear();
  state_ = tokenizer_->start_decode();
  return text;
}

}  // namespace pianola
