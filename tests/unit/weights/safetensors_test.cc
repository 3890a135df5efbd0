#include "weights/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "file_builder.h"

namespace pianola {
namespace {

using test::Bytes;
using test::error_of;
using test::safetensors;
using testing::HasSubstr;

SafetensorsHeader parse(const Bytes& file) { return parse_safetensors(file.span(), "m"); }
SafetensorsHeader parse(std::string_view header, std::size_t data) {
  return parse(safetensors(header, data));
}

std::string refusal(const Bytes& file, ErrorCode expected = ErrorCode::kInvalidModel) {
  ErrorCode code = ErrorCode::kInternal;
  std::string message = error_of([&] { parse(file); }, &code);
  EXPECT_EQ(code, expected) << message;
  EXPECT_THAT(message, testing::StartsWith("m: "));
  EXPECT_LT(message.size(), 400U);
  return message;
}
std::string refusal(std::string_view header, std::size_t data = 8) {
  return refusal(safetensors(header, data));
}

std::string entry(std::string_view name, std::string_view dtype, std::string_view shape,
                  std::uint64_t begin, std::uint64_t end) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", name, dtype,
                     shape, begin, end);
}

TEST(Safetensors, ReadsTensors) {
  const std::string header =
      fmt::format(R"({{"__metadata__":{{"format":"pt","x":""}},{},{},{},{}}}   )",
                  entry("b", "BF16", "[2,3]", 8, 20), entry("a", "F32", "[2]", 0, 8),
                  entry("scalar", "I64", "[]", 20, 28), entry("empty", "F16", "[0,5]", 28, 28));
  const SafetensorsHeader h = parse(header, 28);
  ASSERT_EQ(h.tensors.size(), 4U);
  EXPECT_EQ(h.data_offset, 8 + header.size());
  EXPECT_EQ(h.tensors[0].name, "b");
  EXPECT_EQ(h.tensors[0].dtype, DType::kBF16);
  EXPECT_EQ(h.tensors[0].shape, (Shape{2, 3}));
  EXPECT_EQ(h.tensors[0].offset, h.data_offset + 8);
  EXPECT_EQ(h.tensors[0].bytes, 12U);
  EXPECT_EQ(h.tensors[2].shape.rank(), 0);
  EXPECT_EQ(h.tensors[3].bytes, 0U);
  EXPECT_TRUE(parse("{}", 0).tensors.empty());
  EXPECT_TRUE(parse("{ } \n", 0).tensors.empty());
}

TEST(Safetensors, NamesMayBeEscaped) {
  const auto h = parse("{" + entry("\\u00e9\\ud83d\\ude00\\n", "U8", "[1]", 0, 1) + "}", 1);
  EXPECT_EQ(h.tensors[0].name, "\u00e9\U0001F600\n");
}

TEST(SafetensorsAttack, LengthField) {
  EXPECT_THAT(refusal(Bytes()), HasSubstr("0 bytes, too short"));
  EXPECT_THAT(refusal(Bytes().zeros(7)), HasSubstr("7 bytes, too short"));
  EXPECT_THAT(refusal(Bytes().u64(0)), HasSubstr("must begin with '{'"));
  EXPECT_THAT(refusal(Bytes().u64(0).raw("{}")), HasSubstr("must begin with '{'"));
  EXPECT_THAT(refusal(Bytes().u64(3).raw("{}")), HasSubstr("header of 3 bytes, but only 2 bytes"));
  for (const std::uint64_t n :
       {std::uint64_t{1} << 63, UINT64_MAX, UINT64_MAX - 7, kMaxHeaderBytes + 1}) {
    EXPECT_THAT(refusal(Bytes().u64(n).raw("{}")), HasSubstr("at most 100000000"));
  }
  EXPECT_THAT(refusal(Bytes().u64(kMaxHeaderBytes).raw("{}")),
              HasSubstr("but only 2 bytes follow"));
}

TEST(SafetensorsAttack, HeaderText) {
  EXPECT_THAT(refusal(" {}", 0), HasSubstr("must begin with '{'"));
  EXPECT_THAT(refusal("[]", 0), HasSubstr("must begin with '{'"));
  EXPECT_THAT(refusal("\xef\xbb\xbf{}", 0), HasSubstr("must begin with '{'"));
  EXPECT_THAT(refusal("{", 0), HasSubstr("invalid JSON"));
  EXPECT_THAT(refusal("{}{}", 0), HasSubstr("bytes after the end of the JSON object at 2"));
  EXPECT_THAT(refusal(std::string_view("{}\0", 3), 0), HasSubstr("bytes after the end"));
  EXPECT_THAT(refusal("{" + entry("\xff", "F32", "[2]", 0, 8) + "}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(refusal("{" + entry("\xed\xa0\x80", "F32", "[2]", 0, 8) + "}"),
              HasSubstr("invalid JSON"));
  EXPECT_THAT(refusal("{" + entry("\\ud800", "F32", "[2]", 0, 8) + "}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(refusal("{" + entry("a", "F32", "[2]", 0, 8) + ",}"), HasSubstr("invalid JSON"));
  EXPECT_THAT(refusal("{/**/}", 0), HasSubstr("invalid JSON"));
}

TEST(SafetensorsAttack, DuplicateNames) {
  const std::string a = entry("a", "F32", "[2]", 0, 8);
  EXPECT_THAT(refusal("{" + a + "," + entry("a", "F32", "[2]", 8, 16) + "}", 16),
              HasSubstr("tensor 'a' is there twice"));
  // The same name, spelt in two ways.
  EXPECT_THAT(refusal("{" + a + "," + entry("\\u0061", "F32", "[0]", 8, 8) + "}"),
              HasSubstr("tensor 'a' is there twice"));
  EXPECT_THAT(refusal(R"({"__metadata__":{},"__metadata__":{}})", 0),
              HasSubstr("duplicate '__metadata__'"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"k":"1","k":"2"}})", 0),
              HasSubstr("duplicate key 'k' in __metadata__"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})"),
              HasSubstr("tensor 'a': duplicate field 'dtype'"));
}

TEST(SafetensorsAttack, MetadataHoldsOnlyStrings) {
  for (const char* value :
       {"1", "null", "true", "{}", "[]", "1.5", "{\"a\":\"b\"}", "18446744073709551615"}) {
    EXPECT_THAT(refusal(fmt::format(R"({{"__metadata__":{{"k":{}}}}})", value), 0),
                HasSubstr("__metadata__: values must be strings"));
    EXPECT_THAT(refusal(fmt::format(R"({{"__metadata__":{}}})", value[0] == '{' ? "[]" : value), 0),
                HasSubstr("__metadata__: must be an object of strings"));
  }
}

TEST(SafetensorsAttack, EntriesOfWrongForm) {
  const auto with = [](std::string_view fields) {
    return refusal(fmt::format(R"({{"a":{}}})", fields));
  };
  for (const char* value : {"1", "null", "true", "[]", "\"x\"", "1e9"}) {
    EXPECT_THAT(with(value), HasSubstr("tensor 'a': must be an object"));
  }
  EXPECT_THAT(with("{}"), HasSubstr("'dtype' is missing"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[2]})"), HasSubstr("'data_offsets' is missing"));
  EXPECT_THAT(with(R"({"dtype":"F32","data_offsets":[0,8]})"), HasSubstr("'shape' is missing"));
  EXPECT_THAT(with(R"({"strides":[1]})"), HasSubstr("unknown field 'strides'"));
  EXPECT_THAT(with(R"({"dtype":1})"), HasSubstr("'dtype' must be a string, found a number"));
  EXPECT_THAT(with(R"({"dtype":["F32"]})"), HasSubstr("'dtype' must be a string, found an array"));
  EXPECT_THAT(with(R"({"shape":2})"), HasSubstr("'shape' must be an array of integers"));
  EXPECT_THAT(with(R"({"shape":"2"})"), HasSubstr("'shape' must be an array of integers"));
  EXPECT_THAT(with(R"({"shape":{"a":1}})"), HasSubstr("'shape' must be an array of integers"));
  EXPECT_THAT(with(R"({"shape":[2.0]})"), HasSubstr("found a number that is not an integer"));
  EXPECT_THAT(with(R"({"shape":[1e400]})"), HasSubstr("tensor 'a'"));
  EXPECT_THAT(with(R"({"shape":[[2]]})"), HasSubstr("found an array"));
  EXPECT_THAT(with(R"({"shape":[null]})"), HasSubstr("found null"));
  EXPECT_THAT(with(R"({"shape":[-1]})"), HasSubstr("shape entry -1 is negative"));
  EXPECT_THAT(with(R"({"shape":[-0]})"), HasSubstr("shape entry -0 is negative"));
  EXPECT_THAT(with(R"({"shape":[18446744073709551615]})"), HasSubstr("above 2^63 - 1"));
  EXPECT_THAT(with(R"({"shape":[1,1,1,1,1,1,1,1,1]})"), HasSubstr("more than 8 entries"));
  EXPECT_THAT(with(R"({"data_offsets":[0]})"), HasSubstr("must be [begin, end]"));
  EXPECT_THAT(with(R"({"data_offsets":[0,4,8]})"), HasSubstr("must be [begin, end]"));
  EXPECT_THAT(with(R"({"data_offsets":[8,0]})"), HasSubstr("begin is behind end"));
  EXPECT_THAT(with(R"({"data_offsets":[-8,0]})"), HasSubstr("data offset -8 is negative"));
  EXPECT_THAT(refusal(R"({"":{}})"), HasSubstr("name is empty"));
}

TEST(SafetensorsAttack, Dtypes) {
  EXPECT_THAT(refusal("{" + entry("a", "F33", "[2]", 0, 8) + "}"),
              HasSubstr("tensor 'a': unknown dtype 'F33'"));
  EXPECT_THAT(refusal("{" + entry("a", std::string(5000, 'F'), "[2]", 0, 8) + "}"),
              HasSubstr("tensor 'a': unknown dtype"));
  // Among them those of less than a byte, whatever their alignment.
  for (const char* dtype : {"F64", "F8_E4M3", "BOOL", "F4", "F6_E2M3", "U64", "C64"}) {
    EXPECT_THAT(refusal(safetensors("{" + entry("a", dtype, "[3]", 0, 3) + "}", 3),
                        ErrorCode::kUnsupported),
                HasSubstr(fmt::format("tensor 'a': dtype {} is not read", dtype)));
  }
}

TEST(SafetensorsAttack, OverlapHolesAndEnds) {
  const std::string a = entry("a", "F32", "[2]", 0, 8);
  const auto two = [&](std::uint64_t begin, std::size_t data) {
    return refusal("{" + a + "," + entry("b", "F32", "[2]", begin, begin + 8) + "}", data);
  };
  EXPECT_THAT(two(4, 12),
              HasSubstr("tensor 'b' begins at byte 4 of the data, expected 8: tensors overlap"));
  EXPECT_THAT(two(0, 8), HasSubstr("tensors overlap"));
  EXPECT_THAT(two(12, 20), HasSubstr("expected 8: bytes that belong to no tensor"));
  EXPECT_THAT(two(8, 17), HasSubstr("1 bytes behind the last tensor belong to no tensor"));
  EXPECT_THAT(two(8, 15), HasSubstr("tensor 'b' ends at byte 16 of the data, but the file has 15"));
  EXPECT_THAT(refusal("{" + entry("a", "F32", "[2]", 4, 12) + "}", 12),
              HasSubstr("belong to no tensor"));
  EXPECT_THAT(refusal("{}", 1), HasSubstr("1 bytes behind the last tensor"));
  // An empty tensor inside another one.
  EXPECT_THAT(refusal("{" + a + "," + entry("b", "F32", "[0]", 4, 4) + "}"), HasSubstr("overlap"));
}

TEST(SafetensorsAttack, SizesThatOverflow) {
  const auto with = [](std::string_view shape, std::uint64_t end) {
    return refusal("{" + entry("a", "F32", shape, 0, end) + "}");
  };
  EXPECT_THAT(with("[4294967296,4294967296]", 0), HasSubstr("does not fit 63 bits"));
  EXPECT_THAT(with("[9223372036854775807,2]", 8), HasSubstr("does not fit 63 bits"));
  EXPECT_THAT(with("[0,9223372036854775807,2]", 0), HasSubstr("does not fit 63 bits"));
  EXPECT_THAT(with("[4611686018427387904]", 0), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(with("[4611686018427387903]", INT64_MAX),
              HasSubstr("needs 18446744073709551612 bytes"));
  EXPECT_THAT(with("[3]", 8),
              HasSubstr("tensor 'a': f32 [3] needs 12 bytes, but data_offsets give 8"));
}

TEST(SafetensorsAttack, DeepNestingAndLongNames) {
  EXPECT_THAT(refusal("{\"a\":" + std::string(100'000, '['), 0), HasSubstr("tensor 'a'"));
  EXPECT_THAT(refusal("{" + entry(std::string(2000, 'x'), "F32", "[2]", 0, 8) + "}"),
              HasSubstr("a name is longer than 1024 bytes"));
}

TEST(SafetensorsAttack, MillionsOfEntries) {
  std::string header = "{";
  for (int i = 0; i < 1'000'001; ++i) header += entry(std::to_string(i), "U8", "[0]", 0, 0) + ",";
  header.back() = '}';
  const test::CpuTimer timer;
  EXPECT_THAT(refusal(header, 0), HasSubstr("more than 1000000 tensors"));
  EXPECT_LT(timer.seconds(), 5.0);  // 0.4 s in release
  header = R"({"__metadata__":{)";
  for (int i = 0; i < 100'000; ++i) header += fmt::format(R"("{}":"",)", i);
  header.back() = '}';
  EXPECT_THAT(refusal(header + "}", 0), HasSubstr("__metadata__: more than 65536 entries"));
}

TEST(SafetensorsAttack, TruncatedAtEveryByte) {
  const std::string whole =
      safetensors("{" + entry("a", "F32", "[2]", 0, 8) + "," + entry("b", "I8", "[3]", 8, 11) + "}",
                  11)
          .str();
  for (std::size_t n = 0; n < whole.size(); ++n)
    refusal(Bytes().raw(std::string_view(whole).substr(0, n)));
}

TEST(SafetensorsAttack, RandomDamage) {
  const std::string whole =
      safetensors("{" + entry("a", "F32", "[2]", 0, 8) + "," + entry("b", "I8", "[3]", 8, 11) + "}",
                  11)
          .str();
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string damaged = whole;
    for (int k = 0; k < 1 + i % 3; ++k)
      damaged[random() % whole.size()] = static_cast<char>(random() % 128);
    try {
      for (const TensorInfo& t : parse(Bytes().raw(damaged)).tensors) {
        ASSERT_LE(t.offset + t.bytes, damaged.size());
      }
    } catch (const Error& e) {
      ASSERT_NE(e.code(), ErrorCode::kInternal) << e.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 10'000);
}

TEST(SafetensorsIndex, ReadsItsMap) {
  const auto map = parse_safetensors_index(
      R"({"metadata":{"total_size":12},"weight_map":{"b":"m-2.safetensors","a":"m-1.safetensors"}})",
      "i");
  ASSERT_EQ(map.size(), 2U);
  EXPECT_EQ(map[0], (std::pair<std::string, std::string>("a", "m-1.safetensors")));
}

TEST(SafetensorsIndex, RefusesWhatIsNotAFileNameInTheFolder) {
  for (const char* name :
       {"../../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", ".", "",
        "a\\\\b.safetensors", "x\\u0000.safetensors", "config.json", "x.bin"}) {
    const std::string text = fmt::format(R"({{"weight_map":{{"t":"{}"}}}})", name);
    EXPECT_THAT(error_of([&] { parse_safetensors_index(text, "i"); }),
                HasSubstr("i: tensor 't': '"))
        << name;
  }
}

TEST(SafetensorsIndex, RefusesOtherForms) {
  for (const char* text :
       {"[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":{"t":1}})",
        R"({"weight_map":{"t":"a.safetensors","t":"b.safetensors"}})", "{", ""}) {
    ErrorCode code = ErrorCode::kInternal;
    error_of([&] { parse_safetensors_index(text, "i"); }, &code);
    EXPECT_EQ(code, ErrorCode::kInvalidModel) << text;
  }
}

}  // namespace
}  // namespace pianola
