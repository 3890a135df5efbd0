// A parsed template: nodes in one flat vector that name each other by index, so that a template of
// any shape is freed without recursion. Made by parse_template(), walked by the Interpreter.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tokenizer/jinja_value.h"

namespace pianola::jinja {

using NodeId = std::uint32_t;
inline constexpr NodeId kNoNode = UINT32_MAX;

enum class NodeKind : std::uint8_t {
  // Expressions.
  kConst,         // a: constant
  kName,          // a: variable
  kTuple,         // list (a, count b)
  kList,          // list (a, count b)
  kDict,          // list (a, count b) of key, value, key, value, ...
  kGetAttr,       // a: object, b: constant (name)
  kGetItem,       // a: object, b: index
  kSlice,         // a: start, b: stop, c: step; kNoNode where absent
  kCall,          // a: callee, b: call
  kFilter,        // a: input (kNoNode: the body of a block), b: call, c: constant (name)
  kTest,          // a: input, b: call, c: constant (name)
  kBinary,        // op, a, b
  kAnd,           // a, b
  kOr,            // a, b
  kNot,           // a
  kNegative,      // a
  kPositive,      // a
  kConcat,        // list (a, count b)
  kCompare,       // a: first, list (b, count c) of operator, operand, operator, operand, ...
  kCondition,     // a: test, b: then, c: else or kNoNode
  kNamespaceRef,  // a: variable, b: constant (attribute); only a target
  // Statements.
  kData,         // a: constant
  kPrint,        // a: expression
  kIf,           // list (a, count b) of test, block, test, block, ...; c: else block or kNoNode
  kFor,          // a: loop
  kSet,          // a: target, b: expression
  kSetBlock,     // a: target, b: filter or kNoNode, c: block
  kMacro,        // a: macro
  kCallBlock,    // a: macro (the caller), b: call expression
  kFilterBlock,  // a: filter, c: block
  kWith,         // list (a, count b) of target, value, ...; c: block
  kScope,        // c: block
  kBreak,
  kContinue,
};

enum class BinaryOp : std::uint8_t { kAdd, kSub, kMul, kDiv, kFloorDiv, kMod, kPow };
enum class CompareOp : std::uint8_t { kEq, kNe, kLt, kLe, kGt, kGe, kIn, kNotIn };

struct Node {
  NodeKind kind = NodeKind::kConst;
  std::uint8_t op = 0;
  std::uint32_t line = 0;
  std::uint32_t a = kNoNode, b = kNoNode, c = kNoNode;
};

struct CallSite {
  std::vector<NodeId> positional;
  std::vector<std::pair<std::string, NodeId>> keywords;
  NodeId extra_positional = kNoNode;  // *args
  NodeId extra_keywords = kNoNode;    // **kwargs
};

struct ForLoop {
  NodeId target = kNoNode, items = kNoNode, test = kNoNode;
  std::uint32_t body = 0, otherwise = kNoNode;  // blocks
  bool recursive = false;
};

struct MacroDecl {
  std::string name;
  std::uint32_t variable = 0;
  std::vector<std::uint32_t> parameters;  // variables
  std::vector<NodeId> defaults;           // of the last parameters
  std::uint32_t body = 0;                 // block
  // Set when the body mentions them: only then are they accepted.
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;
};

struct Template {
  std::vector<Node> nodes;
  std::vector<std::uint32_t> lists;
  std::vector<std::vector<NodeId>> blocks;  // statements, in order
  std::vector<Value> constants;
  std::vector<std::string> variables;  // names
  std::vector<CallSite> calls;
  std::vector<ForLoop> loops;
  std::vector<MacroDecl> macros;
  std::uint32_t root = 0;  // block
  // Variables with a meaning of their own; always present.
  std::uint32_t loop = 0, caller = 0, varargs = 0, kwargs = 0;
};

}  // namespace pianola::jinja
