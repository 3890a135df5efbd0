// A model as a user opens it: weights on disk, tokenizer, chat template and generation defaults.
//
//   const Model model = Model::open("SmolLM2-135M-Instruct.Q4_1.gguf");   // reads headers only
//   Engine engine(model.causal(), {.threads = 2});
//   auto ids = model.tokenizer().encode(model.apply_chat_template({{"user", "Hello"}}),
//   {.parse_special = true});
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "pianola/sampling.h"
#include "pianola/tokenizer.h"

namespace pianola {

class CausalModel;

struct ChatMessage {
  std::string role;  // "system", "user", "assistant", ...
  std::string content;
};

struct ChatTemplateOptions {
  bool add_generation_prompt = true;
  std::string template_source;  // "": the model's own; "chatml": built in; else Jinja source
  std::string variables_json;   // "" or a JSON object: enable_thinking and other variables
  std::string tools_json;       // "" or a JSON array of function schemas
};

struct ModelInfo {
  std::string path;
  std::string format;        // "GGUF" or "Hugging Face"
  std::string name;          // what the file calls itself, or its file name
  std::string family;        // "llama", "qwen2", ...
  std::string weight_types;  // "q4_1 + q8_0"
  std::uint64_t file_bytes = 0;
  std::int64_t parameters = 0;
  std::int64_t layers = 0;
  std::int64_t context = 0;  // that the model was made for
};

class Model {
 public:
  // A .gguf file, a .safetensors file or a folder with config.json. Throws NotFound, InvalidModel
  // or Unsupported. A file without a tokenizer opens, and one with an encoder whose tokenizer is of
  // an unknown kind; tokenizer() then throws Unsupported.
  static Model open(const std::string& path);

  const std::shared_ptr<const CausalModel>& causal() const;
  const ModelInfo& info() const;

  bool has_tokenizer() const;
  const Tokenizer& tokenizer() const;
  const std::shared_ptr<const Tokenizer>& shared_tokenizer() const;

  bool has_chat_template() const;
  // The source of the model's own template, or "".
  const std::string& chat_template() const;
  // The text of a prompt. Encode it with parse_special, and without add_special where the template
  // writes bos itself (encode_chat does both). Throws InvalidArgument when the template refuses the
  // conversation, NotFound when there is no template.
  std::string apply_chat_template(const std::vector<ChatMessage>& messages,
                                  const ChatTemplateOptions& options = {}) const;
  // The tokens of a conversation. Text inside the messages never becomes a control token.
  std::vector<TokenId> encode_chat(const std::vector<ChatMessage>& messages,
                                   const ChatTemplateOptions& options = {}) const;

  // From generation_config.json when there is one and it asks for sampling; else greedy.
  const SamplingParams& default_sampling() const;
  // The tokens that end an answer.
  const std::vector<TokenId>& stop_tokens() const;

 private:
  struct Parts;
  explicit Model(std::shared_ptr<const Parts> parts);
  std::shared_ptr<const Parts> parts_;
};

}  // namespace pianola
