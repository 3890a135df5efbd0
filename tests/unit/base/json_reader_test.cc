#include "base/json_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <random>

#include "pianola/error.h"

namespace pianola {
namespace {

using testing::HasSubstr;

std::string refusal(std::string_view text) {
  try {
    parse_json(text, "f.json");
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidModel);
    EXPECT_THAT(e.what(), testing::StartsWith("f.json: invalid JSON"));
    return e.what();
  }
  ADD_FAILURE() << "accepted: " << text.substr(0, 100);
  return {};
}

std::string field_error(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidModel);
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(Json, ReadsDocuments) {
  EXPECT_EQ(parse_json(" {\"a\": [1, 2.5, \"x\"]} \n", "f").at("a").as_array().size(), 3U);
  EXPECT_TRUE(parse_json("null", "f").is_null());
  EXPECT_EQ(parse_json("\"\\u0000\"", "f").as_string().size(), 1U);
  EXPECT_EQ(parse_json("\"\\ud83d\\ude00\"", "f").as_string(), "\U0001F600");
  EXPECT_EQ(parse_json("1e308", "f").as_double(), 1e308);
  EXPECT_EQ(parse_json("1e-400", "f").as_double(), 0.0);
  EXPECT_EQ(parse_json("18446744073709551615", "f").as_uint64(), UINT64_MAX);
  // A key may be there in two objects, and differ by case.
  parse_json(R"({"a":{"a":1,"b":{"a":2}},"A":[{"a":1},{"a":2}]})", "f");
}

TEST(Json, RefusesMalformedText) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[1,]",
                           "{\"a\":1,}",
                           "{a:1}",
                           "'a'",
                           "nul",
                           "NaN",
                           "Infinity",
                           "-Infinity",
                           "+1",
                           "01",
                           "1.",
                           ".5",
                           "0x1",
                           "1e",
                           "\"\t\"",
                           "\"\n\"",
                           "\"\\x\"",
                           "\"abc",
                           "// c\n1",
                           "/* */1",
                           "[1 2]",
                           "\xef\xbb\xbf{}",
                           "\"\xff\"",
                           "\"\xc0\x80\"",
                           "\"\xed\xa0\x80\"",
                           "\"\xf4\x90\x80\x80\""}) {
    EXPECT_THAT(refusal(text), HasSubstr("f.json")) << text;
  }
}

TEST(Json, RefusesBytesBehindTheDocument) {
  for (const char* text : {"{} x", "{}{}", "1 2", "{}}", "null,"}) refusal(text);
  refusal(std::string_view("{}\0", 3));
}

TEST(Json, RefusesNulBytes) {
  refusal(std::string_view("{\"a\0b\":1}", 9));
  refusal(std::string_view("\0{}", 3));
  refusal(std::string_view("{\0}", 3));
}

TEST(Json, RefusesLoneSurrogates) {
  for (const char* text :
       {R"("\ud800")", R"("\udc00")", R"("\ud800\ud800")", R"("\ud800x")", R"("\udc00\ud800")",
        R"({"\ud800":1})", R"("\ud83d\n")", R"("\u12")", R"("\u12g4")"}) {
    refusal(text);
  }
}

TEST(Json, RefusesNumbersThatAreNotFinite) {
  for (const char* text : {"1e400", "-1e400", "[1e309]", "{\"a\":1e99999999999}", "1e2147483648"}) {
    EXPECT_THAT(refusal(text), testing::AnyOf(HasSubstr("not finite"), HasSubstr("exponent")))
        << text;
  }
  EXPECT_THAT(refusal(std::string(400, '9')), HasSubstr("not finite"));
}

TEST(Json, RefusesDeepNesting) {
  const auto nested = [](std::size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  parse_json(nested(64), "f");
  refusal(nested(65));
  refusal(std::string(1'000'000, '['));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  refusal(objects);
}

TEST(Json, RefusesDuplicateKeys) {
  EXPECT_THAT(refusal(R"({"a":1,"b":2,"a":1})"), HasSubstr("duplicate key 'a'"));
  EXPECT_THAT(refusal(R"([{"x":{"k":1,"\u006b":2}}])"), HasSubstr("duplicate key 'k'"));
  EXPECT_THAT(refusal(R"({"":1,"":2})"), HasSubstr("duplicate key ''"));
  EXPECT_THAT(refusal(R"({"\u001b[2J":1,"\u001b[2J":2})"), HasSubstr("duplicate key '\\x1b[2J'"));
  const std::string long_key(100'000, 'k');  // longer than any buffer of the parser
  refusal("{\"" + long_key + "\":1,\"" + long_key + "\":2}");
  parse_json("{\"" + long_key + "\":1,\"" + long_key + "x\":2}", "f");
}

TEST(Json, LargeObjectsAreNotSlow) {
  std::mt19937 random(3);
  std::string text = "{";
  for (int i = 0; i < 300'000; ++i) {
    text +=
        "\"" + std::to_string(random()) + "_" + std::to_string(i) + "\":" + std::to_string(i) + ",";
  }
  const std::clock_t start = std::clock();
  EXPECT_EQ(parse_json(text + "\"last\":0}", "f").as_object().size(), 300'001U);
  EXPECT_THAT(refusal(text + "\"last\":0,\"last\":0}"), HasSubstr("duplicate key 'last'"));
  EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 10.0);  // 0.5 s in release
}

TEST(JsonObject, ReadsFields) {
  const auto root = parse_json(
      R"({"i":-3,"f":1.5,"s":"x","b":true,"n":null,"o":{"k":[1]},"u":18446744073709551615})", "f");
  const JsonObject o(root, "f");
  EXPECT_EQ(o.get_int("i"), -3);
  EXPECT_EQ(o.get_float("i"), -3.0);
  EXPECT_EQ(o.get_float("f"), 1.5);
  EXPECT_EQ(o.get_string("s"), "x");
  EXPECT_EQ(o.find_bool("b"), true);
  EXPECT_EQ(o.get_float("u"), 18446744073709551615.0);
  EXPECT_EQ(o.get_object("o").find_array("k")->size(), 1U);
  // Null is as absent.
  EXPECT_FALSE(o.find_int("n") || o.find_int("none") || o.find_bool("n") || o.find_string("n"));
  EXPECT_FALSE(o.find_float("n") || o.find_object("n") || o.find_array("n"));
}

TEST(JsonObject, NamesThePathAndTheRule) {
  const auto root =
      parse_json(R"({"i":-3,"f":1.5,"s":"x","o":{"k":[1]},"u":9223372036854775808})", "f");
  const JsonObject o(root, "c.json");
  EXPECT_EQ(field_error([&] { o.get_int("none"); }), "c.json: none is missing");
  EXPECT_EQ(field_error([&] { o.get_int("i", 0, 9); }),
            "c.json: i: expected a value in [0, 9], found -3");
  EXPECT_EQ(field_error([&] { o.get_int("f"); }), "c.json: f: expected an integer, found a float");
  EXPECT_EQ(field_error([&] { o.get_int("u"); }), "c.json: u: 9223372036854775808 is out of range");
  EXPECT_EQ(field_error([&] { o.get_float("s"); }), "c.json: s: expected a number, found a string");
  EXPECT_EQ(field_error([&] { o.get_string("o"); }),
            "c.json: o: expected a string, found an object");
  EXPECT_EQ(field_error([&] { o.find_bool("i"); }),
            "c.json: i: expected a boolean, found an integer");
  EXPECT_EQ(field_error([&] { o.get_object("s"); }),
            "c.json: s: expected an object, found a string");
  EXPECT_EQ(field_error([&] { o.get_object("o").get_int("k"); }),
            "c.json: o.k: expected an integer, found an array");
  EXPECT_EQ(field_error([&] { o.get_object("o").get_object("z"); }), "c.json: o.z is missing");
  EXPECT_EQ(field_error([&] { JsonObject(root.at("s"), "c.json"); }),
            "c.json: expected an object, found a string");
}

}  // namespace
}  // namespace pianola
