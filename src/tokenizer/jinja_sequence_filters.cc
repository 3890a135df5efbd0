#include <algorithm>
#include <charconv>

#include "tokenizer/jinja_interpreter.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

Value fold_case(Sandbox& sandbox, const Value& value) {
  if (!value.is_string()) return value;
  sandbox.scan(value.str().size());
  return sandbox.string(to_lower(value.str()));
}

// "a.b.0" as the keys to follow, one after the other; an int is one key, None is none.
std::vector<Value> attribute_path(Sandbox& sandbox, const Value& attribute) {
  std::vector<Value> path;
  if (attribute.is(Kind::kMissing) || attribute.is(Kind::kNone)) return path;
  if (!attribute.is_string()) return {attribute};
  for (const std::string_view part : split_at(attribute.str(), ".", -1)) {
    const bool digits = !part.empty() && std::all_of(part.begin(), part.end(),
                                                     [](char c) { return c >= '0' && c <= '9'; });
    std::int64_t number = 0;
    if (digits &&
        std::from_chars(part.data(), part.data() + part.size(), number).ec == std::errc()) {
      path.push_back(Value::integer(number));
    } else {
      path.push_back(sandbox.string(std::string(part)));
    }
  }
  return path;
}

// make_attrgetter: what an attribute of an item is, for map, sort, groupby, ...
class Getter {
 public:
  Getter(Interpreter& in, const Value& attribute, bool fold = false,
         Value otherwise = Value::none())
      : in_(in),
        path_(attribute_path(in.sandbox(), attribute)),
        fold_(fold),
        otherwise_(std::move(otherwise)) {}

  Value operator()(Value item) const {
    for (const Value& key : path_) {
      in_.sandbox().step();
      item = in_.get_item(item, key);
      if (item.is_undefined() && !otherwise_.is(Kind::kNone)) item = otherwise_;
    }
    return fold_ ? fold_case(in_.sandbox(), item) : item;
  }

 private:
  Interpreter& in_;
  const std::vector<Value> path_;
  const bool fold_;
  const Value otherwise_;
};

// sorted(items, key, reverse): stable, also in reverse.
void sort_by_key(Sandbox& sandbox, std::vector<std::pair<Value, Value>>& keyed, bool reverse) {
  merge_sort(keyed, [&](const auto& a, const auto& b) {
    return reverse ? less(sandbox, b.first, a.first) : less(sandbox, a.first, b.first);
  });
}

Value default_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "default", arguments, {"default_value", "boolean"});
  const bool absent = value.is_undefined() || (bound.truth(1) && !is_true(value));
  if (!absent) return value;
  return bound.has(0) ? bound[0] : in.sandbox().string("");
}

Value length_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "len", arguments, {});
  if (value.is(Kind::kLoop)) return in.loop_attribute(value.as<LoopObject>(), "length");
  return Value::integer(length_of(in.sandbox(), value));
}

Value first(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "first", arguments, {});
  Walk walk(in.sandbox(), value);
  Value item;
  if (walk.next(item)) return item;
  return in.sandbox().undefined("No first item, sequence was empty.");
}

Value last(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "last", arguments, {});
  if (value.is_string() || value.is_sequence() || value.is(Kind::kRange)) {
    if (auto item = find_item(sandbox, value, Value::integer(-1))) return *item;
  } else if (value.is(Kind::kDict) || value.is(Kind::kView)) {
    const std::vector<Value> items = to_vector(sandbox, value);
    if (!items.empty()) return items.back();
  } else if (value.is_undefined()) {
    // reversed() finds a length of 0 and __getitem__, and stops at once.
  } else {
    sandbox.fail("'{}' object is not reversible", type_name(value));
  }
  return sandbox.undefined("No last item, sequence was empty.");
}

Value list_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "list", arguments, {});
  return in.sandbox().list(to_vector(in.sandbox(), value));
}

Value join(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "join", arguments, {"d", "attribute"});
  const Getter getter(in, bound[1]);
  const std::string separator = bound.has(0) ? to_str(sandbox, bound[0]).str() : std::string();
  std::string out;
  bool first_item = true;
  Walk walk(sandbox, value);
  for (Value item; walk.next(item);) {
    if (!first_item) out += separator;
    first_item = false;
    const Value text = to_str(sandbox, getter(item));
    out += text.str();
    sandbox.copy(text.str().size() + separator.size());
    sandbox.reserve(out.size());
  }
  return sandbox.string(std::move(out));
}

Value reverse(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "reverse", arguments, {});
  if (value.is_string()) {
    return slice(sandbox, value, Value(), Value(), Value::integer(-1));
  }
  if (!is_iterable(value)) sandbox.fail("argument must be iterable");
  std::vector<Value> items = to_vector(sandbox, value);
  std::reverse(items.begin(), items.end());
  // A generator has no reversed(): Jinja makes a list of it.
  return value.is(Kind::kGenerator) ? sandbox.list(std::move(items))
                                    : sandbox.generator(std::move(items));
}

Value items_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "items", arguments, {});
  if (value.is_undefined()) return sandbox.generator({});
  if (!value.is(Kind::kDict)) sandbox.fail("Can only get item pairs from a mapping.");
  std::vector<Value> items;
  for (const auto& [key, item] : value.dict().entries) items.push_back(sandbox.tuple({key, item}));
  return sandbox.generator(std::move(items));
}

Value dictsort(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "dictsort", arguments, {"case_sensitive", "by", "reverse"});
  const std::string by = bound.has(1) ? bound.text(1) : "key";
  if (by != "key" && by != "value")
    sandbox.fail("You can only sort by either \"key\" or \"value\"");
  if (value.is_undefined()) fail_undefined(sandbox, value);
  if (!value.is(Kind::kDict)) sandbox.fail("dictsort needs a dict, not {}", type_name(value));
  std::vector<std::pair<Value, Value>> keyed;
  for (const auto& [key, item] : value.dict().entries) {
    const Value& part = by == "key" ? key : item;
    keyed.emplace_back(bound.truth(0) ? part : fold_case(sandbox, part),
                       sandbox.tuple({key, item}));
  }
  sort_by_key(sandbox, keyed, bound.truth(2));
  std::vector<Value> items;
  for (auto& entry : keyed) items.push_back(std::move(entry.second));
  return sandbox.list(std::move(items));
}

Value sort(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "sort", arguments, {"reverse", "case_sensitive", "attribute"});
  const bool fold = !bound.truth(1);
  std::vector<Getter> getters;
  if (bound.has(2) && bound[2].is_string()) {
    for (const std::string_view part : split_at(bound[2].str(), ",", -1)) {
      getters.emplace_back(in, sandbox.string(std::string(part)), fold);
    }
  } else {
    getters.emplace_back(in, bound[2], fold);
  }
  std::vector<std::pair<Value, Value>> keyed;
  Walk walk(sandbox, value);
  for (Value item; walk.next(item);) {
    std::vector<Value> key;
    for (const Getter& getter : getters) key.push_back(getter(item));
    keyed.emplace_back(sandbox.list(std::move(key)), item);
  }
  sort_by_key(sandbox, keyed, bound.truth(0));
  std::vector<Value> items;
  for (auto& entry : keyed) items.push_back(std::move(entry.second));
  return sandbox.list(std::move(items));
}

Value unique(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "unique", arguments, {"case_sensitive", "attribute"});
  const Getter getter(in, bound[1], !bound.truth(0));
  DictObject& seen = sandbox.dict();
  std::vector<Value> items;
  Walk walk(sandbox, value);
  for (Value item; walk.next(item);) {
    const std::size_t before = seen.entries.size();
    sandbox.set(seen, getter(item), Value::none());
    if (seen.entries.size() != before) items.push_back(item);
  }
  return sandbox.generator(std::move(items));
}

Value extreme(Interpreter& in, const Value& value, Arguments& arguments, bool largest) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, largest ? "max" : "min", arguments, {"case_sensitive", "attribute"});
  const Getter getter(in, bound[1], !bound.truth(0));
  Value best;
  Value best_key;
  Walk walk(sandbox, value);
  for (Value item; walk.next(item);) {
    const Value key = getter(item);
    const bool better = best.is(Kind::kMissing) ||
                        (largest ? less(sandbox, best_key, key) : less(sandbox, key, best_key));
    if (!better) continue;
    best = item;
    best_key = key;
  }
  if (!best.is(Kind::kMissing)) return best;
  return sandbox.undefined("No aggregated item, sequence was empty.");
}

Value min_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  return extreme(in, value, arguments, false);
}

Value max_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  return extreme(in, value, arguments, true);
}

Value sum(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "sum", arguments, {"attribute", "start"});
  const Getter getter(in, bound[0]);
  Value total = bound.value_or(1, Value::integer(0));
  if (total.is_string()) sandbox.fail("sum() can't sum strings [use ''.join(seq) instead]");
  Walk walk(sandbox, value);
  for (Value item; walk.next(item);) total = binary(sandbox, BinaryOp::kAdd, total, getter(item));
  return total;
}

Value map_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  std::vector<Value> items;
  if (!is_true(value)) return sandbox.generator({});
  if (arguments.positional.empty() && !arguments.keywords.empty()) {
    const Value attribute = arguments.take("attribute");
    if (attribute.is(Kind::kMissing)) sandbox.fail("map requires a filter argument");
    Value otherwise = arguments.take("default");
    if (!arguments.keywords.empty()) {
      sandbox.fail("Unexpected keyword argument '{}'", arguments.keywords[0].first);
    }
    if (otherwise.is(Kind::kMissing)) otherwise = Value::none();
    const Getter getter(in, attribute, false, otherwise);
    Walk walk(sandbox, value);
    for (Value item; walk.next(item);) items.push_back(getter(item));
    return sandbox.generator(std::move(items));
  }
  if (arguments.positional.empty()) sandbox.fail("map requires a filter argument");
  const Value name = arguments.positional[0];
  if (!name.is_string()) sandbox.fail("no filter named {} found", repr(sandbox, name));
  Arguments rest = arguments;
  rest.positional.erase(rest.positional.begin());
  Walk walk(sandbox, value);
  for (Value item; walk.next(item);) {
    Arguments copy = rest;
    items.push_back(in.apply_filter(name.str(), item, copy));
  }
  return sandbox.generator(std::move(items));
}

Value select_or_reject(Interpreter& in, const Value& value, const Arguments& arguments,
                       bool by_attribute, bool keep) {
  Sandbox& sandbox = in.sandbox();
  if (!is_true(value)) return sandbox.generator({});
  Arguments rest = arguments;
  Value attribute;
  if (by_attribute) {
    if (rest.positional.empty()) sandbox.fail("Missing parameter for attribute name");
    attribute = rest.positional[0];
    rest.positional.erase(rest.positional.begin());
  }
  Value test;
  if (!rest.positional.empty()) {
    test = rest.positional[0];
    if (!test.is_string()) sandbox.fail("no test named {} found", repr(sandbox, test));
    rest.positional.erase(rest.positional.begin());
  }
  const Getter getter(in, attribute);
  std::vector<Value> items;
  Walk walk(sandbox, value);
  for (Value item; walk.next(item);) {
    const Value subject = getter(item);
    Arguments copy = rest;
    const bool passes =
        test.is(Kind::kMissing) ? is_true(subject) : in.apply_test(test.str(), subject, copy);
    if (passes == keep) items.push_back(item);
  }
  return sandbox.generator(std::move(items));
}

Value select(Interpreter& in, const Value& value, Arguments& arguments) {
  return select_or_reject(in, value, arguments, false, true);
}

Value reject(Interpreter& in, const Value& value, Arguments& arguments) {
  return select_or_reject(in, value, arguments, false, false);
}

Value selectattr(Interpreter& in, const Value& value, Arguments& arguments) {
  return select_or_reject(in, value, arguments, true, true);
}

Value rejectattr(Interpreter& in, const Value& value, Arguments& arguments) {
  return select_or_reject(in, value, arguments, true, false);
}

Value batch(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "batch", arguments, {"linecount", "fill_with"}, 1);
  const std::int64_t count = bound.integer(0, 0);
  std::vector<Value> rows;
  std::vector<Value> row;
  Walk walk(sandbox, value);
  for (Value item; walk.next(item);) {
    if (static_cast<std::int64_t>(row.size()) == count) {
      rows.push_back(sandbox.list(std::move(row)));
      row.clear();
    }
    row.push_back(item);
  }
  if (!row.empty()) {
    const auto size = static_cast<std::int64_t>(row.size());
    if (bound.has(1) && !bound[1].is(Kind::kNone) && size < count) {
      sandbox.reserve_items(static_cast<std::size_t>(count));
      row.resize(static_cast<std::size_t>(count), bound[1]);
    }
    rows.push_back(sandbox.list(std::move(row)));
  }
  return sandbox.generator(std::move(rows));
}

Value slice_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "slice", arguments, {"slices", "fill_with"}, 1);
  const std::vector<Value> items = to_vector(sandbox, value);
  const std::int64_t slices = bound.integer(0, 0);
  if (slices == 0) sandbox.fail("integer division or modulo by zero");
  const auto size = static_cast<std::int64_t>(items.size());
  std::vector<Value> rows;
  if (slices < 0) return sandbox.generator({});
  const std::int64_t each = size / slices;
  const std::int64_t extra = size % slices;
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < slices; ++i) {
    const std::int64_t count = each + (i < extra ? 1 : 0);
    std::vector<Value> row(items.begin() + at, items.begin() + at + count);
    if (bound.has(1) && !bound[1].is(Kind::kNone) && i >= extra) row.push_back(bound[1]);
    at += count;
    rows.push_back(sandbox.list(std::move(row)));
  }
  return sandbox.generator(std::move(rows));
}

Value groupby(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "groupby", arguments, {"attribute", "default", "case_sensitive"}, 1);
  const Value otherwise = bound.value_or(1, Value::none());
  const bool fold = !bound.truth(2);
  const Getter key_of(in, bound[0], fold, otherwise);
  const Getter shown_of(in, bound[0], false, otherwise);
  std::vector<std::pair<Value, Value>> keyed;
  Walk walk(sandbox, value);
  for (Value item; walk.next(item);) keyed.emplace_back(key_of(item), item);
  sort_by_key(sandbox, keyed, false);
  std::vector<Value> groups;
  for (std::size_t i = 0; i < keyed.size();) {
    std::vector<Value> members;
    const std::size_t start = i;
    for (; i < keyed.size() && equal(sandbox, keyed[i].first, keyed[start].first); ++i) {
      members.push_back(keyed[i].second);
    }
    if (members.empty()) members.push_back(keyed[i++].second);  // a key unequal to itself: NaN
    const Value group = sandbox.tuple({shown_of(members[0]), sandbox.list(std::move(members))});
    group.as<ListObject>().group = true;
    groups.push_back(group);
  }
  return sandbox.list(std::move(groups));
}

Value attr(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "attr", arguments, {"name"}, 1);
  const std::string& name = bound.text(0);
  if (auto found = find_attribute(in, value, name)) return *found;
  return missing_attribute(sandbox, value, bound[0]);
}

}  // namespace

const std::vector<NamedFilter>& sequence_filters() {
  static const std::vector<NamedFilter> filters = {{"default", default_filter},
                                                   {"d", default_filter},
                                                   {"length", length_filter},
                                                   {"count", length_filter},
                                                   {"first", first},
                                                   {"last", last},
                                                   {"list", list_filter},
                                                   {"join", join},
                                                   {"reverse", reverse},
                                                   {"items", items_filter},
                                                   {"dictsort", dictsort},
                                                   {"sort", sort},
                                                   {"unique", unique},
                                                   {"min", min_filter},
                                                   {"max", max_filter},
                                                   {"sum", sum},
                                                   {"map", map_filter},
                                                   {"select", select},
                                                   {"reject", reject},
                                                   {"selectattr", selectattr},
                                                   {"rejectattr", rejectattr},
                                                   {"batch", batch},
                                                   {"slice", slice_filter},
                                                   {"groupby", groupby},
                                                   {"attr", attr}};
  return filters;
}

}  // namespace pianola::jinja
