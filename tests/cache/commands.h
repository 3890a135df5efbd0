// What can be done to the rows of an engine, as data: RapidCheck makes sequences of it, shortens
// and prints them.
#pragma once

#include <rapidcheck.h>

#include <cstddef>
#include <ostream>

namespace pianola {

enum class Verb {
  kOpen,
  kAppend,
  kContinue,  // append() of nothing
  kLogits,
  kStep,
  kRun,
  kStream,
  kKeepFirst,
  kKeepLeast,  // as few as can be kept, or one less than that
  kDropLast,
  kRollback,
  kKernelRollback,  // a step in front of which a kernel has said so
  kReset,
  kFork,
  kSwap,
  kConfigure,
  kSnapshot,
  kRestore,
  kPoison,
  kClose,
};

inline constexpr const char* kVerbNames[] = {
    "open",      "append",          "continue",   "logits",     "step",
    "run",       "stream",          "keep_first", "keep_least", "drop_last",
    "rollback",  "kernel_rollback", "reset",      "fork",       "swap",
    "configure", "snapshot",        "restore",    "poison",     "close"};

// The numbers choose among what is there when it is executed, so that any part of a sequence is a
// sequence: rows a and b of the open ones, and n for the rest.
struct Command {
  Verb verb = Verb::kOpen;
  int a = 0;
  int b = 0;
  int n = 0;
};

inline std::ostream& operator<<(std::ostream& out, const Command& c) {
  return out << kVerbNames[static_cast<std::size_t>(c.verb)] << "(" << c.a << ", " << c.b << ", "
             << c.n << ")";
}

inline rc::Gen<Command> any_command() {
  const auto verb = rc::gen::weightedElement<Verb>(
      {{4, Verb::kOpen},      {16, Verb::kAppend},   {14, Verb::kContinue},
       {3, Verb::kLogits},    {14, Verb::kStep},     {14, Verb::kRun},
       {12, Verb::kStream},   {5, Verb::kKeepFirst}, {5, Verb::kKeepLeast},
       {10, Verb::kDropLast}, {10, Verb::kRollback}, {8, Verb::kKernelRollback},
       {1, Verb::kReset},     {4, Verb::kFork},      {4, Verb::kSwap},
       {2, Verb::kConfigure}, {4, Verb::kSnapshot},  {5, Verb::kRestore},
       {3, Verb::kPoison},    {2, Verb::kClose}});
  const auto row = rc::gen::inRange(0, 6);
  return rc::gen::apply([](Verb v, int a, int b, int n) { return Command{v, a, b, n}; }, verb, row,
                        row, rc::gen::inRange(0, 1000));
}

}  // namespace pianola
