#include "signals.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "pianola/generator.h"

namespace pianola::cli {
namespace {

std::atomic<bool> interrupt_flag = false;
std::atomic<Generator*> running_generator = nullptr;
static_assert(std::atomic<bool>::is_always_lock_free);
static_assert(std::atomic<Generator*>::is_always_lock_free);

void on_interrupt(int) {
  if (interrupt_flag.exchange(true)) _exit(kInterruptedExitCode);
  if (Generator* generator = running_generator.load()) generator->cancel();
}

// The only mapped files are those of the model. Nothing can go on: the instruction that read
// beyond the file would be run again.
void on_bus_error(int) {
  constexpr char kMessage[] =
      "\npianola: fatal: a model file became shorter, or its disk failed, while it was open; "
      "bring it again and restart\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  _exit(3);  // as for a malformed model file
}

void install(int signal, void (*handler)(int), int flags) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

}  // namespace

void install_signal_handlers() {
  // Without SA_RESTART: a read from the terminal or a pipe returns, and the reader looks.
  install(SIGINT, on_interrupt, 0);
  // Not SA_RESETHAND: two workers may meet the end of the file at once.
  install(SIGBUS, on_bus_error, 0);
  install(SIGPIPE, SIG_IGN, 0);
}

bool interrupted() { return interrupt_flag.load(); }
bool take_interrupt() { return interrupt_flag.exchange(false); }

void throw_if_interrupted() {
  if (interrupted()) throw Interrupted();
}

CancelOnInterrupt::CancelOnInterrupt(Generator& generator) {
  running_generator.store(&generator);
  // One that came just before is not lost.
  if (interrupted()) generator.cancel();
}

CancelOnInterrupt::~CancelOnInterrupt() { running_generator.store(nullptr); }

}  // namespace pianola::cli
