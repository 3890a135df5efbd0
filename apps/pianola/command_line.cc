#include "command_line.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <utility>

#include "base/check.h"

namespace pianola::cli {

Option Option::type(const char* name) const {
  option_->type_name(name);
  return *this;
}

Option Option::group(const std::string& name) const {
  option_->group(name);
  return *this;
}

Option Option::environment(const char* variable) const {
  option_->envname(variable);
  return *this;
}

Option Option::one_of(const std::vector<std::string>& values) const {
  option_->check(CLI::IsMember(values));
  return *this;
}

Option Option::optional_value() const {
  option_->expected(0, 1);
  return *this;
}

Option Option::repeatable() const {
  option_->allow_extra_args(false)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  return *this;
}

Option Option::separator(char character) const {
  option_->delimiter(character);
  return *this;
}

Option Option::verbatim() const {
  option_->type_size(1)->expected(1);
  return *this;
}

bool Option::given() const { return option_ && option_->count() > 0; }
const std::vector<std::string>& Option::values() const { return option_->results(); }
std::string Option::name() const { return option_->get_name(); }

Command Command::subcommand(const char* name, const char* description, const char* footer) const {
  CLI::App* command = command_->add_subcommand(name, description);
  command->footer(footer);
  return Command(command);
}

template <typename T>
Option Command::option(const char* names, T& value, const std::string& text) const {
  return Option(command_->add_option(names, value, text));
}

template Option Command::option(const char*, int&, const std::string&) const;
template Option Command::option(const char*, std::uint64_t&, const std::string&) const;
template Option Command::option(const char*, std::string&, const std::string&) const;
template Option Command::option(const char*, std::optional<int>&, const std::string&) const;
template Option Command::option(const char*, std::optional<float>&, const std::string&) const;
template Option Command::option(const char*, std::optional<std::uint64_t>&,
                                const std::string&) const;
template Option Command::option(const char*, std::vector<int>&, const std::string&) const;
template Option Command::option(const char*, std::vector<std::string>&, const std::string&) const;

Option Command::option(const char* names, const std::string& text) const {
  return Option(command_->add_option(names, text));
}

Option Command::flag(const char* names, bool& value, const std::string& text) const {
  return Option(command_->add_flag(names, value, text));
}

void Command::callback(std::function<void()> function) const {
  command_->callback(std::move(function));
}

CommandLine::CommandLine(const char* name, const char* description, const std::string& version,
                         const char* footer)
    : app_(std::make_unique<CLI::App>(description, name)) {
  app_->set_version_flag("--version", std::string(name) + " " + version);
  app_->require_subcommand(1);
  // As everywhere: an option given twice counts as given last. Lists say otherwise.
  app_->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app_->get_formatter()->column_width(34);
  app_->footer(footer);
}

CommandLine::~CommandLine() = default;

std::optional<std::string> CommandLine::parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::CallForVersion& version_text) {
    return std::string(version_text.what()) + "\n";
  } catch (const CLI::Success&) {
    return app_->help();
  } catch (const CLI::ParseError& error) {
    std::string command = app_->get_name();
    for (const CLI::App* sub : app_->get_subcommands()) command += " " + sub->get_name();
    fail(ErrorCode::kInvalidArgument, "{}; see `{} --help`", error.what(), command);
  }
  return std::nullopt;
}

}  // namespace pianola::cli
