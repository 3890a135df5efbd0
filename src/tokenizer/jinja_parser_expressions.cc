#include <algorithm>

#include "tokenizer/jinja_builtins.h"
#include "tokenizer/jinja_parser.h"

namespace pianola::jinja {

NodeId ExpressionParser::expression(bool with_condition) {
  const ParserState::Nesting nesting(s_);
  const auto first_node = static_cast<NodeId>(s_.result.nodes.size());
  std::uint32_t line = s_.current().line;
  NodeId node = or_expression();
  while (with_condition && s_.skip_name("if")) {
    const NodeId test = or_expression();
    const NodeId otherwise = s_.skip_name("else") ? expression() : kNoNode;
    node = s_.add(NodeKind::kCondition, line, test, node, otherwise);
    // Jinja looks up what stands in a conditional expression only when it runs.
    std::erase_if(s_.unknown, [&](const auto& u) { return u.node >= first_node; });
    line = s_.current().line;
  }
  return node;
}

NodeId ExpressionParser::or_expression() {
  NodeId left = and_expression();
  while (s_.current().is_name("or")) {
    const std::uint32_t line = s_.take().line;
    left = s_.add(NodeKind::kOr, line, left, and_expression());
  }
  return left;
}

NodeId ExpressionParser::and_expression() {
  NodeId left = not_expression();
  while (s_.current().is_name("and")) {
    const std::uint32_t line = s_.take().line;
    left = s_.add(NodeKind::kAnd, line, left, not_expression());
  }
  return left;
}

NodeId ExpressionParser::not_expression() {
  if (!s_.current().is_name("not")) return comparison();
  const ParserState::Nesting nesting(s_);
  const std::uint32_t line = s_.take().line;
  return s_.add(NodeKind::kNot, line, not_expression());
}

NodeId ExpressionParser::comparison() {
  static constexpr std::pair<std::string_view, CompareOp> kOps[] = {
      {"==", CompareOp::kEq}, {"!=", CompareOp::kNe}, {"<", CompareOp::kLt},
      {"<=", CompareOp::kLe}, {">", CompareOp::kGt},  {">=", CompareOp::kGe}};
  const std::uint32_t line = s_.current().line;
  const NodeId first = sum();
  std::vector<std::uint32_t> rest;
  for (;;) {
    const auto* op = std::find_if(std::begin(kOps), std::end(kOps), [this](const auto& candidate) {
      return s_.current().is_op(candidate.first);
    });
    CompareOp kind = CompareOp::kIn;
    if (op != std::end(kOps)) {
      s_.take();
      kind = op->second;
    } else if (s_.skip_name("in")) {
      kind = CompareOp::kIn;
    } else if (s_.current().is_name("not") && s_.next_token().is_name("in")) {
      s_.take();
      s_.take();
      kind = CompareOp::kNotIn;
    } else {
      break;
    }
    rest.push_back(static_cast<std::uint32_t>(kind));
    rest.push_back(sum());
  }
  if (rest.empty()) return first;
  const std::uint32_t start = s_.add_list(rest);
  return s_.add(NodeKind::kCompare, line, first, start, static_cast<std::uint32_t>(rest.size()));
}

NodeId ExpressionParser::sum() {
  NodeId left = concat();
  while (s_.current().is_op("+") || s_.current().is_op("-")) {
    const Token token = s_.take();
    const auto op = token.text == "+" ? BinaryOp::kAdd : BinaryOp::kSub;
    const NodeId right = concat();
    left =
        s_.add(NodeKind::kBinary, token.line, left, right, kNoNode, static_cast<std::uint8_t>(op));
  }
  return left;
}

NodeId ExpressionParser::concat() {
  const std::uint32_t line = s_.current().line;
  std::vector<std::uint32_t> parts = {product()};
  while (s_.skip_op("~")) parts.push_back(product());
  if (parts.size() == 1) return parts[0];
  const std::uint32_t start = s_.add_list(parts);
  return s_.add(NodeKind::kConcat, line, start, static_cast<std::uint32_t>(parts.size()));
}

NodeId ExpressionParser::product() {
  static constexpr std::pair<std::string_view, BinaryOp> kOps[] = {{"*", BinaryOp::kMul},
                                                                   {"/", BinaryOp::kDiv},
                                                                   {"//", BinaryOp::kFloorDiv},
                                                                   {"%", BinaryOp::kMod}};
  NodeId left = power();
  for (;;) {
    const auto* op = std::find_if(std::begin(kOps), std::end(kOps), [this](const auto& candidate) {
      return s_.current().is_op(candidate.first);
    });
    if (op == std::end(kOps)) return left;
    const std::uint32_t line = s_.take().line;
    const NodeId right = power();
    left = s_.add(NodeKind::kBinary, line, left, right, kNoNode,
                  static_cast<std::uint8_t>(op->second));
  }
}

NodeId ExpressionParser::power() {
  NodeId left = unary(true);
  while (s_.current().is_op("**")) {
    const std::uint32_t line = s_.take().line;
    const NodeId right = unary(true);
    left = s_.add(NodeKind::kBinary, line, left, right, kNoNode,
                  static_cast<std::uint8_t>(BinaryOp::kPow));
  }
  return left;
}

NodeId ExpressionParser::unary(bool with_filter) {
  NodeId node = kNoNode;
  if (s_.current().is_op("-") || s_.current().is_op("+")) {
    const ParserState::Nesting nesting(s_);
    const Token token = s_.take();
    const NodeId operand = unary(false);
    node =
        s_.add(token.text == "-" ? NodeKind::kNegative : NodeKind::kPositive, token.line, operand);
  } else {
    node = primary();
  }
  node = postfix(node);
  return with_filter ? filters_and_tests(node) : node;
}

NodeId ExpressionParser::name(const Token& token) {
  const std::string& text = token.text;
  if (text == "true" || text == "True" || text == "false" || text == "False") {
    const bool value = text[0] == 't' || text[0] == 'T';
    return s_.add(NodeKind::kConst, token.line, s_.add_constant(Value::boolean(value)));
  }
  if (text == "none" || text == "None") {
    return s_.add(NodeKind::kConst, token.line, s_.add_constant(Value::none()));
  }
  for (MacroDecl* macro : s_.open_macros) {
    macro->uses_caller = macro->uses_caller || text == "caller";
    macro->uses_varargs = macro->uses_varargs || text == "varargs";
    macro->uses_kwargs = macro->uses_kwargs || text == "kwargs";
  }
  return s_.add(NodeKind::kName, token.line, s_.variable(text));
}

NodeId ExpressionParser::primary() {
  const Token& token = s_.current();
  const std::uint32_t line = token.line;
  switch (token.kind) {
    case TokenKind::kName:
      return name(s_.take());
    case TokenKind::kString: {
      std::string text = s_.take().text;
      while (s_.current().kind == TokenKind::kString) text += s_.take().text;
      return s_.add(NodeKind::kConst, line, s_.add_string(std::move(text)));
    }
    case TokenKind::kInteger:
      return s_.add(NodeKind::kConst, line, s_.add_constant(Value::integer(s_.take().integer)));
    case TokenKind::kFloat:
      return s_.add(NodeKind::kConst, line, s_.add_constant(Value::real(s_.take().real)));
    default:
      break;
  }
  if (s_.skip_op("(")) {
    const NodeId node = tuple(true, {}, true);
    s_.expect_op(")");
    return node;
  }
  if (token.is_op("[")) return list();
  if (token.is_op("{")) return dict();
  fail_syntax(line, fmt::format("unexpected {}", token.describe()));
}

NodeId ExpressionParser::list() {
  const std::uint32_t line = s_.take().line;
  std::vector<std::uint32_t> items;
  while (!s_.current().is_op("]")) {
    if (!items.empty()) s_.expect_op(",");
    if (s_.current().is_op("]")) break;
    items.push_back(expression());
  }
  s_.expect_op("]");
  const std::uint32_t start = s_.add_list(items);
  return s_.add(NodeKind::kList, line, start, static_cast<std::uint32_t>(items.size()));
}

NodeId ExpressionParser::dict() {
  const std::uint32_t line = s_.take().line;
  std::vector<std::uint32_t> items;
  while (!s_.current().is_op("}")) {
    if (!items.empty()) s_.expect_op(",");
    if (s_.current().is_op("}")) break;
    items.push_back(expression());
    s_.expect_op(":");
    items.push_back(expression());
  }
  s_.expect_op("}");
  const std::uint32_t start = s_.add_list(items);
  return s_.add(NodeKind::kDict, line, start, static_cast<std::uint32_t>(items.size()));
}

NodeId ExpressionParser::tuple(bool with_condition, std::string_view end_name,
                               bool explicit_parentheses) {
  std::uint32_t line = s_.current().line;
  std::vector<std::uint32_t> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty()) s_.expect_op(",");
    const Token& token = s_.current();
    if (token.kind == TokenKind::kVariableEnd || token.kind == TokenKind::kBlockEnd ||
        token.is_op(")") || (!end_name.empty() && token.is_name(end_name))) {
      break;
    }
    items.push_back(expression(with_condition));
    if (!s_.current().is_op(",")) break;
    is_tuple = true;
    line = s_.current().line;
  }
  if (!is_tuple) {
    if (!items.empty()) return items[0];
    if (!explicit_parentheses) {
      fail_syntax(line, fmt::format("expected an expression, got {}", s_.current().describe()));
    }
  }
  const std::uint32_t start = s_.add_list(items);
  return s_.add(NodeKind::kTuple, line, start, static_cast<std::uint32_t>(items.size()));
}

NodeId ExpressionParser::target_item(bool with_namespace) {
  const ParserState::Nesting nesting(s_);
  const std::uint32_t line = s_.current().line;
  if (s_.skip_op("(")) {
    const NodeId inner = target(false);
    s_.expect_op(")");
    return inner;
  }
  if (s_.current().kind != TokenKind::kName) {
    fail_syntax(line, fmt::format("can't assign to {}", s_.current().describe()));
  }
  const std::string name = s_.take().text;
  static constexpr std::string_view kConstants[] = {"true",  "false", "True",
                                                    "False", "none",  "None"};
  if (std::find(std::begin(kConstants), std::end(kConstants), name) != std::end(kConstants)) {
    fail_syntax(line, fmt::format("can't assign to '{}'", name));
  }
  if (with_namespace && s_.skip_op(".")) {
    const std::uint32_t attribute = s_.add_string(s_.expect_name());
    return s_.add(NodeKind::kNamespaceRef, line, s_.variable(name), attribute);
  }
  return s_.add(NodeKind::kName, line, s_.variable(name));
}

NodeId ExpressionParser::target(bool with_namespace, std::string_view end_name) {
  const std::uint32_t line = s_.current().line;
  std::vector<std::uint32_t> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty()) s_.expect_op(",");
    const Token& token = s_.current();
    if (token.kind == TokenKind::kBlockEnd || token.is_op(")") ||
        (!end_name.empty() && token.is_name(end_name))) {
      break;
    }
    items.push_back(target_item(with_namespace));
    if (!s_.current().is_op(",")) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (!items.empty()) return items[0];
    fail_syntax(line, fmt::format("expected a name, got {}", s_.current().describe()));
  }
  const std::uint32_t start = s_.add_list(items);
  return s_.add(NodeKind::kTuple, line, start, static_cast<std::uint32_t>(items.size()));
}

NodeId ExpressionParser::postfix(NodeId node) {
  for (;;) {
    if (s_.current().is_op(".") || s_.current().is_op("[")) {
      node = subscript(node);
    } else if (s_.current().is_op("(")) {
      node = call(node);
    } else {
      return node;
    }
  }
}

NodeId ExpressionParser::filters_and_tests(NodeId node) {
  for (;;) {
    if (s_.current().is_op("|")) {
      node = filters(node, false);
    } else if (s_.current().is_name("is")) {
      node = test(node);
    } else if (s_.current().is_op("(")) {
      node = call(node);
    } else {
      return node;
    }
  }
}

NodeId ExpressionParser::subscript(NodeId node) {
  const Token token = s_.take();
  if (token.text == ".") {
    const Token attribute = s_.take();
    if (attribute.kind == TokenKind::kName) {
      return s_.add(NodeKind::kGetAttr, token.line, node, s_.add_string(attribute.text));
    }
    if (attribute.kind != TokenKind::kInteger) {
      fail_syntax(attribute.line,
                  fmt::format("expected name or number, got {}", attribute.describe()));
    }
    const NodeId index = s_.add(NodeKind::kConst, attribute.line,
                                s_.add_constant(Value::integer(attribute.integer)));
    return s_.add(NodeKind::kGetItem, token.line, node, index);
  }
  std::vector<std::uint32_t> items;
  while (!s_.current().is_op("]")) {
    if (!items.empty()) s_.expect_op(",");
    items.push_back(subscribed());
  }
  s_.expect_op("]");
  NodeId index = kNoNode;
  if (items.size() == 1) {
    index = items[0];
  } else {
    const std::uint32_t start = s_.add_list(items);
    index = s_.add(NodeKind::kTuple, token.line, start, static_cast<std::uint32_t>(items.size()));
  }
  return s_.add(NodeKind::kGetItem, token.line, node, index);
}

NodeId ExpressionParser::subscribed() {
  const std::uint32_t line = s_.current().line;
  NodeId start = kNoNode;
  if (!s_.current().is_op(":")) {
    start = expression();
    if (!s_.current().is_op(":")) return start;
  }
  const auto at_end = [this] {
    return s_.current().is_op("]") || s_.current().is_op(",") || s_.current().is_op(":");
  };
  s_.take();
  const NodeId stop = at_end() ? kNoNode : expression();
  NodeId step = kNoNode;
  if (s_.skip_op(":") && !at_end()) step = expression();
  return s_.add(NodeKind::kSlice, line, start, stop, step);
}

NodeId ExpressionParser::call(NodeId callee) {
  const std::uint32_t line = s_.current().line;
  const std::uint32_t site = call_arguments();
  return s_.add(NodeKind::kCall, line, callee, site);
}

std::uint32_t ExpressionParser::call_arguments() {
  const std::uint32_t line = s_.current().line;
  s_.expect_op("(");
  CallSite site;
  const auto ensure = [line](bool valid) {
    if (!valid) fail_syntax(line, "invalid syntax for function call expression");
  };
  bool require_comma = false;
  while (!s_.current().is_op(")")) {
    if (require_comma) {
      s_.expect_op(",");
      if (s_.current().is_op(")")) break;
    }
    require_comma = true;
    if (s_.skip_op("*")) {
      ensure(site.extra_positional == kNoNode && site.extra_keywords == kNoNode);
      site.extra_positional = expression();
    } else if (s_.skip_op("**")) {
      ensure(site.extra_keywords == kNoNode);
      site.extra_keywords = expression();
    } else if (s_.current().kind == TokenKind::kName && s_.next_token().is_op("=")) {
      ensure(site.extra_keywords == kNoNode);
      std::string keyword = s_.take().text;
      s_.take();
      for (const auto& [name, value] : site.keywords) {
        if (name == keyword)
          fail_syntax(line, fmt::format("keyword argument repeated: {}", keyword));
      }
      const NodeId value = expression();
      site.keywords.emplace_back(std::move(keyword), value);
    } else {
      ensure(site.extra_positional == kNoNode && site.extra_keywords == kNoNode &&
             site.keywords.empty());
      site.positional.push_back(expression());
    }
  }
  s_.expect_op(")");
  s_.result.calls.push_back(std::move(site));
  return static_cast<std::uint32_t>(s_.result.calls.size() - 1);
}

void ExpressionParser::note_unknown(NodeId node, bool is_filter, const std::string& name) {
  const bool known = is_filter ? find_filter(name) != nullptr : find_test(name) != nullptr;
  if (known || s_.soft) return;
  s_.unknown.push_back({node, fmt::format("{} '{}'", is_filter ? "filter" : "test", name)});
}

NodeId ExpressionParser::filters(NodeId input, bool start_inline) {
  while (start_inline || s_.current().is_op("|")) {
    if (!start_inline) s_.take();
    start_inline = false;
    const std::uint32_t line = s_.current().line;
    std::string name = s_.expect_name();
    while (s_.skip_op(".")) name.append(1, '.').append(s_.expect_name());
    std::uint32_t site = kNoNode;
    if (s_.current().is_op("(")) site = call_arguments();
    const std::uint32_t constant = s_.add_string(name);
    input = s_.add(NodeKind::kFilter, line, input, site, constant);
    note_unknown(input, true, name);
  }
  return input;
}

NodeId ExpressionParser::test(NodeId node) {
  const std::uint32_t line = s_.take().line;
  const bool negated = s_.skip_name("not");
  std::string name = s_.expect_name();
  while (s_.skip_op(".")) name.append(1, '.').append(s_.expect_name());
  std::uint32_t site = kNoNode;
  const Token& token = s_.current();
  const bool starts_value = token.kind == TokenKind::kName || token.kind == TokenKind::kString ||
                            token.kind == TokenKind::kInteger || token.kind == TokenKind::kFloat ||
                            token.is_op("[") || token.is_op("{");
  if (token.is_op("(")) {
    site = call_arguments();
  } else if (starts_value && !token.is_name("else") && !token.is_name("or") &&
             !token.is_name("and")) {
    if (token.is_name("is")) fail_syntax(line, "you cannot chain multiple tests with is");
    CallSite single;
    single.positional.push_back(postfix(primary()));
    s_.result.calls.push_back(std::move(single));
    site = static_cast<std::uint32_t>(s_.result.calls.size() - 1);
  }
  const std::uint32_t constant = s_.add_string(name);
  NodeId result = s_.add(NodeKind::kTest, line, node, site, constant);
  note_unknown(result, false, name);
  return negated ? s_.add(NodeKind::kNot, line, result) : result;
}

}  // namespace pianola::jinja
