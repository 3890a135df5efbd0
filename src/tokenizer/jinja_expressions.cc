#include "tokenizer/jinja_interpreter.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

// Nodes whose operand `a` is evaluated first: chains of them lean to the left and may be as long as
// the source, so they are walked with a stack of our own.
bool is_spine(const Node& node) {
  switch (node.kind) {
    case NodeKind::kGetAttr:
    case NodeKind::kGetItem:
    case NodeKind::kCall:
    case NodeKind::kTest:
    case NodeKind::kBinary:
    case NodeKind::kAnd:
    case NodeKind::kOr:
      return true;
    case NodeKind::kFilter:
      return node.a != kNoNode;
    default:
      return false;
  }
}

}  // namespace

Value Interpreter::evaluate(NodeId id, Scope& scope) {
  const Descent descent(*this);
  const std::size_t base = spine_.size();
  while (is_spine(template_.nodes[id])) {
    spine_.push_back(id);
    id = template_.nodes[id].a;
  }
  Value value = evaluate_leaf(template_.nodes[id], scope);
  while (spine_.size() > base) {
    const Node& node = template_.nodes[spine_.back()];
    spine_.pop_back();
    value = apply(node, value, scope);
  }
  return value;
}

Value Interpreter::evaluate_leaf(const Node& node, Scope& scope) {
  sandbox_.step();
  sandbox_.line = node.line;
  switch (node.kind) {
    case NodeKind::kConst:
      return template_.constants[node.a];
    case NodeKind::kName:
      return look_up(scope, node.a);
    case NodeKind::kTuple:
      return sandbox_.tuple(evaluate_list(node.a, node.b, scope));
    case NodeKind::kList:
      return sandbox_.list(evaluate_list(node.a, node.b, scope));
    case NodeKind::kDict: {
      DictObject& dict = sandbox_.dict();
      for (std::uint32_t i = 0; i < node.b; i += 2) {
        Value key = evaluate(template_.lists[node.a + i], scope);
        Value value = evaluate(template_.lists[node.a + i + 1], scope);
        sandbox_.set(dict, std::move(key), std::move(value));
      }
      return Value::object(&dict);
    }
    case NodeKind::kNot:
      return Value::boolean(!is_true(evaluate(node.a, scope)));
    case NodeKind::kNegative:
      return negative(sandbox_, evaluate(node.a, scope));
    case NodeKind::kPositive:
      return positive(sandbox_, evaluate(node.a, scope));
    case NodeKind::kConcat:
      return evaluate_concat(node, scope);
    case NodeKind::kCompare:
      return evaluate_compare(node, scope);
    case NodeKind::kCondition:
      if (is_true(evaluate(node.a, scope))) return evaluate(node.b, scope);
      if (node.c != kNoNode) return evaluate(node.c, scope);
      return sandbox_.undefined(fmt::format(
          "the inline if-expression on line {} evaluated to false and no else section was defined.",
          node.line));
    case NodeKind::kSlice:
      sandbox_.unsupported("a slice among several subscripts");
    default:
      break;
  }
  sandbox_.unsupported("this expression");
}

Value Interpreter::apply(const Node& node, const Value& input, Scope& scope) {
  sandbox_.step();
  sandbox_.line = node.line;
  switch (node.kind) {
    case NodeKind::kGetAttr:
      return get_attribute(input, template_.constants[node.b].str());
    case NodeKind::kGetItem: {
      const Node& index = template_.nodes[node.b];
      if (index.kind != NodeKind::kSlice) return get_item(input, evaluate(node.b, scope));
      const auto bound = [&](NodeId id) { return id == kNoNode ? Value() : evaluate(id, scope); };
      const Value start = bound(index.a);
      const Value stop = bound(index.b);
      const Value step = bound(index.c);
      return slice(sandbox_, input, start, stop, step);
    }
    case NodeKind::kCall: {
      Arguments arguments = evaluate_arguments(node.b, scope);
      sandbox_.line = node.line;
      return call(input, arguments);
    }
    case NodeKind::kFilter:
      return apply_filter_node(node, input, scope);
    case NodeKind::kTest: {
      Arguments arguments = evaluate_arguments(node.b, scope);
      sandbox_.line = node.line;
      return Value::boolean(apply_test(template_.constants[node.c].str(), input, arguments));
    }
    case NodeKind::kBinary: {
      const Value right = evaluate(node.b, scope);
      sandbox_.line = node.line;
      return binary(sandbox_, static_cast<BinaryOp>(node.op), input, right);
    }
    case NodeKind::kAnd:
      return is_true(input) ? evaluate(node.b, scope) : input;
    default:  // kOr
      return is_true(input) ? input : evaluate(node.b, scope);
  }
}

Value Interpreter::apply_filter_node(const Node& node, const Value& input, Scope& scope) {
  Arguments arguments = evaluate_arguments(node.b, scope);
  sandbox_.line = node.line;
  return apply_filter(template_.constants[node.c].str(), input, arguments);
}

Value Interpreter::apply_filter(std::string_view name, const Value& input, Arguments& arguments) {
  const Filter filter = find_filter(name);
  if (filter == nullptr) sandbox_.fail("no filter named '{}' found", name);
  return filter(*this, input, arguments);
}

bool Interpreter::apply_test(std::string_view name, const Value& input, Arguments& arguments) {
  const Test test = find_test(name);
  if (test == nullptr) sandbox_.fail("no test named '{}' found", name);
  return test(*this, input, arguments);
}

Value Interpreter::evaluate_compare(const Node& node, Scope& scope) {
  Value left = evaluate(node.a, scope);
  for (std::uint32_t i = 0; i < node.c; i += 2) {
    Value right = evaluate(template_.lists[node.b + i + 1], scope);
    sandbox_.line = node.line;
    const auto op = static_cast<CompareOp>(template_.lists[node.b + i]);
    if (!compare(sandbox_, op, left, right)) return Value::boolean(false);
    left = std::move(right);
  }
  return Value::boolean(true);
}

Value Interpreter::evaluate_concat(const Node& node, Scope& scope) {
  std::string out;
  for (std::uint32_t i = 0; i < node.b; ++i) {
    const Value part = to_str(sandbox_, evaluate(template_.lists[node.a + i], scope));
    sandbox_.reserve(out.size() + part.str().size());
    out += part.str();
  }
  sandbox_.line = node.line;
  return sandbox_.string(std::move(out));
}

std::vector<Value> Interpreter::evaluate_list(std::uint32_t start, std::uint32_t count,
                                              Scope& scope) {
  std::vector<Value> items;
  items.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    items.push_back(evaluate(template_.lists[start + i], scope));
  }
  return items;
}

Arguments Interpreter::evaluate_arguments(std::uint32_t site, Scope& scope) {
  Arguments arguments;
  if (site == kNoNode) return arguments;
  const CallSite& call = template_.calls[site];
  arguments.positional.reserve(call.positional.size());
  for (const NodeId id : call.positional) arguments.positional.push_back(evaluate(id, scope));
  for (const auto& [name, id] : call.keywords) {
    arguments.keywords.emplace_back(name, evaluate(id, scope));
  }
  if (call.extra_positional != kNoNode) {
    const Value extra = evaluate(call.extra_positional, scope);
    Walk walk(sandbox_, extra);
    for (Value item; walk.next(item);) arguments.positional.push_back(item);
  }
  if (call.extra_keywords != kNoNode) {
    const Value extra = evaluate(call.extra_keywords, scope);
    if (!extra.is(Kind::kDict)) {
      sandbox_.fail("argument after ** must be a mapping, not {}", type_name(extra));
    }
    for (const auto& [key, value] : extra.dict().entries) {
      if (!key.is_string()) sandbox_.fail("keywords must be strings");
      for (const auto& [name, unused] : arguments.keywords) {
        sandbox_.step();
        if (name == key.str()) sandbox_.fail("got multiple values for keyword argument '{}'", name);
      }
      arguments.keywords.emplace_back(key.str(), value);
    }
  }
  return arguments;
}

Value Interpreter::get_attribute(const Value& object, std::string_view name) {
  if (object.is_undefined()) fail_undefined(sandbox_, object);
  if (auto found = find_attribute(*this, object, name)) return *found;
  if (object.is(Kind::kDict)) {
    if (const Value* found = object.dict().find(name)) return *found;
  }
  return missing_attribute(sandbox_, object, sandbox_.string(std::string(name)));
}

Value Interpreter::get_item(const Value& object, const Value& key) {
  if (object.is_undefined()) fail_undefined(sandbox_, object);
  if (auto found = find_item(sandbox_, object, key)) return *found;
  if (key.is_string()) {
    if (auto found = find_attribute(*this, object, key.str())) return *found;
  }
  return missing_attribute(sandbox_, object, key);
}

Value Interpreter::call(const Value& callee, Arguments& arguments) {
  switch (callee.kind()) {
    case Kind::kMacro:
      return call_macro(callee.as<MacroObject>(), arguments);
    case Kind::kLoop:
      return call_loop(callee.as<LoopObject>(), arguments);
    case Kind::kFunction: {
      const auto& function = callee.as<FunctionObject>();
      sandbox_.step();
      if (function.self.is(Kind::kMissing)) return call_global(*this, function.name, arguments);
      return call_method(*this, function.self, function.name, arguments);
    }
    case Kind::kJoiner: {
      const Bound bound(sandbox_, "joiner", arguments, {});
      auto& joiner = callee.as<JoinerObject>();
      if (joiner.used) return joiner.separator;
      joiner.used = true;
      return sandbox_.string("");
    }
    case Kind::kUndefined:
      fail_undefined(sandbox_, callee);
    default:
      sandbox_.fail("'{}' object is not callable", type_name(callee));
  }
}

}  // namespace pianola::jinja
