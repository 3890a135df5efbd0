// Python's str operations on UTF-8: everything counts and indexes code points, as a template does.
//
//   length("né")                      -> 2
//   slice_text("héllo", 1, 3, 1)      -> "él"
//   to_upper("straße")                -> "STRASSE"
//
// Inputs are valid UTF-8. Functions that copy are linear in their input; callers charge the budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pianola::jinja {

bool is_ascii(std::string_view text);
std::size_t length(std::string_view text);
std::u32string to_utf32(std::string_view text);
std::string to_utf8(std::u32string_view text);
// Byte offset of code point `index`; the size of the text when it is behind the end.
std::size_t byte_offset(std::string_view text, std::size_t index);

// Python's str.isspace for one character.
bool is_space(char32_t c);
bool is_alpha(char32_t c);
bool is_decimal(char32_t c);
bool is_digit(char32_t c);
bool is_numeric(char32_t c);
bool is_upper(char32_t c);
bool is_lower(char32_t c);
bool is_title(char32_t c);
bool is_printable(char32_t c);
// \w of Python's re.
bool is_word(char32_t c);

std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string to_title(std::string_view text);    // str.title
std::string capitalize(std::string_view text);  // str.capitalize
std::string swap_case(std::string_view text);

// sides: 1 left, 2 right, 3 both.
std::string_view strip_space(std::string_view text, int sides);
std::string_view strip_chars(std::string_view text, std::string_view chars, int sides);

// str.split(None, max): at runs of white space; max < 0 is no limit.
std::vector<std::string_view> split_space(std::string_view text, std::int64_t max);
std::vector<std::string_view> rsplit_space(std::string_view text, std::int64_t max);
std::vector<std::string_view> split_at(std::string_view text, std::string_view separator,
                                       std::int64_t max);
std::vector<std::string_view> rsplit_at(std::string_view text, std::string_view separator,
                                        std::int64_t max);
std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends);

std::size_t count_of(std::string_view text, std::string_view part);
// str.replace with a count (< 0: all).
std::string replace_all(std::string_view text, std::string_view old_part, std::string_view new_part,
                        std::int64_t count);
// How long replace_all's result will be.
std::size_t replaced_size(std::string_view text, std::string_view old_part,
                          std::string_view new_part, std::int64_t count);

// Python's repr of a str: quotes and escapes.
std::string quote(std::string_view text);
// markupsafe.escape
std::string escape_html(std::string_view text);

}  // namespace pianola::jinja
