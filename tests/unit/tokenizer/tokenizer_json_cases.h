// Loads and refusals of a tokenizer.json.
#pragma once

#include <gmock/gmock.h>

#include <memory>
#include <string>

#include "pianola/error.h"
#include "tokenizer/tokenizer_json.h"
#include "tokenizer_files.h"

namespace pianola::test {

inline std::shared_ptr<const Tokenizer> load(const std::string& json) {
  return tokenizer_from_json(json, "tokenizer.json");
}

// In little time, with a short message that has `words` in it.
inline void expect_refused(const std::string& json, ErrorCode code, const std::string& words) {
  const double begin = cpu_seconds();
  try {
    load(json);
    ADD_FAILURE() << "not refused, expected: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), ::testing::HasSubstr(words));
    EXPECT_LT(std::string(error.what()).size(), 1000U);
  }
  EXPECT_LT(cpu_seconds() - begin, 3.0) << words;  // 1 without sanitizers
}

}  // namespace pianola::test
