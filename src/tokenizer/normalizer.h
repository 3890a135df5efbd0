// The normalisers of a vocabulary, in sequence: NFC, a precompiled charsmap, literal Prepend and
// Replace, and what is done to spaces.
//
//   Normalizer normalizer;
//   normalizer.add({Normalizer::Step::Kind::kNfc});
//   std::string_view text = normalizer.apply(input, arena);   // `input` itself when nothing
//   changes
//
// How much a text can grow is bounded when the steps are added. Invalid UTF-8 passes through.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/charsmap.h"
#include "tokenizer/pretokenizer.h"

namespace pianola {

class Normalizer {
 public:
  struct Step {
    enum class Kind {
      kNfc,
      kCharsmap,
      kPrepend,  // not to an empty text
      kReplace,
      kReplaceSpaces,  // each run of two spaces or more, as a whole
      kSqueezeSpaces,  // none at the ends, and one for a run of them
      kStripLeft,      // white space, as Unicode has it
      kStripRight,
    };
    Kind kind = Kind::kNfc;
    std::string from = {};     // kReplace: not empty
    std::string content = {};  // kPrepend, kReplace, kReplaceSpaces
    std::shared_ptr<const Charsmap> charsmap = nullptr;
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
