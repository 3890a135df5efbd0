// Parses a template's source into a Template.
//
//   Template t = parse_template("{% for m in messages %}{{ m.content }}{% endfor %}", limits);
//
// Throws InvalidModel for a syntax error or a source above the limits, Unsupported for Jinja that
// no chat template needs (block, extends, include, import, autoescape); both name the line.
#pragma once

#include <string_view>

#include "tokenizer/jinja_ast.h"
#include "tokenizer/jinja_lexer.h"

namespace pianola::jinja {

Template parse_template(std::string_view source, const Limits& limits);

// The two halves of the grammar share this state: the tokens, what has been built, the nesting.
class ParserState {
 public:
  ParserState(std::vector<Token> tokens, const Limits& limits);

  const Token& current() const { return tokens_[position_]; }
  const Token& next_token() const;
  Token take();
  bool skip_name(std::string_view name);
  bool skip_op(std::string_view op);
  void expect_op(std::string_view op);
  void expect(TokenKind kind, const char* what);
  std::string expect_name();
  [[noreturn]] void fail_expected(const std::string& what) const;

  NodeId add(NodeKind kind, std::uint32_t line, std::uint32_t a = kNoNode,
             std::uint32_t b = kNoNode, std::uint32_t c = kNoNode, std::uint8_t op = 0);
  std::uint32_t add_list(const std::vector<std::uint32_t>& items);
  std::uint32_t add_constant(Value value);
  std::uint32_t add_string(std::string text) {
    return add_constant(constant_string(std::move(text)));
  }
  std::uint32_t variable(const std::string& name);

  Template result;
  // Macros that enclose the current position: a mention of `caller` marks them all.
  std::vector<MacroDecl*> open_macros;
  // Filters and tests that do not exist, outside what Jinja checks only when it runs.
  struct Unknown {
    NodeId node;
    std::string what;
  };
  std::vector<Unknown> unknown;
  bool soft = false;  // inside {% if %}: names are checked when they run

  class Nesting {
   public:
    explicit Nesting(ParserState& state);
    ~Nesting() { --state_.depth_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    ParserState& state_;
  };

 private:
  std::vector<Token> tokens_;
  std::size_t position_ = 0;
  std::size_t depth_ = 0;
  std::size_t max_depth_;
  std::unordered_map<std::string, std::uint32_t> variable_ids_;
};

class ExpressionParser {
 public:
  explicit ExpressionParser(ParserState& state) : s_(state) {}

  NodeId expression(bool with_condition = true);
  // An expression, or a tuple without parentheses. `end_name` also ends a tuple.
  NodeId tuple(bool with_condition = true, std::string_view end_name = {},
               bool explicit_parentheses = false);
  // A target of an assignment: names, tuples of them, and ns.attribute where allowed.
  NodeId target(bool with_namespace, std::string_view end_name = {});
  NodeId filters(NodeId input, bool start_inline);

 private:
  NodeId target_item(bool with_namespace);
  NodeId or_expression();
  NodeId and_expression();
  NodeId not_expression();
  NodeId comparison();
  NodeId sum();
  NodeId concat();
  NodeId product();
  NodeId power();
  NodeId unary(bool with_filter);
  NodeId primary();
  NodeId postfix(NodeId node);
  NodeId filters_and_tests(NodeId node);
  NodeId subscript(NodeId node);
  NodeId subscribed();
  NodeId call(NodeId callee);
  std::uint32_t call_arguments();
  NodeId test(NodeId node);
  NodeId list();
  NodeId dict();
  NodeId name(const Token& token);
  void note_unknown(NodeId node, bool is_filter, const std::string& name);

  ParserState& s_;
};

}  // namespace pianola::jinja
