// How fast the matrix kernels run, beside what this machine can do: a plain read of the same bytes,
// and the multiply instructions of each tier in a loop of their own.
//
//   linear_bench --benchmark_filter='linear/q4_1/amx/576x1536/.*'
//
// Names: linear/TYPE/ISA/ROWSxCOLS/TOKENS. `GOPS` counts a multiplication and an addition as two;
// `GB/s` counts the packed weights once. Before timing, the result is compared with the portable
// kernels.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "backends/cpu/kernels/linear.h"
#include "tensor/half.h"

namespace pianola::cpu {
namespace {

class Buffer {
 public:
  explicit Buffer(std::size_t bytes)
      : data_(static_cast<std::uint8_t*>(::operator new(bytes + 64, std::align_val_t{64}))) {
    std::memset(data_.get(), 0, bytes + 64);
  }
  std::uint8_t* get() { return data_.get(); }

 private:
  struct Delete {
    void operator()(std::uint8_t* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::uint8_t, Delete> data_;
};

// Random codes with small positive scales; one panel's worth, repeated, to be quick for large
// sizes.
std::vector<std::uint8_t> random_rows(DType dtype, int rows, int cols) {
  std::mt19937 random(1);
  const DTypeInfo& info = dtype_info(dtype);
  std::vector<std::uint8_t> file(static_cast<std::size_t>(rows) *
                                 row_bytes(dtype, static_cast<std::size_t>(cols)));
  const std::uint16_t scale = f32_to_f16(0.01F);
  for (std::size_t at = 0; at < file.size(); at += info.bytes) {
    for (std::size_t i = 0; i < info.bytes; ++i) file[at + i] = static_cast<std::uint8_t>(random());
    if (dtype == DType::kF32) {
      const float value = static_cast<float>(random() % 1000) * 1e-4F - 0.05F;
      std::memcpy(&file[at], &value, 4);
    } else if (!is_quantized(dtype)) {
      file[at + 1] = static_cast<std::uint8_t>(0x38 | (file[at + 1] & 0x83));
    } else {
      std::memcpy(&file[at + (dtype == DType::kQ6_K ? 208 : 0)], &scale, 2);
      if (info.elements == 256 || dtype == DType::kQ4_1 || dtype == DType::kQ5_1) {
        std::memcpy(&file[at + (dtype == DType::kQ6_K ? 208 : 2)], &scale, 2);
      }
    }
  }
  return file;
}

struct Problem {
  DType dtype;
  int rows;
  int cols;
  int tokens;
  Isa isa;
};

void run_linear(benchmark::State& state, const Problem& p) {
  constexpr int kSample = 256;  // rows of the random file, repeated through the matrix
  const int sample = std::min(kSample, p.rows);
  const std::vector<std::uint8_t> file = random_rows(p.dtype, sample, p.cols);
  Buffer packed(packed_bytes(p.dtype, p.rows, p.cols));
  const std::size_t part = packed_bytes(p.dtype, sample, p.cols);
  pack_rows(p.dtype, file.data(), sample, p.cols, packed.get(), 0, sample);
  for (int row = sample; row < p.rows; row += sample) {
    const std::size_t bytes = packed_bytes(p.dtype, std::min(sample, p.rows - row), p.cols);
    std::memcpy(packed.get() + static_cast<std::size_t>(row / sample) * part, packed.get(), bytes);
  }
  std::vector<float> x(static_cast<std::size_t>(p.tokens * p.cols));
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (float& v : x) v = normal(random);
  std::vector<float> y(static_cast<std::size_t>(p.tokens) * static_cast<std::size_t>(p.rows));
  const ActivationKind kind = activation_kind(p.dtype, p.isa);
  Buffer prepared(activation_bytes(kind, p.tokens, p.cols));
  Buffer scratch(linear_scratch_bytes(p.dtype, p.isa, p.tokens, p.cols));
  const PackedWeight weight{p.dtype, packed.get(), p.rows, p.cols};
  const auto prepare = [&] {
    prepare_activations(kind, p.isa, x.data(), p.cols, p.tokens, p.cols, prepared.get(), 0,
                        p.tokens);
  };
  const auto multiply = [&] {
    linear(weight, prepared.get(), p.tokens, 0, p.rows, y.data(), p.rows, scratch.get(), p.isa);
  };
  prepare();
  multiply();
  {
    std::vector<float> reference(static_cast<std::size_t>(sample));
    const ActivationKind plain = activation_kind(p.dtype, Isa::kPortable);
    Buffer one(activation_bytes(plain, 1, p.cols));
    prepare_activations(plain, Isa::kPortable, x.data() + (p.tokens - 1) * p.cols, p.cols, 1,
                        p.cols, one.get(), 0, 1);
    linear({p.dtype, packed.get(), sample, p.cols}, one.get(), 1, 0, sample, reference.data(),
           sample, nullptr, Isa::kPortable);
    const float* last =
        y.data() + static_cast<std::size_t>(p.tokens - 1) * static_cast<std::size_t>(p.rows);
    for (int n = 0; n < sample; ++n) {
      const double bound =
          1e-3 + 0.02 * std::fabs(static_cast<double>(reference[static_cast<std::size_t>(n)]));
      if (!(std::fabs(last[n] - reference[static_cast<std::size_t>(n)]) <=
            bound * std::sqrt(p.cols))) {
        state.SkipWithError("differs from the portable kernel");
        return;
      }
    }
  }
  for (auto _ : state) {
    multiply();
    benchmark::ClobberMemory();
  }
  const double per_second = static_cast<double>(state.iterations());
  using Counter = benchmark::Counter;
  state.counters["GB/s"] =
      Counter(per_second * static_cast<double>(packed_bytes(p.dtype, p.rows, p.cols)) * 1e-9,
              Counter::kIsRate);
  state.counters["GOPS"] =
      Counter(per_second * 2e-9 * p.rows * p.cols * p.tokens, Counter::kIsRate);
}

void run_prepare(benchmark::State& state, Isa isa, int tokens, int cols) {
  std::vector<float> x(static_cast<std::size_t>(tokens * cols), 0.5F);
  Buffer out(activation_bytes(ActivationKind::kInt8, tokens, cols));
  for (auto _ : state) {
    prepare_activations(ActivationKind::kInt8, isa, x.data(), cols, tokens, cols, out.get(), 0,
                        tokens);
    benchmark::ClobberMemory();
  }
  state.counters["Gvalues/s"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * 1e-9 * tokens * cols, benchmark::Counter::kIsRate);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"), noinline)) std::int64_t read_bytes(const std::uint8_t* p,
                                                                     std::size_t bytes) {
  __m512i sum[8] = {};
  for (std::size_t i = 0; i < bytes; i += 512) {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < 8; ++j) {
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(p + i + 64 * j));
    }
  }
  for (int j = 1; j < 8; ++j) sum[0] = _mm512_xor_si512(sum[0], sum[j]);
  std::int64_t lanes[8];
  _mm512_storeu_si512(lanes, sum[0]);
  return lanes[0] ^ lanes[7];
}

void run_read(benchmark::State& state, std::size_t bytes) {
  Buffer buffer(bytes);
  std::memset(buffer.get(), 1, bytes);
  for (auto _ : state) benchmark::DoNotOptimize(read_bytes(buffer.get(), bytes));
  state.counters["GB/s"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * static_cast<double>(bytes) * 1e-9,
      benchmark::Counter::kIsRate);
}

__attribute__((target("avx512f,avx512vnni"), noinline)) void vnni_peak(benchmark::State& state) {
  __m512i acc[16] = {};
  const __m512i a = _mm512_set1_epi8(3);
  __m512i b = _mm512_set1_epi8(5);
  for (auto _ : state) {
    for (int i = 0; i < 1000; ++i) {
      asm volatile("" : "+v"(b));
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) acc[j] = _mm512_dpbusd_epi32(acc[j], a, b);
    }
    for (int j = 0; j < 16; ++j) asm volatile("" : "+v"(acc[j]));
  }
  state.counters["GOPS"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * 16e3 * 128e-9, benchmark::Counter::kIsRate);
}

__attribute__((target("amx-tile,amx-int8"), noinline)) void amx_peak(benchmark::State& state) {
  alignas(64) std::uint8_t config[64] = {1};
  for (int i = 0; i < 8; ++i) {
    config[16 + 2 * i] = 64;
    config[48 + i] = 16;
  }
  alignas(64) static std::uint8_t data[1024];
  _tile_loadconfig(config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, data, 64);
  _tile_loadd(5, data, 64);
  _tile_loadd(6, data, 64);
  _tile_loadd(7, data, 64);
  for (auto _ : state) {
    for (int i = 0; i < 1000; ++i) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_release();
  state.counters["GOPS"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * 4e3 * 32768e-9, benchmark::Counter::kIsRate);
}
#endif

void register_all() {
#if defined(__x86_64__)
  if (isa_supported(Isa::kAvx512)) {
    for (const std::size_t mib : {1, 32, 600}) {
      benchmark::RegisterBenchmark(fmt::format("read/{}MiB", mib).c_str(), run_read, mib << 20);
    }
    benchmark::RegisterBenchmark("peak/avx512", vnni_peak);
  }
  if (isa_supported(Isa::kAmx)) benchmark::RegisterBenchmark("peak/amx", amx_peak);
#endif
  for (const Isa isa : supported_isas()) {
    for (const int tokens : {1, 512}) {
      benchmark::RegisterBenchmark(fmt::format("prepare/{}/576/{}", isa_name(isa), tokens).c_str(),
                                   run_prepare, isa, tokens, 576);
    }
  }
  constexpr std::pair<int, int> kShapes[] = {{576, 576},   {1536, 576},  {576, 1536},
                                             {49152, 576}, {4096, 4096}, {131072, 4096}};
  for (const DType dtype :
       {DType::kQ4_1, DType::kQ4_0, DType::kQ5_0, DType::kQ5_1, DType::kQ8_0, DType::kQ4_K,
        DType::kQ5_K, DType::kQ6_K, DType::kF32, DType::kF16, DType::kBF16}) {
    for (const auto& [rows, cols] : kShapes) {
      // K types hold 256 values a block.
      const int fit = dtype_info(dtype).elements == 256 && cols % 256 != 0 ? 512 : cols;
      for (const Isa isa : supported_isas()) {
        for (const int tokens : {1, 2, 4, 8, 16, 32, 512}) {
          if (rows > 5000 && tokens > 8) continue;
          benchmark::RegisterBenchmark(fmt::format("linear/{}/{}/{}x{}/{}", dtype_name(dtype),
                                                   isa_name(isa), rows, fit, tokens)
                                           .c_str(),
                                       run_linear, Problem{dtype, rows, fit, tokens, isa});
        }
      }
    }
  }
}

}  // namespace
}  // namespace pianola::cpu

int main(int argc, char** argv) {
  pianola::cpu::register_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
