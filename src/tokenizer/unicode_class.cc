#include "tokenizer/unicode_class.h"

#include <vector>

namespace pianola::unicode {

const std::uint8_t* class_table() {
  static const std::vector<std::uint8_t> table = [] {
    std::vector<std::uint8_t> classes(0x110000);
    for (const ClassRange& range : kClassRanges) {
      for (char32_t c = range.first; c <= range.last; ++c) classes[c] = range.classes;
    }
    return classes;
  }();
  return table.data();
}

}  // namespace pianola::unicode
