// Splits a template's source into tokens as Jinja 3.1 does with trim_blocks and lstrip_blocks on:
// white space control (`-`, `+`), raw blocks and comments are resolved here.
//
//   for (const Token& t : tokenize("Hi {{ name }}!", limits)) ...   // data, {{, name, }}, data
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/jinja_value.h"

namespace pianola::jinja {

enum class TokenKind : std::uint8_t {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::uint32_t line = 1;
  std::string text;  // of kData, kName, kString (decoded) and kOperator
  std::int64_t integer = 0;
  double real = 0;

  bool is_name(std::string_view name) const { return kind == TokenKind::kName && text == name; }
  bool is_op(std::string_view op) const { return kind == TokenKind::kOperator && text == op; }
  // For messages: "'foo'", "end of statement block", ...
  std::string describe() const;
};

// Throws InvalidModel naming the line. The last token is kEnd.
std::vector<Token> tokenize(std::string_view source, const Limits& limits);

[[noreturn]] void fail_syntax(std::uint32_t line, const std::string& message);
[[noreturn]] void fail_unsupported(std::uint32_t line, const std::string& construct);

}  // namespace pianola::jinja
