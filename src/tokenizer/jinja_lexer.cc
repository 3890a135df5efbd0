#include "tokenizer/jinja_lexer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "base/utf8.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

constexpr std::array<std::string_view, 26> kOperators = {
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
    "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};

bool is_ascii_digit(char c) { return c >= '0' && c <= '9'; }

// "\n" for every line end, and without one at the very end, as Jinja reads its source.
std::string normalize(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
      continue;
    }
    out += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> run() {
    while (position_ < source_.size()) lex_root();
    add(TokenKind::kEnd);
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(source_).substr(position_); }
  bool at(std::string_view text) const { return rest().substr(0, text.size()) == text; }

  Token& add(TokenKind kind, std::string text = {}) {
    Token token;
    token.kind = kind;
    token.line = line_;
    token.text = std::move(text);
    tokens_.push_back(std::move(token));
    return tokens_.back();
  }

  void advance(std::size_t n) {
    const std::string_view taken = rest().substr(0, n);
    line_ += static_cast<std::uint32_t>(std::count(taken.begin(), taken.end(), '\n'));
    if (n != 0) line_start_ = taken.back() == '\n';
    position_ += n;
  }

  void skip_space() {
    const std::string_view left = rest();
    advance(left.size() - strip_space(left, 1).size());
  }

  char take_sign() {
    if (!at("-") && !at("+")) return '\0';
    const char sign = source_[position_];
    advance(1);
    return sign;
  }

  // Text up to a tag: '-' strips all white space before the tag, and lstrip_blocks what stands
  // between the start of the line and a tag that is not an expression.
  void add_data(std::string_view text, char sign, bool is_variable, bool line_start) {
    if (sign == '-') {
      text = strip_space(text, 2);
    } else if (sign != '+' && !is_variable) {
      const std::size_t newline = text.rfind('\n');
      const std::size_t start = newline == std::string_view::npos ? 0 : newline + 1;
      if ((start > 0 || line_start) && strip_space(text.substr(start), 3).empty()) {
        text = text.substr(0, start);
      }
    }
    if (!text.empty()) add(TokenKind::kData, std::string(text));
  }

  void lex_root() {
    const bool line_start = line_start_;
    const std::uint32_t data_line = line_;
    std::size_t tag = position_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 >= source_.size()) {
        add(TokenKind::kData, std::string(rest()));
        position_ = source_.size();
        return;
      }
      const char next = source_[tag + 1];
      if (next == '{' || next == '%' || next == '#') break;
    }
    const std::string text(rest().substr(0, tag - position_));
    advance(text.size());
    const char kind = source_[tag + 1];
    advance(2);
    const char sign = take_sign();
    const std::uint32_t tag_line = line_;
    line_ = data_line;
    add_data(text, sign, kind == '{', line_start);
    line_ = tag_line;
    if (kind == '#') return lex_comment();
    if (kind == '%' && lex_raw()) return;
    if (kind == '%') {
      add(TokenKind::kBlockBegin);
      lex_tag("%}", TokenKind::kBlockEnd);
    } else {
      add(TokenKind::kVariableBegin);
      lex_tag("}}", TokenKind::kVariableEnd);
    }
  }

  void lex_comment() {
    const std::size_t end = source_.find("#}", position_);
    if (end == std::string::npos) fail_syntax(line_, "missing end of comment tag");
    const bool signed_end = end > position_ && (source_[end - 1] == '-' || source_[end - 1] == '+');
    const char sign = signed_end ? source_[end - 1] : '\0';
    advance(end + 2 - position_);
    finish_block(sign);
  }

  // What follows a closing "%}" or "#}": '-' eats white space, '+' nothing, else one line end.
  void finish_block(char sign) {
    if (sign == '-') {
      skip_space();
    } else if (sign != '+' && at("\n")) {
      advance(1);
    }
  }

  // After "{%" and its sign: true, with everything up to and including endraw taken, for a raw
  // block.
  bool lex_raw() {
    std::size_t at_name = source_.size() - strip_space(rest(), 1).size();
    if (source_.compare(at_name, 3, "raw") != 0) return false;
    std::string_view after = strip_space(std::string_view(source_).substr(at_name + 3), 1);
    const bool strips = after.substr(0, 3) == "-%}";
    if (!strips && after.substr(0, 2) != "%}") return false;
    const std::uint32_t raw_line = line_;
    advance(source_.size() - after.size() + (strips ? 3 : 2) - position_);
    if (strips) skip_space();
    const bool line_start = line_start_;
    for (std::size_t tag = source_.find("{%", position_); tag != std::string::npos;
         tag = source_.find("{%", tag + 2)) {
      std::size_t i = tag + 2;
      char sign = '\0';
      if (i < source_.size() && (source_[i] == '-' || source_[i] == '+')) sign = source_[i++];
      std::string_view left = strip_space(std::string_view(source_).substr(i), 1);
      if (left.substr(0, 6) != "endraw") continue;
      left = strip_space(left.substr(6), 1);
      char end_sign = '\0';
      if (!left.empty() && (left[0] == '-' || left[0] == '+')) {
        end_sign = left[0];
        left.remove_prefix(1);
      }
      if (left.substr(0, 2) != "%}") continue;
      add_data(rest().substr(0, tag - position_), sign, false, line_start);
      advance(source_.size() - left.size() + 2 - position_);
      finish_block(end_sign);
      return true;
    }
    fail_syntax(raw_line, "missing end of raw directive");
  }

  void lex_tag(std::string_view close, TokenKind end_kind) {
    std::vector<char> brackets;
    for (;;) {
      if (position_ >= source_.size()) return;  // the parser reports it
      if (brackets.empty() && lex_end(close, end_kind)) return;
      const std::size_t before = position_;
      skip_space();
      if (position_ != before) continue;
      if (lex_number() || lex_name() || lex_string()) continue;
      lex_operator(brackets);
    }
  }

  bool lex_end(std::string_view close, TokenKind kind) {
    const bool is_block = kind == TokenKind::kBlockEnd;
    char sign = '\0';
    if (rest().substr(0, 1) == "-" || (is_block && rest().substr(0, 1) == "+")) sign = rest()[0];
    if (rest().substr(sign == '\0' ? 0 : 1, close.size()) != close) return false;
    add(kind);
    advance(close.size() + (sign == '\0' ? 0 : 1));
    if (is_block) {
      finish_block(sign);
    } else if (sign == '-') {
      skip_space();
    }
    return true;
  }

  // End of a run of digits that single underscores may separate: (\d+_)*\d+ from `i`.
  std::size_t digits_end(std::size_t i) const {
    std::size_t end = i;
    while (i < source_.size() && is_ascii_digit(source_[i])) {
      end = ++i;
      if (i < source_.size() && source_[i] == '_') ++i;
    }
    return end;
  }

  bool lex_number() {
    const std::size_t start = position_;
    if (!is_ascii_digit(source_[start])) return false;
    const std::size_t whole = digits_end(start);
    std::size_t end = whole;
    bool is_float = false;
    if (start == 0 || source_[start - 1] != '.') {
      if (end + 1 < source_.size() && source_[end] == '.' && is_ascii_digit(source_[end + 1])) {
        end = digits_end(end + 1);
        is_float = true;
      }
      if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
        std::size_t i = end + 1;
        if (i < source_.size() && (source_[i] == '+' || source_[i] == '-')) ++i;
        if (i < source_.size() && is_ascii_digit(source_[i])) {
          end = digits_end(i);
          is_float = true;
        }
      }
    }
    if (is_float) {
      std::string digits(source_.substr(start, end - start));
      std::erase(digits, '_');
      double value = 0;
      std::from_chars(digits.data(), digits.data() + digits.size(), value);
      add(TokenKind::kFloat, digits).real = value;
      advance(end - start);
      return true;
    }
    lex_integer(whole);
    return true;
  }

  void lex_integer(std::size_t decimal_end) {
    const std::size_t start = position_;
    std::size_t end = decimal_end;
    int base = 10;
    std::size_t first = start;
    if (source_[start] == '0') {
      const char mark =
          start + 1 < source_.size() ? static_cast<char>(source_[start + 1] | 0x20) : 0;
      const int marked = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
      const std::size_t last = marked == 0 ? start : based_digits_end(start + 2, marked);
      if (last > start + 2) {
        base = marked;
        first = start + 2;
        end = last;
      } else {  // a zero: 0(_?0)*
        end = start + 1;
        while (end < source_.size()) {
          const std::size_t i = end + (source_[end] == '_' ? 1 : 0);
          if (i >= source_.size() || source_[i] != '0') break;
          end = i + 1;
        }
      }
    }
    std::string digits(source_.substr(first, end - first));
    std::erase(digits, '_');
    std::int64_t value = 0;
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
    if (result.ec != std::errc()) fail_unsupported(line_, "an integer above 2^63 - 1");
    add(TokenKind::kInteger, digits).integer = value;
    advance(end - start);
  }

  std::size_t based_digits_end(std::size_t i, int base) const {
    std::size_t end = i;
    while (i < source_.size()) {
      if (source_[i] == '_') ++i;
      if (i >= source_.size()) break;
      const char c = source_[i];
      const int digit = is_ascii_digit(c)                          ? c - '0'
                        : ((c | 0x20) >= 'a' && (c | 0x20) <= 'f') ? (c | 0x20) - 'a' + 10
                                                                   : 99;
      if (digit >= base) break;
      end = ++i;
    }
    return end;
  }

  bool lex_name() {
    std::size_t i = position_;
    while (i < source_.size()) {
      const Utf8Char c = decode_utf8(std::string_view(source_).substr(i));
      if (!is_word(c.code_point)) break;
      i += static_cast<std::size_t>(c.length);
    }
    if (i == position_) return false;
    std::string name(source_.substr(position_, i - position_));
    const char32_t first = decode_utf8(name).code_point;
    if (first != '_' && !is_alpha(first)) fail_syntax(line_, "invalid character in identifier");
    add(TokenKind::kName, std::move(name));
    advance(i - position_);
    return true;
  }

  bool lex_string() {
    const char mark = source_[position_];
    if (mark != '\'' && mark != '"') return false;
    std::size_t end = position_ + 1;
    while (end < source_.size() && source_[end] != mark) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail_syntax(line_, fmt::format("unexpected char {:?}", mark));
    const std::string_view body =
        std::string_view(source_).substr(position_ + 1, end - position_ - 1);
    add(TokenKind::kString, unescape(body));
    advance(end + 1 - position_);
    return true;
  }

  // Python's "unicode-escape" after "ascii, backslashreplace", as Jinja decodes its literals.
  std::string unescape(std::string_view body) const {
    std::string out;
    for (std::size_t i = 0; i < body.size(); ++i) {
      if (body[i] != '\\') {
        out += body[i];
        continue;
      }
      const char c = body[++i];
      static constexpr std::string_view kFrom = "abfnrtv\\'\"";
      static constexpr std::string_view kTo = "\a\b\f\n\r\t\v\\'\"";
      if (const std::size_t k = kFrom.find(c); k != std::string_view::npos) {
        out += kTo[k];
      } else if (c == '\n') {
        continue;
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const std::size_t count = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        append_escape(out, body.substr(i + 1, count), count, 16);
        i += count;
      } else if (c >= '0' && c <= '7') {
        std::size_t n = 1;
        while (n < 3 && i + n < body.size() && body[i + n] >= '0' && body[i + n] <= '7') ++n;
        append_escape(out, body.substr(i, n), n, 8);
        i += n - 1;
      } else if (c == 'N') {
        fail_unsupported(line_, "the escape \\N{...} in a string");
      } else if (static_cast<unsigned char>(c) >= 0x80) {
        // The character was written as an escape of its own, whose backslash this one quotes.
        const Utf8Char wide = decode_utf8(body.substr(i));
        const auto code = static_cast<std::uint32_t>(wide.code_point);
        out += code < 0x100     ? fmt::format("\\x{:02x}", code)
               : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                                : fmt::format("\\U{:08x}", code);
        i += static_cast<std::size_t>(wide.length) - 1;
      } else {
        out += '\\';
        out += c;
      }
    }
    return out;
  }

  void append_escape(std::string& out, std::string_view digits, std::size_t count, int base) const {
    std::uint32_t code = 0;
    const char* begin = digits.data();
    const char* end = begin + digits.size();
    const auto result = std::from_chars(begin, end, code, base);
    if (digits.size() != count || result.ec != std::errc() || result.ptr != end ||
        code > 0x10FFFF) {
      fail_syntax(line_, "a truncated or illegal escape in a string");
    }
    if (code >= 0xD800 && code < 0xE000) fail_unsupported(line_, "a lone surrogate in a string");
    append_utf8(out, code);
  }

  void lex_operator(std::vector<char>& brackets) {
    const auto* op = std::find_if(kOperators.begin(), kOperators.end(),
                                  [this](std::string_view candidate) { return at(candidate); });
    if (op == kOperators.end()) {
      const auto size = static_cast<std::size_t>(decode_utf8(rest()).length);
      fail_syntax(line_, fmt::format("unexpected character '{}'", rest().substr(0, size)));
    }
    const char c = (*op)[0];
    if (c == '(' || c == '[' || c == '{') {
      brackets.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    } else if (c == ')' || c == ']' || c == '}') {
      if (brackets.empty()) fail_syntax(line_, fmt::format("unexpected '{}'", c));
      if (brackets.back() != c) {
        fail_syntax(line_, fmt::format("unexpected '{}', expected '{}'", c, brackets.back()));
      }
      brackets.pop_back();
    }
    add(TokenKind::kOperator, std::string(*op));
    advance(op->size());
  }

  const std::string source_;
  std::size_t position_ = 0;
  std::uint32_t line_ = 1;
  bool line_start_ = true;  // the last thing taken ended a line
  std::vector<Token> tokens_;
};

}  // namespace

std::string Token::describe() const {
  switch (kind) {
    case TokenKind::kData:
      return "template text";
    case TokenKind::kVariableBegin:
      return "begin of print statement";
    case TokenKind::kVariableEnd:
      return "end of print statement";
    case TokenKind::kBlockBegin:
      return "begin of statement block";
    case TokenKind::kBlockEnd:
      return "end of statement block";
    case TokenKind::kString:
      return "string";
    case TokenKind::kInteger:
      return "integer";
    case TokenKind::kFloat:
      return "float";
    case TokenKind::kEnd:
      return "end of template";
    default:
      return fmt::format("'{}'", text);
  }
}

std::vector<Token> tokenize(std::string_view source, const Limits& limits) {
  if (source.size() > limits.source_bytes) {
    fail(ErrorCode::kInvalidModel, "chat template: {} bytes, at most {}", source.size(),
         limits.source_bytes);
  }
  if (!is_valid_utf8(source)) fail(ErrorCode::kInvalidModel, "chat template: not valid UTF-8");
  return Lexer(normalize(source)).run();
}

void fail_syntax(std::uint32_t line, const std::string& message) {
  fail(ErrorCode::kInvalidModel, "chat template line {}: {}", line, message);
}

void fail_unsupported(std::uint32_t line, const std::string& construct) {
  fail(ErrorCode::kUnsupported, "chat template line {}: {} is not supported by this interpreter",
       line, construct);
}

}  // namespace pianola::jinja
