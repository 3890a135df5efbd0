// Real chat templates against jinja2 itself: tools/golden/chat_template_oracle.py writes the cases
// into the cache folder, because the templates are not ours to commit.
#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <set>

#include "base/json_reader.h"
#include "base/mapped_file.h"
#include "pianola/error.h"
#include "tokenizer/chat_template.h"

namespace pianola {
namespace {

// The moment that the oracle's clock shows.
std::chrono::system_clock::time_point oracle_clock() {
  setenv("TZ", "UTC", 1);
  tzset();
  return std::chrono::system_clock::time_point(
      std::chrono::duration_cast<std::chrono::system_clock::duration>(
          std::chrono::seconds(1'720'505'104) +
          std::chrono::microseconds(30)));  // 2024-07-09 06:05:04.000030
}

std::filesystem::path oracle_file() {
  const char* cache = std::getenv("PIANOLA_CACHE");
  const char* home = std::getenv("HOME");
  const std::filesystem::path folder =
      cache != nullptr ? std::filesystem::path(cache)
                       : std::filesystem::path(home == nullptr ? "." : home) / ".cache/pianola";
  return folder / "chat_template_oracle.json";
}

ChatInput input_of(const boost::json::object& chat) {
  ChatInput input;
  input.messages = chat.at("messages").as_array();
  if (chat.at("tools").is_array()) input.tools = chat.at("tools").as_array();
  input.add_generation_prompt = chat.at("add_generation_prompt").as_bool();
  input.variables = chat.at("variables").as_object();
  input.bos_token = "<s>";
  input.eos_token = "</s>";
  input.clock = oracle_clock();
  return input;
}

// Empty when our outcome is jinja2's.
std::string difference(const ChatTemplate& chat, const ChatInput& input,
                       const boost::json::object& expected) {
  try {
    const std::string text = chat.render(input);
    if (!expected.contains("text")) {
      return "jinja2 fails: " + std::string(expected.at("message").as_string()) + "\nours: " + text;
    }
    const std::string wanted(expected.at("text").as_string());
    return text == wanted ? "" : "jinja2: " + wanted + "\nours: " + text;
  } catch (const Error& error) {
    if (expected.contains("text")) return std::string("jinja2 renders; ours: ") + error.what();
    if (error.code() != ErrorCode::kInvalidArgument) return error.what();
    const std::string message(expected.at("message").as_string());
    const bool same = std::string(error.what()).find(message) != std::string::npos;
    return expected.at("raised").as_bool() && !same ? message + "\nours: " + error.what() : "";
  }
}

TEST(ChatTemplateOracle, EveryTemplateRendersAsJinja2Does) {
  const std::filesystem::path file = oracle_file();
  if (!std::filesystem::exists(file)) {
    GTEST_SKIP() << file << " is missing: run tools/golden/chat_template_oracle.py";
  }
  // Not parse_json: its bound on depth is for model files.
  const boost::json::value root = boost::json::parse(read_text_file(file, std::size_t{64} << 20));
  const auto& chats = root.at("conversations").as_array();
  ASSERT_GE(chats.size(), 20U);
  // What the project promises, by the names of the files.
  std::set<std::string> promised = {"meta-llama-Llama-3.1-8B-Instruct",
                                    "meta-llama-Llama-3.2-3B-Instruct",
                                    "meta-llama-Llama-3.3-70B-Instruct",
                                    "Qwen-Qwen2.5-7B-Instruct",
                                    "Qwen-Qwen3-0.6B",
                                    "google-gemma-2-2b-it",
                                    "mistralai-Mistral-Nemo-Instruct-2407",
                                    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
                                    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
                                    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                                    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
                                    "gguf:SmolLM2-135M-Instruct.Q4_1"};
  int pairs = 0;
  int templates = 0;
  for (const auto& item : root.at("templates").as_array()) {
    const auto& entry = item.as_object();
    const std::string name(entry.at("name").as_string());
    if (entry.contains("syntax_error")) {
      EXPECT_THROW(ChatTemplate::parse(std::string(entry.at("source").as_string())), Error)
          << name << ": jinja2 says " << entry.at("syntax_error").as_string();
      continue;
    }
    try {
      const ChatTemplate chat = ChatTemplate::parse(std::string(entry.at("source").as_string()));
      bool all = true;
      for (std::size_t i = 0; i < chats.size(); ++i) {
        const auto& conversation = chats[i].as_object();
        const std::string wrong =
            difference(chat, input_of(conversation), entry.at("cases").as_array()[i].as_object());
        EXPECT_EQ(wrong, "") << name << ", " << conversation.at("name").as_string();
        all = all && wrong.empty();
        ++pairs;
      }
      templates += all ? 1 : 0;
      if (all) promised.erase(name);
    } catch (const Error& error) {
      ADD_FAILURE() << name << ": " << error.what();
    }
  }
  for (const std::string& name : promised) ADD_FAILURE() << name << " is missing or differs";
  RecordProperty("templates", templates);
  RecordProperty("pairs", pairs);
  std::cout << templates << " templates, " << pairs << " renderings\n";
}

}  // namespace
}  // namespace pianola
