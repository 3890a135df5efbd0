// Mistral. Reference: MistralForCausalLM of transformers.
//
// A Llama without biases, with a sliding window in all layers or in none. Its GGUF files say that
// they are llama.
#include "models/family.h"

namespace pianola {
namespace {

void parse_mistral(const JsonObject& root, ModelConfig& config) {
  constexpr std::int64_t kDefaultWindow = 4096;  // transformers', when the field is absent
  set_sliding_window(
      root, is_absent(root, "sliding_window") ? kDefaultWindow : root.find_int("sliding_window"), 0,
      config);
}

}  // namespace

const Family kMistral = {.model_type = "mistral",
                         .architecture = "",
                         .default_max_position_embeddings = 131072,
                         .parse_hf = parse_mistral};

}  // namespace pianola
