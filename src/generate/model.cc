#include "pianola/model.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/check.h"
#include "base/json_reader.h"
#include "models/model.h"
#include "tokenizer/chat_template.h"
#include "tokenizer/gguf_vocab.h"
#include "tokenizer/tokenizer_json.h"

namespace pianola {

struct Model::Parts {
  std::shared_ptr<const CausalModel> causal;
  ModelInfo info;
  std::shared_ptr<const Tokenizer> tokenizer;  // null: the file has none, or it cannot be used
  std::string no_tokenizer;                    // why
  ChatTemplateSources templates;
  SamplingParams sampling;
  std::vector<TokenId> stop_tokens;
  std::vector<std::string> control_texts;  // of the vocabulary's control tokens
};

namespace {

ModelInfo read_info(const CausalModel& model, const std::string& path) {
  const Checkpoint& checkpoint = model.checkpoint();
  ModelInfo info;
  info.path = path;
  info.format = checkpoint.format_name();
  const std::string* name = checkpoint.metadata().find_string("general.name");
  info.name = name ? *name : std::filesystem::path(path).filename().string();
  info.family = model.config().model_type;
  info.weight_types = model.weight_types();
  info.file_bytes = checkpoint.total_bytes();
  info.parameters = model.parameter_count();
  info.layers = model.config().num_hidden_layers;
  info.context = model.config().max_position_embeddings;
  return info;
}

std::shared_ptr<const Tokenizer> read_tokenizer(const Checkpoint& checkpoint) {
  if (checkpoint.format() == Checkpoint::Format::kHuggingFace) {
    if (!std::filesystem::exists(checkpoint.folder() / "tokenizer.json")) return nullptr;
    return tokenizer_from_folder(checkpoint.folder());
  }
  const std::string* kind = checkpoint.metadata().find_string("tokenizer.ggml.model");
  if (!kind || *kind == "no_vocab" || *kind == "none") return nullptr;
  return tokenizer_from_gguf(checkpoint.metadata());
}

// Of a model with an encoder: with a tokenizer of another kind it opens all the same, for token
// ids.
std::shared_ptr<const Tokenizer> read_tokenizer_if_known(const Checkpoint& checkpoint,
                                                         std::string& why_not) {
  try {
    return read_tokenizer(checkpoint);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    why_not = error.what();
    return nullptr;
  }
}

ChatTemplateSources read_templates(const Checkpoint& checkpoint) {
  return checkpoint.format() == Checkpoint::Format::kGguf
             ? find_chat_templates(checkpoint.metadata())
             : find_chat_templates(checkpoint.folder());
}

// What generation_config.json asks for. Sampling only counts when do_sample is true, as there.
SamplingParams read_sampling(const Checkpoint& checkpoint) {
  SamplingParams params;
  if (!checkpoint.generation_config()) return params;
  const JsonObject config(*checkpoint.generation_config(), "generation_config.json");
  params.repeat_penalty = static_cast<float>(config.find_float("repetition_penalty").value_or(1.0));
  if (params.repeat_penalty != 1) params.penalty_window = -1;  // transformers counts every token
  if (config.find_bool("do_sample").value_or(false)) {
    params.temperature = static_cast<float>(config.find_float("temperature").value_or(1.0));
    params.top_k = static_cast<int>(config.find_int("top_k", 0, 1 << 30).value_or(50));
    params.top_p = static_cast<float>(config.find_float("top_p").value_or(1.0));
    params.min_p = static_cast<float>(config.find_float("min_p").value_or(0.0));
  }
  try {
    validate(params);
  } catch (const Error& error) {
    fail(ErrorCode::kInvalidModel, "generation_config.json: {}", error.what());
  }
  return params;
}

std::vector<TokenId> read_stop_tokens(const CausalModel& model, const Tokenizer* tokenizer) {
  std::set<TokenId> ids;
  for (const std::int64_t id : model.config().eos_token_ids) {
    if (id >= 0 && id < model.config().vocab_size) ids.insert(static_cast<TokenId>(id));
  }
  if (tokenizer) ids.insert(tokenizer->eog_ids().begin(), tokenizer->eog_ids().end());
  return {ids.begin(), ids.end()};
}

std::vector<std::string> read_control_texts(const Tokenizer& tokenizer) {
  std::vector<std::string> texts;
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id) {
    if (tokenizer.is_special(id) && !tokenizer.token_text(id).empty()) {
      texts.emplace_back(tokenizer.token_text(id));
    }
  }
  return texts;
}

boost::json::value optional_json(const std::string& text, const char* what) {
  return text.empty() ? boost::json::value() : parse_json(text, what);
}

ChatInput make_input(const std::vector<ChatMessage>& messages, const ChatTemplateOptions& options,
                     const Tokenizer* tokenizer) {
  ChatInput input;
  for (const ChatMessage& message : messages) {
    input.messages.emplace_back(
        boost::json::object{{"role", message.role}, {"content", message.content}});
  }
  input.add_generation_prompt = options.add_generation_prompt;
  const boost::json::value variables = optional_json(options.variables_json, "template variables");
  if (!variables.is_null()) input.variables = JsonObject(variables, "template variables").object();
  const boost::json::value tools = optional_json(options.tools_json, "tools");
  if (!tools.is_null()) {
    if (!tools.is_array()) fail(ErrorCode::kInvalidArgument, "tools: expected a JSON array");
    input.tools = tools.get_array();
  }
  if (tokenizer) {
    if (tokenizer->bos_id()) input.bos_token = tokenizer->token_text(*tokenizer->bos_id());
    if (tokenizer->eos_id()) input.eos_token = tokenizer->token_text(*tokenizer->eos_id());
  }
  return input;
}

// Separates the text of the template from that of the user. A control token's text inside a message
// gets a mark in front, a character that occurs nowhere in the conversation; after the template has
// run, what reads as a control token without a mark is the template's own.
class ControlTextGuard {
 public:
  explicit ControlTextGuard(const std::vector<std::string>& control_texts)
      : control_texts_(control_texts) {}

  bool is_needed(const std::vector<ChatMessage>& messages) const {
    return std::any_of(messages.begin(), messages.end(), [this](const ChatMessage& message) {
      return contains_control(message.content) || contains_control(message.role);
    });
  }

  std::vector<ChatMessage> protect(std::vector<ChatMessage> messages) {
    choose_mark(messages);
    for (ChatMessage& message : messages) {
      protect_text(message.content);
      protect_text(message.role);
    }
    return messages;
  }

  // Tokens of the rendered text: control tokens where the template wrote them, plain text
  // elsewhere.
  std::vector<TokenId> encode(const std::string& rendered, const Tokenizer& tokenizer) const {
    std::vector<TokenId> ids;
    std::string plain;
    const auto flush = [&] {
      const auto part = tokenizer.encode(plain, {.add_special = false, .parse_special = false});
      ids.insert(ids.end(), part.begin(), part.end());
      plain.clear();
    };
    for (std::size_t at = 0; at < rendered.size();) {
      if (rendered.compare(at, mark_.size(), mark_) == 0) {
        at += mark_.size();
        if (at < rendered.size()) plain += rendered[at++];
        continue;
      }
      const std::string* control = longest_control_at(rendered, at);
      if (control) {
        flush();
        ids.push_back(*tokenizer.find_token(*control));
        at += control->size();
      } else {
        plain += rendered[at++];
      }
    }
    flush();
    return ids;
  }

 private:
  bool contains_control(const std::string& text) const {
    return std::any_of(control_texts_.begin(), control_texts_.end(),
                       [&](const std::string& c) { return text.find(c) != std::string::npos; });
  }

  const std::string* longest_control_at(const std::string& text, std::size_t at) const {
    const std::string* best = nullptr;
    for (const std::string& control : control_texts_) {
      if (text.compare(at, control.size(), control) == 0 &&
          (!best || control.size() > best->size())) {
        best = &control;
      }
    }
    return best;
  }

  void choose_mark(const std::vector<ChatMessage>& messages) {
    // U+FDD0 to U+FDEF are set aside by Unicode for a program's own use.
    for (char last = '\x90'; last != '\xB0'; ++last) {
      mark_ = std::string("\xEF\xB7") + last;
      const bool used = std::any_of(messages.begin(), messages.end(), [this](const ChatMessage& m) {
        return m.content.find(mark_) != std::string::npos ||
               m.role.find(mark_) != std::string::npos;
      });
      if (!used) return;
    }
    fail(ErrorCode::kInvalidArgument,
         "chat: a message holds every Unicode noncharacter from U+FDD0 to U+FDEF");
  }

  // In front, not inside: a control text may be a single character. One that starts inside another
  // gets its own mark.
  void protect_text(std::string& text) const {
    std::string marked;
    for (std::size_t at = 0; at < text.size(); ++at) {
      if (longest_control_at(text, at)) marked += mark_;
      marked += text[at];
    }
    text = std::move(marked);
  }

  const std::vector<std::string>& control_texts_;
  std::string mark_;
};

}  // namespace

Model::Model(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

Model Model::open(const std::string& path) {
  auto parts = std::make_shared<Parts>();
  parts->causal = CausalModel::open(path);
  const Checkpoint& checkpoint = parts->causal->checkpoint();
  parts->info = read_info(*parts->causal, path);
  parts->tokenizer = parts->causal->config().encoder.num_layers > 0
                         ? read_tokenizer_if_known(checkpoint, parts->no_tokenizer)
                         : read_tokenizer(checkpoint);
  parts->templates = read_templates(checkpoint);
  parts->sampling = read_sampling(checkpoint);
  parts->stop_tokens = read_stop_tokens(*parts->causal, parts->tokenizer.get());
  if (parts->tokenizer) {
    const std::int64_t vocab = parts->causal->config().vocab_size;
    if (parts->tokenizer->vocab_size() > vocab) {
      fail(ErrorCode::kInvalidModel, "{}: the tokenizer has {} tokens, the model's vocabulary {}",
           path, parts->tokenizer->vocab_size(), vocab);
    }
    parts->control_texts = read_control_texts(*parts->tokenizer);
  }
  return Model(std::move(parts));
}

const std::shared_ptr<const CausalModel>& Model::causal() const { return parts_->causal; }
const ModelInfo& Model::info() const { return parts_->info; }
bool Model::has_tokenizer() const { return parts_->tokenizer != nullptr; }
const Tokenizer& Model::tokenizer() const { return *shared_tokenizer(); }

const std::shared_ptr<const Tokenizer>& Model::shared_tokenizer() const {
  if (!parts_->tokenizer && !parts_->no_tokenizer.empty()) {
    fail(ErrorCode::kUnsupported,
         "{}: the model's tokenizer cannot be used; only token ids can be (--ids): {}",
         parts_->info.path, parts_->no_tokenizer);
  }
  if (!parts_->tokenizer) {
    fail(ErrorCode::kUnsupported, "{}: the model has no tokenizer; only token ids can be used",
         parts_->info.path);
  }
  return parts_->tokenizer;
}

bool Model::has_chat_template() const {
  return choose_chat_template(parts_->templates, false) != nullptr;
}

const std::string& Model::chat_template() const {
  static const std::string kNone;
  const std::string* source = choose_chat_template(parts_->templates, false);
  return source ? *source : kNone;
}

std::string Model::apply_chat_template(const std::vector<ChatMessage>& messages,
                                       const ChatTemplateOptions& options) const {
  const ChatInput input = make_input(messages, options, parts_->tokenizer.get());
  if (options.template_source == "chatml") return ChatTemplate::named("chatml").render(input);
  const std::string* source = &options.template_source;
  if (source->empty()) source = choose_chat_template(parts_->templates, input.tools.has_value());
  if (!source) {
    fail(ErrorCode::kNotFound,
         "{}: the model has no chat template; name one (chatml) or use plain text",
         parts_->info.path);
  }
  return ChatTemplate::parse(*source).render(input);
}

std::vector<TokenId> Model::encode_chat(const std::vector<ChatMessage>& messages,
                                        const ChatTemplateOptions& options) const {
  ControlTextGuard guard(parts_->control_texts);
  if (!guard.is_needed(messages)) {
    return tokenizer().encode(apply_chat_template(messages, options),
                              {.add_special = false, .parse_special = true});
  }
  const std::string rendered = apply_chat_template(guard.protect(messages), options);
  return guard.encode(rendered, tokenizer());
}

const SamplingParams& Model::default_sampling() const { return parts_->sampling; }
const std::vector<TokenId>& Model::stop_tokens() const { return parts_->stop_tokens; }

}  // namespace pianola
