#include <algorithm>

#include "tokenizer/jinja_interpreter.h"

namespace pianola::jinja {

// A scope that lives as long as a C++ block.
class Interpreter::LocalScope {
 public:
  LocalScope(Interpreter& interpreter, Scope& parent)
      : interpreter_(interpreter), scope_(interpreter.open_scope(parent)) {}
  ~LocalScope() { interpreter_.close_scope(scope_); }
  LocalScope(const LocalScope&) = delete;
  LocalScope& operator=(const LocalScope&) = delete;
  Scope& operator*() { return scope_; }

 private:
  Interpreter& interpreter_;
  Scope& scope_;
};

Interpreter::Interpreter(const Template& parsed, Sandbox& sandbox, std::int64_t now_microseconds)
    : template_(parsed), sandbox_(sandbox), now_(now_microseconds) {
  root_.resize(parsed.variables.size());
}

std::string Interpreter::render(const std::vector<std::pair<std::string, Value>>& variables) {
  for (std::size_t i = 0; i < template_.variables.size(); ++i) {
    const std::string& name = template_.variables[i];
    const auto it = std::find_if(variables.begin(), variables.end(),
                                 [&name](const auto& v) { return v.first == name; });
    if (it != variables.end()) {
      root_[i] = it->second;
    } else if (is_global(name)) {
      root_[i] = sandbox_.function(name);
    }
  }
  std::string out;
  out_ = &out;
  run_block(template_.root, root_scope_);
  return out;
}

Scope& Interpreter::open_scope(Scope& parent) {
  if (free_scopes_.empty()) {
    sandbox_.charge(sizeof(Scope) + sizeof(void*) * 2);
    scopes_.push_back(std::make_unique<Scope>());
    free_scopes_.push_back(scopes_.back().get());
  }
  Scope& scope = *free_scopes_.back();
  free_scopes_.pop_back();
  scope.parent = &parent;
  return scope;
}

void Interpreter::close_scope(Scope& scope) {
  if (scope.captured) return;
  scope.variables.clear();
  free_scopes_.push_back(&scope);
}

void Interpreter::define(Scope& scope, std::uint32_t variable, Value value) {
  if (&scope == &root_scope_) {
    root_[variable] = std::move(value);
    return;
  }
  sandbox_.step(1 + static_cast<std::int64_t>(scope.variables.size() / 16));
  for (auto& [id, old] : scope.variables) {
    if (id == variable) {
      old = std::move(value);
      return;
    }
  }
  scope.variables.emplace_back(variable, std::move(value));
}

Value Interpreter::look_up(const Scope& scope, std::uint32_t variable) {
  for (const Scope* s = &scope; s != &root_scope_; s = s->parent) {
    sandbox_.step(static_cast<std::int64_t>(s->variables.size() / 16));
    for (const auto& [id, value] : s->variables) {
      if (id == variable) return value;
    }
  }
  if (!root_[variable].is(Kind::kMissing)) return root_[variable];
  return sandbox_.undefined(fmt::format("'{}' is undefined", template_.variables[variable]));
}

void Interpreter::write(std::string_view text) {
  sandbox_.copy(text.size());
  // Every byte counts, also those that a macro or a block collects.
  const std::size_t limit = sandbox_.limits().output_bytes;
  if (text.size() > limit || out_->size() > limit - text.size()) {
    sandbox_.fail("output of more than {} bytes; the template or the request is too large", limit);
  }
  *out_ += text;
}

void Interpreter::print(const Value& value) {
  if (value.is_undefined()) return;
  write(to_str(sandbox_, value).str());
}

std::pair<Interpreter::Flow, std::string> Interpreter::capture(std::uint32_t block, Scope& scope) {
  std::string text;
  std::string* const outer = out_;
  out_ = &text;
  const Flow flow = run_block(block, scope);
  out_ = outer;
  return {flow, std::move(text)};
}

Interpreter::Flow Interpreter::run_block(std::uint32_t block, Scope& scope) {
  const Descent descent(*this);
  for (const NodeId id : template_.blocks[block]) {
    const Flow flow = run(template_.nodes[id], scope);
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run(const Node& node, Scope& scope) {
  sandbox_.step();
  sandbox_.line = node.line;
  switch (node.kind) {
    case NodeKind::kData:
      write(template_.constants[node.a].str());
      return Flow::kNormal;
    case NodeKind::kPrint:
      print(evaluate(node.a, scope));
      return Flow::kNormal;
    case NodeKind::kIf:
      return run_if(node, scope);
    case NodeKind::kFor:
      return run_for(node, scope);
    case NodeKind::kSet:
      assign(node.a, evaluate(node.b, scope), scope);
      return Flow::kNormal;
    case NodeKind::kSetBlock:
      return run_set_block(node, scope);
    case NodeKind::kMacro:
      define(scope, template_.macros[node.a].variable, make_macro(node.a, scope));
      return Flow::kNormal;
    case NodeKind::kCallBlock:
      run_call_block(node, scope);
      return Flow::kNormal;
    case NodeKind::kFilterBlock:
      return run_filter_block(node, scope);
    case NodeKind::kWith:
      return run_with(node, scope);
    case NodeKind::kScope: {
      LocalScope local(*this, scope);
      return run_block(node.c, *local);
    }
    case NodeKind::kBreak:
      return Flow::kBreak;
    case NodeKind::kContinue:
      return Flow::kContinue;
    default:
      sandbox_.unsupported("this statement");
  }
}

Interpreter::Flow Interpreter::run_if(const Node& node, Scope& scope) {
  for (std::uint32_t i = 0; i < node.b; i += 2) {
    if (is_true(evaluate(template_.lists[node.a + i], scope))) {
      return run_block(template_.lists[node.a + i + 1], scope);
    }
  }
  return node.c == kNoNode ? Flow::kNormal : run_block(node.c, scope);
}

Interpreter::Flow Interpreter::run_for(const Node& node, Scope& scope) {
  const ForLoop& loop = template_.loops[node.a];
  Value iterable = evaluate(loop.items, scope);
  if (!loop.recursive) return run_loop(loop, std::move(iterable), scope, 0);
  // A recursive loop is a function that Jinja calls and prints.
  std::string text;
  std::string* const outer = out_;
  out_ = &text;
  run_loop(loop, std::move(iterable), scope, 0);
  out_ = outer;
  write(text);
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_loop(const ForLoop& loop, Value iterable, Scope& scope,
                                        std::int64_t depth0) {
  auto& state = sandbox_.make<LoopObject>();
  state.loop = &loop;
  state.scope = &scope;
  state.depth0 = depth0;
  state.iterable = iterable;
  state.walk.emplace(sandbox_, std::move(iterable));
  // The loop object may be kept by a namespace and used after the block that holds `scope` ended.
  if (loop.recursive || loop.test != kNoNode) {
    for (Scope* s = &scope; s != nullptr && !s->captured; s = s->parent) s->captured = true;
  }
  const Value self = Value::object(&state);
  bool finished = false;
  for (Value item; advance(state, item);) {
    LocalScope local(*this, scope);
    define(*local, template_.loop, self);
    assign(loop.target, item, *local);
    const Flow flow = run_block(loop.body, *local);
    if (flow == Flow::kBreak) break;
    finished = finished || flow == Flow::kNormal;
  }
  // As Jinja compiles it, {% else %} runs when no item reached the end of the body: not only when
  // there was none, but also when each met a break or a continue.
  if (!finished && loop.otherwise != kNoNode) {
    LocalScope local(*this, scope);
    return run_block(loop.otherwise, *local);
  }
  return Flow::kNormal;
}

// The next item of the iterable that passes the loop's `if`, which Jinja tests as late as this.
bool Interpreter::pull(LoopObject& loop, Value& item) {
  if (loop.is_drained) {
    if (loop.drained_at >= loop.drained.size()) return false;
    item = loop.drained[loop.drained_at++];
    return true;
  }
  while (loop.walk->next(item)) {
    if (loop.loop->test == kNoNode) return true;
    LocalScope local(*this, *loop.scope);
    assign(loop.loop->target, item, *local);
    if (is_true(evaluate(loop.loop->test, *local))) return true;
  }
  return false;
}

const Value& Interpreter::peek(LoopObject& loop) {
  if (loop.after.is(Kind::kMissing)) {
    Value item;
    if (pull(loop, item)) loop.after = std::move(item);
  }
  return loop.after;
}

bool Interpreter::advance(LoopObject& loop, Value& item) {
  if (!loop.after.is(Kind::kMissing)) {
    item = std::move(loop.after);
    loop.after = Value();
  } else if (!pull(loop, item)) {
    return false;
  }
  ++loop.index0;
  loop.before = std::move(loop.current);
  loop.current = item;
  return true;
}

std::int64_t Interpreter::loop_length(LoopObject& loop) {
  if (loop.length >= 0) return loop.length;
  const auto known = loop.loop->test == kNoNode ? find_length(loop.iterable) : std::nullopt;
  if (known) {
    loop.length = *known;
    return loop.length;
  }
  std::vector<Value> rest;
  for (Value item; pull(loop, item);) rest.push_back(item);
  sandbox_.charge(rest.size() * sizeof(Value));
  loop.drained = std::move(rest);
  loop.drained_at = 0;
  loop.is_drained = true;
  loop.length = static_cast<std::int64_t>(loop.drained.size()) + loop.index0 + 1 +
                (loop.after.is(Kind::kMissing) ? 0 : 1);
  return loop.length;
}

Value Interpreter::loop_attribute(LoopObject& loop, std::string_view name) {
  if (name == "index") return Value::integer(loop.index0 + 1);
  if (name == "index0") return Value::integer(loop.index0);
  if (name == "first") return Value::boolean(loop.index0 == 0);
  if (name == "last") return Value::boolean(peek(loop).is(Kind::kMissing));
  if (name == "length") return Value::integer(loop_length(loop));
  if (name == "revindex") return Value::integer(loop_length(loop) - loop.index0);
  if (name == "revindex0") return Value::integer(loop_length(loop) - loop.index0 - 1);
  if (name == "depth") return Value::integer(loop.depth0 + 1);
  if (name == "depth0") return Value::integer(loop.depth0);
  if (name == "previtem") {
    return loop.index0 == 0 ? sandbox_.undefined("there is no previous item") : loop.before;
  }
  if (name == "nextitem") {
    const Value& next = peek(loop);
    return next.is(Kind::kMissing) ? sandbox_.undefined("there is no next item") : next;
  }
  if (name == "cycle" || name == "changed") {
    return sandbox_.function(name == "cycle" ? "cycle" : "changed", Value::object(&loop));
  }
  return Value();
}

Value Interpreter::call_loop(LoopObject& loop, const Arguments& arguments) {
  const Bound bound(sandbox_, "loop", arguments, {"iterable"}, 1);
  if (!loop.loop->recursive) {
    sandbox_.fail("the loop must have the 'recursive' marker to be called recursively");
  }
  if (++call_depth_ > sandbox_.limits().call_depth) {
    sandbox_.fail("calls nested deeper than {}", sandbox_.limits().call_depth);
  }
  std::string text;
  std::string* const outer = out_;
  out_ = &text;
  run_loop(*loop.loop, bound[0], *loop.scope, loop.depth0 + 1);
  out_ = outer;
  --call_depth_;
  return sandbox_.string(std::move(text));
}

Interpreter::Flow Interpreter::run_set_block(const Node& node, Scope& scope) {
  LocalScope local(*this, scope);
  auto [flow, text] = capture(node.c, *local);
  if (flow != Flow::kNormal) return flow;
  Value value = sandbox_.string(std::move(text));
  // Filters of {% set x | a | b %} lie on the spine above the one without input.
  std::vector<NodeId> filters;
  for (NodeId id = node.b; id != kNoNode; id = template_.nodes[id].a) filters.push_back(id);
  for (; !filters.empty(); filters.pop_back()) {
    value = apply_filter_node(template_.nodes[filters.back()], value, *local);
  }
  assign(node.a, value, scope);
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_filter_block(const Node& node, Scope& scope) {
  LocalScope local(*this, scope);
  auto [flow, text] = capture(node.c, *local);
  if (flow != Flow::kNormal) return flow;
  Value value = sandbox_.string(std::move(text));
  std::vector<NodeId> filters;
  for (NodeId id = node.a; id != kNoNode; id = template_.nodes[id].a) filters.push_back(id);
  for (; !filters.empty(); filters.pop_back()) {
    value = apply_filter_node(template_.nodes[filters.back()], value, *local);
  }
  print(value);
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_with(const Node& node, Scope& scope) {
  LocalScope local(*this, scope);
  for (std::uint32_t i = 0; i < node.b; i += 2) {
    // Values see the outer scope, not the names before them.
    const Value value = evaluate(template_.lists[node.a + i + 1], scope);
    assign(template_.lists[node.a + i], value, *local);
  }
  return run_block(node.c, *local);
}

void Interpreter::run_call_block(const Node& node, Scope& scope) {
  const Node& call_node = template_.nodes[node.b];
  const Value callee = evaluate(call_node.a, scope);
  Arguments arguments = evaluate_arguments(call_node.b, scope);
  arguments.keywords.emplace_back("caller", make_macro(node.a, scope));
  sandbox_.line = node.line;
  print(call(callee, arguments));
}

Value Interpreter::make_macro(std::uint32_t macro, Scope& scope) {
  auto& object = sandbox_.make<MacroObject>();
  object.decl = &template_.macros[macro];
  object.scope = &scope;
  for (Scope* s = &scope; s != nullptr && !s->captured; s = s->parent) s->captured = true;
  return Value::object(&object);
}

Value Interpreter::macro_attribute(MacroObject& macro, std::string_view name) {
  if (name == "name") return sandbox_.string(macro.decl->name);
  if (name == "caller") return Value::boolean(macro.decl->uses_caller);
  if (name == "catch_kwargs") return Value::boolean(macro.decl->uses_kwargs);
  if (name == "catch_varargs") return Value::boolean(macro.decl->uses_varargs);
  if (name == "arguments") {
    std::vector<Value> names;
    for (const std::uint32_t v : macro.decl->parameters) {
      names.push_back(sandbox_.string(template_.variables[v]));
    }
    return sandbox_.tuple(std::move(names));
  }
  return Value();
}

Value Interpreter::call_macro(MacroObject& macro, Arguments& arguments) {
  const MacroDecl& decl = *macro.decl;
  if (++call_depth_ > sandbox_.limits().call_depth) {
    sandbox_.fail("macro '{}': calls nested deeper than {}", decl.name,
                  sandbox_.limits().call_depth);
  }
  LocalScope local(*this, *macro.scope);
  const std::size_t count = decl.parameters.size();
  const std::size_t given = std::min(count, arguments.positional.size());
  std::vector<Value> values(arguments.positional.begin(),
                            arguments.positional.begin() + static_cast<std::ptrdiff_t>(given));
  for (std::size_t i = given; i < count; ++i) {
    values.push_back(arguments.take(template_.variables[decl.parameters[i]]));
  }
  if (decl.uses_caller) {
    Value caller = arguments.take("caller");
    if (caller.is(Kind::kMissing) || caller.is(Kind::kNone)) {
      caller = sandbox_.undefined("No caller defined");
    }
    define(*local, template_.caller, std::move(caller));
  }
  if (decl.uses_kwargs) {
    DictObject& dict = sandbox_.dict();
    for (auto& [name, value] : arguments.keywords) sandbox_.set(dict, sandbox_.string(name), value);
    define(*local, template_.kwargs, Value::object(&dict));
  } else if (!arguments.keywords.empty()) {
    sandbox_.fail("macro '{}' takes no keyword argument '{}'", decl.name,
                  arguments.keywords[0].first);
  }
  if (decl.uses_varargs) {
    std::vector<Value> rest(arguments.positional.begin() + static_cast<std::ptrdiff_t>(given),
                            arguments.positional.end());
    define(*local, template_.varargs, sandbox_.tuple(std::move(rest)));
  } else if (arguments.positional.size() > count) {
    sandbox_.fail("macro '{}' takes not more than {} argument(s)", decl.name, count);
  }
  const std::size_t first_default = count - decl.defaults.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (values[i].is(Kind::kMissing)) {
      values[i] = i >= first_default
                      ? evaluate(decl.defaults[i - first_default], *local)
                      : sandbox_.undefined(fmt::format("parameter '{}' was not provided",
                                                       template_.variables[decl.parameters[i]]));
    }
    define(*local, decl.parameters[i], values[i]);
  }
  auto [flow, text] = capture(decl.body, *local);
  --call_depth_;
  return sandbox_.string(std::move(text));
}

void Interpreter::assign(NodeId target, const Value& value, Scope& scope) {
  const Node& node = template_.nodes[target];
  if (node.kind == NodeKind::kName) return define(scope, node.a, value);
  if (node.kind == NodeKind::kNamespaceRef) {
    sandbox_.line = node.line;
    const Value object = look_up(scope, node.a);
    if (!object.is(Kind::kNamespace)) {
      sandbox_.fail("cannot assign attribute on non-namespace object");
    }
    auto& space = object.as<NamespaceObject>();
    sandbox_.set(*space.attributes, template_.constants[node.b], value);
    sandbox_.nest(space, Value::object(space.attributes));
    return;
  }
  std::vector<Value> items;
  Walk walk(sandbox_, value);
  for (Value item; items.size() <= node.b && walk.next(item);) items.push_back(item);
  if (items.size() != node.b) {
    if (items.size() > node.b) {
      sandbox_.fail("too many values to unpack (expected {})", node.b);
    }
    sandbox_.fail("not enough values to unpack (expected {}, got {})", node.b, items.size());
  }
  for (std::uint32_t i = 0; i < node.b; ++i) {
    assign(template_.lists[node.a + i], items[i], scope);
  }
}

}  // namespace pianola::jinja
