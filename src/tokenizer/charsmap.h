// The precompiled character map of a SentencePiece model: what each sequence of characters becomes
// before it is split into pieces.
//
//   Charsmap map(bytes, Charsmap::Matching::kLongest, "tokenizer.ggml.precompiled_charsmap");
//   std::string normalized = map.apply(text);
//
// The bytes are a length, a double array (a trie in the form of darts-clone) of so many bytes, and
// the replacements, each ending in a zero byte; the value of a key is where its replacement begins.
// Invalid UTF-8 passes through.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pianola {

class Charsmap {
 public:
  // SentencePiece replaces the longest key at each place. The `tokenizers` library looks up the
  // shortest key of each grapheme of at most five bytes, and replaces all of the grapheme; of
  // others, that of each character.
  enum class Matching { kLongest, kGrapheme };

  // Throws InvalidModel, naming `where`, for bytes of another form.
  Charsmap(std::string_view bytes, Matching matching, std::string_view where);

  // Throws InvalidModel when the text becomes more than 16 times longer.
  std::string apply(std::string_view text) const;

 private:
  struct Match {
    std::size_t length = 0;  // of the key; 0: none
    std::string_view replacement = {};
  };
  Match find(std::string_view text, bool longest) const;
  void apply_longest(std::string_view text, std::string& out) const;
  void apply_graphemes(std::string_view text, std::string& out) const;
  void apply_grapheme(std::string_view grapheme, std::string& out) const;

  Matching matching_;
  std::vector<std::uint32_t> units_;
  std::string replacements_;
};

// The bytes of a text in base64 (with padding). Throws InvalidModel, naming `where`.
std::string decode_base64(std::string_view text, std::string_view where);

}  // namespace pianola
