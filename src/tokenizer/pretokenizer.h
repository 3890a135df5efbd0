// Splitting text into words before BPE: hand-written scanners for the regular expressions of known
// vocabularies, and the other pre-tokenizers of a tokenizer.json.
//
//   PreTokenizer pre;
//   pre.add({PreStep::Kind::kPattern, WordPattern::kGpt2});
//   pre.split(text, /*at_text_start=*/true, arena, sink);   // sink.word(view) for each word
//
// Bytes that are not UTF-8 count as a symbol: neither letter, number nor space.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pianola {

enum class WordPattern { kGpt2, kLlama3, kQwen2, kQwen35, kO200k };

// End of the word that starts at `at` (< text.size()).
std::size_t word_end(WordPattern pattern, std::string_view text, std::size_t at);

// The pattern whose regular expression is written exactly so.
std::optional<WordPattern> known_pattern(std::string_view regex);

struct PreStep {
  enum class Kind {
    kPattern,      // words of `pattern`
    kDigits,       // every numeric character on its own
    kDigitRuns,    // runs of numeric characters on their own
    kWhitespace,   // at white space, which is dropped
    kLiteral,      // split at `literal` as `behaviour` says
    kMetaspace,    // spaces become `literal`, one is put in front as `prepend` says
    kSpacePrefix,  // a space in front unless there is one
  };
  enum class Behaviour { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kNone };
  enum class Prepend { kAlways, kFirst, kNever };

  Kind kind = Kind::kPattern;
  WordPattern pattern = WordPattern::kGpt2;
  std::string literal = {};
  Behaviour behaviour = Behaviour::kIsolated;
  Prepend prepend = Prepend::kNever;
};

class WordSink {
 public:
  virtual void word(std::string_view text) = 0;

 protected:
  ~WordSink() = default;
};

// Text made while encoding; views into it stay valid until the encoding ends.
using TextArena = std::deque<std::string>;

class PreTokenizer {
 public:
  void add(PreStep step) { steps_.push_back(std::move(step)); }
  bool empty() const { return steps_.empty(); }

  // Calls sink.word for every word. `at_text_start`: the fragment is the beginning of the text.
  void split(std::string_view text, bool at_text_start, TextArena& arena, WordSink& sink) const;

 private:
  void run(std::size_t step, std::string_view text, bool at_text_start, TextArena& arena,
           WordSink& sink) const;

  std::vector<PreStep> steps_;
};

}  // namespace pianola
