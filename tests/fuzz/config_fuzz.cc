// Any bytes as config.json: a refusal or a config that passes its own rules, never more.
//
// The config that comes out must give rope tables, and a generation config is applied to it as
// well.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/json_reader.h"
#include "models/model_config.h"
#include "models/rope.h"
#include "pianola/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const boost::json::value value = pianola::parse_json(text, "config.json");
    pianola::ModelConfig config = pianola::parse_hf_config(value);
    const auto table = pianola::rope_inverse_frequencies(config.rope, config.head_dim, 1 << 20);
    for (const float frequency : table) {
      if (!(frequency >= 0.0F) || !std::isfinite(frequency)) std::abort();
    }
    if (!std::isfinite(pianola::rope_attention_scale(config.rope))) std::abort();
    pianola::apply_generation_config(value, config);
  } catch (const pianola::Error&) {
    // A refusal is an answer.
  }
  return 0;
}
