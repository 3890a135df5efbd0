#include "weights/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <random>

#include "file_builder.h"

namespace pianola {
namespace {

using test::Bytes;
using test::error_of;
using test::Gguf;
using testing::AllOf;
using testing::HasSubstr;

// Numbers of the format: value types and tensor types.
enum : std::uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64
};
enum : std::uint32_t { kTypeF32 = 0, kTypeF16 = 1, kTypeQ4_0 = 2, kTypeQ2_K = 10, kTypeQ4_K = 12 };

template <typename T>
std::string key(std::string_view name, std::uint32_t type, T value) {
  return Bytes().string(name).u32(type).number(value).str();
}

std::string string_key(std::string_view name, std::string_view value) {
  return Bytes().string(name).u32(kString).string(value).str();
}

GgufHeader parse(const Bytes& file) { return parse_gguf(file.span(), "m.gguf"); }
GgufHeader parse(const Gguf& file) { return parse(file.build()); }

std::string refusal(const Bytes& file, ErrorCode expected = ErrorCode::kInvalidModel) {
  ErrorCode code = ErrorCode::kInternal;
  std::string message = error_of([&] { parse(file); }, &code);
  EXPECT_EQ(code, expected) << message;
  EXPECT_THAT(message, testing::StartsWith("m.gguf: "));
  EXPECT_LT(message.size(), 400U);
  return message;
}
std::string refusal(const Gguf& file, ErrorCode code = ErrorCode::kInvalidModel) {
  return refusal(file.build(), code);
}

Gguf good() {
  Gguf g;
  g.keys = {string_key("general.architecture", "llama"), key("llama.block_count", kU32, 30U)};
  g.tensors = {Gguf::tensor("a", {64, 3}, kTypeF32, 0), Gguf::tensor("b", {32, 5}, kTypeQ4_0, 768)};
  g.data_bytes = 768 + 5 * 18;
  return g;
}

TEST(Gguf, ReadsTensorsRowMajorAndPlacesThem) {
  for (const std::uint32_t version : {2U, 3U}) {
    Gguf g = good();
    g.version = version;
    const GgufHeader header = parse(g);
    EXPECT_EQ(header.version, version);
    ASSERT_EQ(header.tensors.size(), 2U);
    EXPECT_EQ(header.tensors[0].shape, (Shape{3, 64}));
    EXPECT_EQ(header.tensors[1].dtype, DType::kQ4_0);
    EXPECT_EQ(header.tensors[1].bytes, 90U);
    EXPECT_EQ(header.tensors[1].offset, header.data_offset + 768);
    EXPECT_EQ(header.data_offset % 32, 0U);
    EXPECT_EQ(header.metadata.get_int("llama.block_count"), 30);
  }
}

TEST(Gguf, ReadsEveryKindOfValue) {
  Gguf g;
  g.keys = {key("u8", kU8, std::uint8_t{200}),
            key("i8", kI8, std::int8_t{-3}),
            key("u16", kU16, std::uint16_t{60000}),
            key("i16", kI16, std::int16_t{-300}),
            key("u32", kU32, 4000000000U),
            key("i32", kI32, -5),
            key("f32", kF32, 0.5F),
            key("bool", kBool, std::uint8_t{1}),
            key("u64", kU64, std::uint64_t{INT64_MAX}),
            key("i64", kI64, INT64_MIN),
            key("f64", kF64, 1e300),
            string_key("s", std::string_view("a\0\xff", 3)),
            Bytes().string("strings").u32(kArray).u32(kString).u64(2).string("x").string("").str(),
            Bytes().string("floats").u32(kArray).u32(kF32).u64(2).number(1.5F).number(-1.0F).str(),
            Bytes().string("ints").u32(kArray).u32(kI8).u64(2).number('\1').number('\xff').str(),
            Bytes().string("bools").u32(kArray).u32(kBool).u64(2).u8(0).u8(1).str(),
            Bytes().string("none").u32(kArray).u32(kI32).u64(0).str()};
  const Metadata m = parse(g).metadata;
  EXPECT_EQ(m.get_int("u8"), 200);
  EXPECT_EQ(m.get_int("i8"), -3);
  EXPECT_EQ(m.get_int("u16"), 60000);
  EXPECT_EQ(m.get_int("i16"), -300);
  EXPECT_EQ(m.get_int("u32"), 4000000000);
  EXPECT_EQ(m.get_int("i32"), -5);
  EXPECT_EQ(m.get_float("f32"), 0.5);
  EXPECT_EQ(m.find_bool("bool"), true);
  EXPECT_EQ(m.get_int("u64"), INT64_MAX);
  EXPECT_EQ(m.get_int("i64"), INT64_MIN);
  EXPECT_EQ(m.get_float("f64"), 1e300);
  EXPECT_EQ(m.get_string("s"), std::string("a\0\xff", 3));
  EXPECT_EQ(*m.find_strings("strings"), (std::vector<std::string>{"x", ""}));
  EXPECT_EQ(*m.find_floats("floats"), (std::vector<double>{1.5, -1}));
  EXPECT_EQ(*m.find_ints("ints"), (std::vector<std::int64_t>{1, -1}));
  EXPECT_EQ(std::get<std::vector<bool>>(*m.find("bools")), (std::vector<bool>{false, true}));
  EXPECT_TRUE(m.find_ints("none")->empty());
}

TEST(Gguf, AlignmentIsUsed) {
  Gguf g = good();
  g.alignment = 256;
  g.keys.push_back(key("general.alignment", kU32, 256U));
  const GgufHeader header = parse(g);
  EXPECT_EQ(header.data_offset % 256, 0U);
  g.tensors[1] = Gguf::tensor("b", {32, 5}, kTypeQ4_0, 800);
  EXPECT_THAT(refusal(g), HasSubstr("offset 800 is not a multiple of the alignment 256"));
}

TEST(Gguf, TensorsMayBeListedInAnyOrder) {
  Gguf g = good();
  std::swap(g.tensors[0], g.tensors[1]);
  EXPECT_EQ(parse(g).tensors[0].name, "b");
}

// Cut anywhere, a file is refused. Inside the padding at its end, too.
TEST(GgufAttack, TruncatedAtEveryByte) {
  const std::string whole = good().build().str();
  for (std::size_t n = 0; n < whole.size(); ++n) {
    refusal(Bytes().raw(std::string_view(whole).substr(0, n)));
  }
}

TEST(GgufAttack, OtherFilesAndVersions) {
  EXPECT_THAT(refusal(Bytes().raw("GGML").zeros(100)), HasSubstr("not a GGUF file"));
  Gguf g = good();
  g.version = 1;
  EXPECT_THAT(refusal(g, ErrorCode::kUnsupported), HasSubstr("version 1"));
  g.version = 4;
  EXPECT_THAT(refusal(g, ErrorCode::kUnsupported), HasSubstr("version 4"));
  g.version = 0x03000000;
  EXPECT_THAT(refusal(g, ErrorCode::kUnsupported), HasSubstr("big-endian"));
}

TEST(GgufAttack, HugeCounts) {
  for (const std::uint64_t count : {UINT64_MAX, std::uint64_t{1} << 63, std::uint64_t{1} << 32}) {
    EXPECT_THAT(refusal(Bytes().raw("GGUF").u32(3).u64(count).u64(0)), HasSubstr("tensors"));
    EXPECT_THAT(refusal(Bytes().raw("GGUF").u32(3).u64(0).u64(count)), HasSubstr("keys"));
  }
  // Within the limits, but more than the file can hold.
  EXPECT_THAT(refusal(Bytes().raw("GGUF").u32(3).u64(1000).u64(0).zeros(500)),
              HasSubstr("1000 tensors, but only 500 bytes are left"));
  EXPECT_THAT(refusal(Bytes().raw("GGUF").u32(3).u64(0).u64(1000).zeros(500)),
              HasSubstr("1000 metadata keys, but only 500 bytes are left"));
  EXPECT_THAT(refusal(Bytes().raw("GGUF").u32(3).u64(1'000'001).u64(0)),
              HasSubstr("1000001 tensors, at most 1000000"));
}

TEST(GgufAttack, HugeStringLengths) {
  for (const std::uint64_t n : {UINT64_MAX, std::uint64_t{1} << 63, std::uint64_t{70'000}}) {
    const Bytes key_length = Bytes().raw("GGUF").u32(3).u64(0).u64(1).u64(n).zeros(64);
    EXPECT_THAT(refusal(key_length), HasSubstr("at most 65535"));
    Gguf g;
    g.keys = {Bytes().string("k").u32(kString).u64(n).zeros(64).str()};
    EXPECT_THAT(refusal(g), HasSubstr("metadata key 'k': string of"));
    g.keys.clear();
    g.tensors = {Bytes().u64(n).zeros(64).str()};
    EXPECT_THAT(refusal(g), HasSubstr("tensor name of"));
  }
}

TEST(GgufAttack, ArrayOfManyStringsInFewBytes) {
  Gguf g;
  g.keys = {Bytes().string("k").u32(kArray).u32(kString).u64(std::uint64_t{1} << 62).str()};
  ASSERT_LE(g.build().str().size(), 50U);
  EXPECT_THAT(refusal(g), HasSubstr("metadata key 'k': 4611686018427387904 array elements"));
  for (const std::uint32_t type : {kU8, kF64, kBool}) {
    g.keys = {Bytes().string("k").u32(kArray).u32(type).u64(UINT64_MAX).zeros(64).str()};
    EXPECT_THAT(refusal(g), HasSubstr("array elements, but only 64 bytes are left"));
  }
}

TEST(GgufAttack, ArraysAreBoundedTogether) {
  constexpr std::uint64_t kHalf = (1U << 22) + 1;
  Gguf g;
  for (const char* name : {"a", "b"}) {
    g.keys.push_back(Bytes().string(name).u32(kArray).u32(kU8).u64(kHalf).zeros(kHalf).str());
  }
  EXPECT_THAT(refusal(g), AllOf(HasSubstr("key 'b'"), HasSubstr("at most 8388608")));
}

TEST(GgufAttack, NestedArraysAndUnknownTypes) {
  Gguf g;
  g.keys = {Bytes().string("k").u32(kArray).u32(kArray).u64(1).u32(kU8).u64(1).u8(1).str()};
  EXPECT_THAT(refusal(g, ErrorCode::kUnsupported), HasSubstr("key 'k': arrays of arrays"));
  g.keys = {Bytes().string("k").u32(13).u64(1).str()};
  EXPECT_THAT(refusal(g), HasSubstr("unknown value type 13"));
  g.keys = {Bytes().string("k").u32(kArray).u32(99).u64(1).zeros(9).str()};
  EXPECT_THAT(refusal(g), HasSubstr("unknown array element type 99"));
}

TEST(GgufAttack, ValuesOutOfRange) {
  Gguf g;
  g.keys = {key("k", kBool, std::uint8_t{2})};
  EXPECT_THAT(refusal(g), HasSubstr("a boolean must be 0 or 1, found 2"));
  g.keys = {key("k", kU64, std::uint64_t{1} << 63)};
  EXPECT_THAT(refusal(g), HasSubstr("above 2^63 - 1"));
}

TEST(GgufAttack, KeysAreUniqueAndNamed) {
  Gguf g = good();
  g.keys.push_back(g.keys[0]);
  EXPECT_THAT(refusal(g), HasSubstr("key 'general.architecture': duplicate key"));
  g.keys[2] = key("", kU8, std::uint8_t{1});
  EXPECT_THAT(refusal(g), HasSubstr("is empty"));
  g.keys[2] = key("k\xff\x1b[31m", kU8, std::uint8_t{1});
  EXPECT_THAT(refusal(g), HasSubstr("'k\\xff\\x1b[31m': a key must be valid UTF-8"));
}

TEST(GgufAttack, Alignment) {
  for (const std::uint32_t a : {0U, 1U, 3U, 4U, 48U, 1U << 21, 1U << 31, UINT32_MAX}) {
    Gguf g = good();
    g.keys.push_back(key("general.alignment", kU32, a));
    EXPECT_THAT(refusal(g), HasSubstr("key 'general.alignment': must be a power of two"));
  }
  Gguf g = good();
  g.keys.push_back(key("general.alignment", kU64, std::uint64_t{32}));
  EXPECT_THAT(refusal(g), HasSubstr("must be an unsigned 32-bit integer"));
  g.keys.back() = string_key("general.alignment", "32");
  EXPECT_THAT(refusal(g), HasSubstr("must be an unsigned 32-bit integer"));
}

TEST(GgufAttack, Dimensions) {
  Gguf g = good();
  const auto with = [&](const std::vector<std::uint64_t>& dims, std::uint32_t type = kTypeF32) {
    g.tensors = {Gguf::tensor("t", dims, type, 0)};
    return refusal(g);
  };
  EXPECT_THAT(with({}), HasSubstr("tensor 't': 0 dimensions, expected 1 to 4"));
  EXPECT_THAT(with({1, 1, 1, 1, 1}), HasSubstr("5 dimensions"));
  EXPECT_THAT(with({4, 0}), HasSubstr("dimension 1 is 0"));
  EXPECT_THAT(with({static_cast<std::uint64_t>(-4), 1}), HasSubstr("dimension 0 is -4"));
  EXPECT_THAT(with({std::uint64_t{1} << 32, std::uint64_t{1} << 32}), HasSubstr("does not fit"));
  EXPECT_THAT(with({std::uint64_t{1} << 62, 1}), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(with({48, 2}, kTypeQ4_0),
              HasSubstr("rows of 48 elements are not whole blocks of 32"));
  EXPECT_THAT(with({32, 2}, kTypeQ4_K), HasSubstr("not whole blocks of 256"));
  // A rank that claims more dimensions than the file holds must not be read as such.
  g.tensors = {Bytes().string("t").u32(UINT32_MAX).zeros(40).str()};
  EXPECT_THAT(refusal(g), HasSubstr("4294967295 dimensions"));
}

TEST(GgufAttack, TensorTypes) {
  Gguf g = good();
  g.tensors = {Gguf::tensor("t", {256}, kTypeQ2_K, 0)};
  EXPECT_THAT(refusal(g, ErrorCode::kUnsupported), HasSubstr("tensor 't': type Q2_K is not read"));
  for (const std::uint32_t type : {4U, 5U, 31U, 1000U, UINT32_MAX}) {
    g.tensors = {Gguf::tensor("t", {256}, type, 0)};
    EXPECT_THAT(refusal(g), HasSubstr("tensor 't': unknown type"));
  }
}

TEST(GgufAttack, Offsets) {
  Gguf g = good();
  const auto with = [&](std::uint64_t offset) {
    g.tensors[1] = Gguf::tensor("b", {32, 5}, kTypeQ4_0, offset);
    return refusal(g);
  };
  EXPECT_THAT(with(32), HasSubstr("tensors overlap"));
  EXPECT_THAT(with(0), HasSubstr("tensors overlap"));
  EXPECT_THAT(with(784), HasSubstr("not a multiple of the alignment"));
  EXPECT_THAT(with(800), HasSubstr("tensor 'b': 90 bytes at offset 800"));
  EXPECT_THAT(with(UINT64_MAX - 31), HasSubstr("the whole file has"));
  EXPECT_THAT(with(std::uint64_t{1} << 63), HasSubstr("the whole file has"));
  g.data_bytes += 64;
  EXPECT_THAT(with(800), HasSubstr("leave a hole"));
}

// Sizes near 2^64 whose padded sum would wrap to 0.
TEST(GgufAttack, PaddingThatWraps) {
  Gguf g = good();
  g.tensors = {Gguf::tensor("a", {(std::uint64_t{1} << 62) - 1}, kTypeF32, 0),
               Gguf::tensor("b", {64}, kTypeF32, 0)};
  EXPECT_THAT(refusal(g), HasSubstr("but the whole file has"));
}

TEST(GgufAttack, TensorNames) {
  Gguf g = good();
  g.tensors[1] = Gguf::tensor("a", {32, 5}, kTypeQ4_0, 768);
  EXPECT_THAT(refusal(g), HasSubstr("tensor 'a' is there twice"));
  g.tensors[1] = Gguf::tensor("", {32, 5}, kTypeQ4_0, 768);
  EXPECT_THAT(refusal(g), HasSubstr("name of tensor 1 is empty"));
  g.tensors[1] = Gguf::tensor("\xc0\x80", {32, 5}, kTypeQ4_0, 768);
  EXPECT_THAT(refusal(g), HasSubstr("valid UTF-8"));
}

// The count may claim more than there is: what follows (padding, data) is then read as entries.
TEST(GgufAttack, CountsThatDoNotMatch) {
  for (const int extra : {1, 2}) {
    Gguf g = good();
    g.extra_tensors = extra;
    refusal(g);
    g = good();
    g.extra_keys = extra;
    refusal(g);
  }
}

// A header of one million strings, or of 100,000 tensors, is not slow to read.
TEST(Gguf, LargeHeadersAreFast) {
  Gguf g;
  Bytes tokens;
  tokens.string("tokenizer.ggml.tokens").u32(kArray).u32(kString).u64(1'000'000);
  for (int i = 0; i < 1'000'000; ++i) tokens.string(std::to_string(i));
  g.keys = {tokens.str()};
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    g.tensors.push_back(Gguf::tensor(fmt::format("t{}", i), {8}, kTypeF32, 32 * i));
  }
  g.data_bytes = 3'200'000;
  const Bytes file = g.build();
  const test::CpuTimer timer;
  EXPECT_EQ(parse(file).metadata.find_strings("tokenizer.ggml.tokens")->size(), 1'000'000U);
  EXPECT_LT(timer.seconds(), 5.0);  // 0.1 s in release
}

// Random damage either leaves a readable file or is refused; it never does anything else.
TEST(GgufAttack, RandomDamage) {
  Gguf g = good();
  g.keys.push_back(
      Bytes().string("a").u32(kArray).u32(kString).u64(2).string("x").string("yz").str());
  const std::string whole = g.build().str();
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string damaged = whole;
    for (int k = 0; k < 1 + i % 3; ++k)
      damaged[random() % 300 % whole.size()] = static_cast<char>(random());
    try {
      const GgufHeader header = parse(Bytes().raw(damaged));
      for (const TensorInfo& t : header.tensors) {
        ASSERT_LE(t.offset + t.bytes, damaged.size());
        ASSERT_GE(t.offset, header.data_offset);
      }
    } catch (const Error& e) {
      ASSERT_NE(e.code(), ErrorCode::kInternal) << e.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 10'000);
}

}  // namespace
}  // namespace pianola
