// The command line in the words that this program needs: subcommands, options, flags. Only
// command_line.cc includes CLI11, whose header alone takes longer to compile than a subcommand.
//
//   CommandLine line("pianola", "Runs models.", version(), kFooter);
//   Command score = line.root().subcommand("score", "Log-probability of a text", kScoreFooter);
//   score.option("--window", options->window, "Tokens of a window").type("N");
//   score.flag("--json", options->json, "One JSON object");
//   score.callback([&] { ... });                     // when everything is parsed
//   if (auto text = line.parse(argc, argv)) put(*text);    // --help or --version was asked for
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace pianola::cli {

// One option; it lives as long as its CommandLine. The setters return it.
class Option {
 public:
  Option() = default;  // none
  explicit Option(CLI::Option* option) : option_(option) {}

  // What --help shows for the value, and under which heading.
  Option type(const char* name) const;
  Option group(const std::string& name) const;
  // Its environment variable: it is shown in --help, and the option wins.
  Option environment(const char* variable) const;

  Option one_of(const std::vector<std::string>& values) const;
  Option optional_value() const;  // --plan, or --plan SHAPE
  // Every occurrence counts, each with one value, where else the last wins.
  Option repeatable() const;
  Option separator(char character) const;  // of values in one occurrence
  // One value for each occurrence, as it is written: CLI11 would read "[a,b]" as a list, and "{}"
  // as nothing.
  Option verbatim() const;

  // After parsing.
  explicit operator bool() const { return option_ != nullptr; }
  bool operator==(const Option&) const = default;
  bool given() const;
  const std::vector<std::string>& values() const;
  std::string name() const;

 private:
  CLI::Option* option_ = nullptr;
};

class Command {
 public:
  explicit Command(CLI::App* command) : command_(command) {}

  Command subcommand(const char* name, const char* description, const char* footer) const;

  // "-m,--model" is an option, "MODEL" an argument. Parsing sets `value`, a number, a text, an
  // optional or a list of those; command_line.cc names the types that it is made for.
  template <typename T>
  Option option(const char* names, T& value, const std::string& text) const;
  // One whose values are read from the Option.
  Option option(const char* names, const std::string& text) const;
  Option flag(const char* names, bool& value, const std::string& text) const;

  // Called when this is the subcommand that was named.
  void callback(std::function<void()> function) const;

 private:
  CLI::App* command_;
};

class CommandLine {
 public:
  CommandLine(const char* name, const char* description, const std::string& version,
              const char* footer);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command root() const { return Command(app_.get()); }

  // The text that was asked for instead of a subcommand, if any. Throws InvalidArgument.
  std::optional<std::string> parse(int argc, char** argv);

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace pianola::cli
