// Checkpoints of mixtures of experts: which tensors are asked for, and what is said when one is
// missing or has another shape.
#include <gtest/gtest.h>
#include <unistd.h>
#include <boost/json.hpp>

#include <filesystem>
#include <fstream>

#include "expect_error.h"
#include "models/golden.h"
#include "models/model.h"

namespace pianola {
namespace {

// A golden's folder with fields of its config.json changed; goes away with the test.
class ExpertTensorsTest : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path edited(const std::string& golden, std::string_view changes) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    const std::filesystem::path from = golden_folder() / golden / "hf";
    std::filesystem::copy_file(from / "model.safetensors", folder_ / "model.safetensors");
    boost::json::value config =
        parse_json(read_text_file(from / "config.json", 1 << 20), "config.json");
    const boost::json::value edit = parse_json(changes, "changes");
    for (const auto& [key, value] : edit.as_object()) {
      config.as_object()[key] = value;
    }
    std::ofstream(folder_ / "config.json") << boost::json::serialize(config);
    return folder_;
  }
  void expect_refused(const std::string& golden, std::string_view changes, ErrorCode code,
                      const std::string& words) {
    SCOPED_TRACE(std::string(changes));
    const std::filesystem::path path = edited(golden, changes);
    expect_error(code, words, [&] { CausalModel::open(path); });
  }

 private:
  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("pianola_experts_" + std::to_string(getpid()));
};

constexpr auto kInvalid = ErrorCode::kInvalidModel;

TEST_F(ExpertTensorsTest, AreFoundInEveryForm) {
  for (const auto& [file, first] :
       {std::pair("qwen3_moe/some/hf", "model.layers.1.mlp.experts.0.gate_proj.weight"),
        std::pair("qwen3_moe/all/f16.gguf", "blk.0.ffn_gate_exps.weight"),
        std::pair("qwen2_moe/shared/f16.gguf", "blk.1.ffn_down_exps.weight"),
        std::pair("qwen2_moe/q4/q4_0.gguf", "blk.0.ffn_up_exps.weight"),
        std::pair("gpt_oss/mixed/hf", "model.layers.0.mlp.experts.gate_up_proj"),
        std::pair("gpt_oss/mixed/f16.gguf", "blk.0.ffn_gate_exps.weight")}) {
    const auto model = CausalModel::open(golden_folder() / file);
    const ModelTables tables = model->tables(64);
    std::uint64_t bytes = 0;
    bool found = false;
    for (const WeightDecl& decl : tables.weights) {
      if (decl.experts == 1) continue;
      EXPECT_EQ(decl.experts, model->config().experts.num_experts);
      found = found || decl.source == first;
      bytes += decl.source_bytes();
    }
    EXPECT_TRUE(found) << file;
    // All elements of the files' tensors of experts, each once.
    std::uint64_t stored = 0;
    for (const TensorInfo& tensor : model->checkpoint().tensors()) {
      const bool gguf = tensor.name.find("_exps.weight") != std::string::npos;
      const bool hf =
          tensor.name.find(".experts.") != std::string::npos && !tensor.name.ends_with("_bias");
      if (gguf || hf) stored += tensor.bytes;
    }
    EXPECT_EQ(bytes, stored) << file;
  }
}

TEST_F(ExpertTensorsTest, OneForEachExpert) {
  const auto refused = [this](std::string_view changes, ErrorCode code, const std::string& words) {
    expect_refused("qwen3_moe/some", changes, code, words);
  };
  // The router comes first.
  refused(R"({"num_local_experts": 7})", kInvalid, "mlp.gate.weight': expected shape [7, 64]");
  refused(R"({"moe_intermediate_size": 41})", kInvalid,
          "mlp.experts.0.gate_proj.weight': expected shape [41, 64], found [40, 64]");
  // A layer that has experts is said to have none, and the other way round.
  refused(R"({"mlp_only_layers": [1, 3]})", kInvalid, "layers.1.mlp.gate_proj.weight");
  refused(R"({"mlp_only_layers": []})", kInvalid, "layers.3.mlp.gate.weight");
}

TEST_F(ExpertTensorsTest, AMissingExpertIsNamed) {
  // The names of expert 5's tensors, as many characters long, made into something else.
  const std::filesystem::path folder = edited("qwen3_moe/some", "{}");
  std::string bytes = read_text_file(folder / "model.safetensors", 16 << 20);
  const std::string name = "model.layers.1.mlp.experts.5.up_proj.weight";
  const std::size_t at = bytes.find(name);
  ASSERT_NE(at, std::string::npos);
  bytes[at + name.find(".5.") + 1] = 'x';
  std::ofstream(folder / "model.safetensors", std::ios::binary) << bytes;
  expect_error(kInvalid, name, [&] { CausalModel::open(folder); });
}

TEST_F(ExpertTensorsTest, GateAndUpInOneTensor) {
  const auto refused = [this](std::string_view changes, const std::string& words) {
    expect_refused("gpt_oss/mixed", changes, kInvalid, words);
  };
  refused(R"({"num_local_experts": 9})", "mlp.router.weight': expected shape [9, 64]");
  refused(R"({"intermediate_size": 47})",
          "mlp.experts.gate_up_proj': expected shape [8, 64, 94], found [8, 64, 96]");
  refused(R"({"num_attention_heads": 2})", "q_proj.weight': expected shape [64, 64]");
}

}  // namespace
}  // namespace pianola
