// Where the characters of a line stand on the screen, and its boundaries. Apart from the editor so
// that it can be tested without a terminal.
//
// A "character" here is a code point with the marks of no width that follow it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pianola::cli {

// Columns of a code point: 0, 1 or 2.
int display_width(char32_t code_point);

std::size_t next_character(std::string_view text, std::size_t at);
std::size_t previous_character(std::string_view text, std::size_t at);
std::size_t next_word(std::string_view text, std::size_t at);
std::size_t previous_word(std::string_view text, std::size_t at);

// The text as the line shows it: "↵" for a line end, a space for a tab, U+FFFD for other controls.
std::string visible(std::string_view text);

struct ScreenPosition {
  int row = 0;
  int column = 0;
};

// Where the cursor stands after `text` was written from `from` on, on a screen so many columns
// wide. `text` holds what visible() gives.
ScreenPosition cursor_after(std::string_view text, int columns, ScreenPosition from = {});

}  // namespace pianola::cli
