// How fast attention runs for all layers of one step, beside what this machine can do: a plain read
// of the same caches, and multiply-adds in a loop of their own.
//
//   attention_bench --benchmark_filter='decode/smollm2/f16/.*/4096/2'
//
// Names: decode/MODEL/TYPE/ISA/DEPTH/THREADS, one token; prefill/MODEL/TYPE/ISA/TOKENS/THREADS,
// from an empty cache. Time is wall time of all layers, each with a cache of its own; `GB/s` counts
// the keys and values that are attended to once, `GFLOPS` a multiplication and an addition as two.
// Before timing, the result is compared with the portable kernels.
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

#include "backends/cpu/kernels/attention.h"
#include "base/thread_pool.h"
#include "cache/cache_type.h"
#include "cache/layer_cache.h"

namespace pianola::cpu {
namespace {

struct Model {
  const char* name;
  int layers, heads, kv_heads, head_dim;
};
constexpr Model kModels[] = {{"smollm2", 30, 9, 3, 64}, {"qwen3-0.6b", 28, 16, 8, 128}};

class Buffer {
 public:
  explicit Buffer(std::size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64}))) {
    std::memset(data_.get(), 0, bytes);
  }
  std::byte* get() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte, Delete> data_;
};

std::vector<float> random_floats(std::size_t n) {
  std::mt19937 engine(static_cast<unsigned>(n));
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = normal(engine);
  return v;
}

// Caches of all layers with `length` positions filled, and a step of the last `tokens` of them.
struct Problem {
  Problem(const Model& m, DType type, int length, int tokens)
      : model(m),
        capacity((length + 63) / 64 * 64),
        layer_bytes(cache_slot_bytes(type, capacity, m.kv_heads, m.head_dim)),
        keys(layer_bytes * static_cast<std::size_t>(m.layers)),
        values(layer_bytes * static_cast<std::size_t>(m.layers)),
        queries(random_floats(static_cast<std::size_t>(tokens * m.heads * m.head_dim))),
        output(queries.size()),
        slots(static_cast<std::size_t>(length)) {
    for (int p = 0; p < length; ++p) positions.push_back(p);
    const int width = m.kv_heads * m.head_dim;
    const std::vector<float> rows = random_floats(static_cast<std::size_t>(length * width + 100));
    for (int layer = 0; layer < m.layers; ++layer) {
      // Each layer starts elsewhere in the random numbers.
      append({detect_isa(), cache(layer, type), length, positions.data(), slots.data(),
              rows.data() + layer, rows.data() + 50 + layer, width},
             0, 1);
    }
    args.tokens = tokens;
    args.heads = m.heads;
    args.scale = 1.0F / std::sqrt(static_cast<float>(m.head_dim));
    args.positions = positions.data() + length - tokens;
    args.slots = slots.data();
    args.queries = queries.data();
    args.query_stride = m.heads * m.head_dim;
    args.output = output.data();
    args.output_stride = args.query_stride;
    args.cache = cache(0, type);
  }

  KvCache cache(int layer, DType type) const {
    const std::size_t at = layer_bytes * static_cast<std::size_t>(layer);
    return {keys.get() + at, values.get() + at, type, capacity, model.kv_heads, model.head_dim};
  }

  void run(ThreadPool& pool, std::byte* scratch) {
    pool.run([&](int worker, int workers) {
      AttentionArgs layer_args = args;
      for (int layer = 0; layer < model.layers; ++layer) {
        layer_args.cache = cache(layer, args.cache.dtype);
        attend(layer_args, scratch, worker, workers);
        if (attention_needs_combine(layer_args, workers)) {
          pool.barrier();
          combine(layer_args, scratch, worker, workers);
        }
        pool.barrier();
      }
    });
  }

  Model model;
  int capacity;
  std::size_t layer_bytes;
  Buffer keys, values;
  std::vector<float> queries, output;
  std::vector<std::int32_t> positions, slots;
  AttentionArgs args;
};

void check(Problem& problem, ThreadPool& pool, std::byte* scratch, Isa isa) {
  problem.args.isa = Isa::kPortable;
  problem.run(pool, scratch);
  const std::vector<float> want = problem.output;
  std::fill(problem.output.begin(), problem.output.end(), NAN);
  problem.args.isa = isa;
  problem.run(pool, scratch);
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (!(std::abs(want[i] - problem.output[i]) < 1e-5F)) {
      fmt::print(stderr, "attention_bench: wrong result, {} for {}\n", problem.output[i], want[i]);
      std::exit(1);
    }
  }
}

void run_attention(benchmark::State& state, Model model, DType dtype, Isa isa, int length,
                   int tokens, int threads) {
  Problem problem(model, dtype, length, tokens);
  ThreadPool pool(threads);
  const Buffer scratch(attention_scratch_bytes(problem.args.cache, model.heads, tokens, threads));
  check(problem, pool, scratch.get(), isa);
  for (auto _ : state) problem.run(pool, scratch.get());
  double attended = 0;  // positions, over all tokens
  for (int t = 0; t < tokens; ++t) attended += length - t;
  using benchmark::Counter;
  state.counters["GFLOPS"] =
      Counter(attended * model.layers * model.heads * model.head_dim * 4 / 1e9,
              Counter::kIsIterationInvariantRate);
  const double position =
      static_cast<double>(cache_slot_bytes(dtype, 64, model.kv_heads, model.head_dim)) / 64;
  state.counters["GB/s"] =
      Counter(2.0 * model.layers * length * position / 1e9, Counter::kIsIterationInvariantRate);
}

#if defined(__x86_64__)
// As many bytes as one decoding step of SmolLM2 at depth 4,096 reads, one stretch for each thread.
__attribute__((target("avx512f"))) void read_bandwidth(benchmark::State& state) {
  constexpr std::int64_t kVectors = 94'371'840 / 64;
  const Buffer data(kVectors * 64);
  ThreadPool pool(static_cast<int>(state.range(0)));
  for (auto _ : state) {
    pool.run([&](int worker, int workers) __attribute__((target("avx512f"))) {
      const std::int64_t end = kVectors / 4 * (worker + 1) / workers;
      const auto* p = reinterpret_cast<const __m512i*>(data.get());
      __m512i a = _mm512_setzero_si512();
      __m512i b = a;
      for (std::int64_t i = kVectors / 4 * worker / workers; i < end; ++i) {
        a = _mm512_or_si512(a, _mm512_or_si512(p[4 * i], p[4 * i + 1]));
        b = _mm512_or_si512(b, _mm512_or_si512(p[4 * i + 2], p[4 * i + 3]));
      }
      alignas(64) int result[16];
      _mm512_store_si512(result, _mm512_or_si512(a, b));
      benchmark::DoNotOptimize(result[0]);
    });
  }
  state.counters["GB/s"] =
      benchmark::Counter(kVectors * 64 / 1e9, benchmark::Counter::kIsIterationInvariantRate);
}

__attribute__((target("avx512f"))) void fma_peak(benchmark::State& state) {
  ThreadPool pool(static_cast<int>(state.range(0)));
  constexpr int kRounds = 100'000;
  for (auto _ : state) {
    pool.run([&](int, int) __attribute__((target("avx512f"))) {
      __m512 acc[10];
      for (auto& a : acc) a = _mm512_set1_ps(1.0F);
      const __m512 x = _mm512_set1_ps(0.999F);
      for (int i = 0; i < kRounds; ++i) {
        for (auto& a : acc) a = _mm512_fmadd_ps(a, x, x);
      }
      alignas(64) float result[16];
      for (auto& a : acc) {
        _mm512_store_ps(result, a);
        benchmark::DoNotOptimize(result[0]);
      }
    });
  }
  state.counters["GFLOPS"] =
      benchmark::Counter(kRounds * 10.0 * 32 / 1e9 * static_cast<double>(state.range(0)),
                         benchmark::Counter::kIsIterationInvariantRate);
}
#endif

void barrier_time(benchmark::State& state) {
  ThreadPool pool(static_cast<int>(state.range(0)));
  for (auto _ : state) {
    pool.run([&](int, int) {
      for (int i = 0; i < 1000; ++i) pool.barrier();
    });
  }
  state.counters["per barrier"] = benchmark::Counter(
      1000, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void register_all() {
  const auto add = [](const std::string& name, auto... rest) {
    benchmark::RegisterBenchmark(name.c_str(), rest...)
        ->UseRealTime()
        ->Unit(benchmark::kMillisecond);
  };
  for (const int threads : {1, 2}) {
    const auto limit = [&](const char* name, void (*run)(benchmark::State&)) {
      benchmark::RegisterBenchmark(name, run)->Arg(threads)->UseRealTime()->Unit(
          benchmark::kMillisecond);
    };
    limit("barrier", barrier_time);
#if defined(__x86_64__)
    if (isa_supported(Isa::kAvx512)) {
      limit("peak/read", read_bandwidth);
      limit("peak/fma", fma_peak);
    }
#endif
  }
  for (const Model& model : kModels) {
    for (const DType dtype : kCacheTypes) {
      for (const Isa isa : supported_isas()) {
        if (isa > Isa::kAvx512) continue;  // the same kernels
        for (const int threads : {1, 2}) {
          const std::string what =
              fmt::format("{}/{}/{}", model.name, dtype_name(dtype), isa_name(isa));
          for (const int depth : {1, 64, 256, 1024, 4096}) {
            add(fmt::format("decode/{}/{}/{}", what, depth, threads), run_attention, model, dtype,
                isa, depth, 1, threads);
          }
          add(fmt::format("verify/{}/8/1024/{}", what, threads), run_attention, model, dtype, isa,
              1024, 8, threads);
          for (const int tokens : {128, 512}) {
            add(fmt::format("prefill/{}/{}/{}", what, tokens, threads), run_attention, model, dtype,
                isa, tokens, tokens, threads);
          }
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
