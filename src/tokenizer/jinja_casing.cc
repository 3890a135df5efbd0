#include <utf8proc.h>

#include <algorithm>
#include <iterator>

#include "base/utf8.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

struct SpecialCase {
  char32_t code_point;
  char32_t upper[4];  // ends with 0
  char32_t title[4];
};

constexpr SpecialCase kSpecialCases[] = {
#include "tokenizer/jinja_casing_table.inc"
};

const SpecialCase* find_special(char32_t c) {
  const auto* it = std::lower_bound(
      std::begin(kSpecialCases), std::end(kSpecialCases), c,
      [](const SpecialCase& special, char32_t value) { return special.code_point < value; });
  return it != std::end(kSpecialCases) && it->code_point == c ? it : nullptr;
}

void append_upper(std::u32string& out, char32_t c) {
  if (const SpecialCase* special = find_special(c)) {
    out += special->upper;
  } else {
    out += static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
  }
}

void append_title(std::u32string& out, char32_t c) {
  if (const SpecialCase* special = find_special(c)) {
    out += special->title;
  } else {
    out += static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c)));
  }
}

bool is_cased(char32_t c) { return is_upper(c) || is_lower(c) || is_title(c); }

bool is_case_ignorable(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
      return true;
    default:
      return c == '\'' || c == '.' || c == ':' || c == 0xB7 || c == 0x2018 || c == 0x2019;
  }
}

// Sigma is final when a cased letter comes before it and none after, skipping what case ignores.
bool is_final_sigma(std::u32string_view text, std::size_t at) {
  std::size_t before = at;
  while (before > 0 && is_case_ignorable(text[before - 1])) --before;
  if (before == 0 || !is_cased(text[before - 1])) return false;
  std::size_t after = at + 1;
  while (after < text.size() && is_case_ignorable(text[after])) ++after;
  return after == text.size() || !is_cased(text[after]);
}

void append_lower(std::u32string& out, std::u32string_view text, std::size_t at) {
  const char32_t c = text[at];
  if (c == 0x3A3) {
    out += is_final_sigma(text, at) ? U'\u03C2' : U'\u03C3';
  } else if (c == 0x130) {
    out += U"i\u0307";
  } else {
    out += static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
  }
}

}  // namespace

std::string to_upper(std::string_view text) {
  std::u32string out;
  for (const char32_t c : to_utf32(text)) append_upper(out, c);
  return to_utf8(out);
}

std::string to_lower(std::string_view text) {
  const std::u32string in = to_utf32(text);
  std::u32string out;
  for (std::size_t i = 0; i < in.size(); ++i) append_lower(out, in, i);
  return to_utf8(out);
}

std::string to_title(std::string_view text) {
  const std::u32string in = to_utf32(text);
  std::u32string out;
  bool inside = false;
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (inside) {
      append_lower(out, in, i);
    } else {
      append_title(out, in[i]);
    }
    inside = is_cased(in[i]);
  }
  return to_utf8(out);
}

std::string capitalize(std::string_view text) {
  const std::u32string in = to_utf32(text);
  std::u32string out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (i == 0) {
      append_title(out, in[i]);
    } else {
      append_lower(out, in, i);
    }
  }
  return to_utf8(out);
}

std::string swap_case(std::string_view text) {
  const std::u32string in = to_utf32(text);
  std::u32string out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (is_upper(in[i])) {
      append_lower(out, in, i);
    } else if (is_lower(in[i])) {
      append_upper(out, in[i]);
    } else {
      out += in[i];
    }
  }
  return to_utf8(out);
}

}  // namespace pianola::jinja
