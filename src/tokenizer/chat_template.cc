#include "tokenizer/chat_template.h"

#include <utility>
#include <vector>

#include "base/check.h"
#include "base/json_reader.h"
#include "base/mapped_file.h"
#include "base/utf8.h"
#include "tokenizer/jinja_interpreter.h"
#include "tokenizer/jinja_parser.h"

namespace pianola {
namespace {

constexpr std::string_view kChatMl =
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

constexpr std::size_t kConfigBytes = std::size_t{64} << 20;
constexpr std::string_view kKey = "tokenizer.chat_template";

}  // namespace

struct ChatTemplate::Parsed {
  std::string source;
  jinja::Limits limits;
  jinja::Template parsed;
};

ChatTemplate::ChatTemplate(std::unique_ptr<const Parsed> parsed) : parsed_(std::move(parsed)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

const std::string& ChatTemplate::source() const { return parsed_->source; }

ChatTemplate ChatTemplate::parse(std::string_view source, const jinja::Limits& limits) {
  auto parsed = std::make_unique<Parsed>();
  parsed->parsed = jinja::parse_template(source, limits);
  parsed->source = std::string(source);
  parsed->limits = limits;
  return ChatTemplate(std::move(parsed));
}

ChatTemplate ChatTemplate::named(std::string_view name) {
  if (name != "chatml") {
    fail(ErrorCode::kNotFound, "chat template: no built-in template '{}'; there is: chatml", name);
  }
  return parse(kChatMl);
}

std::string ChatTemplate::render(const ChatInput& input) const {
  using jinja::Value;
  jinja::Sandbox sandbox(parsed_->limits);
  std::vector<std::pair<std::string, Value>> variables;
  // Variables of the request first: a name is found where it comes first.
  for (const auto& [key, value] : input.variables) {
    variables.emplace_back(std::string(key), jinja::value_from_json(sandbox, value));
  }
  const auto optional_array = [&](const std::optional<boost::json::array>& array) {
    return array ? jinja::value_from_json(sandbox, *array) : Value::none();
  };
  variables.emplace_back("messages", jinja::value_from_json(sandbox, input.messages));
  variables.emplace_back("tools", optional_array(input.tools));
  variables.emplace_back("documents", optional_array(input.documents));
  variables.emplace_back("add_generation_prompt", Value::boolean(input.add_generation_prompt));
  variables.emplace_back("bos_token", sandbox.string(sanitize_utf8(input.bos_token)));
  variables.emplace_back("eos_token", sandbox.string(sanitize_utf8(input.eos_token)));
  const auto now = input.clock.value_or(std::chrono::system_clock::now());
  const auto microseconds =
      std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count();
  jinja::Interpreter interpreter(parsed_->parsed, sandbox, microseconds);
  return interpreter.render(variables);
}

ChatTemplateSources find_chat_templates(const Metadata& metadata) {
  ChatTemplateSources sources;
  if (const std::string* source = metadata.find_string(kKey)) sources.emplace("default", *source);
  const std::string prefix = std::string(kKey) + ".";
  for (const auto& [key, value] : metadata.entries()) {
    if (!key.starts_with(prefix)) continue;
    sources.emplace(key.substr(prefix.size()), *metadata.find_string(key));
  }
  return sources;
}

ChatTemplateSources find_chat_templates(const std::filesystem::path& folder) {
  namespace fs = std::filesystem;
  constexpr std::size_t kBytes = jinja::Limits().source_bytes;
  ChatTemplateSources sources;
  if (const fs::path file = folder / "chat_template.jinja"; fs::exists(file)) {
    sources.emplace("default", read_text_file(file, kBytes));
  }
  if (const fs::path more = folder / "additional_chat_templates"; fs::is_directory(more)) {
    for (const auto& entry : fs::directory_iterator(more)) {
      if (entry.path().extension() != ".jinja") continue;
      sources.emplace(entry.path().stem().string(), read_text_file(entry.path(), kBytes));
    }
  }
  const fs::path config = folder / "tokenizer_config.json";
  if (!sources.empty() || !fs::exists(config)) return sources;
  const boost::json::value root =
      parse_json(read_text_file(config, kConfigBytes), "tokenizer_config.json");
  const JsonObject object(root, "tokenizer_config.json");
  const boost::json::value* value = object.find("chat_template");
  if (value == nullptr) return sources;
  if (!value->is_array()) {
    sources.emplace("default", object.get_string("chat_template"));
    return sources;
  }
  for (const auto& item : value->as_array()) {
    const JsonObject named(item, object.field_path("chat_template[]"));
    sources[named.get_string("name")] = named.get_string("template");
  }
  return sources;
}

const std::string* choose_chat_template(const ChatTemplateSources& sources, bool has_tools,
                                        std::string_view name) {
  if (!name.empty()) {
    const auto it = sources.find(name);
    if (it == sources.end()) {
      fail(ErrorCode::kNotFound, "chat template: the model has no template named '{}'", name);
    }
    return &it->second;
  }
  if (has_tools) {
    if (const auto it = sources.find("tool_use"); it != sources.end()) return &it->second;
  }
  const auto it = sources.find("default");
  return it == sources.end() ? nullptr : &it->second;
}

}  // namespace pianola
