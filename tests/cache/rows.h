// For tests of what rows do: checkpoints of the goldens by name, texts, and what a row says.
//
//   Engine engine(tiny_model("mistral/window"), {.max_seq_len = 160});
//   const int row = engine.open_row(sampled(3));
//   engine.append(row, text_tokens(1, 0, 40));
//   EXPECT_EQ(say(engine, row, 8), ...);
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/golden.h"
#include "models/model.h"
#include "pianola/engine.h"
#include "plan/step_state.h"

namespace pianola {

// The first file of a golden. Read once: some are put together in a folder that goes away.
inline std::shared_ptr<const CausalModel> tiny_model(const std::string& name) {
  static std::map<std::string, std::shared_ptr<const CausalModel>> opened;
  std::shared_ptr<const CausalModel>& model = opened[name];
  if (model) return model;
  const ModelGolden golden = read_golden(golden_folder() / name);
  const auto scratch =
      std::filesystem::temp_directory_path() / ("pianola_golden_" + std::to_string(getpid()));
  model = CausalModel::open(prepare_golden_file(golden.files.at(0), scratch));
  std::filesystem::remove_all(scratch);
  return model;
}

// Token `position` of one of several texts that never end; ids below 250.
inline TokenId text_token(int text, int position) {
  const std::uint32_t mixed =
      (static_cast<std::uint32_t>(text) * 7919U + static_cast<std::uint32_t>(position)) *
      2654435761U;
  return static_cast<TokenId>((mixed >> 12) % 250U);
}

inline std::vector<TokenId> text_tokens(int text, int begin, int count) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(text_token(text, begin + i));
  return tokens;
}

inline RowOptions sampled(std::uint64_t seed, std::uint32_t choice = 0) {
  RowOptions o;
  o.sampling.temperature = 0.9F;
  o.sampling.seed = seed;
  o.sampling.choice = choice;
  o.sampling.logprobs = true;
  return o;
}

struct Said {
  std::vector<TokenId> tokens;
  std::vector<std::uint32_t> logprobs;  // their bits
  bool operator==(const Said&) const = default;

  void add(const TokenEvent& event) {
    tokens.push_back(event.token);
    logprobs.push_back(std::bit_cast<std::uint32_t>(event.logprob));
  }
};

inline std::vector<TokenId> history(const Engine& engine, int row) {
  return {engine.history(row).begin(), engine.history(row).end()};
}

// The next `count` tokens of a row that runs.
inline Said say(Engine& engine, int row, int count) {
  Said said;
  while (static_cast<int>(said.tokens.size()) < count) {
    if (engine.status(row) != RowStatus::kRunning) {
      ADD_FAILURE() << "row " << row << " has stopped";
      break;
    }
    for (const TokenEvent& event : engine.step({&row, 1})) said.add(event);
  }
  return said;
}

// And of a row that is idle.
inline Said go_on(Engine& engine, int row, int count) {
  engine.append(row, {});
  return say(engine, row, count);
}

}  // namespace pianola
