// pianola: one program, a subcommand for each thing to do with a model.
#include <CLI/CLI.hpp>

#include <langinfo.h>

#include <clocale>
#include <cstring>
#include <exception>
#include <new>

#include "build_info.h"
#include "command.h"
#include "pianola/error.h"
#include "signals.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

constexpr const char* kFooter = R"(
Examples:
  pianola run -m model.gguf "Why is the sky blue?"
  pianola chat -m model.gguf
  pianola bench -m model.gguf -p 512 -n 64 -r 5
  pianola plan -m model.gguf -c 8192 --slots 4

`pianola COMMAND --help` explains a command. Options may come from the environment, too: the name is
in brackets behind each; an option on the command line wins.

Exit status: 0 success, 2 wrong argument, 3 malformed model, 4 not supported, 5 not found, 6 does
not fit in memory, 7 too long for the context, 8 device failure, 9 internal error, 10 the model gave
no number (NaN), 130 interrupted.)";

// Characters have widths only in a UTF-8 locale; the rest of the locale stays "C".
void use_utf8() {
  if (std::setlocale(LC_CTYPE, "") && std::strcmp(nl_langinfo(CODESET), "UTF-8") == 0) return;
  std::setlocale(LC_CTYPE, "C.UTF-8");
}

int report(const char* message, int code) {
  note("pianola: error: {}", message);
  return code;
}

int run_action(const Action& action) {
  try {
    return action();
  } catch (const OutputClosed&) {
    return kOutputClosedExitCode;
  } catch (const Interrupted&) {
    return kInterruptedExitCode;
  } catch (const Error& error) {
    return report(error.what(), error.exit_code());
  } catch (const std::bad_alloc&) {
    return report("the system gave no more memory", Error(ErrorCode::kOutOfMemory, "").exit_code());
  } catch (const std::exception& error) {
    return report(error.what(), 1);
  }
}

int main_program(int argc, char** argv) {
  use_utf8();
  install_signal_handlers();

  CLI::App app("Runs autoregressive language models from one recorded step over static caches.",
               "pianola");
  app.set_version_flag("--version", std::string("pianola ") + version());
  app.require_subcommand(1);
  // As everywhere: an option given twice counts as given last. Lists say otherwise.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(34);
  app.footer(kFooter);
  Action action;
  add_run(app, action);
  add_chat(app, action);
  add_score(app, action);
  add_bench(app, action);
  add_inspect(app, action);
  add_plan(app, action);
  add_check(app, action);
  add_doctor(app, action);

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForVersion& version_text) {
    return run_action([&] {
      put(std::string(version_text.what()) + "\n");
      return 0;
    });
  } catch (const CLI::Success&) {
    return run_action([&] {
      put(app.help());
      return 0;
    });
  } catch (const CLI::ParseError& error) {
    std::string command = "pianola";
    for (const CLI::App* sub : app.get_subcommands()) command += " " + sub->get_name();
    return report(fmt::format("{}; see `{} --help`", error.what(), command).c_str(),
                  Error(ErrorCode::kInvalidArgument, "").exit_code());
  }
  return run_action(action);
}

}  // namespace
}  // namespace pianola::cli

int main(int argc, char** argv) { return pianola::cli::main_program(argc, argv); }
