#include "tokenizer/jinja_text.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <iterator>

#include "base/utf8.h"

namespace pianola::jinja {
namespace {

utf8proc_category_t category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

// Calls visit(code point, byte offset, byte length).
template <typename Visit>
void for_each_char(std::string_view text, Visit visit) {
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(i));
    visit(c.code_point, i, static_cast<std::size_t>(c.length));
    i += static_cast<std::size_t>(c.length);
  }
}

// The last character of a text that is not empty: (code point, its bytes).
std::pair<char32_t, std::size_t> last_char(std::string_view text) {
  std::size_t start = text.size() - 1;
  while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
  return {decode_utf8(text.substr(start)).code_point, text.size() - start};
}

bool is_line_end(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

}  // namespace

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

std::size_t length(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

std::u32string to_utf32(std::string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for_each_char(text, [&out](char32_t c, std::size_t, std::size_t) { out.push_back(c); });
  return out;
}

std::string to_utf8(std::u32string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : text) append_utf8(out, c);
  return out;
}

std::size_t byte_offset(std::string_view text, std::size_t index) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) == 0x80) continue;
    if (index == 0) return i;
    --index;
  }
  return text.size();
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

bool is_alpha(char32_t c) {
  if (c < 0x80) return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  const auto cat = category(c);
  return cat >= UTF8PROC_CATEGORY_LU && cat <= UTF8PROC_CATEGORY_LO;
}

bool is_decimal(char32_t c) { return category(c) == UTF8PROC_CATEGORY_ND; }

bool is_digit(char32_t c) {
  if (is_decimal(c)) return true;
  // Numeric_Type=Digit outside Nd: superscripts, subscripts, circled and dotted digits.
  static constexpr std::pair<char32_t, char32_t> kDigits[] = {
      {0xB2, 0xB3},       {0xB9, 0xB9},       {0x1369, 0x1371},   {0x19DA, 0x19DA},
      {0x2070, 0x2070},   {0x2074, 0x2079},   {0x2080, 0x2089},   {0x2460, 0x2468},
      {0x2474, 0x247C},   {0x2488, 0x2490},   {0x24EA, 0x24EA},   {0x24F5, 0x24FD},
      {0x24FF, 0x24FF},   {0x2776, 0x277E},   {0x2780, 0x2788},   {0x278A, 0x2792},
      {0x10A40, 0x10A43}, {0x10E60, 0x10E68}, {0x11052, 0x1105A}, {0x1F100, 0x1F10A}};
  return std::any_of(std::begin(kDigits), std::end(kDigits),
                     [c](const auto& range) { return c >= range.first && c <= range.second; });
}

bool is_numeric(char32_t c) {
  const auto cat = category(c);
  return cat >= UTF8PROC_CATEGORY_ND && cat <= UTF8PROC_CATEGORY_NO;
}

bool is_upper(char32_t c) {
  return utf8proc_isupper(static_cast<utf8proc_int32_t>(c)) != 0 &&
         category(c) != UTF8PROC_CATEGORY_LT;
}
bool is_lower(char32_t c) { return utf8proc_islower(static_cast<utf8proc_int32_t>(c)) != 0; }
bool is_title(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LT; }

bool is_printable(char32_t c) {
  if (c == ' ') return true;
  const auto cat = category(c);
  return cat != UTF8PROC_CATEGORY_CN && !(cat >= UTF8PROC_CATEGORY_ZS);
}

bool is_word(char32_t c) { return c == '_' || is_alpha(c) || is_numeric(c); }

std::string_view strip_space(std::string_view text, int sides) {
  if ((sides & 1) != 0) {
    while (!text.empty()) {
      const Utf8Char c = decode_utf8(text);
      if (!is_space(c.code_point)) break;
      text.remove_prefix(static_cast<std::size_t>(c.length));
    }
  }
  if ((sides & 2) != 0) {
    while (!text.empty()) {
      const auto [c, size] = last_char(text);
      if (!is_space(c)) break;
      text.remove_suffix(size);
    }
  }
  return text;
}

std::string_view strip_chars(std::string_view text, std::string_view chars, int sides) {
  const std::u32string set = to_utf32(chars);
  const auto in_set = [&set](char32_t c) { return set.find(c) != std::u32string::npos; };
  if ((sides & 1) != 0) {
    while (!text.empty()) {
      const Utf8Char c = decode_utf8(text);
      if (!in_set(c.code_point)) break;
      text.remove_prefix(static_cast<std::size_t>(c.length));
    }
  }
  if ((sides & 2) != 0) {
    while (!text.empty()) {
      const auto [c, size] = last_char(text);
      if (!in_set(c)) break;
      text.remove_suffix(size);
    }
  }
  return text;
}

std::vector<std::string_view> split_space(std::string_view text, std::int64_t max) {
  std::vector<std::string_view> parts;
  text = strip_space(text, 1);
  while (!text.empty()) {
    if (max >= 0 && static_cast<std::int64_t>(parts.size()) == max) {
      parts.push_back(text);
      break;
    }
    std::size_t end = 0;
    while (end < text.size()) {
      const Utf8Char c = decode_utf8(text.substr(end));
      if (is_space(c.code_point)) break;
      end += static_cast<std::size_t>(c.length);
    }
    parts.push_back(text.substr(0, end));
    text = strip_space(text.substr(end), 1);
  }
  return parts;
}

std::vector<std::string_view> rsplit_space(std::string_view text, std::int64_t max) {
  std::vector<std::string_view> parts;
  text = strip_space(text, 2);
  while (!text.empty()) {
    if (max >= 0 && static_cast<std::int64_t>(parts.size()) == max) {
      parts.push_back(text);
      break;
    }
    std::size_t start = text.size();
    while (start > 0) {
      const auto [c, size] = last_char(text.substr(0, start));
      if (is_space(c)) break;
      start -= size;
    }
    parts.push_back(text.substr(start));
    text = strip_space(text.substr(0, start), 2);
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split_at(std::string_view text, std::string_view separator,
                                       std::int64_t max) {
  std::vector<std::string_view> parts;
  for (;;) {
    const bool more = max < 0 || static_cast<std::int64_t>(parts.size()) < max;
    const std::size_t at = more ? text.find(separator) : std::string_view::npos;
    if (at == std::string_view::npos) break;
    parts.push_back(text.substr(0, at));
    text.remove_prefix(at + separator.size());
  }
  parts.push_back(text);
  return parts;
}

std::vector<std::string_view> rsplit_at(std::string_view text, std::string_view separator,
                                        std::int64_t max) {
  std::vector<std::string_view> parts;
  for (;;) {
    const bool more = max < 0 || static_cast<std::int64_t>(parts.size()) < max;
    const std::size_t at = more ? text.rfind(separator) : std::string_view::npos;
    if (at == std::string_view::npos) break;
    parts.push_back(text.substr(at + separator.size()));
    text = text.substr(0, at);
  }
  parts.push_back(text);
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  std::size_t start = 0;
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(i));
    const std::size_t end = i;
    i += static_cast<std::size_t>(c.length);
    if (!is_line_end(c.code_point)) continue;
    if (c.code_point == '\r' && i < text.size() && text[i] == '\n') ++i;
    lines.push_back(text.substr(start, (keep_ends ? i : end) - start));
    start = i;
  }
  if (start < text.size()) lines.push_back(text.substr(start));
  return lines;
}

std::size_t count_of(std::string_view text, std::string_view part) {
  if (part.empty()) return length(text) + 1;
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string_view::npos;
       at = text.find(part, at + part.size())) {
    ++n;
  }
  return n;
}

std::size_t replaced_size(std::string_view text, std::string_view old_part,
                          std::string_view new_part, std::int64_t count) {
  std::size_t n = count_of(text, old_part);
  if (count >= 0) n = std::min(n, static_cast<std::size_t>(count));
  return text.size() + n * new_part.size() - n * old_part.size();
}

std::string replace_all(std::string_view text, std::string_view old_part, std::string_view new_part,
                        std::int64_t count) {
  std::string out;
  if (old_part.empty()) {
    std::size_t i = 0;
    for (;;) {
      if (count != 0) {
        out += new_part;
        --count;
      }
      if (i >= text.size()) break;
      const auto n = static_cast<std::size_t>(decode_utf8(text.substr(i)).length);
      out += text.substr(i, n);
      i += n;
    }
    return out;
  }
  while (count != 0) {
    const std::size_t at = text.find(old_part);
    if (at == std::string_view::npos) break;
    out += text.substr(0, at);
    out += new_part;
    text.remove_prefix(at + old_part.size());
    --count;
  }
  out += text;
  return out;
}

std::string quote(std::string_view text) {
  const bool use_double =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char mark = use_double ? '"' : '\'';
  std::string out(1, mark);
  for_each_char(text, [&](char32_t c, std::size_t at, std::size_t size) {
    if (c == static_cast<char32_t>(mark) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (is_printable(c)) {
      out += text.substr(at, size);
    } else if (c < 0x100) {
      out += fmt::format("\\x{:02x}", static_cast<std::uint32_t>(c));
    } else if (c < 0x10000) {
      out += fmt::format("\\u{:04x}", static_cast<std::uint32_t>(c));
    } else {
      out += fmt::format("\\U{:08x}", static_cast<std::uint32_t>(c));
    }
  });
  out += mark;
  return out;
}

std::string escape_html(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace pianola::jinja
