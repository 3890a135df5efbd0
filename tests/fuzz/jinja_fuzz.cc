// Any bytes as a chat template, rendered over a small conversation: a text within the limits or an
// Error, never more. What was rendered once renders the same again.
//
// Seeds: the sources of tests/unit/chat_template/expressions.json, one file each.
#include <boost/json.hpp>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/utf8.h"
#include "pianola/error.h"
#include "tokenizer/chat_template.h"

namespace {

pianola::ChatInput small_input() {
  pianola::ChatInput input;
  input.messages = boost::json::parse(R"([
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo 🙂"},
    {"role": "assistant", "content": null, "tool_calls": [
      {"type": "function", "function": {"name": "f", "arguments": {"a": [1, 2.5, "x", null]}}}]}])")
                       .as_array();
  input.tools =
      boost::json::parse(R"([{"type": "function", "function": {"name": "f"}}])").as_array();
  input.variables = boost::json::parse(R"({"n": null, "t": true, "f": false, "i": 7, "m": -7,
    "x": 2.5, "s": "Hello, Wörld", "e": "", "l": [3, 1, 2], "w": ["b", "A"], "z": "日本🙂é",
    "d": {"b": 1, "a": [1, {"k": "v"}]}, "u": [{"name": "Bo", "age": 30}, {"name": "al"}]})")
                        .as_object();
  input.bos_token = "<s>";
  input.eos_token = "</s>";
  input.clock = std::chrono::system_clock::time_point();
  return input;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const pianola::ChatInput input = small_input();
  pianola::jinja::Limits limits;
  limits.steps = 100'000;
  limits.memory_bytes = std::size_t{8} << 20;
  limits.output_bytes = std::size_t{1} << 20;
  limits.cpu_ms = 0;  // the same outcome on every machine
  try {
    const auto chat = pianola::ChatTemplate::parse(
        std::string_view(reinterpret_cast<const char*>(data), size), limits);
    const std::string text = chat.render(input);
    if (text.size() > limits.output_bytes || !pianola::is_valid_utf8(text)) std::abort();
    if (chat.render(input) != text) std::abort();
  } catch (const pianola::Error& error) {
    if (error.code() == pianola::ErrorCode::kInternal) std::abort();
  }
  return 0;
}
