#include "tokenizer/jinja_parser.h"

#include <algorithm>
#include <deque>

namespace pianola::jinja {

ParserState::ParserState(std::vector<Token> tokens, const Limits& limits)
    : tokens_(std::move(tokens)), max_depth_(limits.nesting) {
  result.loop = variable("loop");
  result.caller = variable("caller");
  result.varargs = variable("varargs");
  result.kwargs = variable("kwargs");
}

ParserState::Nesting::Nesting(ParserState& state) : state_(state) {
  if (++state_.depth_ > state_.max_depth_) {
    --state_.depth_;
    fail_syntax(state_.current().line, fmt::format("{} is nested deeper than {} levels",
                                                   state_.current().describe(), state_.max_depth_));
  }
}

const Token& ParserState::next_token() const {
  return tokens_[std::min(position_ + 1, tokens_.size() - 1)];
}

Token ParserState::take() {
  Token token = tokens_[position_];
  if (position_ + 1 < tokens_.size()) ++position_;
  return token;
}

bool ParserState::skip_name(std::string_view name) {
  if (!current().is_name(name)) return false;
  take();
  return true;
}

bool ParserState::skip_op(std::string_view op) {
  if (!current().is_op(op)) return false;
  take();
  return true;
}

void ParserState::fail_expected(const std::string& what) const {
  if (current().kind == TokenKind::kEnd) {
    fail_syntax(current().line, fmt::format("unexpected end of template, expected {}", what));
  }
  fail_syntax(current().line, fmt::format("expected {}, got {}", what, current().describe()));
}

void ParserState::expect_op(std::string_view op) {
  if (!skip_op(op)) fail_expected(fmt::format("'{}'", op));
}

void ParserState::expect(TokenKind kind, const char* what) {
  if (current().kind != kind) fail_expected(what);
  take();
}

std::string ParserState::expect_name() {
  if (current().kind != TokenKind::kName) fail_expected("a name");
  return take().text;
}

NodeId ParserState::add(NodeKind kind, std::uint32_t line, std::uint32_t a, std::uint32_t b,
                        std::uint32_t c, std::uint8_t op) {
  result.nodes.push_back({kind, op, line, a, b, c});
  return static_cast<NodeId>(result.nodes.size() - 1);
}

std::uint32_t ParserState::add_list(const std::vector<std::uint32_t>& items) {
  const auto start = static_cast<std::uint32_t>(result.lists.size());
  result.lists.insert(result.lists.end(), items.begin(), items.end());
  return start;
}

std::uint32_t ParserState::add_constant(Value value) {
  result.constants.push_back(std::move(value));
  return static_cast<std::uint32_t>(result.constants.size() - 1);
}

std::uint32_t ParserState::variable(const std::string& name) {
  const auto [it, added] =
      variable_ids_.emplace(name, static_cast<std::uint32_t>(result.variables.size()));
  if (added) result.variables.push_back(name);
  return it->second;
}

namespace {

class StatementParser {
 public:
  explicit StatementParser(ParserState& state) : s_(state), expressions_(state) {}

  std::uint32_t parse_root() {
    const std::uint32_t root = statements({});
    if (!s_.unknown.empty()) {
      const auto& unknown = s_.unknown.front();
      fail_syntax(s_.result.nodes[unknown.node].line, fmt::format("no {}", unknown.what));
    }
    return root;
  }

 private:
  using Names = std::vector<std::string_view>;

  // Saves what a body must not inherit, for as long as it is parsed.
  struct Body {
    Body(StatementParser& parser, bool in_loop) : p(parser), loop(p.in_loop_), soft(p.s_.soft) {
      p.in_loop_ = in_loop;
      p.s_.soft = false;
    }
    ~Body() {
      p.in_loop_ = loop;
      p.s_.soft = soft;
    }
    Body(const Body&) = delete;
    Body& operator=(const Body&) = delete;
    StatementParser& p;
    bool loop, soft;
  };

  // Statements up to one of the end tags, whose name stays the current token.
  std::uint32_t statements(const Names& end_names) {
    const ParserState::Nesting nesting(s_);
    std::vector<NodeId> block;
    for (;;) {
      const std::uint32_t line = s_.current().line;
      if (s_.current().kind == TokenKind::kEnd) {
        if (!end_names.empty()) fail_missing(end_names);
        break;
      }
      if (s_.current().kind == TokenKind::kData) {
        block.push_back(s_.add(NodeKind::kData, line, s_.add_string(s_.take().text)));
      } else if (s_.current().kind == TokenKind::kVariableBegin) {
        s_.take();
        block.push_back(s_.add(NodeKind::kPrint, line, expressions_.tuple()));
        s_.expect(TokenKind::kVariableEnd, "end of print statement");
      } else {
        s_.expect(TokenKind::kBlockBegin, "a statement");
        const auto is_end = [this](std::string_view name) { return s_.current().is_name(name); };
        if (std::any_of(end_names.begin(), end_names.end(), is_end)) break;
        statement(block);
        s_.expect(TokenKind::kBlockEnd, "end of statement block");
      }
    }
    s_.result.blocks.push_back(std::move(block));
    return static_cast<std::uint32_t>(s_.result.blocks.size() - 1);
  }

  [[noreturn]] void fail_missing(const Names& end_names) {
    fail_syntax(
        s_.current().line,
        fmt::format("unexpected end of template: looking for {}{}", fmt::join(end_names, " or "),
                    tags_.empty() ? "" : fmt::format(" of '{}'", tags_.back())));
  }

  // The body of a tag: from the end of the tag to the first of `end_names`.
  std::uint32_t body(const Names& end_names) {
    s_.skip_op(":");
    s_.expect(TokenKind::kBlockEnd, "end of statement block");
    return statements(end_names);
  }

  std::uint32_t body_until(std::string_view end_name) {
    const std::uint32_t block = body({end_name});
    s_.take();
    return block;
  }

  void statement(std::vector<NodeId>& block) {
    const Token token = s_.current();
    if (token.kind != TokenKind::kName) fail_syntax(token.line, "tag name expected");
    tags_.push_back(token.text);
    s_.take();
    using Parse = NodeId (StatementParser::*)(std::uint32_t);
    static constexpr std::pair<std::string_view, Parse> kTags[] = {
        {"if", &StatementParser::parse_if},
        {"for", &StatementParser::parse_for},
        {"set", &StatementParser::parse_set},
        {"macro", &StatementParser::parse_macro},
        {"call", &StatementParser::parse_call},
        {"filter", &StatementParser::parse_filter},
        {"with", &StatementParser::parse_with},
        {"break", &StatementParser::parse_break},
        {"continue", &StatementParser::parse_continue},
        {"generation", &StatementParser::parse_generation}};
    static constexpr std::string_view kRefused[] = {"block",  "extends", "include",
                                                    "import", "from",    "autoescape"};
    const auto* tag = std::find_if(std::begin(kTags), std::end(kTags),
                                   [&](const auto& t) { return t.first == token.text; });
    if (tag != std::end(kTags)) {
      block.push_back((this->*tag->second)(token.line));
    } else if (token.text == "print") {
      parse_print(block);
    } else if (std::find(std::begin(kRefused), std::end(kRefused), token.text) !=
               std::end(kRefused)) {
      fail_unsupported(token.line, fmt::format("the statement '{}'", token.text));
    } else {
      fail_syntax(token.line, fmt::format("encountered unknown tag '{}'", token.text));
    }
    tags_.pop_back();
  }

  void parse_print(std::vector<NodeId>& block) {
    bool first = true;
    while (s_.current().kind != TokenKind::kBlockEnd) {
      if (!first) s_.expect_op(",");
      first = false;
      const std::uint32_t line = s_.current().line;
      block.push_back(s_.add(NodeKind::kPrint, line, expressions_.expression()));
    }
  }

  NodeId parse_if(std::uint32_t line) {
    const bool soft = s_.soft;
    s_.soft = true;
    std::vector<std::uint32_t> branches;
    std::uint32_t otherwise = kNoNode;
    for (;;) {
      branches.push_back(expressions_.tuple(false));
      branches.push_back(body({"elif", "else", "endif"}));
      const Token tag = s_.take();
      if (tag.is_name("elif")) continue;
      if (tag.is_name("else")) otherwise = body_until("endif");
      break;
    }
    s_.soft = soft;
    const std::uint32_t start = s_.add_list(branches);
    return s_.add(NodeKind::kIf, line, start, static_cast<std::uint32_t>(branches.size()),
                  otherwise);
  }

  NodeId parse_for(std::uint32_t line) {
    ForLoop loop;
    ++for_depth_;
    loop.target = expressions_.target(false, "in");
    check_target(loop.target);
    if (!s_.skip_name("in")) s_.fail_expected("'in'");
    loop.items = expressions_.tuple(false, "recursive");
    {
      const Body scope(*this, true);
      if (s_.skip_name("if")) loop.test = expressions_.expression();
      loop.recursive = s_.skip_name("recursive");
      loop.body = body({"endfor", "else"});
    }
    if (s_.take().text == "else") {
      const Body scope(*this, in_loop_ && !loop.recursive);
      loop.otherwise = body_until("endfor");
    }
    --for_depth_;
    s_.result.loops.push_back(loop);
    return s_.add(NodeKind::kFor, line, static_cast<std::uint32_t>(s_.result.loops.size() - 1));
  }

  // Inside a loop nothing may be assigned to the name `loop`.
  void check_target(NodeId target) {
    const Node node = s_.result.nodes[target];
    if (node.kind == NodeKind::kTuple) {
      for (std::uint32_t i = 0; i < node.b; ++i) check_target(s_.result.lists[node.a + i]);
    } else if (node.kind == NodeKind::kName && node.a == s_.result.loop && for_depth_ > 0) {
      fail_syntax(node.line, "can't assign to special loop variable in for-loop target");
    }
  }

  NodeId parse_set(std::uint32_t line) {
    const NodeId target = expressions_.target(true);
    check_target(target);
    if (s_.skip_op("=")) return s_.add(NodeKind::kSet, line, target, expressions_.tuple());
    const Body scope(*this, in_loop_);
    NodeId filter = kNoNode;
    if (s_.current().is_op("|")) filter = expressions_.filters(kNoNode, false);
    const std::uint32_t block = body_until("endset");
    return s_.add(NodeKind::kSetBlock, line, target, filter, block);
  }

  void parse_signature(MacroDecl& macro) {
    s_.expect_op("(");
    while (!s_.current().is_op(")")) {
      if (!macro.parameters.empty()) s_.expect_op(",");
      const std::uint32_t line = s_.current().line;
      const std::uint32_t parameter = s_.variable(s_.expect_name());
      if (std::find(macro.parameters.begin(), macro.parameters.end(), parameter) !=
          macro.parameters.end()) {
        fail_syntax(line, fmt::format("duplicate argument '{}' in macro definition",
                                      s_.result.variables[parameter]));
      }
      if (s_.skip_op("=")) {
        macro.defaults.push_back(expressions_.expression());
      } else if (!macro.defaults.empty()) {
        fail_syntax(line, "non-default argument follows default argument");
      }
      macro.parameters.push_back(parameter);
    }
    s_.expect_op(")");
  }

  // Parses the body of a macro, a call block or a generation block, and stores the macro.
  std::uint32_t finish_macro(MacroDecl macro, std::uint32_t line, std::string_view end_name) {
    const Body scope(*this, false);
    s_.open_macros.push_back(&macro);
    macro.body = body_until(end_name);
    s_.open_macros.pop_back();
    const auto has = [&](std::uint32_t v) {
      return std::find(macro.parameters.begin(), macro.parameters.end(), v) !=
             macro.parameters.end();
    };
    if (has(s_.result.varargs)) macro.uses_varargs = false;
    if (has(s_.result.kwargs)) macro.uses_kwargs = false;
    if (has(s_.result.caller)) {
      const auto at = std::find(macro.parameters.begin(), macro.parameters.end(), s_.result.caller);
      if (macro.uses_caller && macro.parameters.end() - at > std::ssize(macro.defaults)) {
        fail_syntax(line, "the special argument 'caller' must be omitted or be given a default");
      }
      macro.uses_caller = false;
    }
    s_.result.macros.push_back(std::move(macro));
    return static_cast<std::uint32_t>(s_.result.macros.size() - 1);
  }

  NodeId parse_macro(std::uint32_t line) {
    MacroDecl macro;
    macro.name = s_.expect_name();
    macro.variable = s_.variable(macro.name);
    parse_signature(macro);
    return s_.add(NodeKind::kMacro, line, finish_macro(std::move(macro), line, "endmacro"));
  }

  NodeId parse_call(std::uint32_t line) {
    MacroDecl caller;
    caller.name = "caller";
    if (s_.current().is_op("(")) parse_signature(caller);
    const NodeId call = expressions_.expression();
    if (s_.result.nodes[call].kind != NodeKind::kCall) fail_syntax(line, "expected call");
    return s_.add(NodeKind::kCallBlock, line, finish_macro(std::move(caller), line, "endcall"),
                  call);
  }

  NodeId parse_filter(std::uint32_t line) {
    const Body scope(*this, in_loop_);
    const NodeId filter = expressions_.filters(kNoNode, true);
    return s_.add(NodeKind::kFilterBlock, line, filter, kNoNode, body_until("endfilter"));
  }

  NodeId parse_with(std::uint32_t line) {
    std::vector<std::uint32_t> pairs;
    while (s_.current().kind != TokenKind::kBlockEnd) {
      if (!pairs.empty()) s_.expect_op(",");
      pairs.push_back(expressions_.target(false));
      s_.expect_op("=");
      pairs.push_back(expressions_.expression());
    }
    const Body scope(*this, in_loop_);
    const std::uint32_t block = body_until("endwith");
    const std::uint32_t start = s_.add_list(pairs);
    return s_.add(NodeKind::kWith, line, start, static_cast<std::uint32_t>(pairs.size()), block);
  }

  // {% generation %} marks what the assistant said; it changes nothing in the text. Jinja compiles
  // it as a call block, so it is a scope of its own.
  NodeId parse_generation(std::uint32_t line) {
    const Body scope(*this, false);
    return s_.add(NodeKind::kScope, line, kNoNode, kNoNode, body_until("endgeneration"));
  }

  NodeId parse_break(std::uint32_t line) {
    if (!in_loop_) fail_syntax(line, "'break' outside loop");
    return s_.add(NodeKind::kBreak, line);
  }

  NodeId parse_continue(std::uint32_t line) {
    if (!in_loop_) fail_syntax(line, "'continue' outside loop");
    return s_.add(NodeKind::kContinue, line);
  }

  ParserState& s_;
  ExpressionParser expressions_;
  std::vector<std::string> tags_;
  bool in_loop_ = false;
  int for_depth_ = 0;
};

}  // namespace

Template parse_template(std::string_view source, const Limits& limits) {
  ParserState state(tokenize(source, limits), limits);
  state.result.root = StatementParser(state).parse_root();
  return std::move(state.result);
}

}  // namespace pianola::jinja
