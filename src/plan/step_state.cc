#include "plan/step_state.h"

#include <algorithm>

namespace pianola {
namespace {

// Hands out aligned pieces of one block, or only counts them when the base is null.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <typename T>
  T* take(std::size_t count) {
    constexpr std::size_t kAlign = 128;
    T* piece = base_ ? reinterpret_cast<T*>(base_ + offset_) : nullptr;
    offset_ += (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return piece;
  }
  std::size_t offset() const { return offset_; }

 private:
  std::byte* base_;
  std::size_t offset_ = 0;
};

StepState carve(const StepLimits& limits, Carver& carver, Carver& shared) {
  const auto rows = static_cast<std::size_t>(limits.rows);
  const auto tokens = static_cast<std::size_t>(limits.tokens);
  const auto lanes = static_cast<std::size_t>(limits.lanes);
  const auto logit_rows = static_cast<std::size_t>(limits.logit_rows);
  StepState s;
  s.rows = limits.rows;
  s.history_stride = limits.max_seq_len + 1;
  s.ring_capacity = std::max(1024, 64 * limits.lanes);
  s.rollback_depth = limits.rollback_depth;
  s.most_ahead = limits.most_ahead;
  s.row = carver.take<RowState>(rows);
  s.history = carver.take<TokenId>(rows * static_cast<std::size_t>(s.history_stride));
  s.rollback = carver.take<std::int32_t>(rows);
  s.went_back = carver.take<std::int32_t>(rows);
  s.counts = carver.take<StepCounts>(1);
  s.token = carver.take<TokenId>(tokens);
  s.position = carver.take<std::int32_t>(tokens);
  s.lane_of = carver.take<std::int32_t>(tokens);
  s.first_token = carver.take<std::int32_t>(lanes + 1);
  s.row_of = carver.take<std::int32_t>(lanes);
  s.logit_token = carver.take<std::int32_t>(logit_rows);
  s.target = carver.take<TokenId>(logit_rows);
  s.sampled = carver.take<TokenId>(logit_rows);
  s.logprob = carver.take<float>(logit_rows);
  s.yield = carver.take<std::int32_t>(1);
  s.control = carver.take<RunControl>(1);
  s.ring_head = shared.take<std::uint64_t>(1);
  s.ring_tail = shared.take<std::uint64_t>(1);
  s.ring = shared.take<TokenEvent>(static_cast<std::size_t>(s.ring_capacity));
  return s;
}

}  // namespace

StepStateLayout::StepStateLayout(const StepLimits& limits) : limits_(limits) {
  Carver carver(nullptr);
  Carver shared(nullptr);
  carve(limits_, carver, shared);
  bytes_ = carver.offset();
  shared_bytes_ = shared.offset();
}

StepState StepStateLayout::bind(std::byte* base, std::byte* shared_base) const {
  Carver carver(base);
  Carver shared(shared_base);
  return carve(limits_, carver, shared);
}

double uniform_random(std::uint64_t seed, std::uint32_t choice, std::uint32_t position,
                      RandomPurpose purpose) {
  const auto c = philox4x32({position, choice, static_cast<std::uint32_t>(purpose), 0}, seed);
  const std::uint64_t bits = (std::uint64_t{c[0]} << 21) | (c[1] >> 11);  // 53 bits
  return static_cast<double>(bits) * 0x1.0p-53;
}

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> c, std::uint64_t key) {
  auto k0 = static_cast<std::uint32_t>(key);
  auto k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * c[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57U} * c[2];
    const auto h0 = static_cast<std::uint32_t>(p0 >> 32);
    const auto h1 = static_cast<std::uint32_t>(p1 >> 32);
    c = {h1 ^ c[1] ^ k0, static_cast<std::uint32_t>(p1), h0 ^ c[3] ^ k1,
         static_cast<std::uint32_t>(p0)};
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return c;
}

}  // namespace pianola
