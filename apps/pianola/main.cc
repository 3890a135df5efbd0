// pianola: one program, a subcommand for each thing to do with a model.
#include <langinfo.h>

#include <clocale>
#include <cstring>
#include <exception>
#include <new>

#include "build_info.h"
#include "command.h"
#include "command_line.h"
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

  CommandLine line("pianola",
                   "Runs autoregressive language models from one recorded step over static caches.",
                   version(), kFooter);
  Action action;
  add_run(line.root(), action);
  add_chat(line.root(), action);
  add_score(line.root(), action);
  add_bench(line.root(), action);
  add_inspect(line.root(), action);
  add_plan(line.root(), action);
  add_check(line.root(), action);
  add_doctor(line.root(), action);

  return run_action([&] {
    const std::optional<std::string> text = line.parse(argc, argv);
    if (!text) return action();
    put(*text);
    return 0;
  });
}

}  // namespace
}  // namespace pianola::cli

int main(int argc, char** argv) { return pianola::cli::main_program(argc, argv); }
