// Where templates come from: GGUF metadata, a Hugging Face folder, the built-in one.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "pianola/error.h"
#include "tokenizer/chat_template.h"

namespace pianola {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder()
      : path_(fs::temp_directory_path() / ("pianola-chat-template-" + std::to_string(getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  void write(const fs::path& name, std::string_view text) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << text;
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

ErrorCode code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "no Error";
  return ErrorCode::kInternal;
}

TEST(ChatTemplateSources, GgufMetadata) {
  Metadata metadata;
  EXPECT_TRUE(find_chat_templates(metadata).empty());
  metadata.insert("tokenizer.chat_template", std::string("one"));
  metadata.insert("tokenizer.chat_template.tool_use", std::string("two"));
  metadata.insert("tokenizer.chat_templates", std::vector<std::string>{"tool_use"});
  const ChatTemplateSources sources = find_chat_templates(metadata);
  EXPECT_EQ(sources, (ChatTemplateSources{{"default", "one"}, {"tool_use", "two"}}));
  EXPECT_EQ(*choose_chat_template(sources, false), "one");
  EXPECT_EQ(*choose_chat_template(sources, true), "two");
  EXPECT_EQ(*choose_chat_template(sources, true, "default"), "one");
  EXPECT_EQ(code_of([&] { choose_chat_template(sources, true, "rag"); }), ErrorCode::kNotFound);
  EXPECT_EQ(choose_chat_template({}, true), nullptr);
}

TEST(ChatTemplateSources, HuggingFaceFolder) {
  const Folder folder;
  EXPECT_TRUE(find_chat_templates(folder.path()).empty());
  folder.write("tokenizer_config.json", R"({"chat_template": "from config"})");
  EXPECT_EQ(find_chat_templates(folder.path()), (ChatTemplateSources{{"default", "from config"}}));
  folder.write(
      "tokenizer_config.json",
      R"({"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]})");
  EXPECT_EQ(find_chat_templates(folder.path()),
            (ChatTemplateSources{{"default", "a"}, {"rag", "b"}}));
  folder.write("chat_template.jinja", "file\n");
  folder.write("additional_chat_templates/tool_use.jinja", "tools");
  EXPECT_EQ(find_chat_templates(folder.path()),
            (ChatTemplateSources{{"default", "file\n"}, {"tool_use", "tools"}}));
}

TEST(ChatTemplateSources, AConfigWithoutOrWithAWrongTemplate) {
  const Folder folder;
  folder.write("tokenizer_config.json", R"({"chat_template": null})");
  EXPECT_TRUE(find_chat_templates(folder.path()).empty());
  folder.write("tokenizer_config.json", R"({"chat_template": 5})");
  EXPECT_EQ(code_of([&] { find_chat_templates(folder.path()); }), ErrorCode::kInvalidModel);
  folder.write("tokenizer_config.json", R"({"chat_template": [{"name": "x"}]})");
  EXPECT_EQ(code_of([&] { find_chat_templates(folder.path()); }), ErrorCode::kInvalidModel);
}

TEST(ChatTemplateSources, ChatMl) {
  ChatInput input;
  input.messages = {{{"role", "user"}, {"content", "Hi"}}};
  EXPECT_EQ(ChatTemplate::named("chatml").render(input),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  input.add_generation_prompt = false;
  EXPECT_EQ(ChatTemplate::named("chatml").render(input), "<|im_start|>user\nHi<|im_end|>\n");
  EXPECT_EQ(code_of([] { ChatTemplate::named("nope"); }), ErrorCode::kNotFound);
}

}  // namespace
}  // namespace pianola
