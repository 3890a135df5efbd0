#include "base/metadata.h"

#include <gtest/gtest.h>

#include "pianola/error.h"

namespace pianola {
namespace {

Metadata sample() {
  Metadata m;
  m.insert("b", true);
  m.insert("i", std::int64_t{-7});
  m.insert("f", 0.5);
  m.insert("s", std::string("text"));
  m.insert("bools", std::vector<bool>{true});
  m.insert("ints", std::vector<std::int64_t>{1, 2});
  m.insert("floats", std::vector<double>{0.5});
  m.insert("strings", std::vector<std::string>{"x", "y"});
  return m;
}

TEST(Metadata, ReadsByType) {
  const Metadata m = sample();
  EXPECT_EQ(m.find_bool("b"), true);
  EXPECT_EQ(m.get_int("i"), -7);
  EXPECT_EQ(m.get_float("f"), 0.5);
  EXPECT_EQ(m.get_float("i"), -7.0);  // a float reader accepts an integer
  EXPECT_EQ(m.get_string("s"), "text");
  EXPECT_EQ(m.find_ints("ints")->at(1), 2);
  EXPECT_EQ(m.find_floats("floats")->at(0), 0.5);
  EXPECT_EQ(m.find_strings("strings")->at(1), "y");
  EXPECT_EQ(m.entries().size(), 8U);
  EXPECT_STREQ(metadata_kind(*m.find("strings")), "[string]");
}

TEST(Metadata, KeepsTheFirstOfTwo) {
  Metadata m = sample();
  EXPECT_FALSE(m.insert("i", std::int64_t{1}));
  EXPECT_EQ(m.get_int("i"), -7);
}

TEST(Metadata, AbsentIsNotAnErrorToFind) {
  const Metadata m;
  EXPECT_FALSE(m.contains("k"));
  EXPECT_EQ(m.find_bool("k"), std::nullopt);
  EXPECT_EQ(m.find_int("k"), std::nullopt);
  EXPECT_EQ(m.find_float("k"), std::nullopt);
  EXPECT_EQ(m.find_string("k"), nullptr);
  EXPECT_EQ(m.find_strings("k"), nullptr);
  EXPECT_EQ(m.find_ints("k"), nullptr);
  EXPECT_EQ(m.find_floats("k"), nullptr);
}

template <typename F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidModel);
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(Metadata, ErrorsNameKeyAndTypes) {
  const Metadata m = sample();
  EXPECT_EQ(message_of([&] { m.find_int("s"); }),
            "metadata key 's': expected integer, found string");
  EXPECT_EQ(message_of([&] { m.find_int("f"); }),
            "metadata key 'f': expected integer, found float");
  EXPECT_EQ(message_of([&] { m.find_float("b"); }), "metadata key 'b': expected float, found bool");
  EXPECT_EQ(message_of([&] { m.find_strings("ints"); }),
            "metadata key 'ints': expected [string], found [integer]");
  EXPECT_EQ(message_of([&] { m.get_int("k"); }), "metadata key 'k' is missing");
  EXPECT_EQ(message_of([&] { m.get_float("k"); }), "metadata key 'k' is missing");
  EXPECT_EQ(message_of([&] { m.get_string("k"); }), "metadata key 'k' is missing");
}

}  // namespace
}  // namespace pianola
