// Signals as the program wants them: Ctrl-C ends what is running and nothing more, a reader that
// goes away ends the program quietly, and a model file that shrinks while it is mapped is one line
// that a person can read.
//
//   install_signal_handlers();
//   {
//     CancelOnInterrupt guard(generator);           // Ctrl-C ends this answer
//     while (auto piece = generator.next()) ...;
//   }
//   if (take_interrupt()) ...;                      // it came, and is now forgotten
//
// A second Ctrl-C before the first was taken ends the process with status 130 at once.
#pragma once

#include <exception>

namespace pianola {
class Generator;
}

namespace pianola::cli {

inline constexpr int kInterruptedExitCode = 130;

// Thrown where work that has no result of its own is given up; main() ends with 130, without a
// message.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

void install_signal_handlers();

bool interrupted();
// Whether Ctrl-C came since the last call.
bool take_interrupt();
void throw_if_interrupted();

class CancelOnInterrupt {
 public:
  explicit CancelOnInterrupt(Generator& generator);
  ~CancelOnInterrupt();
  CancelOnInterrupt(const CancelOnInterrupt&) = delete;
  CancelOnInterrupt& operator=(const CancelOnInterrupt&) = delete;
};

}  // namespace pianola::cli
