// Hostile templates: each is refused by an Error that names a line, well below 200 ms of processor
// time, and neither the stack nor the memory grows with the source.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <time.h>

#include <thread>

#include "base/json_reader.h"
#include "pianola/error.h"
#include "sanitized.h"
#include "tokenizer/chat_template.h"

namespace pianola {
namespace {

#ifdef PIANOLA_TEST_SANITIZED
constexpr double kSlack = 20;
#else
constexpr double kSlack = 1;
#endif

double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

std::string repeated(std::string_view text, std::size_t count) {
  std::string out;
  for (std::size_t i = 0; i < count; ++i) out += text;
  return out;
}

ChatInput one_message() {
  ChatInput input;
  input.messages = {{{"role", "user"}, {"content", "Hi"}}};
  return input;
}

// The code of the Error, or nullopt and the text when there is none.
struct Result {
  std::optional<ErrorCode> code;
  std::string text;
  double ms = 0;
};

Result render(const std::string& source, const ChatInput& input = one_message(),
              const jinja::Limits& limits = {}) {
  Result result;
  const double start = cpu_ms();
  try {
    result.text = ChatTemplate::parse(source, limits).render(input);
  } catch (const Error& error) {
    result.code = error.code();
    result.text = error.what();
  }
  result.ms = cpu_ms() - start;
  return result;
}

struct Attack {
  const char* name;
  std::string source;
  ErrorCode code;
};

std::vector<Attack> attacks() {
  const auto argument = ErrorCode::kInvalidArgument;
  const auto model = ErrorCode::kInvalidModel;
  return {
      {"range(10**9)", "{% for i in range(10**9) %}{% endfor %}", argument},
      {"nested loops",
       "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
       argument},
      {"nested loops that print",
       "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", argument},
      {"a long output", "{% for a in range(99999) %}" + repeated("x", 1000) + "{% endfor %}",
       argument},
      {"string * 10**9", "{{ 'a' * 10**9 }}", argument},
      {"string * 2**62", "{{ 'ab' * 4611686018427387904 }}", argument},
      {"list * 10**9", "{{ [1] * 10**9 }}", argument},
      {"tuple * 10**12", "{{ ((1, 2) * 10**12)|length }}", argument},
      {"doubling a string",
       "{% set ns = namespace(s='ab') %}{% for i in range(90) %}{% set ns.s = ns.s + ns.s %}{% "
       "endfor %}",
       argument},
      {"doubling a list",
       "{% set ns = namespace(s=[1]) %}{% for i in range(90) %}{% set ns.s = ns.s + ns.s %}{% "
       "endfor %}",
       argument},
      {"doubling by replace",
       "{% set ns = namespace(s='a') %}{% for i in range(90) %}{% set ns.s = ns.s|replace('a', "
       "'aaaa') %}"
       "{% endfor %}",
       argument},
      {"doubling by join",
       "{% set ns = namespace(s='a' * 1000) %}{% for i in range(90) %}{% set ns.s = "
       "ns.s.join(ns.s) %}"
       "{% endfor %}",
       argument},
      {"a list inside itself, printed",
       "{% set ns = namespace(s=[]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% "
       "endfor %}"
       "{{ ns.s }}",
       argument},
      {"a list inside itself, compared",
       "{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
       "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
       argument},
      {"a list inside itself, as JSON",
       "{% set ns = namespace(s=[]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% "
       "endfor %}"
       "{{ ns.s|tojson }}",
       argument},
      {"a tuple inside itself, as a key",
       "{% set ns = namespace(s=()) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% "
       "endfor %}"
       "{{ {ns.s: 1} }}",
       argument},
      {"a deep list",
       "{% set ns = namespace(s=[]) %}{% for i in range(9999) %}{% set ns.s = [ns.s] %}{% endfor "
       "%}",
       argument},
      {"a namespace in itself", "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}", argument},
      {"a chain of namespaces",
       "{% set h = namespace(t=namespace()) %}{% set first = h.t %}{% for i in range(5000) %}"
       "{% set t = h.t %}{% set n = namespace() %}{% set t.next = n %}{% set h.t = n %}{% endfor %}"
       "{{ first }}",
       argument},
      {"a macro that calls itself", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", argument},
      {"macros that call each other",
       "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
       argument},
      {"a macro that calls itself twice",
       "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
       argument},
      {"a caller that calls itself",
       "{% macro m() %}{{ caller() }}{% endmacro %}{% macro r() %}{% call m() %}{{ r() }}{% "
       "endcall %}"
       "{% endmacro %}{{ r() }}",
       argument},
      {"a default that calls its macro", "{% macro m(a=m()) %}{% endmacro %}{{ m() }}", argument},
      {"a recursive loop", "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", argument},
      {"50,000 nested ifs", repeated("{% if true %}", 50000) + repeated("{% endif %}", 50000),
       model},
      {"50,000 nested fors", repeated("{% for a in [1] %}", 50000), model},
      {"100,000 parentheses", "{{ " + repeated("(", 100000) + "1" + repeated(")", 100000) + " }}",
       model},
      {"100,000 brackets", "{{ " + repeated("[", 100000) + repeated("]", 100000) + " }}", model},
      {"100,000 braces", "{{ " + repeated("{1:", 100000), model},
      {"100,000 subscripts", "{{ " + repeated("a[", 100000), model},
      {"100,000 calls", "{{ " + repeated("f(", 100000), model},
      {"100,000 nots", "{{ " + repeated("not ", 100000) + "1 }}", model},
      {"100,000 minuses", "{{ " + repeated("-", 100000) + "1 }}", model},
      {"100,000 conditions", "{{ " + repeated("1 if 1 else ", 100000) + "1 }}", model},
      {"nested targets", "{% set " + repeated("(", 100000) + "a = 1 %}", model},
      {"100,000 attributes", "{{ messages" + repeated(".a", 100000) + " }}", argument},
      {"100,000 calls in a row", "{{ messages" + repeated("()", 100000) + " }}", argument},
      {"a huge width", "{{ '%99999999d' % 1 }}", argument},
      {"a huge precision", "{{ '%.99999999f' % 1 }}", argument},
      {"a huge width of format", "{{ '{:>99999999}'.format(1) }}", argument},
      {"nested format", "{{ '{:{:{:{}}}}'.format(1, 2, 3, 4) }}", argument},
      {"a huge indent", "{{ [1]|tojson(indent=10**12) }}", argument},
      {"a huge center", "{{ 'a'.center(10**12) }}", argument},
      {"a huge center filter", "{{ 'a'|center(10**15) }}", argument},
      {"a huge batch", "{{ [1]|batch(10**12, 0)|list }}", argument},
      {"a huge slice", "{{ [1]|slice(10**12)|list }}", argument},
      {"a huge round", "{{ 1.5|round(10**6) }}{{ 10**9**9 }}", argument},
      {"a huge power", "{{ 2 ** 9999999999 }}", argument},
      {"a huge integer", "{{ " + repeated("9", 100000) + " }}", ErrorCode::kUnsupported},
      {"a huge clock format", "{{ strftime_now('%c' * 1000000) }}", argument},
      {"attribute tricks", "{{ ''.__class__.__mro__[1].__subclasses__() }}", argument},
      {"mutation", "{{ messages.append(1) }}", argument},
      {"invalid UTF-8", "\xff\xfe{{ 1 }}", model},
      {"too much source", repeated("x", (1 << 20) + 1), model},
  };
}

TEST(ChatTemplateLimits, AttacksAreRefusedInTime) {
  double slowest = 0;
  for (const Attack& attack : attacks()) {
    const Result result = render(attack.source);
    EXPECT_EQ(result.code, std::optional<ErrorCode>(attack.code))
        << attack.name << ": " << result.text.substr(0, 300);
    EXPECT_LT(result.ms, 200 * kSlack) << attack.name;
    slowest = std::max(slowest, result.ms);
    EXPECT_TRUE(result.text.find("line ") != std::string::npos ||
                attack.code == ErrorCode::kInvalidModel)
        << attack.name << ": " << result.text.substr(0, 300);
  }
  std::cout << "slowest: " << slowest << " ms of processor time\n";
}

// Left-leaning chains are walked without recursion: they render, whatever their length.
TEST(ChatTemplateLimits, LongChainsRender) {
  jinja::Limits limits;
  limits.cpu_ms = 0;  // a sanitizer may need more
  const auto run = [&](const std::string& source) { return render(source, one_message(), limits); };
  EXPECT_EQ(run("{{ 1" + repeated(" + 1", 100000) + " }}").text, "100001");
  EXPECT_EQ(run("{{ 1" + repeated(" and 1", 100000) + " }}").text, "1");
  EXPECT_EQ(run("{{ 0" + repeated(" or 0", 100000) + " }}").text, "0");
  EXPECT_EQ(run("{{ 'a'" + repeated("|upper", 50000) + " }}").text, "A");
  EXPECT_EQ(run("{{ 'a'" + repeated(" ~ 'b'", 100000) + " }}").text.size(), 100001U);
  EXPECT_EQ(run("{{ 1" + repeated(" <= 1", 100000) + " }}").text, "True");
  EXPECT_EQ(run("{{ 1" + repeated(" is eq 1", 100000) + " }}").text, "True");
  EXPECT_EQ(run("{% if false %}" + repeated("{% elif false %}", 50000) + "{% endif %}").text, "");
  EXPECT_EQ(run("{{ 'a'" + repeated("[0]", 50000) + " }}").text, "a");
  EXPECT_EQ(run(repeated("{# c #}", 100000)).text, "");
  EXPECT_EQ(run(repeated("{", 100000)).code, std::optional<ErrorCode>(ErrorCode::kInvalidModel));
}

// The deepest nests that are accepted fit in a small stack.
TEST(ChatTemplateLimits, TheDeepestNestFitsInOneMegabyteOfStack) {
  std::string source = "{% macro m(n) %}";
  source += repeated("{% if n %}", 40) + "{{ " + repeated("[not 1 or (1 and ", 15) + "m(n - 1)" +
            repeated(")][0]", 15) + " }}" + repeated("{% endif %}", 40);
  source += "{% endmacro %}{{ m(1000) }}";
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, static_cast<std::size_t>(kSlack > 1 ? 8 : 1) << 20);
  struct Task {
    std::string source;
    Result result;
  } task{source, {}};
  pthread_t thread{};
  const auto body = [](void* argument) -> void* {
    auto& t = *static_cast<Task*>(argument);
    t.result = render(t.source);
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, body, &task), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  EXPECT_EQ(task.result.code, std::optional<ErrorCode>(ErrorCode::kInvalidArgument));
  EXPECT_NE(task.result.text.find("nested deeper"), std::string::npos) << task.result.text;
}

TEST(ChatTemplateLimits, HugeVariablesAreRefused) {
  ChatInput input = one_message();
  boost::json::value nest = 1;
  for (int i = 0; i < 150; ++i) nest = boost::json::array{nest};
  input.variables["deep"] = nest;
  EXPECT_EQ(render("{{ deep }}", input).code,
            std::optional<ErrorCode>(ErrorCode::kInvalidArgument));
  input.variables.clear();
  boost::json::array numbers(5'000'000, 1);
  input.variables["wide"] = numbers;
  EXPECT_EQ(render("x", input).code, std::optional<ErrorCode>(ErrorCode::kInvalidArgument));
  input.variables.clear();
  input.variables["big"] = boost::json::value(std::uint64_t{1} << 63);
  EXPECT_EQ(render("x", input).code, std::optional<ErrorCode>(ErrorCode::kInvalidArgument));
}

TEST(ChatTemplateLimits, ErrorsNameLineAndConstruct) {
  EXPECT_EQ(render("a\n{{ 1 }}\n{% include 'x' %}").text,
            "chat template line 3: the statement 'include' is not supported by this interpreter");
  EXPECT_EQ(render("a\n\n{{ 'x'|wordwrap }}").text,
            "chat template line 3: the filter 'wordwrap' is not supported by this interpreter");
  EXPECT_EQ(
      render("\n{{ 'x'.encode() }}").text,
      "chat template line 2: the method 'encode' of a string is not supported by this interpreter");
  EXPECT_EQ(render("\n\n{% if %}").text,
            "chat template line 3: expected an expression, got end of statement block");
  EXPECT_EQ(
      render("{% for m in messages %}\n{{ raise_exception('No ' ~ m.role) }}{% endfor %}").text,
      "chat template line 2: the template refuses this conversation: No user");
  EXPECT_EQ(render("{{ a.b }}").text, "chat template line 1: 'a' is undefined");
}

TEST(ChatTemplateLimits, ThreadsShareATemplate) {
  const ChatTemplate chat = ChatTemplate::parse(
      "{% macro m(x) %}<{{ x|upper }}>{% endmacro %}{% for i in range(50) %}{{ m('a' ~ i) }}{% "
      "endfor %}"
      "{{ 'const' ~ missing }}{{ messages }}");
  const std::string expected = chat.render(one_message());
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) wrong[t] += chat.render(one_message()) == expected ? 0 : 1;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace pianola
