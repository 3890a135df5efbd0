// The subcommands. Each add_*() declares its options on a subcommand of `app`; the one that the
// user names stores what to do in `action`, which main() calls once everything is parsed and which
// returns the exit status.
#pragma once

#include <functional>

#include "command_line.h"

namespace pianola::cli {

using Action = std::function<int()>;

void add_run(Command app, Action& action);
void add_chat(Command app, Action& action);
void add_score(Command app, Action& action);
void add_bench(Command app, Action& action);
void add_inspect(Command app, Action& action);
void add_plan(Command app, Action& action);
void add_check(Command app, Action& action);
void add_doctor(Command app, Action& action);

// A generation that ended because the model gave NaN or infinite logits. Other failures have the
// codes of pianola/error.h.
inline constexpr int kGenerationFailedExitCode = 10;

}  // namespace pianola::cli
