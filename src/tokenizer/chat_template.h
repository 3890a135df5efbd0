// Chat templates: from messages to the text of a prompt, by the template that a model carries.
//
//   ChatTemplate chat = ChatTemplate::parse(source);
//   ChatInput input;
//   input.messages = parse_json(R"([{"role": "user", "content": "Hi"}])", "request").as_array();
//   std::string prompt = chat.render(input);
//
// The text is byte for byte what Hugging Face transformers gives with jinja2 (sandboxed and
// immutable, trim_blocks, lstrip_blocks, loop controls, its own tojson, raise_exception,
// strftime_now, {% generation %}). Errors name the line of the template: InvalidModel for its
// syntax, Unsupported for a construct this interpreter does not have, InvalidArgument when the
// template refuses the conversation (raise_exception), fails on it, or reaches a limit.
// A ChatTemplate is immutable: threads may render with it at the same time.
#pragma once

#include <boost/json.hpp>

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/metadata.h"
#include "tokenizer/jinja_value.h"

namespace pianola {

struct ChatInput {
  boost::json::array messages;
  std::optional<boost::json::array> tools;  // JSON schemas of functions
  std::optional<boost::json::array> documents;
  bool add_generation_prompt = true;
  boost::json::object variables;  // enable_thinking and other variables of the template
  std::string bos_token;
  std::string eos_token;
  // What strftime_now shows, in local time; now when absent.
  std::optional<std::chrono::system_clock::time_point> clock;
};

class ChatTemplate {
 public:
  static ChatTemplate parse(std::string_view source, const jinja::Limits& limits = {});
  // A built-in fall-back: "chatml". NotFound for another name.
  static ChatTemplate named(std::string_view name);

  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  std::string render(const ChatInput& input) const;
  const std::string& source() const;

 private:
  struct Parsed;
  explicit ChatTemplate(std::unique_ptr<const Parsed> parsed);
  std::unique_ptr<const Parsed> parsed_;
};

// The templates that a model carries, by name ("default", "tool_use", ...): their sources. Empty
// when there is none.
using ChatTemplateSources = std::map<std::string, std::string, std::less<>>;

// From GGUF: tokenizer.chat_template, and tokenizer.chat_template.NAME.
ChatTemplateSources find_chat_templates(const Metadata& metadata);
// From a Hugging Face folder: chat_template.jinja and additional_chat_templates/NAME.jinja, which
// win, or chat_template of tokenizer_config.json (a string, or a list of named templates).
ChatTemplateSources find_chat_templates(const std::filesystem::path& folder);

// The one to use, as transformers chooses: `name` when it is given (NotFound when it is not there),
// else "tool_use" with tools, else "default". nullptr when there is none.
const std::string* choose_chat_template(const ChatTemplateSources& sources, bool has_tools,
                                        std::string_view name = {});

}  // namespace pianola
