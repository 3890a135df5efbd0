#include "line_layout.h"

#include <wchar.h>

#include "base/utf8.h"

namespace pianola::cli {

int display_width(char32_t code_point) {
  const int width = wcwidth(static_cast<wchar_t>(code_point));
  return width < 0 ? 1 : width;  // unassigned, or a locale without it: most show one column
}

namespace {

bool is_word(std::string_view text, std::size_t at) {
  return text[at] != ' ' && text[at] != '\n' && text[at] != '\t';
}

}  // namespace

std::size_t next_character(std::string_view text, std::size_t at) {
  if (at >= text.size()) return text.size();
  at += static_cast<std::size_t>(decode_utf8(text.substr(at)).length);
  while (at < text.size()) {
    const Utf8Char next = decode_utf8(text.substr(at));
    if (next.code_point < 0x20 || display_width(next.code_point) != 0) break;
    at += static_cast<std::size_t>(next.length);
  }
  return at;
}

// UTF-8 cannot be walked backwards over marks without knowing where they begin: walk from the
// front. Lines are short.
std::size_t previous_character(std::string_view text, std::size_t at) {
  std::size_t begin = 0;
  for (std::size_t next = 0; next < at; next = next_character(text, next)) begin = next;
  return begin;
}

std::size_t next_word(std::string_view text, std::size_t at) {
  while (at < text.size() && !is_word(text, at)) ++at;
  while (at < text.size() && is_word(text, at)) ++at;
  return at;
}

std::size_t previous_word(std::string_view text, std::size_t at) {
  while (at > 0 && !is_word(text, at - 1)) --at;
  while (at > 0 && is_word(text, at - 1)) --at;
  return at;
}

std::string visible(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(at));
    if (c.code_point == '\n') {
      out += "\u21B5";
    } else if (c.code_point == '\t') {
      out += ' ';
    } else if (c.code_point < 0x20 || (c.code_point >= 0x7F && c.code_point < 0xA0)) {
      append_utf8(out, kReplacementCharacter);
    } else {
      append_utf8(out, c.code_point);
    }
    at += static_cast<std::size_t>(c.length);
  }
  return out;
}

ScreenPosition cursor_after(std::string_view text, int columns, ScreenPosition from) {
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(at));
    const int width = display_width(c.code_point);
    if (from.column + width > columns) from = {from.row + 1, 0};
    from.column += width;
    at += static_cast<std::size_t>(c.length);
  }
  if (from.column >= columns) from = {from.row + 1, 0};
  return from;
}

}  // namespace pianola::cli
