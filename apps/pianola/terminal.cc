#include "terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace pianola::cli {
namespace {

// Returns 0, or errno.
int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

void put(std::string_view text) {
  const int error = write_all(STDOUT_FILENO, text);
  if (error == EPIPE) throw OutputClosed();
  if (error != 0) {
    throw std::system_error(error, std::generic_category(), "writing to standard output");
  }
}

void put_error(std::string_view text) { write_all(STDERR_FILENO, text); }

bool is_terminal(int fd) { return isatty(fd) == 1; }

int terminal_columns(int fd) {
  winsize size = {};
  if (ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

std::string human_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string human_seconds(double seconds) {
  return seconds < 1 ? fmt::format("{:.0f} ms", seconds * 1e3) : fmt::format("{:.1f} s", seconds);
}

Progress::Progress(std::string what, ProgressUnit unit, bool enabled)
    : what_(std::move(what)), unit_(unit), enabled_(enabled && is_terminal(STDERR_FILENO)) {}

Progress::~Progress() { finish(); }

void Progress::update(std::uint64_t done, std::uint64_t total) {
  if (!enabled_) return;
  const auto now = Clock::now();
  if (now - last_draw_ < std::chrono::milliseconds(100)) return;
  last_draw_ = now;
  const double seconds = std::max(std::chrono::duration<double>(now - begin_).count(), 1e-3);
  const auto part = static_cast<double>(done);
  const double percent = total ? 100.0 * part / static_cast<double>(total) : 100.0;
  std::string line;
  if (unit_ == ProgressUnit::kBytes) {
    line =
        fmt::format("{} {} of {} ({:.0f} %), {}/s", what_, human_bytes(part),
                    human_bytes(static_cast<double>(total)), percent, human_bytes(part / seconds));
  } else {
    line = fmt::format("{} {} of {} tokens ({:.0f} %), {:.0f} tok/s", what_, done, total, percent,
                       part / seconds);
  }
  const int columns = terminal_columns(STDERR_FILENO);
  line.resize(std::min(line.size(), static_cast<std::size_t>(std::max(columns - 1, 1))));
  put_error("\r\x1b[K" + line);
  drawn_ = true;
}

void Progress::finish() {
  if (drawn_) put_error("\r\x1b[K");
  drawn_ = false;
}

}  // namespace pianola::cli
