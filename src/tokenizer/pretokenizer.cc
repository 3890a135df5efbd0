#include "tokenizer/pretokenizer.h"

#include "base/utf8.h"
#include "tokenizer/unicode_class.h"
#include "tokenizer/vocabulary.h"

namespace pianola {
namespace {

using unicode::kDigit;
using unicode::kLetter;
using unicode::kLower;
using unicode::kMark;
using unicode::kNumber;
using unicode::kSpace;
using unicode::kUpper;

// Cursor over the characters of a text. At the end, and for invalid bytes, no class is set.
class Scanner {
 public:
  Scanner(std::string_view text, std::size_t at)
      : table_(unicode::class_table()), text_(text), at_(at) {
    load();
  }

  bool done() const { return at_ >= text_.size(); }
  std::size_t at() const { return at_; }
  char32_t code_point() const { return code_point_; }
  bool is(unsigned classes) const { return (classes_ & classes) != 0; }
  bool is_newline() const { return code_point_ == '\n' || code_point_ == '\r'; }
  // [^\s\p{L}\p{N}], and not of `others`
  bool is_symbol(unsigned others = 0) const {
    return !done() && !is(kSpace | kLetter | kNumber | others);
  }

  void advance() {
    at_ += length_;
    load();
  }
  void skip(unsigned classes) {
    while (is(classes)) advance();
  }
  void skip_symbols(unsigned others = 0) {
    while (is_symbol(others)) advance();
  }

 private:
  void load() {
    if (done()) {
      code_point_ = kNothing;
      classes_ = 0;
      length_ = 0;
      return;
    }
    const auto byte = static_cast<unsigned char>(text_[at_]);
    if (byte < 0x80) {
      code_point_ = byte;
      classes_ = table_[byte];
      length_ = 1;
      return;
    }
    const Utf8Char c = decode_utf8(text_.substr(at_));
    code_point_ = c.code_point;
    classes_ = c.valid ? table_[c.code_point] : 0;
    length_ = static_cast<std::size_t>(c.length);
  }

  static constexpr char32_t kNothing = 0x110000;
  const unicode::Classes* table_;
  std::string_view text_;
  std::size_t at_;
  std::size_t length_ = 0;
  char32_t code_point_ = kNothing;
  unsigned classes_ = 0;
};

// Length of the contraction ('s 't 'm 'd 're 've 'll) at `at`, or 0. Ignoring case means Unicode
// case folding: the long s (U+017F) is an s.
std::size_t contraction(std::string_view text, std::size_t at, bool ignore_case) {
  const auto letter = [&](std::size_t i) {
    const char c = at + i < text.size() ? text[at + i] : '\0';
    return ignore_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  const char first = letter(1);
  const char second = letter(2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if ((first == 'r' || first == 'v') && second == 'e') return 3;
  if (first == 'l' && second == 'l') return 3;
  if (ignore_case && text.substr(at + 1, 2) == "\u017F") return 3;
  return 0;
}

// \s+(?!\S)|\s+ : a run of spaces without its last one, unless the text ends there or it is alone.
// `newlines` adds \s*[\r\n]+ before them.
std::size_t space_end(std::string_view text, std::size_t at, bool newlines) {
  Scanner scan(text, at);
  std::size_t last = at;           // where the last space starts
  std::size_t after_newline = at;  // behind the last newline
  while (scan.is(kSpace)) {
    last = scan.at();
    const bool newline = scan.is_newline();
    scan.advance();
    if (newline) after_newline = scan.at();
  }
  if (newlines && after_newline > at) return after_newline;
  if (scan.done() || last == at) return scan.at();
  return last;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
std::size_t gpt2_end(std::string_view text, std::size_t at) {
  Scanner scan(text, at);
  if (scan.code_point() == '\'') {
    if (const std::size_t length = contraction(text, at, false)) return at + length;
  }
  if (scan.code_point() == ' ') scan.advance();
  if (scan.is(kLetter)) {
    scan.skip(kLetter);
  } else if (scan.is(kNumber)) {
    scan.skip(kNumber);
  } else if (scan.is_symbol()) {
    scan.skip_symbols();
  } else {
    return space_end(text, at, false);
  }
  return scan.at();
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*
// |\s*[\r\n]+|\s+(?!\S)|\s+     with {1,max_digits}, and `letters` for the \p{L} of words
std::size_t llama3_end(std::string_view text, std::size_t at, int max_digits,
                       unsigned letters = kLetter) {
  Scanner scan(text, at);
  if (scan.code_point() == '\'') {
    if (const std::size_t length = contraction(text, at, true)) return at + length;
  }
  if (scan.is(kNumber)) {
    for (int i = 0; i < max_digits && scan.is(kNumber); ++i) scan.advance();
    return scan.at();
  }
  const bool is_space = scan.code_point() == ' ';
  Scanner next = scan;
  if (!scan.is(kLetter) && !scan.is_newline()) next.advance();
  if (next.is(letters)) {
    next.skip(letters);
    return next.at();
  }
  if (scan.is(letters)) return next.at();  // a mark alone
  if (is_space ? next.is_symbol(letters) : scan.is_symbol(letters)) {
    next.skip_symbols(letters);
    while (next.is_newline()) next.advance();
    return next.at();
  }
  return space_end(text, at, true);
}

// [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ from `scan` on: where it ends, or
// where it begins when it does not match. Characters of both sets count for the first as long as
// one is left for the second.
std::size_t cased_word_end(Scanner scan) {
  std::size_t end = scan.at();
  while (scan.is(kLetter | kMark) && !scan.is(kLower)) {
    const bool of_both = !scan.is(kUpper);
    scan.advance();
    if (of_both) end = scan.at();
  }
  if (!scan.is(kLower)) return end;
  while (scan.is(kLetter | kMark) && !scan.is(kUpper)) scan.advance();
  return scan.at();
}

// A word of o200k: small letters behind capital ones, or capital ones alone, with at most one
// symbol in front and a contraction behind. `at` when there is none.
std::size_t o200k_word_end(std::string_view text, std::size_t at) {
  const Scanner first(text, at);
  Scanner behind = first;
  if (!first.is(kLetter | kNumber) && !first.is_newline()) behind.advance();
  std::size_t end = cased_word_end(behind);
  if (end == behind.at()) end = cased_word_end(first);  // the symbol may be a mark
  if (end == at) {
    const std::size_t begin = behind.at();
    behind.skip(kUpper);  // nothing of the second set follows
    if (behind.at() == begin) return at;
    end = behind.at();
  }
  return end < text.size() && text[end] == '\'' ? end + contraction(text, end, true) : end;
}

// [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
// |[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
// |\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
std::size_t o200k_end(std::string_view text, std::size_t at) {
  if (const std::size_t end = o200k_word_end(text, at); end > at) return end;
  Scanner scan(text, at);
  if (scan.is(kNumber)) {
    for (int i = 0; i < 3 && scan.is(kNumber); ++i) scan.advance();
    return scan.at();
  }
  if (scan.code_point() == ' ') scan.advance();
  if (!scan.is_symbol()) return space_end(text, at, true);
  scan.skip_symbols();
  while (scan.is_newline() || scan.code_point() == '/') scan.advance();
  return scan.at();
}

void split_digits(std::string_view text, bool runs, auto&& emit) {
  std::size_t begin = 0;
  bool in_digits = false;
  for (Scanner scan(text, 0); !scan.done(); scan.advance()) {
    const bool digit = scan.is(kDigit);
    if (scan.at() > begin && (digit != in_digits || (digit && !runs))) {
      emit(text.substr(begin, scan.at() - begin));
      begin = scan.at();
    }
    in_digits = digit;
  }
  if (begin < text.size()) emit(text.substr(begin));
}

void split_whitespace(std::string_view text, auto&& emit) {
  for (Scanner scan(text, 0); !scan.done();) {
    scan.skip(kSpace);
    const std::size_t begin = scan.at();
    while (!scan.done() && !scan.is(kSpace)) scan.advance();
    if (scan.at() > begin) emit(text.substr(begin, scan.at() - begin));
  }
}

void split_literal(std::string_view text, std::string_view literal, PreStep::Behaviour behaviour,
                   auto&& emit) {
  using Behaviour = PreStep::Behaviour;
  std::size_t begin = 0;  // start of the word that is open
  const auto close = [&](std::size_t end) {
    if (end > begin) emit(text.substr(begin, end - begin));
    begin = end;
  };
  for (std::size_t at = text.find(literal); at != std::string_view::npos;
       at = text.find(literal, at + literal.size())) {
    const std::size_t end = at + literal.size();
    if (behaviour != Behaviour::kMergedWithPrevious) close(at);
    if (behaviour == Behaviour::kRemoved) begin = end;
    if (behaviour != Behaviour::kMergedWithNext) close(end);
  }
  close(text.size());
}

}  // namespace

std::size_t word_end(WordPattern pattern, std::string_view text, std::size_t at) {
  switch (pattern) {
    case WordPattern::kGpt2:
      return gpt2_end(text, at);
    case WordPattern::kLlama3:
      return llama3_end(text, at, 3);
    case WordPattern::kQwen2:
      return llama3_end(text, at, 1);
    case WordPattern::kQwen35:
      return llama3_end(text, at, 1, kLetter | kMark);
    case WordPattern::kO200k:
      return o200k_end(text, at);
  }
  return text.size();
}

std::optional<WordPattern> known_pattern(std::string_view regex) {
  if (regex == R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)") {
    return WordPattern::kGpt2;
  }
  if (regex ==
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)") {
    return WordPattern::kLlama3;
  }
  if (regex ==
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)") {
    return WordPattern::kQwen2;
  }
  if (regex ==
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)") {
    return WordPattern::kQwen35;
  }
  if (regex ==
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)") {
    return WordPattern::kO200k;
  }
  return std::nullopt;
}

void PreTokenizer::split(std::string_view text, bool at_text_start, TextArena& arena,
                         WordSink& sink) const {
  run(0, text, at_text_start, arena, sink);
}

void PreTokenizer::run(std::size_t index, std::string_view text, bool at_text_start,
                       TextArena& arena, WordSink& sink) const {
  if (text.empty()) return;
  if (index == steps_.size()) return sink.word(text);
  const PreStep& step = steps_[index];
  const auto next = [&](std::string_view word) {
    run(index + 1, word, at_text_start && word.data() == text.data(), arena, sink);
  };
  switch (step.kind) {
    case PreStep::Kind::kPattern:
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = word_end(step.pattern, text, at);
        next(text.substr(at, end - at));
        at = end;
      }
      return;
    case PreStep::Kind::kDigits:
      return split_digits(text, false, next);
    case PreStep::Kind::kDigitRuns:
      return split_digits(text, true, next);
    case PreStep::Kind::kWhitespace:
      return split_whitespace(text, next);
    case PreStep::Kind::kLiteral:
      return split_literal(text, step.literal, step.behaviour, next);
    case PreStep::Kind::kSpacePrefix:
      if (text[0] != ' ') text = arena.emplace_back(std::string(" ").append(text));
      return next(text);
    case PreStep::Kind::kMetaspace: {
      std::string& changed = arena.emplace_back(replace_all(text, " ", step.literal));
      const bool wanted = step.prepend == PreStep::Prepend::kAlways ||
                          (step.prepend == PreStep::Prepend::kFirst && at_text_start);
      if (wanted && !changed.starts_with(step.literal)) changed.insert(0, step.literal);
      text = changed;
      if (step.behaviour == PreStep::Behaviour::kNone) return next(text);
      return split_literal(text, step.literal, step.behaviour, next);
    }
  }
}

}  // namespace pianola
