// Random sequences of everything that can be done to the rows of an engine, on every kind of stack.
// What a row has been through must not show: each token that comes, and its log-probability to the
// bit, is what an engine answers that has never held anything and computes the row's tokens from
// the first one on, in one step. What is promised can be done, what is refused changes nothing, and
// no row knows of another. RapidCheck shortens a sequence that fails and prints it.
//
// PIANOLA_PROPERTY_OPERATIONS=100000 runs so many commands, shared out over the stacks.
// PIANOLA_PROPERTY_SEED=n begins elsewhere; without it, every run is the same, but for how far a
// GPU gets while nobody looks (cache/player.h). RapidCheck's RC_PARAMS has no effect but for
// `reproduce`.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <sstream>

#include "backend_here.h"
#include "cache/player.h"
#include "host_pages.h"
#include "sanitized.h"

namespace pianola {
namespace {

#ifdef PIANOLA_TEST_SANITIZED
constexpr std::uint64_t kOperations = 3000;
#else
constexpr std::uint64_t kOperations = 20000;
#endif

using Clock = std::chrono::steady_clock;

// How long a sequence that failed is made shorter. When the device is lost, not at all: whatever is
// tried on it then fails.
constexpr std::chrono::seconds kShortening{60};

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::strtoull(value, nullptr, 10) : otherwise;
}

class RowProperty : public testing::TestWithParam<Stack> {
 protected:
  void SetUp() override {
    const std::string& missing = missing_backend(GetParam().backend);
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
  static void TearDownTestSuite() {
    if (total.operations > 0) std::cout << "in all: " << total << std::endl;
  }

  inline static Tally total;
};

TEST_P(RowProperty, WhatARowHasBeenThroughDoesNotShow) {
  const std::uint64_t wanted =
      from_environment("PIANOLA_PROPERTY_OPERATIONS", kOperations) / stacks().size() + 1;
  const HostPages pages(GetParam().page_bytes);
  const Clock::time_point begin = Clock::now();
  Oracle oracle(GetParam());
  Tally tally;
  std::optional<Clock::time_point> shorten_until;  // once a sequence has failed
  const auto property = [&] {
    const auto commands =
        *rc::gen::scale(3.0, rc::gen::container<std::vector<Command>>(any_command()))
             .as("commands");
    if (shorten_until && Clock::now() > *shorten_until) return;  // it stays as it is
    try {
      Player player(GetParam(), oracle, tally);
      for (const Command& command : commands) player.play(command);
      player.finish();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDevice) shorten_until = Clock::now();
      if (!shorten_until) shorten_until = Clock::now() + kShortening;
      throw;
    } catch (...) {  // what RC_ASSERT throws
      if (!shorten_until) shorten_until = Clock::now() + kShortening;
      throw;
    }
  };
  const testing::TestInfo& info = *testing::UnitTest::GetInstance()->current_test_info();
  const rc::detail::TestMetadata metadata{.id = info.name(), .description = info.name()};
  rc::detail::TestParams params;
  // Not the same sequences on every stack.
  const auto place = std::ranges::find(stacks(), GetParam().name, &Stack::name) - stacks().begin();
  params.seed = from_environment("PIANOLA_PROPERTY_SEED", 1) + 1000 * static_cast<unsigned>(place);
  params.maxSuccess = static_cast<int>(std::clamp<std::uint64_t>(wanted / 100, 3, 50));
  for (; tally.operations < wanted; ++params.seed) {
    const auto result = rc::detail::checkTestable(property, metadata, params);
    if (result.is<rc::detail::SuccessResult>()) continue;
    std::ostringstream message;
    rc::detail::printResultMessage(result, message);
    FAIL() << "seed " << params.seed << "\n" << message.str();
  }
  tally.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  std::cout << GetParam().name << ": " << tally << std::endl;
  total.add(tally);
}

INSTANTIATE_TEST_SUITE_P(Stacks, RowProperty, testing::ValuesIn(stacks()),
                         [](const auto& stack) { return stack.param.name; });

}  // namespace
}  // namespace pianola
