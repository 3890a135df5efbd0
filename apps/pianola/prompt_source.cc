#include "prompt_source.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <system_error>

#include "base/check.h"
#include "base/mapped_file.h"
#include "base/utf8.h"
#include "model_options.h"
#include "signals.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

constexpr const char* kPromptVariable = "PIANOLA_PROMPT";
constexpr const char* kFileVariable = "PIANOLA_FILE";
constexpr std::size_t kMaxPromptBytes = std::size_t{1} << 30;

// Whether an option was given on the command line, and not only by its variable.
bool is_on_command_line(Option option, const char* variable) {
  if (!option.given()) return false;
  const char* value = std::getenv(variable);
  return !value || option.values().front() != value;
}

std::string read_stdin() {
  std::string text;
  char buffer[65536];
  while (true) {
    const ssize_t n = read(STDIN_FILENO, buffer, sizeof(buffer));
    throw_if_interrupted();
    if (n == 0) return text;
    if (n < 0) {
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category(), "reading standard input");
    }
    text.append(buffer, static_cast<std::size_t>(n));
    if (text.size() > kMaxPromptBytes) {
      fail(ErrorCode::kInvalidArgument, "standard input: more than {} bytes", kMaxPromptBytes);
    }
  }
}

}  // namespace

void add_prompt_source(Command command, PromptSource& source, const char* what) {
  source.argument =
      command
          .option(what, "The text; - or nothing reads standard input, where that is not a terminal")
          .type("TEXT")
          .verbatim();
  source.option = command.option("-p,--prompt", "The text")
                      .type("TEXT")
                      .verbatim()
                      .environment(kPromptVariable);
  source.file = command.option("-f,--file", "A file with the text; - is standard input")
                    .type("FILE")
                    .verbatim()
                    .environment(kFileVariable);
}

std::string read_prompt(const PromptSource& source) {
  std::vector<Option> given;
  if (source.argument.given()) given.push_back(source.argument);
  if (is_on_command_line(source.option, kPromptVariable)) given.push_back(source.option);
  if (is_on_command_line(source.file, kFileVariable)) given.push_back(source.file);
  if (given.size() > 1) {
    fail(ErrorCode::kInvalidArgument, "{} and {}: only one text can be given", given[0].name(),
         given[1].name());
  }
  // What the environment says counts when the command line says nothing.
  Option chosen = given.empty() ? Option() : given.front();
  if (!chosen && source.option.given()) chosen = source.option;
  if (!chosen && source.file.given()) chosen = source.file;
  if (!chosen) {
    if (is_terminal(STDIN_FILENO)) {
      fail(ErrorCode::kInvalidArgument,
           "no text: give it as an argument, with -p, -f FILE, or on standard input");
    }
    return read_stdin();
  }
  const std::string& text = chosen.values().front();
  if (chosen == source.file) {
    return text == "-" ? read_stdin() : read_text_file(text, kMaxPromptBytes);
  }
  return chosen == source.argument && text == "-" ? read_stdin() : text;
}

std::vector<TokenId> parse_ids(std::string_view text) {
  std::vector<TokenId> ids;
  constexpr std::string_view kSeparators = " \t\r\n,[]";
  for (std::size_t at = 0; at < text.size();) {
    if (kSeparators.find(text[at]) != std::string_view::npos) {
      ++at;
      continue;
    }
    TokenId id = 0;
    const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), id);
    const auto next = static_cast<std::size_t>(end - text.data());
    if (error != std::errc() || id < 0 ||
        (next < text.size() && kSeparators.find(text[next]) == std::string_view::npos)) {
      const std::size_t stop = std::min(text.find_first_of(kSeparators, at), text.size());
      fail(ErrorCode::kInvalidArgument, "--ids: '{}' is no token id",
           printable(text.substr(at, stop - at)));
    }
    ids.push_back(id);
    at = next;
  }
  return ids;
}

std::string format_ids(const std::vector<TokenId>& ids) {
  return fmt::format("{}", fmt::join(ids, " "));
}

}  // namespace pianola::cli
