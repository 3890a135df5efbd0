// Any bytes as tokenizer.json: refused, or a tokenizer that encodes and decodes without harm.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/utf8.h"
#include "pianola/error.h"
#include "pianola/tokenizer.h"
#include "tokenizer/tokenizer_json.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  try {
    const auto tokenizer = pianola::tokenizer_from_json(input, "fuzz");
    for (const bool parse_special : {false, true}) {
      const pianola::EncodeOptions options{.parse_special = parse_special};
      for (const std::string_view text :
           {std::string_view(" ab  abc\xFF \xE2\x96\x81 12's<s>\n\n\xCC\x81"),
            input.substr(0, 512)}) {
        const auto ids = tokenizer->encode(text, options);
        pianola::Detokenizer stream(tokenizer);
        std::string joined;
        for (const pianola::TokenId id : ids) joined += stream.push(id);
        joined += stream.flush();
        if (joined != pianola::sanitize_utf8(tokenizer->decode(ids))) std::abort();
      }
    }
  } catch (const pianola::Error& e) {
    if (e.code() == pianola::ErrorCode::kInternal) std::abort();
  }
  return 0;
}
