#include "line_editor.h"

#include <poll.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "base/utf8.h"
#include "line_layout.h"
#include "signals.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

constexpr std::size_t kMaxHistory = 1000;
constexpr std::size_t kMaxLine = std::size_t{16} << 20;
constexpr int kEndOfInput = -1;
constexpr int kNothingYet = -2;
// How long the rest of a key's escape sequence may take; a lone Escape is one that has none.
constexpr int kEscapeMilliseconds = 50;

// Keys beyond characters, numbered above Unicode.
enum Key : int {
  kNoKey = 0x110000,
  kLeft,
  kRight,
  kUp,
  kDown,
  kHome,
  kEnd,
  kDelete,
  kWordLeft,
  kWordRight,
  kPaste,
  kNewLine,
};

constexpr int control(char letter) { return letter & 0x1F; }

// The terminal delivers every byte as it is typed, and brackets around pasted text.
class RawMode {
 public:
  RawMode() {
    tcgetattr(STDIN_FILENO, &before_);
    termios raw = before_;
    raw.c_iflag &= ~static_cast<tcflag_t>(BRKINT | ICRNL | INPCK | ISTRIP | IXON);
    raw.c_lflag &= ~static_cast<tcflag_t>(ECHO | ICANON | IEXTEN | ISIG);
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    put("\x1b[?2004h");
  }
  ~RawMode() {
    tcsetattr(STDIN_FILENO, TCSADRAIN, &before_);
    // The terminal may be gone, and a destructor has nobody to tell.
    constexpr std::string_view kNoPasteMarks = "\x1b[?2004l";
    [[maybe_unused]] const auto written =
        ::write(STDOUT_FILENO, kNoPasteMarks.data(), kNoPasteMarks.size());
  }
  RawMode(const RawMode&) = delete;
  RawMode& operator=(const RawMode&) = delete;

 private:
  termios before_ = {};
};

// Bytes and keys from standard input; what was read ahead stays in `pending`.
class KeyReader {
 public:
  explicit KeyReader(std::string& pending) : pending_(pending) {}

  // A code point, a control character or a Key; kEndOfInput.
  int next_key() {
    const int first = next_byte(-1);
    if (first == 0x1B) return escape_key();
    if (first < 0x80) return first;
    std::string bytes(1, static_cast<char>(first));
    while (complete_utf8_prefix(bytes) < bytes.size()) {
      const int byte = next_byte(kEscapeMilliseconds);
      if (byte < 0) break;
      bytes += static_cast<char>(byte);
    }
    const Utf8Char c = decode_utf8(bytes);
    pending_.insert(0, bytes.substr(static_cast<std::size_t>(c.length)));
    return static_cast<int>(c.code_point);
  }

  // Whether a key would come at once.
  bool is_waiting() const {
    pollfd input = {STDIN_FILENO, POLLIN, 0};
    return !pending_.empty() || poll(&input, 1, 0) > 0;
  }

  // The text between the brackets of a paste, whose first was a key.
  std::string pasted_text() {
    constexpr std::string_view kEndMark = "\x1b[201~";
    std::string text;
    while (text.size() < kMaxLine && !text.ends_with(kEndMark)) {
      const int byte = next_byte(-1);
      if (byte < 0) return text;
      text += static_cast<char>(byte);
    }
    if (text.ends_with(kEndMark)) text.resize(text.size() - kEndMark.size());
    std::string lines;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\r') {
        lines += text[i];
      } else if (i + 1 == text.size() || text[i + 1] != '\n') {
        lines += '\n';  // terminals send line ends as \r
      }
    }
    return sanitize_utf8(lines);
  }

 private:
  int next_byte(int milliseconds) {
    if (pending_.empty()) {
      pollfd input = {STDIN_FILENO, POLLIN, 0};
      const int ready = poll(&input, 1, milliseconds);
      if (ready < 0 && errno == EINTR)
        return interrupted() ? control('C') : next_byte(milliseconds);
      if (ready == 0) return kNothingYet;
      char buffer[4096];
      const ssize_t n = read(STDIN_FILENO, buffer, sizeof(buffer));
      if (n <= 0) return kEndOfInput;
      pending_.assign(buffer, static_cast<std::size_t>(n));
    }
    const auto byte = static_cast<unsigned char>(pending_.front());
    pending_.erase(0, 1);
    return byte;
  }

  int escape_key() {
    const int kind = next_byte(kEscapeMilliseconds);
    if (kind == '\r' || kind == '\n') return kNewLine;
    if (kind == 'b') return kWordLeft;
    if (kind == 'f') return kWordRight;
    if (kind != '[' && kind != 'O') return kNoKey;
    std::string parameters;
    int final = next_byte(kEscapeMilliseconds);
    while (final >= 0x20 && final < 0x40) {
      parameters += static_cast<char>(final);
      final = next_byte(kEscapeMilliseconds);
    }
    const bool with_control = parameters == "1;5" || parameters == "1;3";
    switch (final) {
      case 'A':
        return kUp;
      case 'B':
        return kDown;
      case 'C':
        return with_control ? kWordRight : kRight;
      case 'D':
        return with_control ? kWordLeft : kLeft;
      case 'H':
        return kHome;
      case 'F':
        return kEnd;
      case '~':
        return numbered_key(parameters);
      default:
        return kNoKey;
    }
  }

  static int numbered_key(const std::string& number) {
    if (number == "1" || number == "7") return kHome;
    if (number == "4" || number == "8") return kEnd;
    if (number == "3") return kDelete;
    if (number == "200") return kPaste;
    return kNoKey;
  }

  std::string& pending_;
};

// The text being edited, and its picture on the screen.
class EditedLine {
 public:
  EditedLine(std::string_view prompt, std::string_view initial)
      : prompt_(prompt), text_(initial), cursor_(initial.size()) {}

  const std::string& text() const { return text_; }

  void set(std::string text) {
    text_ = std::move(text);
    cursor_ = text_.size();
  }
  void insert(std::string_view text) {
    if (text_.size() + text.size() > kMaxLine) return;
    text_.insert(cursor_, text);
    cursor_ += text.size();
  }
  void erase(std::size_t begin, std::size_t end) {
    text_.erase(begin, end - begin);
    cursor_ = begin;
  }
  // Whether the key was one that moves or changes the text.
  bool handle(int key);

  // Draws over what was drawn before. The cursor's row tells where that began.
  void draw() {
    const int columns = terminal_columns(STDOUT_FILENO);
    const std::string before = prompt_ + visible(std::string_view(text_).substr(0, cursor_));
    const std::string after = visible(std::string_view(text_).substr(cursor_));
    const ScreenPosition cursor = cli::cursor_after(before, columns);
    const ScreenPosition end = cli::cursor_after(after, columns, cursor);
    std::string out = "\r";
    if (row_ > 0) out += fmt::format("\x1b[{}A", row_);
    out += "\x1b[J" + before + after;
    // At the right edge a terminal waits with going on to the next row.
    if (end.row > 0 && end.column == 0) out += "\r\n";
    if (end.row > cursor.row) out += fmt::format("\x1b[{}A", end.row - cursor.row);
    out += "\r";
    if (cursor.column > 0) out += fmt::format("\x1b[{}C", cursor.column);
    put(out);
    row_ = cursor.row;
  }

  void clear_screen() {
    put("\x1b[H\x1b[2J");
    row_ = 0;
  }

  // Leaves the line as it stands and goes below it.
  void leave() {
    cursor_ = text_.size();
    draw();
    put("\r\n");
  }

 private:
  std::string prompt_;
  std::string text_;
  std::size_t cursor_;
  int row_ = 0;
};

bool EditedLine::handle(int key) {
  switch (key) {
    case kLeft:
    case control('B'):
      cursor_ = previous_character(text_, cursor_);
      return true;
    case kRight:
    case control('F'):
      cursor_ = next_character(text_, cursor_);
      return true;
    case kHome:
    case control('A'):
      cursor_ = 0;
      return true;
    case kEnd:
    case control('E'):
      cursor_ = text_.size();
      return true;
    case kWordLeft:
      cursor_ = previous_word(text_, cursor_);
      return true;
    case kWordRight:
      cursor_ = next_word(text_, cursor_);
      return true;
    case 0x7F:
    case control('H'):
      erase(previous_character(text_, cursor_), cursor_);
      return true;
    case kDelete:
    case control('D'):
      erase(cursor_, next_character(text_, cursor_));
      return true;
    case control('K'):
      erase(cursor_, text_.size());
      return true;
    case control('U'):
      erase(0, cursor_);
      return true;
    case control('W'):
      erase(previous_word(text_, cursor_), cursor_);
      return true;
    case kNewLine:
      insert("\n");
      return true;
    case '\t':
      insert("\t");
      return true;
    default:
      break;
  }
  if (key < 0x20 || key >= kNoKey) return false;
  std::string bytes;
  append_utf8(bytes, static_cast<char32_t>(key));
  insert(bytes);
  return true;
}

// Lines as they come, from a pipe, a file or a terminal without cursor control.
Line read_plain(std::string& pending) {
  while (true) {
    const std::size_t end = pending.find('\n');
    if (end != std::string::npos) {
      Line line{LineInput::kLine, sanitize_utf8(pending.substr(0, end))};
      pending.erase(0, end + 1);
      if (!line.text.empty() && line.text.back() == '\r') line.text.pop_back();
      return line;
    }
    char buffer[4096];
    const ssize_t n = read(STDIN_FILENO, buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) {
      if (take_interrupt()) return {LineInput::kInterrupt, {}};
      continue;
    }
    if (n <= 0) {
      if (pending.empty()) return {LineInput::kEnd, {}};
      return {LineInput::kLine, sanitize_utf8(std::exchange(pending, {}))};
    }
    pending.append(buffer, static_cast<std::size_t>(n));
  }
}

bool can_edit() {
  const char* terminal = std::getenv("TERM");
  return is_terminal(STDIN_FILENO) && is_terminal(STDOUT_FILENO) &&
         !(terminal && std::string_view(terminal) == "dumb");
}

}  // namespace

void LineEditor::add_history(const std::string& text) {
  if (text.empty() || (!history_.empty() && history_.back() == text)) return;
  history_.push_back(text);
  if (history_.size() > kMaxHistory) history_.erase(history_.begin());
}

Line LineEditor::read(std::string_view prompt, std::string_view initial) {
  if (!can_edit()) {
    if (is_terminal(STDIN_FILENO)) put(prompt);
    return read_plain(pending_);
  }
  RawMode raw;
  KeyReader keys(pending_);
  EditedLine line(prompt, initial);
  std::vector<std::string> lines = history_;  // changes to old lines last while this one is edited
  lines.emplace_back(initial);
  std::size_t at = lines.size() - 1;
  while (true) {
    // What comes faster than it can be read is drawn once.
    if (!keys.is_waiting()) line.draw();
    const int key = keys.next_key();
    if (key == '\r' || key == '\n') {
      line.leave();
      return {LineInput::kLine, line.text()};
    }
    if (key == control('C')) {
      take_interrupt();
      line.leave();
      return {LineInput::kInterrupt, {}};
    }
    if (key == kEndOfInput || (key == control('D') && line.text().empty())) {
      line.leave();
      return {LineInput::kEnd, {}};
    }
    if (key == kPaste) {
      line.insert(keys.pasted_text());
    } else if (key == control('L')) {
      line.clear_screen();
    } else if ((key == kUp || key == control('P')) && at > 0) {
      lines[at] = line.text();
      line.set(lines[--at]);
    } else if ((key == kDown || key == control('N')) && at + 1 < lines.size()) {
      lines[at] = line.text();
      line.set(lines[++at]);
    } else {
      line.handle(key);
    }
  }
}

}  // namespace pianola::cli
