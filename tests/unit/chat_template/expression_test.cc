// Small templates against what jinja2 says of them: the table expressions.json, made by
// tools/golden/chat_template_expressions.py.
#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>

#include "base/check.h"
#include "base/json_reader.h"
#include "base/mapped_file.h"
#include "pianola/error.h"
#include "tokenizer/chat_template.h"

namespace pianola {
namespace {

// Outcome of one source: its text, or "error: " with what was thrown.
std::string outcome(const std::string& source, const boost::json::object& context) {
  ChatInput input;
  input.variables = context;
  input.clock = std::chrono::system_clock::time_point(
      std::chrono::duration_cast<std::chrono::system_clock::duration>(
          std::chrono::seconds(1'720'505'104) + std::chrono::microseconds(30)));
  try {
    return ChatTemplate::parse(source).render(input);
  } catch (const Error& error) {
    return fmt::format("error: {}: {}", error_code_name(error.code()), error.what());
  }
}

TEST(ChatTemplateExpressions, AgreeWithJinja2) {
  setenv("TZ", "UTC", 1);
  tzset();
  const boost::json::value root = boost::json::parse(read_text_file(
      PIANOLA_SOURCE_DIR "/tests/unit/chat_template/expressions.json", std::size_t{1} << 20));
  const auto& context = root.at("context").as_object();
  for (const auto& item : root.at("cases").as_array()) {
    const auto& expected = item.as_object();
    const std::string source(expected.at("source").as_string());
    const std::string ours = outcome(source, context);
    if (expected.contains("text")) {
      EXPECT_EQ(ours, std::string(expected.at("text").as_string())) << source;
      continue;
    }
    EXPECT_TRUE(ours.starts_with("error: "))
        << source << "\njinja2: " << expected.at("message").as_string() << "\nours: " << ours;
    EXPECT_NE(ours.find("line "), std::string::npos) << ours;
    const bool syntax = expected.at("error").as_string() == "syntax";
    EXPECT_TRUE(!syntax || !ours.starts_with("error: invalid_argument")) << source << "\n" << ours;
  }
}

}  // namespace
}  // namespace pianola
