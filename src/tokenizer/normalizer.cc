#include "tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "base/check.h"
#include "base/utf8.h"
#include "tokenizer/unicode_class.h"
#include "tokenizer/vocabulary.h"

namespace pianola {
namespace {

constexpr double kMaxGrowth = 16;
constexpr std::size_t kMaxPrepend = 64;

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// Blocks with compositions that are younger than the reference's NFC tables (Unicode 12).
struct Block {
  char32_t first;
  char32_t last;
};
constexpr Block kYoungBlocks[] = {{0x105C0, 0x105FF},
                                  {0x11380, 0x113FF},
                                  {0x11900, 0x1195F},
                                  {0x16100, 0x1613F},
                                  {0x16D40, 0x16D7F}};

// Whether the reference knows no decomposition, composition or order of this character, though the
// library here may: it then stands still, and nothing moves across it.
bool is_inert_for_reference(char32_t c) {
  if (c < 0x300) return false;
  for (const Block& block : kYoungBlocks) {
    if (c >= block.first && c <= block.last) return true;
  }
  return (unicode::classes_of(c) & unicode::kReordered) == 0 &&
         utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class != 0;
}

// NFC of text that is valid UTF-8.
void append_nfc(std::string_view text, std::string& out) {
  if (text.empty()) return;
  utf8proc_uint8_t* mapped = nullptr;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  const utf8proc_ssize_t length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &mapped, options);
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(mapped, std::free);
  PIANOLA_CHECK(length >= 0, "utf8proc: {}", utf8proc_errmsg(length));
  out.append(reinterpret_cast<const char*>(mapped), static_cast<std::size_t>(length));
}

std::string nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(at));
    const auto length = static_cast<std::size_t>(c.length);
    if (!c.valid || is_inert_for_reference(c.code_point)) {
      append_nfc(text.substr(begin, at - begin), out);
      out.append(text.substr(at, length));
      begin = at + length;
    }
    at += length;
  }
  append_nfc(text.substr(begin), out);
  return out;
}

std::string replace_space_runs(std::string_view text, std::string_view content) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t spaces = std::min(text.find_first_not_of(' '), text.size());
    const std::size_t end = std::min(text.find(' ', spaces), text.size());
    out.append(spaces > 1 ? content : text.substr(0, spaces));
    out.append(text.substr(spaces, end - spaces));
    text.remove_prefix(end);
  }
  return out;
}

std::string_view strip_spaces(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  return text.substr(0, text.find_last_not_of(' ') + 1);
}

std::string_view strip_left(std::string_view text) {
  while (!text.empty()) {
    const Utf8Char c = decode_utf8(text);
    if (!c.valid || (unicode::classes_of(c.code_point) & unicode::kSpace) == 0) break;
    text.remove_prefix(static_cast<std::size_t>(c.length));
  }
  return text;
}

std::string_view strip_right(std::string_view text) {
  while (!text.empty()) {
    std::size_t begin = text.size() - 1;
    while (begin > 0 && text.size() - begin < 4 && (text[begin] & 0xC0) == 0x80) --begin;
    const Utf8Char c = decode_utf8(text.substr(begin));
    if (!c.valid || begin + static_cast<std::size_t>(c.length) != text.size() ||
        (unicode::classes_of(c.code_point) & unicode::kSpace) == 0) {
      break;
    }
    text = text.substr(0, begin);
  }
  return text;
}

}  // namespace

void Normalizer::add(Step step, std::string_view where) {
  switch (step.kind) {
    case Step::Kind::kNfc:
      growth_ *= 3;  // U+0390 and its like: two bytes that compose from nothing shorter than six
      break;
    case Step::Kind::kPrepend:
      if (step.content.size() > kMaxPrepend) {
        fail(ErrorCode::kInvalidModel, "{}: Prepend of {} bytes, at most {}", where,
             step.content.size(), kMaxPrepend);
      }
      break;
    case Step::Kind::kReplace:
      if (step.from.empty()) {
        fail(ErrorCode::kInvalidModel, "{}: Replace with an empty pattern", where);
      }
      growth_ *= std::max(
          1.0, static_cast<double>(step.content.size()) / static_cast<double>(step.from.size()));
      break;
    case Step::Kind::kReplaceSpaces:
      growth_ *= std::max(1.0, static_cast<double>(step.content.size()) / 2);
      break;
    case Step::Kind::kCharsmap:
      PIANOLA_CHECK(step.charsmap != nullptr, "a charsmap step without a charsmap");
      break;  // bounds what it makes of each text
    case Step::Kind::kSqueezeSpaces:
    case Step::Kind::kStripLeft:
    case Step::Kind::kStripRight:
      break;
  }
  if (growth_ > kMaxGrowth) {
    fail(ErrorCode::kInvalidModel, "{}: the steps can make a text {:.0f} times longer, at most {}",
         where, growth_, kMaxGrowth);
  }
  steps_.push_back(std::move(step));
  if (steps_.size() > 64) {
    fail(ErrorCode::kInvalidModel, "{}: more than 64 steps", where);
  }
}

std::string_view Normalizer::apply(std::string_view text, TextArena& arena) const {
  if (text.empty()) return text;
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Step::Kind::kNfc:
        if (!is_ascii(text)) text = arena.emplace_back(nfc(text));
        break;
      case Step::Kind::kPrepend:
        if (!text.empty()) text = arena.emplace_back(std::string(step.content).append(text));
        break;
      case Step::Kind::kReplace:
        if (text.find(step.from) != std::string_view::npos) {
          text = arena.emplace_back(replace_all(text, step.from, step.content));
        }
        break;
      case Step::Kind::kReplaceSpaces:
        if (text.find("  ") != std::string_view::npos) {
          text = arena.emplace_back(replace_space_runs(text, step.content));
        }
        break;
      case Step::Kind::kSqueezeSpaces:
        text = strip_spaces(text);
        if (text.find("  ") != std::string_view::npos) {
          text = arena.emplace_back(replace_space_runs(text, " "));
        }
        break;
      case Step::Kind::kCharsmap:
        text = arena.emplace_back(step.charsmap->apply(text));
        break;
      case Step::Kind::kStripLeft:
        text = strip_left(text);
        break;
      case Step::Kind::kStripRight:
        text = strip_right(text);
        break;
    }
  }
  return text;
}

}  // namespace pianola
