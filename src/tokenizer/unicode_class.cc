#include "tokenizer/unicode_class.h"

#include <algorithm>
#include <vector>

namespace pianola::unicode {
namespace {

struct Run {
  char32_t first;
  char32_t count;
  Classes classes;
};
constexpr Run kRuns[] = {
#include "tokenizer/unicode_ranges.inc"
};

}  // namespace

const Classes* class_table() {
  static const std::vector<Classes> table = [] {
    std::vector<Classes> classes(0x110000);
    for (const Run& run : kRuns) std::fill_n(classes.begin() + run.first, run.count, run.classes);
    return classes;
  }();
  return table.data();
}

}  // namespace pianola::unicode
