// Reading a line from a person: cursor keys, history, paste of several lines, characters of any
// width. Where standard input is no terminal it just reads lines.
//
//   LineEditor editor;
//   auto [input, text] = editor.read("> ");
//   if (input == LineInput::kLine) editor.add_history(text);
//
// Keys: left, right, home, end, up and down (history), backspace, delete, Ctrl-A E B F H K U W L D
// P N, Ctrl-left and Ctrl-right (words), Alt-Enter (a new line inside the text). A pasted text
// keeps its line ends; they are shown as "↵" until it is sent.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pianola::cli {

enum class LineInput {
  kLine,
  kInterrupt,  // Ctrl-C; the text typed so far is dropped
  kEnd,        // Ctrl-D on an empty line, or the end of the input
};

struct Line {
  LineInput input = LineInput::kEnd;
  std::string text;  // valid UTF-8
};

class LineEditor {
 public:
  // `initial` stands in the line, to be changed.
  Line read(std::string_view prompt, std::string_view initial = {});
  void add_history(const std::string& text);

 private:
  std::vector<std::string> history_;
  std::string pending_;  // read ahead of the line at hand
};

}  // namespace pianola::cli
