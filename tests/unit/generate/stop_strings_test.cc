#include "generate/stop_strings.h"

#include <gtest/gtest.h>

#include "pianola/error.h"

namespace pianola {
namespace {

// Pushes `text` in pieces of `size` bytes and returns all that came out.
std::string feed(StopStrings& stop, const std::string& text, std::size_t size) {
  std::string out;
  for (std::size_t at = 0; at < text.size(); at += size) out += stop.push(text.substr(at, size));
  if (!stop.found()) out += stop.flush();
  return out;
}

TEST(StopStrings, TheCutDoesNotMatter) {
  struct Case {
    std::vector<std::string> strings;
    std::string text;
    std::string want;
    bool found;
  };
  const std::vector<Case> cases = {
      {{"\nUser:"}, "Hello\nUser: hi", "Hello", true},
      {{"\nUser:"}, "Hello\nUsers", "Hello\nUsers", false},
      {{"aab"}, "aaaab!", "aa", true},
      {{"abc", "b"}, "xabcx", "xa", true},
      {{"ab", "abc"}, "xabc", "x", true},
      {{"\xC3\xA9"}, "caf\xC3\xA9 noir", "caf", true},
      {{"stop"}, "sto", "sto", false},
      {{"stop"}, "stop", "", true},
      {{}, "anything", "anything", false},
  };
  for (const Case& c : cases) {
    for (std::size_t size = 1; size <= c.text.size(); ++size) {
      StopStrings stop(c.strings);
      EXPECT_EQ(feed(stop, c.text, size), c.want) << c.text << " in pieces of " << size;
      EXPECT_EQ(stop.found(), c.found);
    }
  }
}

TEST(StopStrings, NothingComesAfterTheEnd) {
  StopStrings stop({"x"});
  EXPECT_EQ(stop.push("axb"), "a");
  EXPECT_EQ(stop.push("more"), "");
  EXPECT_EQ(stop.flush(), "");
}

TEST(StopStrings, ListsAreBounded) {
  EXPECT_NO_THROW(StopStrings(std::vector<std::string>(16, std::string(256, 'x'))));
  EXPECT_THROW(StopStrings(std::vector<std::string>(17, "x")), Error);
  EXPECT_THROW(StopStrings({""}), Error);
  EXPECT_THROW(StopStrings({std::string(257, 'x')}), Error);
}

}  // namespace
}  // namespace pianola
