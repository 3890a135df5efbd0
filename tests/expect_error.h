// That a call is refused: with which code, and with what in its words.
//
//   expect_error(ErrorCode::kInvalidArgument, "max_seq_len", [&] { make_engine(0); });
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "pianola/error.h"

namespace pianola {

template <typename F>
void expect_error(ErrorCode code, const std::string& part, F&& call) {
  try {
    call();
    FAIL() << "nothing was thrown, expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

}  // namespace pianola
