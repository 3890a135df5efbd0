// The subcommands. Each add_*() declares its options on a subcommand of `app`; the one that the
// user names stores what to do in `action`, which main() calls once everything is parsed and which
// returns the exit status.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace pianola::cli {

using Action = std::function<int()>;

void add_run(CLI::App& app, Action& action);
void add_chat(CLI::App& app, Action& action);
void add_score(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_inspect(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_check(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);

// A generation that ended because the model gave NaN or infinite logits. Other failures have the
// codes of pianola/error.h.
inline constexpr int kGenerationFailedExitCode = 10;

}  // namespace pianola::cli
