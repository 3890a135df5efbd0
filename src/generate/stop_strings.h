// Finds stop strings in text that arrives in pieces. Text that could still become the start of one
// is held back, so nothing of a stop string is ever handed out.
//
//   StopStrings stop({"\nUser:"});
//   stop.push("Hello\nUs");      // "Hello"
//   stop.push("er: hi");         // ""; stop.found() is true
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pianola {

class StopStrings {
 public:
  // InvalidArgument for more than 16 strings, an empty one, or one above 256 bytes.
  explicit StopStrings(std::vector<std::string> strings);

  // The text that is safe to hand out after `text` has arrived; "" once a stop string was found.
  std::string push(std::string_view text);
  // What was held back, when no more text comes.
  std::string flush();
  bool found() const { return found_; }

 private:
  std::vector<std::string> strings_;
  std::string held_;
  bool found_ = false;
};

}  // namespace pianola
