#include "tokenizer/unicode_class.h"

#include <vector>

namespace pianola::unicode {

const Classes* class_table() {
  static const std::vector<Classes> table = [] {
    std::vector<Classes> classes(0x110000);
    for (const ClassRange& range : kClassRanges) {
      for (char32_t c = range.first; c <= range.last; ++c) classes[c] = range.classes;
    }
    return classes;
  }();
  return table.data();
}

}  // namespace pianola::unicode
