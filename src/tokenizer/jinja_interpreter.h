// Renders a Template: walks its statements and expressions within the bounds of a Sandbox.
//
//   Sandbox sandbox(limits);
//   Interpreter interpreter(parsed, sandbox, clock_in_microseconds);
//   std::string text = interpreter.render({{"messages", value_from_json(sandbox, json)}});
//
// One Interpreter renders once. Names are looked up through a chain of scopes, as Jinja resolves
// them when it compiles: for, macro, call, filter, with and block set open a scope, if does not.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tokenizer/jinja_ast.h"
#include "tokenizer/jinja_builtins.h"
#include "tokenizer/jinja_operators.h"

namespace pianola::jinja {

struct Scope {
  Scope* parent = nullptr;
  bool captured = false;  // by a macro or a loop that may outlive the block
  std::vector<std::pair<std::uint32_t, Value>> variables;
};

struct MacroObject : Object {
  MacroObject() : Object(Kind::kMacro) {}
  const MacroDecl* decl = nullptr;
  Scope* scope = nullptr;  // where it was defined
};

struct LoopObject : Object {
  LoopObject() : Object(Kind::kLoop) {}
  const ForLoop* loop = nullptr;
  Scope* scope = nullptr;  // around the loop
  Value iterable;
  std::optional<Walk> walk;
  std::vector<Value> drained;  // items read ahead, to know the length
  std::size_t drained_at = 0;
  bool is_drained = false;
  std::int64_t index0 = -1;
  std::int64_t length = -1;  // unknown yet
  std::int64_t depth0 = 0;
  Value before, current, after;  // kMissing where there is none
  Value last_changed;
};

class Interpreter {
 public:
  Interpreter(const Template& parsed, Sandbox& sandbox, std::int64_t now_microseconds);

  std::string render(const std::vector<std::pair<std::string, Value>>& variables);

  Sandbox& sandbox() { return sandbox_; }
  const Template& parsed() const { return template_; }
  std::int64_t now_microseconds() const { return now_; }

  Value get_attribute(const Value& object, std::string_view name);
  Value get_item(const Value& object, const Value& key);
  Value call(const Value& callee, Arguments& arguments);
  Value apply_filter(std::string_view name, const Value& input, Arguments& arguments);
  bool apply_test(std::string_view name, const Value& input, Arguments& arguments);
  // loop.index and the like; kMissing for a name that a loop does not have.
  Value loop_attribute(LoopObject& loop, std::string_view name);
  Value macro_attribute(MacroObject& macro, std::string_view name);

 private:
  enum class Flow : std::uint8_t { kNormal, kBreak, kContinue };
  class Descent;  // counts nested calls of this class, which are calls on the stack
  class LocalScope;

  // Statements: jinja_statements.cc.
  Flow run_block(std::uint32_t block, Scope& scope);
  Flow run(const Node& node, Scope& scope);
  Flow run_if(const Node& node, Scope& scope);
  Flow run_for(const Node& node, Scope& scope);
  Flow run_loop(const ForLoop& loop, Value iterable, Scope& scope, std::int64_t depth0);
  Flow run_set_block(const Node& node, Scope& scope);
  Flow run_filter_block(const Node& node, Scope& scope);
  Flow run_with(const Node& node, Scope& scope);
  void run_call_block(const Node& node, Scope& scope);
  void print(const Value& value);
  void write(std::string_view text);
  // Runs the block into a string of its own.
  std::pair<Flow, std::string> capture(std::uint32_t block, Scope& scope);
  void assign(NodeId target, const Value& value, Scope& scope);
  Value call_macro(MacroObject& macro, Arguments& arguments);
  Value call_loop(LoopObject& loop, const Arguments& arguments);
  bool advance(LoopObject& loop, Value& item);
  bool pull(LoopObject& loop, Value& item);
  const Value& peek(LoopObject& loop);
  std::int64_t loop_length(LoopObject& loop);
  Value make_macro(std::uint32_t macro, Scope& scope);
  void define(Scope& scope, std::uint32_t variable, Value value);
  Value look_up(const Scope& scope, std::uint32_t variable);
  Scope& open_scope(Scope& parent);
  void close_scope(Scope& scope);

  // Expressions: jinja_expressions.cc.
  Value evaluate(NodeId id, Scope& scope);
  Value evaluate_leaf(const Node& node, Scope& scope);
  Value apply(const Node& node, const Value& input, Scope& scope);
  Value apply_filter_node(const Node& node, const Value& input, Scope& scope);
  Value evaluate_compare(const Node& node, Scope& scope);
  Value evaluate_concat(const Node& node, Scope& scope);
  std::vector<Value> evaluate_list(std::uint32_t start, std::uint32_t count, Scope& scope);
  Arguments evaluate_arguments(std::uint32_t site, Scope& scope);

  const Template& template_;
  Sandbox& sandbox_;
  const std::int64_t now_;
  int descent_ = 0;
  int call_depth_ = 0;
  std::vector<NodeId> spine_;  // pending operations of left-leaning chains
  std::string* out_ = nullptr;
  std::size_t written_ = 0;
  std::vector<Value> root_;  // by variable: what is set outside every inner scope
  Scope root_scope_;
  std::vector<std::unique_ptr<Scope>> scopes_;
  std::vector<Scope*> free_scopes_;
};

class Interpreter::Descent {
 public:
  // Each level takes well below 4 KiB of stack, also with AddressSanitizer.
  static constexpr int kMax = 1000;
  explicit Descent(Interpreter& interpreter) : interpreter_(interpreter) {
    if (++interpreter_.descent_ > kMax) {
      --interpreter_.descent_;
      interpreter_.sandbox_.fail("statements, expressions and calls nested deeper than {}", kMax);
    }
  }
  ~Descent() { --interpreter_.descent_; }
  Descent(const Descent&) = delete;
  Descent& operator=(const Descent&) = delete;

 private:
  Interpreter& interpreter_;
};

}  // namespace pianola::jinja
