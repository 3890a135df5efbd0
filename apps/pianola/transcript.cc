#include "transcript.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/check.h"
#include "base/json_reader.h"
#include "base/mapped_file.h"
#include "base/utf8.h"
#include "json_text.h"

namespace pianola::cli {
namespace {

constexpr const char* kFormat = "pianola-transcript";
constexpr int kVersion = 1;
constexpr std::size_t kMaxBytes = std::size_t{64} << 20;

[[noreturn]] void fail_system(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

class File {
 public:
  explicit File(std::string path)
      : path_(std::move(path)),
        fd_(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) {
    if (fd_ < 0) fail_system(path_);
  }
  ~File() {
    if (fd_ >= 0) close(fd_);
    if (!kept_) unlink(path_.c_str());
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(std::string_view text) {
    while (!text.empty()) {
      const ssize_t n = ::write(fd_, text.data(), text.size());
      if (n < 0 && errno != EINTR) fail_system(path_);
      if (n > 0) text.remove_prefix(static_cast<std::size_t>(n));
    }
  }

  void rename_to(const std::string& target) {
    if (fsync(fd_) != 0) fail_system(path_);
    if (rename(path_.c_str(), target.c_str()) != 0) fail_system(target);
    kept_ = true;
  }

 private:
  std::string path_;
  int fd_;
  bool kept_ = false;
};

[[noreturn]] void refuse(const std::string& where, const std::string& rule) {
  fail(ErrorCode::kInvalidArgument, "{}: {}", where, rule);
}

ChatMessage read_message(const boost::json::value& value, const std::string& where) {
  const JsonObject object(value, where);
  ChatMessage message{object.get_string("role"), object.get_string("content")};
  if (object.object().size() != 2) refuse(where, "expected role and content, and nothing else");
  return message;
}

Transcript parse(const std::string& text, const std::string& path) {
  const boost::json::value root = parse_json(text, path);
  const JsonObject object(root, path);
  if (object.get_string("format") != kFormat) {
    refuse(path, fmt::format("format is not '{}': this is no conversation of pianola", kFormat));
  }
  object.get_int("version", kVersion, kVersion);
  Transcript transcript;
  transcript.model = object.find_string("model").value_or("");
  const boost::json::array* messages = object.find_array("messages");
  if (!messages) refuse(path, "there is no array 'messages'");
  std::string expected = "user";
  for (std::size_t i = 0; i < messages->size(); ++i) {
    const std::string where = fmt::format("{}: messages[{}]", path, i);
    ChatMessage message = read_message((*messages)[i], where);
    const bool is_system = i == 0 && message.role == "system";
    if (!is_system && message.role != expected) {
      refuse(where, fmt::format("role is '{}', expected '{}'", printable(message.role), expected));
    }
    if (!is_system) expected = expected == "user" ? "assistant" : "user";
    transcript.messages.push_back(std::move(message));
  }
  if (expected != "user") refuse(path, "the last question has no answer");
  return transcript;
}

}  // namespace

void save_transcript(const std::string& path, const Transcript& transcript) {
  boost::json::array messages;
  for (const ChatMessage& message : transcript.messages) {
    messages.emplace_back(boost::json::object{{"role", json_string(message.role)},
                                              {"content", json_string(message.content)}});
  }
  boost::json::object object;
  object["format"] = kFormat;
  object["version"] = kVersion;
  object["model"] = json_string(transcript.model);
  object["messages"] = std::move(messages);
  File file(fmt::format("{}.{}.part", path, getpid()));
  file.write(to_json_text(object));
  file.rename_to(path);
}

Transcript load_transcript(const std::string& path) {
  try {
    return parse(read_text_file(path, kMaxBytes), path);
  } catch (const Error& error) {
    // A malformed file is the user's, not a model's.
    if (error.code() != ErrorCode::kInvalidModel) throw;
    throw Error(ErrorCode::kInvalidArgument, error.what());
  }
}

}  // namespace pianola::cli
