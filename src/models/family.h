// One entry for each model family: which files are its own, and what it adds to the plain decoder
// that all share. A family is one file (llama.cc, qwen3.cc, ...) and one line in registry.cc.
//
//   if (const Family* family = find_family_by_model_type("qwen3")) family->parse_hf(root, config);
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/json_reader.h"
#include "models/model_config.h"

namespace pianola {

// What config.json calls a field that others call by another name.
struct FieldAlias {
  std::string_view field;
  std::string_view own;
};

struct Family {
  std::string_view model_type;    // config.json: model_type
  std::string_view architecture;  // GGUF: general.architecture; "" when its files carry another's
  // transformers' default: config.json may leave out what equals it.
  std::int64_t default_max_position_embeddings = 0;
  // What may stand in layer_types besides full and sliding attention.
  std::string_view state_layer_type;
  // Of its rope, unless config.json says otherwise; 0: all of a head turns, always.
  double partial_rotary_factor = 0;
  // Names of its own for the shared fields: transformers' attribute_map.
  std::span<const FieldAlias> aliases;
  // Reads the fields of config.json that only this family has; the shared ones are there already.
  void (*parse_hf)(const JsonObject& root, ModelConfig& config) = nullptr;
  // What GGUF files of this architecture imply without saying it.
  RopeStyle gguf_rope_style = RopeStyle::kHalf;
  bool gguf_qkv_bias = false;
  bool gguf_qk_norm = false;
  bool gguf_experts = false;  // and nothing but them: no layer has a plain MLP
  bool gguf_shared_expert = false;
  bool gguf_latent = false;  // multi-head latent attention, and experts as DeepSeek has them
  RouteScore gguf_route_score = RouteScore::kSoftmaxOfChosen;
  // The rest of it, once the shared keys are read.
  void (*finish_gguf)(const Metadata& metadata, ModelConfig& config) = nullptr;
  // What only the tensors of a file say: whether layers have a gate, and whether there is a head.
  void (*finish_gguf_tensors)(bool has_gate, bool has_head, ModelConfig& config) = nullptr;
};

extern const Family kBamba;
extern const Family kDeepseekV2;
extern const Family kDeepseekV3;
extern const Family kGemma3;
extern const Family kGptOss;
extern const Family kLlama;
extern const Family kMistral;
extern const Family kQwen2;
extern const Family kQwen2Moe;
extern const Family kQwen3;
extern const Family kQwen35;
extern const Family kQwen3Moe;
extern const Family kQwen3Next;
extern const Family kT5;

std::span<const Family* const> families();
const Family* find_family_by_model_type(std::string_view model_type);      // nullptr: unknown
const Family* find_family_by_architecture(std::string_view architecture);  // nullptr: unknown
// "llama, qwen2, qwen3": the values of one field, for messages.
std::string known_families(std::string_view Family::* field);

// --- For the families' parsers ------------------------------------------------------------------

// Absent is not null: transformers fills in its default only for the first.
bool is_absent(const JsonObject& object, std::string_view key);

// One rope_scaling or rope_parameters object into `out`.
void parse_rope_parameters(const JsonObject& root, const JsonObject& rope,
                           const ModelConfig& config, RopeConfig& out);

// A window for the layers from `first_layer` on.
void set_sliding_window(const JsonObject& root, std::optional<std::int64_t> window,
                        std::int64_t first_layer, ModelConfig& config);

// The same for all layers, from a key of a GGUF file.
void set_gguf_window(const Metadata& metadata, const char* key, ModelConfig& config);

// num_experts (or num_local_experts) and num_experts_per_tok.
void parse_expert_counts(const JsonObject& root, ModelConfig& config);

// Layers of every second or so are full attention: those whose number + 1 is a multiple.
void open_layers(ModelConfig& config, std::int64_t pattern);

// Throws Unsupported naming the field's path.
template <typename... Args>
[[noreturn]] void fail_unsupported(const JsonObject& object, std::string_view field,
                                   fmt::format_string<Args...> format, Args&&... args) {
  fail(ErrorCode::kUnsupported, "{}: {}", object.field_path(field),
       fmt::format(format, std::forward<Args>(args)...));
}

// Qwen switches its window on by a flag, and then only from layer max_window_layers up.
void parse_qwen_window(const JsonObject& root, ModelConfig& config);
// The experts of Qwen2-MoE and Qwen3-MoE, and which layers have them.
void parse_qwen_experts(const JsonObject& root, ModelConfig& config);

}  // namespace pianola
