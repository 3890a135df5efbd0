// Writing to people and to pipes: standard output checked and unbuffered, progress and notes on
// standard error, sizes and rates in words.
//
//   put("text\n");                                   // throws OutputClosed when the reader is gone
//   note("loaded in {:.1f} s", seconds);             // "loaded in 0.3 s" on standard error
//   Progress progress("loading", total);             // silent where stderr is no terminal
//   progress.update(done);
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace pianola::cli {

// The reader of standard output has gone away: main() ends with 141 and no message, as a program
// that SIGPIPE ends.
struct OutputClosed : std::exception {
  const char* what() const noexcept override { return "output closed"; }
};
inline constexpr int kOutputClosedExitCode = 141;

// Writes all of it to standard output now. Throws OutputClosed, or std::system_error.
void put(std::string_view text);
// Writes to standard error; failures are ignored.
void put_error(std::string_view text);

template <typename... Args>
void note(fmt::format_string<Args...> format, Args&&... args) {
  put_error(fmt::format(format, std::forward<Args>(args)...) + "\n");
}

bool is_terminal(int fd);
// Of the terminal behind `fd`; 80 when it is none or will not say.
int terminal_columns(int fd);

// "93.8 MiB"
std::string human_bytes(double bytes);
// "4.2 s", "130 ms"
std::string human_seconds(double seconds);

enum class ProgressUnit { kBytes, kTokens };

// One line that is drawn over itself at most ten times a second, and wiped at the end.
class Progress {
 public:
  Progress(std::string what, ProgressUnit unit, bool enabled = true);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(std::uint64_t done, std::uint64_t total);
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  ProgressUnit unit_;
  bool enabled_;
  bool drawn_ = false;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point last_draw_ = begin_;  // what is over in a moment shows nothing
};

}  // namespace pianola::cli
