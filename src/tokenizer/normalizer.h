// The normalisers a tokenizer.json may ask for: NFC, and literal Prepend and Replace, in sequence.
//
//   Normalizer normalizer;
//   normalizer.add({Normalizer::Step::Kind::kNfc});
//   std::string_view text = normalizer.apply(input, arena);   // `input` itself when nothing
//   changes
//
// How much a text can grow is bounded when the steps are added. Invalid UTF-8 passes through.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/pretokenizer.h"

namespace pianola {

class Normalizer {
 public:
  struct Step {
    enum class Kind { kNfc, kPrepend, kReplace };
    Kind kind = Kind::kNfc;
    std::string from = {};     // kReplace: not empty
    std::string content = {};  // kPrepend, kReplace
  };

  // Throws InvalidModel, naming `where`, for an empty pattern or when the steps together could make
  // a text more than 16 times longer.
  void add(Step step, std::string_view where);
  bool empty() const { return steps_.empty(); }

  std::string_view apply(std::string_view text, TextArena& arena) const;

 private:
  std::vector<Step> steps_;
  double growth_ = 1;
};

}  // namespace pianola
