// Products by cuBLASLt on addresses that are aligned as an arena's pieces are, and no better: an
// algorithm that wants more must not be chosen.
#include "backends/cuda/gemm.h"

#include <cmath>
#include <vector>

#include "cuda/matrix_fixture.h"
#include "tensor/arena.h"
#include "tensor/half.h"

namespace pianola::cuda {
namespace {

// Numbers in bfloat16 behind the first multiple of 256 plus kAlignment.
class Moved {
 public:
  explicit Moved(const std::vector<float>& values) : memory_(values.size() * 2 + 512) {
    for (const float v : values) rounded.push_back(bf16_to_f32(f32_to_bf16(v)));
    std::vector<std::byte> bytes(memory_.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint16_t word = f32_to_bf16(values[i]);
      std::memcpy(bytes.data() + offset() + 2 * i, &word, 2);
    }
    memory_.write(bytes);
  }
  const std::byte* data() const { return memory_.data() + offset(); }
  std::vector<float> rounded;

 private:
  std::size_t offset() const {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return (256 - address % 256) % 256 + Arena::kAlignment;
  }
  DeviceArray<std::byte> memory_;
};

TEST(Gemm, TakesAddressesOfAnArena) {
  const GemmLibrary library;
  if (!library.loaded()) GTEST_SKIP() << "no cuBLASLt here";
  DeviceArray<std::byte> workspace(kGemmWorkspaceBytes);  // cudaMalloc aligns to 256
  unsigned seed = 1;
  for (const int tokens : {65, 120, 512}) {
    for (const int rows : {32, 1000, 2048}) {
      constexpr int kCols = 256;
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(rows) + " rows");
      const auto numbers = [&](int count) {
        return random_floats(static_cast<std::size_t>(count) * kCols, ++seed);
      };
      const Moved w(numbers(rows));
      const Moved x(numbers(tokens));
      const std::size_t count = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(rows);
      const std::size_t shift = Arena::kAlignment / sizeof(float);
      DeviceArray<float> y(count + shift);
      Gemm(library, tokens, rows, kCols, GemmOut::kF32, false, false)
          .run(w.data(), x.data(), nullptr, nullptr, y.data() + shift, workspace.data(), nullptr);
      const std::vector<float> got = y.read();
      double worst = 0;
      for (int t = 0; t < tokens; t += 7) {
        for (int r = 0; r < rows; r += 5) {
          double sum = 0;
          for (int c = 0; c < kCols; ++c) {
            sum += static_cast<double>(x.rounded[static_cast<std::size_t>(t * kCols + c)]) *
                   w.rounded[static_cast<std::size_t>(r * kCols + c)];
          }
          const std::size_t at = static_cast<std::size_t>(t) * static_cast<std::size_t>(rows) +
                                 static_cast<std::size_t>(r) + shift;
          worst = std::max(worst, std::abs(sum - got[at]));
        }
      }
      EXPECT_LT(worst, 1e-3);
    }
  }
}

}  // namespace
}  // namespace pianola::cuda
