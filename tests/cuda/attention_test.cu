// The attention kernels against double precision on fresh random inputs. Every cache position that
// no token has written holds NaN, as do outputs before a launch and the scratch beyond its
// counters.
#include "backends/cuda/kernels/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/cuda/kernels/attention_common.cuh"
#include "backends/cuda/kernels/linear.h"
#include "backends/reference/ops.h"
#include "tensor/half.h"

namespace pianola::cuda {
namespace {

void ok(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(const std::vector<T>& host) : size_(host.size()) {
    ok(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(size_, 1) * sizeof(T)));
    write(host);
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }
  void write(const std::vector<T>& host) {
    ok(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> read() const {
    std::vector<T> host(size_);
    ok(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  DType dtype = DType::kBF16;
  int heads = 4;
  int kv_heads = 2;
  int key_dim = 64;
  int value_dim = 64;
  int capacity = 320;
  int slots = 4;
  RopeStyle style = RopeStyle::kHalf;
  bool norms = false;
  float attention_factor = 1;
  int window = 0;  // 0: none; then `capacity` is that of a ring
  bool sinks = false;
  int turned = 0;  // elements of a head that rope turns; 0: all

  int turned_half() const {
    return style == RopeStyle::kNone ? 0 : (turned > 0 ? turned : key_dim) / 2;
  }
  std::size_t slot_bytes(int dim) const { return cache_slot_bytes(dtype, capacity, kv_heads, dim); }
  bool has_16_bits() const { return dtype == DType::kF16 || dtype == DType::kBF16; }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(key_dim)); }
  std::string name() const {
    return std::string(dtype_name(dtype)) + " " + std::to_string(heads) + "/" +
           std::to_string(kv_heads) + " heads of " + std::to_string(key_dim) + " and " +
           std::to_string(value_dim) +
           (style == RopeStyle::kHalf   ? ""
            : style == RopeStyle::kNone ? ", no rope"
                                        : ", interleaved") +
           (norms ? ", norms" : "") + (window > 0 ? ", window " + std::to_string(window) : "") +
           (sinks ? ", sinks" : "") + (turned > 0 ? ", turned " + std::to_string(turned) : "");
  }
};

// The same number for the same arguments, so that a token has the same q, k and v in every step.
enum Kind { kQ, kK, kV, kKeyFill, kValueFill, kSink };
float noise(Kind kind, int row, int position, int index) {
  std::uint64_t x =
      (static_cast<std::uint64_t>(kind) << 60) ^ (static_cast<std::uint64_t>(row) << 44) ^
      (static_cast<std::uint64_t>(position) << 22) ^ static_cast<std::uint64_t>(index);
  x = (x + 0x9e3779b97f4a7c15U) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  x ^= x >> 31;
  return (static_cast<float>(x >> 40) / static_cast<float>(1 << 23) - 1.0F) * 1.7F;
}

float rounded(DType dtype, float value) {
  return dtype == DType::kF16 ? f16_to_f32(f32_to_f16(value)) : bf16_to_f32(f32_to_bf16(value));
}

// Tokens of one lane; position -1 is masked.
struct Lane {
  int row = 0;
  std::vector<int> positions;
};
Lane run_of(int row, int first, int count) {
  Lane lane{row, std::vector<int>(static_cast<std::size_t>(count))};
  std::iota(lane.positions.begin(), lane.positions.end(), first);
  return lane;
}

// A layer: its constants and caches, with rows filled up to their lengths. Of a window's layer only
// the positions that the next token attends to are filled.
class Layer {
 public:
  Layer(const Shape& shape, const std::vector<std::pair<int, int>>& row_lengths) : shape_(shape) {
    const int half = shape.turned_half();
    for (int h = 0; h < shape.heads; ++h) {
      sinks.push_back(h == 1 ? 12.0F : 3.0F * noise(kSink, 0, 0, h));
    }
    for (int i = 0; i < half; ++i) {
      frequencies.push_back(std::pow(10000.0F, -static_cast<float>(i) / static_cast<float>(half)));
    }
    for (int i = 0; i < shape.key_dim; ++i) {
      q_norm.push_back(1.0F + 0.3F * noise(kQ, 999, 0, i));
      k_norm.push_back(1.0F + 0.3F * noise(kK, 999, 0, i));
    }
    const auto slots = static_cast<std::size_t>(shape.slots);
    keys.assign(slots * shape.slot_bytes(shape.key_dim), std::byte{0xff});
    values.assign(slots * shape.slot_bytes(shape.value_dim), std::byte{0xff});
    const auto fill = [&](std::vector<std::byte>& bytes, Kind kind, int row, int p, int h,
                          int dim) {
      std::vector<float> head;
      for (int i = 0; i < dim; ++i) head.push_back(noise(kind, row, p, h * 512 + i));
      put(bytes, place(row, p, h, dim), head);
    };
    for (const auto& [row, length] : row_lengths) {
      for (int p = window_begin(length, shape.window); p < length; ++p) {
        for (int h = 0; h < shape.kv_heads; ++h) {
          fill(keys, kKeyFill, row, p, h, shape.key_dim);
          fill(values, kValueFill, row, p, h, shape.value_dim);
        }
      }
    }
    device_keys_ = DeviceArray<std::byte>(keys);
    device_values_ = DeviceArray<std::byte>(values);
    device_frequencies_ = DeviceArray<float>(frequencies);
    device_q_norm_ = DeviceArray<float>(q_norm);
    device_k_norm_ = DeviceArray<float>(k_norm);
    device_sinks_ = DeviceArray<float>(sinks);
  }

  const Shape& shape() const { return shape_; }
  // Where a head of a position lies, in bytes; the scale only of int8.
  struct Place {
    std::size_t elements;
    std::size_t bytes;
    std::size_t scale;
  };
  Place place(int row, int position, int head, int dim) const {
    const std::size_t slot = static_cast<std::size_t>(row) * shape_.slot_bytes(dim);
    const std::size_t index = cache_index(position % shape_.capacity, head, shape_.kv_heads, 1);
    const std::size_t bytes = row_bytes(shape_.dtype, static_cast<std::size_t>(dim));
    return {slot + index * bytes, bytes,
            slot + cache_element_bytes(shape_.dtype, shape_.capacity, shape_.kv_heads, dim) +
                index * sizeof(float)};
  }
  void put(std::vector<std::byte>& bytes, const Place& at, const std::vector<float>& head) const {
    float scale = 0;
    reference::store_head(shape_.dtype, head.data(), static_cast<int>(head.size()),
                          bytes.data() + at.elements, &scale);
    if (has_scales(shape_.dtype)) std::memcpy(bytes.data() + at.scale, &scale, sizeof(scale));
  }
  std::vector<float> get(const std::vector<std::byte>& bytes, const Place& at, int dim) const {
    float scale = 0;
    if (has_scales(shape_.dtype)) std::memcpy(&scale, bytes.data() + at.scale, sizeof(scale));
    std::vector<float> head(static_cast<std::size_t>(dim));
    reference::load_head(shape_.dtype, bytes.data() + at.elements, &scale, dim, head.data());
    return head;
  }
  LayerCacheView view() const {
    LayerCacheView view;
    view.dtype = shape_.dtype;
    view.kv_heads = shape_.kv_heads;
    view.key_dim = shape_.key_dim;
    view.value_dim = shape_.value_dim;
    view.capacity = shape_.capacity;
    view.window = shape_.window;
    view.slots = shape_.slots;
    view.key_slot_bytes = shape_.slot_bytes(shape_.key_dim);
    view.value_slot_bytes = shape_.slot_bytes(shape_.value_dim);
    view.keys = device_keys_.get();
    view.values = device_values_.get();
    return view;
  }
  void constants(HeadsArgs& args) const {
    if (shape_.norms) {
      args.q_norm = device_q_norm_.get();
      args.k_norm = device_k_norm_.get();
      args.q_norm_eps = 1e-5F;
      args.k_norm_eps = 1e-6F;
    }
    args.inverse_frequencies = device_frequencies_.get();
    args.turned = 2 * shape_.turned_half();
    args.style = shape_.style;
    args.attention_factor = shape_.attention_factor;
    args.heads = shape_.heads;
    args.cache = view();
  }
  const float* device_sinks() const { return shape_.sinks ? device_sinks_.get() : nullptr; }
  // Back to what the constructor made.
  void reset() {
    device_keys_.write(keys);
    device_values_.write(values);
  }
  std::vector<std::byte> read_keys() const { return device_keys_.read(); }
  std::vector<std::byte> read_values() const { return device_values_.read(); }

  std::vector<float> frequencies, q_norm, k_norm, sinks;
  std::vector<std::byte> keys, values;  // as made

 private:
  Shape shape_;
  DeviceArray<std::byte> device_keys_, device_values_;
  DeviceArray<float> device_frequencies_, device_q_norm_, device_k_norm_, device_sinks_;
};

// The head of q or k that the raw one becomes, as op.h says.
std::vector<double> finished(const Layer& layer, Kind kind, int row, int position, int head) {
  const Shape& shape = layer.shape();
  const int dim = shape.key_dim;
  std::vector<double> x;
  for (int i = 0; i < dim; ++i) x.push_back(noise(kind, row, position, head * dim + i));
  if (shape.norms) {
    double sum = 0;
    for (double v : x) sum += v * v;
    const double scale = 1 / std::sqrt(sum / dim + (kind == kQ ? 1e-5 : 1e-6));
    const std::vector<float>& weight = kind == kQ ? layer.q_norm : layer.k_norm;
    for (int i = 0; i < dim; ++i) x[std::size_t(i)] *= scale * weight[std::size_t(i)];
  }
  const int half = shape.turned_half();
  for (int i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * layer.frequencies[std::size_t(i)];
    const double c = std::cos(static_cast<double>(angle)) * shape.attention_factor;
    const double s = std::sin(static_cast<double>(angle)) * shape.attention_factor;
    const bool halves = shape.style == RopeStyle::kHalf;
    double& a = x[std::size_t(halves ? i : 2 * i)];
    double& b = x[std::size_t(halves ? i + half : 2 * i + 1)];
    const double u = a;
    a = u * c - b * s;
    b = b * c + u * s;
  }
  return x;
}

int multiprocessors() {
  int device = 0;
  int sms = 0;
  ok(cudaGetDevice(&device));
  ok(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  return sms;
}

// Tables, raw heads and outputs of one step on the device.
class Step {
 public:
  Step(const Layer& layer, const std::vector<Lane>& lanes, int bucket) {
    const Shape& shape = layer.shape();
    std::vector<std::int32_t> position, lane_of, first{0}, row_of;
    std::vector<float> q, k, v;
    for (const Lane& lane : lanes) {
      for (int p : lane.positions) {
        position.push_back(p);
        lane_of.push_back(static_cast<int>(row_of.size()));
        for (int i = 0; i < shape.heads * shape.key_dim; ++i)
          q.push_back(noise(kQ, lane.row, p, i));
        for (int i = 0; i < shape.kv_heads * shape.key_dim; ++i) {
          k.push_back(noise(kK, lane.row, p, i));
        }
        for (int i = 0; i < shape.kv_heads * shape.value_dim; ++i) {
          v.push_back(noise(kV, lane.row, p, i));
        }
      }
      first.push_back(static_cast<int>(position.size()));
      row_of.push_back(lane.row);
    }
    tokens_ = static_cast<int>(position.size());
    StepCounts counts;
    counts.tokens = tokens_;
    counts.lanes = static_cast<int>(lanes.size());
    // Padding that looks real but for the counts.
    position.resize(static_cast<std::size_t>(bucket), 3);
    lane_of.resize(static_cast<std::size_t>(bucket), 0);
    const auto wide = static_cast<std::size_t>(bucket);
    q.resize(wide * static_cast<std::size_t>(shape.heads * shape.key_dim), kNan);
    k.resize(wide * static_cast<std::size_t>(shape.kv_heads * shape.key_dim), kNan);
    v.resize(wide * static_cast<std::size_t>(shape.kv_heads * shape.value_dim), kNan);
    position_ = DeviceArray<std::int32_t>(position);
    lane_of_ = DeviceArray<std::int32_t>(lane_of);
    first_ = DeviceArray<std::int32_t>(first);
    row_of.resize((row_of.size() + 31) / 32 * 32, 1 << 20);  // as StepStateLayout makes it
    row_of_ = DeviceArray<std::int32_t>(row_of);
    counts_ = DeviceArray<StepCounts>({counts});
    q_ = DeviceArray<float>(q);
    k_ = DeviceArray<float>(k);
    v_ = DeviceArray<float>(v);
    q_out_ = DeviceArray<float>(std::vector<float>(q.size(), kNan));
    out_ = DeviceArray<float>(
        std::vector<float>(wide * static_cast<std::size_t>(shape.heads * shape.value_dim), kNan));
    const std::size_t bytes = attention_scratch_bytes(bucket, shape.heads, shape.kv_heads,
                                                      shape.value_dim, shape.capacity);
    std::vector<std::byte> scratch(bytes, std::byte{0xff});
    std::fill_n(scratch.begin(), kCounterBytes, std::byte{0});
    scratch_ = DeviceArray<std::byte>(scratch);

    StepState state;
    state.rows = shape.slots;
    state.counts = counts_.get();
    state.position = position_.get();
    state.lane_of = lane_of_.get();
    state.first_token = first_.get();
    state.row_of = row_of_.get();
    layer.constants(heads_args);
    heads_args.q = q_.get();
    heads_args.k = k_.get();
    heads_args.v = v_.get();
    heads_args.q_out = q_out_.get();
    heads_args.state = state;
    heads_args.tokens = bucket;
    args.q = q_out_.get();
    args.out = out_.get();
    args.heads = shape.heads;
    args.scale = shape.scale();
    args.sinks = layer.device_sinks();
    args.cache = layer.view();
    args.state = state;
    args.tokens = bucket;
    args.scratch = scratch_.get();
  }

  int tokens() const { return tokens_; }
  std::vector<float> read_out() const { return out_.read(); }
  std::vector<float> read_q() const { return q_out_.read(); }
  bool counters_are_zero() const {
    const std::vector<std::byte> scratch = scratch_.read();
    return std::all_of(scratch.begin(), scratch.begin() + kCounterBytes,
                       [](std::byte b) { return b == std::byte{0}; });
  }

  HeadsArgs heads_args;
  AttentionArgs args;

 private:
  int tokens_ = 0;
  DeviceArray<std::int32_t> position_, lane_of_, first_, row_of_;
  DeviceArray<StepCounts> counts_;
  DeviceArray<float> q_, k_, v_, q_out_, out_;
  DeviceArray<std::byte> scratch_;
};

enum class Route { kSeparate, kFused, kChunk };
struct Result {
  std::vector<float> q, out;  // [bucket, heads * dim]
  std::vector<std::byte> keys, values;
};

void launch(const Step& step, Route route, const Launch& on) {
  if (route != Route::kFused) finish_heads(step.heads_args, on);
  if (route == Route::kChunk) {
    attend_chunk(step.args, on);
  } else {
    attend(step.args, route == Route::kFused ? &step.heads_args : nullptr, on);
  }
}

Result run(Layer& layer, const std::vector<Lane>& lanes, int bucket, Route route) {
  layer.reset();
  const Step step(layer, lanes, bucket);
  Launch on;
  on.sms = multiprocessors();
  launch(step, route, on);
  ok(cudaGetLastError());
  ok(cudaDeviceSynchronize());
  EXPECT_TRUE(step.counters_are_zero());
  return {step.read_q(), step.read_out(), layer.read_keys(), layer.read_values()};
}

bool same_bits(const float* a, const float* b, std::size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

// Keys and values of the step's tokens are what they should be, and nothing else has changed.
void check_cache(const Layer& layer, const std::vector<Lane>& lanes, const Result& result) {
  const Shape& shape = layer.shape();
  std::vector<std::byte> keys = layer.keys;
  std::vector<std::byte> values = layer.values;
  const double step = shape.dtype == DType::kF32   ? 4e-6
                      : shape.dtype == DType::kF16 ? 1e-3
                      : shape.has_16_bits()        ? 8e-3
                                                   : 7e-2;
  for (const Lane& lane : lanes) {
    for (int p : lane.positions) {
      if (p < 0) continue;
      for (int h = 0; h < shape.kv_heads; ++h) {
        const std::vector<double> k = finished(layer, kK, lane.row, p, h);
        const Layer::Place at = layer.place(lane.row, p, h, shape.key_dim);
        const std::vector<float> got = layer.get(result.keys, at, shape.key_dim);
        for (std::size_t i = 0; i < k.size(); ++i) {
          ASSERT_NEAR(got[i], k[i], step * (1 + std::abs(k[i])))
              << shape.name() << " key of row " << lane.row << " position " << p << " head " << h
              << " element " << i;
        }
        std::copy_n(result.keys.begin() + std::ptrdiff_t(at.elements), at.bytes,
                    keys.begin() + std::ptrdiff_t(at.elements));
        if (has_scales(shape.dtype)) {
          std::copy_n(result.keys.begin() + std::ptrdiff_t(at.scale), sizeof(float),
                      keys.begin() + std::ptrdiff_t(at.scale));
        }
        std::vector<float> v;
        for (int i = 0; i < shape.value_dim; ++i) {
          v.push_back(noise(kV, lane.row, p, h * shape.value_dim + i));
        }
        layer.put(values, layer.place(lane.row, p, h, shape.value_dim), v);
      }
    }
  }
  EXPECT_TRUE(keys == result.keys) << shape.name() << ": other keys have changed";
  EXPECT_TRUE(values == result.values) << shape.name() << ": values differ";
}

// Outputs against double precision on the finished q and the caches that the step left.
void check_out(const Layer& layer, const std::vector<Lane>& lanes, const Result& result,
               bool round_q, double tolerance) {
  const Shape& shape = layer.shape();
  const int group = shape.heads / shape.kv_heads;
  std::size_t token = 0;
  for (const Lane& lane : lanes) {
    for (int position : lane.positions) {
      for (int h = 0; h < shape.heads; ++h) {
        const std::size_t index = token * std::size_t(shape.heads) + std::size_t(h);
        const float* out = result.out.data() + index * std::size_t(shape.value_dim);
        const float* q = result.q.data() + index * std::size_t(shape.key_dim);
        std::vector<double> scores;
        const int begin = window_begin(position, shape.window);
        for (int p = begin; p <= position; ++p) {
          const std::vector<float> key = layer.get(
              result.keys, layer.place(lane.row, p, h / group, shape.key_dim), shape.key_dim);
          double sum = 0;
          for (int i = 0; i < shape.key_dim; ++i) {
            const float x = round_q ? rounded(shape.dtype, q[i]) : q[i];
            sum += double{x} * key[std::size_t(i)];
          }
          scores.push_back(sum * shape.scale());
        }
        const double most = scores.empty() ? 0 : *std::max_element(scores.begin(), scores.end());
        double total = shape.sinks ? std::exp(layer.sinks[std::size_t(h)] - most) : 0;
        for (double& s : scores) total += s = std::exp(s - most);
        std::vector<double> expected(std::size_t(shape.value_dim), 0.0);
        for (int p = begin; p <= position; ++p) {
          const std::vector<float> value = layer.get(
              result.values, layer.place(lane.row, p, h / group, shape.value_dim), shape.value_dim);
          const double weight = scores[std::size_t(p - begin)] / total;
          for (std::size_t i = 0; i < value.size(); ++i) expected[i] += weight * value[i];
        }
        for (int i = 0; i < shape.value_dim; ++i) {
          ASSERT_NEAR(out[i], expected[std::size_t(i)], position < 0 ? 0 : tolerance)
              << shape.name() << " row " << lane.row << " position " << position << " head " << h
              << " element " << i;
        }
      }
      ++token;
    }
  }
  const std::size_t width = std::size_t(shape.heads) * std::size_t(shape.value_dim);
  for (std::size_t i = token * width; i < result.out.size(); ++i) {
    ASSERT_TRUE(std::isnan(result.out[i])) << shape.name() << ": padding was written";
  }
}

double tolerance(DType dtype) { return dtype == DType::kF32 ? 2e-5 : 1e-4; }

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const auto& [heads, kv_heads] :
         {std::pair{2, 2}, {4, 2}, {9, 3}, {8, 2}, {8, 1}, {12, 1}}) {
      for (const auto& [key, value] :
           {std::pair{64, 64}, {128, 128}, {80, 80}, {32, 32}, {96, 64}, {192, 128}, {256, 256}}) {
        // Every group with the common widths, the other widths with two groups.
        if (key != 64 && key != 128 && heads != 9 && heads != 8) continue;
        Shape shape;
        shape.dtype = dtype;
        shape.heads = heads;
        shape.kv_heads = kv_heads;
        shape.key_dim = key;
        shape.value_dim = value;
        shape.style = heads == 9 ? RopeStyle::kInterleaved : RopeStyle::kHalf;
        shape.norms = heads == 8;
        shape.attention_factor = heads == 4 ? 1.25F : 1.0F;
        if (heads == 12 || key == 80) shape.turned = key / 4;
        all.push_back(shape);
      }
    }
  }
  return all;
}

std::vector<std::pair<int, int>> lengths_before(const std::vector<Lane>& lanes) {
  std::vector<std::pair<int, int>> lengths;
  for (const Lane& lane : lanes) {
    int first = std::numeric_limits<int>::max();
    for (int p : lane.positions) {
      if (p >= 0) first = std::min(first, p);
    }
    if (first != std::numeric_limits<int>::max()) lengths.emplace_back(lane.row, first);
  }
  return lengths;
}

TEST(FinishHeads, MatchesDoublePrecision) {
  for (const Shape& shape : shapes()) {
    std::vector<Lane> lanes = {run_of(2, 61, 7), {3, {-1}}, run_of(0, 0, 2), {1, {255, -1}}};
    Layer layer(shape, {});
    const Result result = run(layer, lanes, 16, Route::kSeparate);
    check_cache(layer, lanes, result);
    std::size_t token = 0;
    const std::size_t width = std::size_t(shape.heads) * std::size_t(shape.key_dim);
    for (const Lane& lane : lanes) {
      for (int p : lane.positions) {
        for (int h = 0; h < shape.heads; ++h) {
          const std::vector<double> q = finished(layer, kQ, lane.row, p, h);
          for (int i = 0; i < shape.key_dim; ++i) {
            const double expected = p < 0 ? 0 : q[std::size_t(i)];
            ASSERT_NEAR(result.q[token * width + std::size_t(h * shape.key_dim + i)], expected,
                        4e-6 * (1 + std::abs(expected)))
                << shape.name() << " position " << p << " head " << h << " element " << i;
          }
        }
        ++token;
      }
    }
    for (std::size_t i = token * width; i < result.q.size(); ++i) {
      ASSERT_TRUE(std::isnan(result.q[i])) << "padding was written";
    }
  }
}

TEST(FinishHeads, LongContextsAndInPlace) {
  Shape shape;
  shape.dtype = DType::kF32;
  shape.heads = 2;
  shape.kv_heads = 1;
  shape.key_dim = shape.value_dim = 32;
  shape.capacity = 131072;
  shape.slots = 1;
  const std::vector<Lane> lanes = {{0, {99999, 105616, 131071}}};
  Layer layer(shape, {});
  Step step(layer, lanes, 3);
  step.heads_args.q_out = const_cast<float*>(step.heads_args.q);
  Launch on;
  on.sms = multiprocessors();
  finish_heads(step.heads_args, on);
  ok(cudaDeviceSynchronize());
  std::vector<float> q(3 * 64);
  ok(cudaMemcpy(q.data(), step.heads_args.q, q.size() * 4, cudaMemcpyDeviceToHost));
  check_cache(layer, lanes, {{}, {}, layer.read_keys(), layer.read_values()});
  for (int t = 0; t < 3; ++t) {
    for (int h = 0; h < 2; ++h) {
      const int position = lanes[0].positions[std::size_t(t)];
      const std::vector<double> expected = finished(layer, kQ, 0, position, h);
      for (int i = 0; i < 32; ++i) {
        ASSERT_NEAR(q[std::size_t((t * 2 + h) * 32 + i)], expected[std::size_t(i)], 4e-6);
      }
    }
  }
}

// Both routes at once: bits of the fused one are those of the separate one, and those are right.
void check_decode(const Shape& shape, const std::vector<Lane>& lanes, int bucket) {
  Layer layer(shape, lengths_before(lanes));
  const Result separate = run(layer, lanes, bucket, Route::kSeparate);
  check_out(layer, lanes, separate, false, tolerance(shape.dtype));
  const Result fused = run(layer, lanes, bucket, Route::kFused);
  check_cache(layer, lanes, fused);
  EXPECT_TRUE(same_bits(separate.out.data(), fused.out.data(), fused.out.size())) << shape.name();
  EXPECT_TRUE(separate.keys == fused.keys) << shape.name();
  EXPECT_TRUE(separate.values == fused.values) << shape.name();
}

TEST(Attend, EveryShapeMatchesDoublePrecision) {
  for (const Shape& shape : shapes()) {
    check_decode(shape, {run_of(2, 60, 9), {3, {-1}}, run_of(0, 0, 2), {1, {255, -1}}}, 16);
    if (HasFatalFailure()) return;
  }
}

TEST(Attend, LengthsAtEdges) {
  const int edges[] = {0,   1,   15,  16,  17,  62,  63,   64,   65,   126,  127,  128,
                       129, 191, 192, 255, 256, 257, 2047, 2048, 2049, 4095, 4096, 8191};
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (int kv_heads : {2, 8}) {  // up to 64 and up to 32 splits
      Shape shape;
      shape.dtype = dtype;
      shape.heads = kv_heads;
      shape.kv_heads = kv_heads;
      shape.key_dim = shape.value_dim = kv_heads == 2 ? 64 : 32;
      shape.capacity = 8192;
      shape.slots = 24;
      std::vector<Lane> lanes;
      for (int i = 0; i < 24; ++i) lanes.push_back({23 - i, {edges[i]}});
      check_decode(shape, lanes, 32);
      if (HasFatalFailure()) return;
    }
  }
}

constexpr DType kCacheTypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kI8,
                                 DType::kF8E4M3};

// Heads of every width that has kernels of its own, in every type of cache.
std::vector<Shape> small_shapes() {
  std::vector<Shape> all;
  for (DType dtype : kCacheTypes) {
    for (int dim : {32, 64, 80, 128, 256}) {
      Shape shape;
      shape.dtype = dtype;
      shape.key_dim = shape.value_dim = dim;
      shape.capacity = 128;
      shape.slots = 3;
      shape.norms = dim == 80;
      shape.style = dim == 128 ? RopeStyle::kInterleaved : RopeStyle::kHalf;
      if (dim == 32 || dim == 128) shape.turned = dim / 2;
      all.push_back(shape);
    }
  }
  return all;
}

TEST(Attend, SmallShapesMatchDoublePrecision) {
  for (const Shape& shape : small_shapes()) {
    check_decode(shape, {run_of(2, 62, 3), {1, {-1}}, {0, {127}}}, 8);
    if (HasFatalFailure()) return;
  }
}

TEST(Attend, SmallHeadsWithoutRopeMatchDoublePrecision) {
  for (Shape shape : small_shapes()) {
    shape.style = RopeStyle::kNone;
    check_decode(shape, {run_of(2, 62, 3), {1, {-1}}, {0, {127}}}, 8);
    check_decode(shape, {{0, {100}}}, 1);
    if (HasFatalFailure()) return;
  }
}

// --- Heads of 256, which have a kernel of their own on tensor cores. ---

// `group` heads on each kv head, more than eight of them in two parts.
Shape wide_shape(DType dtype, int group, int kv_heads, int capacity) {
  Shape shape;
  shape.dtype = dtype;
  shape.heads = group * kv_heads;
  shape.kv_heads = kv_heads;
  shape.key_dim = shape.value_dim = 256;
  shape.capacity = capacity;
  shape.norms = group == 4;
  shape.style = group == 1 ? RopeStyle::kInterleaved : RopeStyle::kHalf;
  if (group == 8) shape.turned = 64;
  return shape;
}

// Tokens on both sides of a block's end, of where a rank has a second block and of where all have;
// a run whose first tokens are split into fewer ranks than its last ones.
TEST(Attend, WideHeadsMatchDoublePrecision) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int group : {1, 3, 4, 8, 12}) {
      for (const bool sinks : {false, true}) {
        if (sinks && group != 4) continue;
        Shape shape = wide_shape(dtype, group, group == 8 ? 2 : 1, 4160);
        shape.sinks = sinks;
        shape.slots = 12;
        std::vector<Lane> lanes = {{0, {-1}}};
        for (const int position : {0, 15, 63, 64, 1023, 1024, 1087, 2047, 2048, 4159}) {
          lanes.push_back({static_cast<int>(lanes.size()), {position}});
        }
        lanes.push_back(run_of(11, 930, 40));
        lanes.back().positions.push_back(-1);
        check_decode(shape, lanes, 64);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Attend, SmallWideHeadsMatchDoublePrecision) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int group : {1, 4, 8}) {
      for (const int window : {0, 70}) {
        Shape shape = wide_shape(dtype, group, 1, 192);
        shape.slots = 3;
        shape.window = window;
        shape.sinks = window > 0 && group == 4;
        check_decode(shape, {run_of(2, 62, 4), {1, {-1}}, {0, {150}}}, 8);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Steps of one token, of a few and of as many as the class has.
TEST(Attend, WideHeadsInStepsOfAnySizeGiveTheSameBits) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const auto& [group, window] : {std::pair{1, 0}, {4, 0}, {8, 0}, {4, 512}, {8, 90}}) {
      Shape shape = wide_shape(dtype, group, 1, window > 0 ? 640 : 1216);
      shape.slots = 2;
      shape.window = window;
      const int start = 1090;
      const int count = 64;
      const auto width = static_cast<std::size_t>(shape.heads * shape.value_dim);
      Layer layer(shape, {{1, start}, {0, 130}});
      const Result whole = run(layer, {run_of(1, start, count)}, 64, Route::kFused);
      for (const int size : {1, 2, 5, 17, 33}) {
        layer.reset();
        for (int done = 0; done < count; done += size) {
          const int now = std::min(size, count - done);
          const Step step(layer, {{0, {-1, 130}}, run_of(1, start + done, now)}, now + 7);
          Launch on;
          on.sms = multiprocessors();
          launch(step, done % 3 == 0 ? Route::kSeparate : Route::kFused, on);
          ok(cudaDeviceSynchronize());
          const std::vector<float> out = step.read_out();
          ASSERT_TRUE(same_bits(out.data() + 2 * width,
                                whole.out.data() + static_cast<std::size_t>(done) * width,
                                static_cast<std::size_t>(now) * width))
              << shape.name() << " from " << start + done << " in steps of " << size;
        }
      }
    }
  }
}

// --- Windows and sinks. ---

// A ring as the engine makes it, for steps of up to `tokens` of a row.
Shape windowed(DType dtype, int dim, int window, int tokens) {
  Shape shape;
  shape.dtype = dtype;
  shape.key_dim = shape.value_dim = dim;
  shape.window = window;
  shape.capacity = (window + tokens - 1 + kCacheBlock - 1) / kCacheBlock * kCacheBlock;
  shape.slots = 9;
  shape.norms = dim == 256;
  return shape;
}

// Tokens on both sides of where a window begins to move, and a run across the end of the ring.
std::vector<Lane> lanes_at_edges(const Shape& shape, int tokens) {
  const int w = shape.window;
  std::vector<Lane> lanes = {{2, {-1}}};
  int row = 3;
  for (const int position : {w - 1, w, w + 1, 2 * w, 2 * w + 1}) {
    lanes.push_back({row++, {position}});
  }
  lanes.push_back(run_of(1, 3 * shape.capacity - tokens / 2, tokens));
  lanes.push_back(run_of(0, std::max(0, w - tokens / 2), tokens));
  return lanes;
}

TEST(Attend, WindowsMatchDoublePrecision) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const int dim : {64, 80, 128, 256}) {
      for (const int window : {1, 16, 64, 100, 513, 1100}) {
        Shape shape = windowed(dtype, dim, window, 20);
        shape.sinks = window % 2 == 0;
        if (window == 100) shape.heads = 12;
        check_decode(shape, lanes_at_edges(shape, 20), 64);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Attend, SmallWindowsMatchDoublePrecision) {
  for (const DType dtype : kCacheTypes) {
    for (const int dim : {32, 64, 80, 128, 256}) {
      Shape shape = windowed(dtype, dim, 70, 4);
      shape.sinks = dim != 64;
      check_decode(shape, lanes_at_edges(shape, 3), 16);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Attend, SmallSinksMatchDoublePrecision) {
  for (const Shape& base : small_shapes()) {
    Shape shape = base;
    shape.sinks = true;
    check_decode(shape, {run_of(2, 62, 3), {1, {-1}}, {0, {127}}}, 8);
    if (HasFatalFailure()) return;
  }
}

// --- Tokens of a lane each, which have a kernel of their own. ---

// What that kernel is compiled for, with `capacity` positions or with a window of `window` in steps
// of up to `tokens` of a row.
std::vector<Shape> one_token_shapes(int capacity, int window, int tokens = 1) {
  std::vector<Shape> all;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int dim : {64, 128}) {
      Shape shape;
      shape.dtype = dtype;
      shape.key_dim = shape.value_dim = dim;
      shape.capacity = capacity;
      shape.attention_factor = 1.25F;
      shape.slots = 2;
      shape.heads = 8;
      all.push_back(shape);
      shape.heads = 4;
      shape.norms = true;
      shape.kv_heads = 1;
      all.push_back(shape);
      shape.heads = 6;
      shape.norms = false;
      shape.kv_heads = 2;
      shape.style = RopeStyle::kInterleaved;
      all.push_back(shape);
      Shape ring = windowed(dtype, dim, window, tokens);
      ring.heads = 8;
      ring.kv_heads = 1;
      ring.norms = true;
      all.push_back(ring);
      ring.sinks = true;
      ring.norms = false;
      all.push_back(ring);
    }
  }
  return all;
}

void check_one_token(const std::vector<Shape>& shapes, std::initializer_list<int> positions) {
  for (const Shape& shape : shapes) {
    for (const int position : positions) {
      check_decode(shape, {{1, {position}}}, 1);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Attend, OneTokenMatchesDoublePrecision) {
  check_one_token(one_token_shapes(4224, 1100), {-1, 0, 1, 15, 16, 17, 63, 64, 200, 1023, 1024,
                                                 1087, 1100, 1101, 2047, 2048, 2111, 2112, 4159});
}

TEST(Attend, SmallOneTokenMatchesDoublePrecision) {
  check_one_token(one_token_shapes(192, 70), {-1, 0, 78, 150});
}

// A lane of each length, as many as there may be, and the first few of them: every launch has
// thread blocks of its own for a token. The bits are those of attend_tensor() after finish_heads(),
// and of each token alone.
void check_lanes(Shape shape, const std::vector<int>& lengths) {
  shape.slots = kDecodeTokens;
  std::vector<Lane> lanes;
  for (int i = 0; i < shape.slots; ++i) {
    lanes.push_back({i, {lengths[std::size_t(i) % lengths.size()] - 1}});
  }
  Launch on;
  on.sms = multiprocessors();
  Layer layer(shape, lengths_before(lanes));
  const std::size_t width = std::size_t(shape.heads * shape.value_dim);
  std::vector<float> alone;
  for (const Lane& lane : lanes) {
    const Step step(layer, {lane}, 1);
    launch(step, Route::kFused, on);
    ok(cudaDeviceSynchronize());
    const std::vector<float> out = step.read_out();
    alone.insert(alone.end(), out.begin(), out.end());
  }
  for (const int count : {2, 5, 8, 16, 17, 32, 33, 64}) {
    const std::vector<Lane> some(lanes.begin(), lanes.begin() + count);
    for (const Route route : {Route::kFused, Route::kSeparate}) {
      layer.reset();
      const Step step(layer, some, std::min(count + count % 2 * 7, kDecodeTokens));
      launch(step, route, on);
      ok(cudaDeviceSynchronize());
      ASSERT_TRUE(same_bits(step.read_out().data(), alone.data(), std::size_t(count) * width))
          << shape.name() << ", " << count << " lanes, "
          << (route == Route::kFused ? "fused" : "after finish_heads");
    }
  }
  const Result fused = run(layer, lanes, kDecodeTokens, Route::kFused);
  const Result separate = run(layer, lanes, kDecodeTokens, Route::kSeparate);
  EXPECT_TRUE(fused.keys == separate.keys) << shape.name();
  EXPECT_TRUE(fused.values == separate.values) << shape.name();
}

TEST(Attend, TokensOfManyLanesHaveTheBitsOfOneAlone) {
  for (const Shape& shape : one_token_shapes(2112, 300)) {
    check_lanes(shape, {1, 15, 16, 17, 63, 64, 65, 512, 1023, 1024, 1025, 2049});
    if (HasFatalFailure()) return;
  }
}

// So many items that each has one thread block, up to more than there is room for at once.
TEST(Attend, TokensOfManyLanesAndHeadsHaveTheBitsOfOneAlone) {
  for (const int dim : {64, 128}) {
    for (const int kv_heads : {8, 4}) {
      Shape shape;
      shape.heads = 32;
      shape.kv_heads = kv_heads;
      shape.key_dim = shape.value_dim = dim;
      shape.capacity = 1152;
      check_lanes(shape, {1, 16, 17, 64, 65, 512, 1090});
      if (HasFatalFailure()) return;
    }
  }
}

// Lanes of one token beside some of several, whose tokens need each other's keys where they share a
// block, and not where a block's end is between them; masked tokens and padding.
TEST(Attend, LanesOfOneTokenAndOfSeveralMatchDoublePrecision) {
  for (Shape shape : one_token_shapes(1216, 300, 9)) {
    shape.slots = 8;
    check_decode(shape,
                 {{3, {700}},
                  run_of(2, 1020, 9),
                  {1, {-1}},
                  {0, {1100}},
                  run_of(4, 60, 5),
                  {5, {0}},
                  {6, {511, -1}},
                  run_of(7, 0, 3)},
                 32);
    if (HasFatalFailure()) return;
  }
}

TEST(Attend, SmallLanesOfOneTokenAndOfSeveralMatchDoublePrecision) {
  for (Shape shape : one_token_shapes(192, 70, 3)) {
    shape.slots = 5;
    check_decode(shape, {{3, {150}}, run_of(2, 62, 3), {1, {-1}}, {0, {64}}, {4, {0}}}, 8);
    if (HasFatalFailure()) return;
  }
}

// Deep enough for every ring of tiles to turn several times, in a few long rows and in many.
TEST(Attend, DeepLanesMatchDoublePrecision) {
  for (Shape shape : one_token_shapes(5056, 3000)) {
    if (shape.dtype == DType::kF16) continue;
    shape.slots = 40;
    check_decode(shape, {{0, {4999}}}, 1);
    check_decode(shape, {{0, {4999}}, {1, {5055}}, {2, {300}}}, 3);
    std::vector<Lane> lanes;
    for (int i = 0; i < 40; ++i) lanes.push_back({i, {i % 8 == 0 ? 4990 + i : 10 * i}});
    check_decode(shape, lanes, 64);
    if (HasFatalFailure()) return;
  }
}

// A token's bits do not depend on the step, the bucket or the capacity of the ring.
TEST(Attend, WindowsInStepsOfAnySizeGiveTheSameBits) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kI8}) {
    for (const int dim : {64, 128, 256}) {
      for (const int window : {20, 300}) {
        if (dtype == DType::kI8 && dim != 128) continue;
        Shape shape = windowed(dtype, dim, window, 64);
        shape.heads = 8;
        shape.slots = 3;
        shape.sinks = dim == 64;
        for (const int start : {0, window - 30 > 0 ? window - 30 : 1, 3 * shape.capacity - 32}) {
          const int count = 64;
          const std::size_t width = std::size_t(shape.heads * dim);
          Layer layer(shape, {{1, start}, {0, 300}});
          const Result whole = run(layer, {run_of(1, start, count)}, 64, Route::kFused);
          for (const int size : {1, 3, 8}) {
            Shape other = shape;
            if (size == 3) other.capacity += 3 * kCacheBlock;
            Layer stepwise(other, {{1, start}, {0, 300}});
            for (int done = 0; done < count; done += size) {
              const int now = std::min(size, count - done);
              const bool alone = done / size % 2 == 0;
              std::vector<Lane> lanes;
              if (!alone) lanes.push_back(run_of(0, 300, 2));
              lanes.push_back(run_of(1, start + done, now));
              const Step step(stepwise, lanes, now + (alone ? 0 : 5));
              Launch on;
              on.sms = multiprocessors();
              launch(step, done % 5 == 0 ? Route::kSeparate : Route::kFused, on);
              ok(cudaDeviceSynchronize());
              const std::vector<float> out = step.read_out();
              const std::size_t skip = alone ? 0 : 2 * width;
              ASSERT_TRUE(same_bits(out.data() + skip, whole.out.data() + std::size_t(done) * width,
                                    std::size_t(now) * width))
                  << shape.name() << " from " << start + done << " in steps of " << size;
            }
          }
        }
      }
    }
  }
}

// A window that nothing has outgrown is none.
TEST(Attend, SmallAWideWindowChangesNoBit) {
  for (const Shape& base : small_shapes()) {
    Shape shape = base;
    const std::vector<Lane> lanes = {run_of(2, 62, 3), {0, {127}}};
    Layer plain(shape, lengths_before(lanes));
    const Result without = run(plain, lanes, 8, Route::kFused);
    shape.window = 128;
    Layer layer(shape, lengths_before(lanes));
    const Result with = run(layer, lanes, 8, Route::kFused);
    EXPECT_TRUE(same_bits(with.out.data(), without.out.data(),
                          4 * std::size_t(shape.heads * shape.value_dim)))
        << shape.name();
  }
}

// Alone, a token's work is spread over more thread blocks than in a large step.
TEST(Attend, AloneAndTogetherGiveTheSameBits) {
  const std::vector<int> positions = {0,    5,    63,   64,   200,  511,  512,  1023, 1024,
                                      1087, 1500, 2047, 2048, 3071, 4095, 6000, 8191};
  for (const auto& [dtype, heads, kv_heads, dim] : {std::tuple{DType::kBF16, 32, 8, 64},
                                                    {DType::kBF16, 6, 2, 128},
                                                    {DType::kF16, 9, 3, 64},
                                                    {DType::kF16, 9, 1, 80},
                                                    {DType::kF32, 4, 2, 64},
                                                    {DType::kI8, 4, 2, 64},
                                                    {DType::kF8E4M3, 2, 1, 128},
                                                    {DType::kF16, 2, 2, 256},
                                                    {DType::kF16, 16, 2, 256},
                                                    {DType::kBF16, 4, 1, 256}}) {
    Shape shape;
    shape.dtype = dtype;
    shape.heads = heads;
    shape.kv_heads = kv_heads;
    shape.key_dim = shape.value_dim = dim;
    if (heads % 3 == 0) shape.style = RopeStyle::kInterleaved;
    shape.capacity = 8192;
    shape.slots = static_cast<int>(positions.size());
    std::vector<Lane> lanes;
    for (int i = 0; i < shape.slots; ++i) lanes.push_back({i, {positions[std::size_t(i)]}});
    Layer layer(shape, lengths_before(lanes));
    const Result together = run(layer, lanes, 64, Route::kFused);
    const std::size_t width = std::size_t(heads * dim);
    Launch on;
    on.sms = multiprocessors();
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      for (const int bucket : {1, 4}) {
        for (const Route route : {Route::kFused, Route::kSeparate}) {
          const Step step(layer, {lanes[i]}, bucket);
          launch(step, route, on);
          ok(cudaDeviceSynchronize());
          ASSERT_TRUE(same_bits(step.read_out().data(), together.out.data() + i * width, width))
              << shape.name() << " position " << positions[i] << " bucket " << bucket;
        }
      }
    }
  }
}

// A token's bits do not depend on what else the step holds, on its lane, or on the bucket.
TEST(Attend, StepsOfAnySizeGiveTheSameBits) {
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (int dim : {64, 128, 80, 256}) {
      for (int start : {0, 40, 2020}) {  // from 2048 positions on, splits are larger
        Shape shape;
        shape.dtype = dtype;
        shape.heads = 8;
        shape.kv_heads = 2;
        shape.key_dim = shape.value_dim = dim;
        shape.capacity = 4096;
        shape.slots = 3;
        shape.norms = true;
        if (dim == 256) shape.capacity = 2112;
        const int count = 64;
        const std::size_t width = std::size_t(shape.heads * dim);
        Layer layer(shape, {{1, start}, {0, 300}});
        const Result whole = run(layer, {run_of(1, start, count)}, 64, Route::kFused);
        for (int size : {1, 3, 8}) {
          Layer stepwise(shape, {{1, start}, {0, 300}});
          for (int done = 0; done < count; done += size) {
            const int now = std::min(size, count - done);
            // Alone, or behind another lane.
            const bool alone = done / size % 2 == 0;
            std::vector<Lane> lanes;
            if (!alone) lanes.push_back(run_of(0, 300, 2));
            lanes.push_back(run_of(1, start + done, now));
            const int bucket = now + (alone ? 0 : 5);
            const Step step(stepwise, lanes, bucket);
            Launch on;
            on.sms = multiprocessors();
            launch(step, Route::kFused, on);
            ok(cudaDeviceSynchronize());
            ASSERT_TRUE(step.counters_are_zero());
            const std::vector<float> out = step.read_out();
            const std::size_t skip = alone ? 0 : 2 * width;
            ASSERT_TRUE(same_bits(out.data() + skip, whole.out.data() + std::size_t(done) * width,
                                  std::size_t(now) * width))
                << shape.name() << " from " << start + done << " in steps of " << size;
          }
          const std::vector<std::byte> keys = stepwise.read_keys();
          const std::size_t bytes = shape.slot_bytes(dim);
          ASSERT_EQ(std::memcmp(keys.data() + bytes, whole.keys.data() + bytes, bytes), 0);
        }
      }
    }
  }
}

// More tokens than one launch takes, in the order of the decode class.
TEST(Attend, ChunksInDecodeOrder) {
  Shape shape;
  const std::vector<Lane> lanes = {run_of(2, 90, 150), {1, {-1}}, run_of(0, 0, 60)};
  Layer layer(shape, lengths_before(lanes));
  const Result many = run(layer, lanes, 300, Route::kSeparate);
  check_out(layer, lanes, many, false, tolerance(shape.dtype));
  Layer before(shape, {{2, 90}});
  const std::size_t width = std::size_t(shape.heads * shape.value_dim);
  const Result few = run(before, {run_of(2, 90, 64)}, 64, Route::kFused);
  EXPECT_TRUE(same_bits(few.out.data(), many.out.data(), 64 * width));
}

TEST(Attend, SlotsDoNotMatter) {
  Shape shape;
  shape.heads = 6;
  shape.kv_heads = 2;
  const std::size_t width = std::size_t(shape.heads * shape.value_dim);
  Layer layer(shape, {{0, 200}, {1, 200}, {2, 77}, {3, 130}});
  const Result alone = run(layer, {{3, {130}}}, 1, Route::kFused);
  const Result last =
      run(layer, {run_of(2, 77, 5), {1, {-1}}, {0, {200}}, {3, {130}}}, 64, Route::kFused);
  EXPECT_TRUE(same_bits(alone.out.data(), last.out.data() + 7 * width, width));
}

// Launches behind each other with programmatic dependent edges, captured, give what single ones do.
void check_dependent(const Shape& shape, const std::vector<Lane>& lanes, int bucket) {
  Layer layer(shape, lengths_before(lanes));
  const Result expected = run(layer, lanes, bucket, Route::kFused);
  layer.reset();
  const Step step(layer, lanes, bucket);
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreate(&stream));
  Launch on;
  on.stream = stream;
  on.sms = multiprocessors();
  on.dependent = true;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < 20; ++i) {
    launch(step, i % 3 == 0 ? Route::kSeparate : i % 3 == 1 ? Route::kFused : Route::kChunk, on);
    if (i % 3 == 2) launch(step, Route::kFused, on);
  }
  ok(cudaStreamEndCapture(stream, &graph));
  ok(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 20; ++i) ok(cudaGraphLaunch(executable, stream));
  ok(cudaStreamSynchronize(stream));
  EXPECT_TRUE(step.counters_are_zero());
  const std::vector<float> out = step.read_out();
  const std::size_t live = std::size_t(step.tokens() * shape.heads * shape.value_dim);
  EXPECT_TRUE(same_bits(out.data(), expected.out.data(), live));
  EXPECT_TRUE(layer.read_keys() == expected.keys);
  ok(cudaGraphExecDestroy(executable));
  ok(cudaGraphDestroy(graph));
  ok(cudaStreamDestroy(stream));
}

void check_dependent(const Shape& shape) {
  check_dependent(shape, {run_of(0, 700, 4), {3, {1000}}, {1, {-1}}, {2, {0}}}, 8);
}

TEST(Attend, DependentLaunchesAgree) {
  Shape shape;
  shape.heads = 8;
  shape.kv_heads = 2;
  shape.capacity = 1024;
  check_dependent(shape);
  shape.window = 150;
  shape.capacity = 192;
  shape.sinks = true;
  check_dependent(shape);
  shape.dtype = DType::kI8;
  check_dependent(shape);
  check_dependent(wide_shape(DType::kBF16, 4, 1, 1024));
  check_dependent(wide_shape(DType::kF16, 8, 2, 1024));
  for (const Shape& one : one_token_shapes(1088, 300)) {
    check_dependent(one, {{0, {1040}}}, 1);
    check_dependent(one, {{1, {40}}}, 1);
    check_dependent(one, {{0, {1040}}, {1, {40}}}, 4);
  }
}

// A head that is not finite has the scale NaN, and a head of zeros stays zeros.
TEST(FinishHeads, SmallEdgesOfInt8) {
  Shape shape;
  shape.dtype = DType::kI8;
  shape.heads = 2;
  shape.capacity = 64;
  shape.slots = 1;
  Layer layer(shape, {});
  const Step step(layer, {run_of(0, 0, 1)}, 1);
  const int dim = shape.value_dim;
  for (const float edge : {kNan, INFINITY, 0.0F}) {
    std::vector<float> v(std::size_t(2 * dim), 0.0F);
    v[5] = edge;
    v[std::size_t(dim + 3)] = -2.0F;
    ok(cudaMemcpy(const_cast<float*>(step.heads_args.v), v.data(), v.size() * sizeof(float),
                  cudaMemcpyHostToDevice));
    Launch on;
    on.sms = multiprocessors();
    finish_heads(step.heads_args, on);
    ok(cudaDeviceSynchronize());
    const std::vector<std::byte> values = layer.read_values();
    const std::vector<float> first = layer.get(values, layer.place(0, 0, 0, dim), dim);
    const std::vector<float> second = layer.get(values, layer.place(0, 0, 1, dim), dim);
    for (int i = 0; i < dim; ++i) {
      if (edge == 0) {
        EXPECT_EQ(first[std::size_t(i)], 0) << i;
      } else {
        EXPECT_TRUE(std::isnan(first[std::size_t(i)])) << i;
      }
      EXPECT_NEAR(second[std::size_t(i)], i == 3 ? -2.0F : 0.0F, 1e-6) << i;
    }
  }
}

void check_chunk(const Shape& shape, const std::vector<Lane>& lanes, int bucket) {
  Layer layer(shape, lengths_before(lanes));
  const Result result = run(layer, lanes, bucket, Route::kChunk);
  check_cache(layer, lanes, result);
  const double rounding = shape.dtype == DType::kF16 ? 1e-3 : 6e-3;
  check_out(layer, lanes, result, shape.has_16_bits(),
            shape.has_16_bits() ? rounding : tolerance(shape.dtype));
}

TEST(AttendChunk, SmallShapesMatchDoublePrecision) {
  for (const Shape& shape : small_shapes()) {
    check_chunk(shape, {run_of(2, 60, 20), {1, {-1, -1}}, run_of(0, 0, 9)}, 40);
    if (HasFatalFailure()) return;
  }
}

TEST(AttendChunk, RaggedLanesMatchDoublePrecision) {
  for (const Shape& base : shapes()) {
    if (base.heads == 12) continue;
    Shape shape = base;
    shape.slots = 6;
    std::vector<Lane> lanes = {
        run_of(5, 0, 129), run_of(3, 70, 64), {2, {-1, -1}}, {1, {200}}, run_of(0, 63, 131)};
    lanes.back().positions.push_back(-1);
    check_chunk(shape, lanes, 400);
    if (HasFatalFailure()) return;
  }
}

std::vector<Shape> windowed_chunk_shapes(std::initializer_list<int> windows, int tokens) {
  std::vector<Shape> all;
  for (const DType dtype : kCacheTypes) {
    for (const int dim : {32, 64, 80, 128, 256}) {
      for (const int window : windows) {
        Shape shape = windowed(dtype, dim, window, tokens);
        shape.sinks = (window + dim) % 3 != 0;
        all.push_back(shape);
      }
    }
  }
  return all;
}

TEST(AttendChunk, SmallWindowsMatchDoublePrecision) {
  for (const Shape& shape : windowed_chunk_shapes({1, 20, 70}, 40)) {
    check_chunk(shape, lanes_at_edges(shape, 40), 90);
    if (HasFatalFailure()) return;
  }
}

TEST(AttendChunk, WindowsMatchDoublePrecision) {
  for (const Shape& shape : windowed_chunk_shapes({64, 300}, 150)) {
    std::vector<Lane> lanes = lanes_at_edges(shape, 150);
    lanes.back().positions.back() = -1;
    check_chunk(shape, lanes, 310);
    if (HasFatalFailure()) return;
  }
}

TEST(AttendChunk, SmallSinksMatchDoublePrecision) {
  for (const Shape& base : small_shapes()) {
    Shape shape = base;
    shape.sinks = true;
    check_chunk(shape, {run_of(2, 60, 20), {1, {-1, -1}}, run_of(0, 0, 9)}, 40);
    if (HasFatalFailure()) return;
  }
}

// One long lane: queries whose first positions lie many blocks before them.
TEST(AttendChunk, LongLane) {
  Shape shape;
  shape.heads = 2;
  shape.kv_heads = 1;
  shape.capacity = 2048;
  shape.slots = 1;
  for (int dim : {64, 128}) {
    shape.key_dim = shape.value_dim = dim;
    const std::vector<Lane> lanes = {run_of(0, 1500, 513)};
    Layer layer(shape, lengths_before(lanes));
    check_out(layer, lanes, run(layer, lanes, 513, Route::kChunk), true, 6e-3);
    if (HasFatalFailure()) return;
  }
}

// --- Times, printed. ---

// Microseconds of each of `count` launches, replayed as one graph.
double microseconds(int count, const std::function<void(const Launch&, int)>& each) {
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreate(&stream));
  Launch on;
  on.stream = stream;
  on.sms = multiprocessors();
  on.dependent = true;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < count; ++i) each(on, i);
  ok(cudaStreamEndCapture(stream, &graph));
  ok(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  ok(cudaEventCreate(&begin));
  ok(cudaEventCreate(&end));
  double best = 1e30;
  for (int i = 0; i < 6; ++i) {
    ok(cudaEventRecord(begin, stream));
    ok(cudaGraphLaunch(executable, stream));
    ok(cudaEventRecord(end, stream));
    ok(cudaStreamSynchronize(stream));
    float milliseconds = 0;
    ok(cudaEventElapsedTime(&milliseconds, begin, end));
    best = std::min(best, milliseconds * 1000.0 / count);
  }
  ok(cudaEventDestroy(begin));
  ok(cudaEventDestroy(end));
  ok(cudaGraphExecDestroy(executable));
  ok(cudaGraphDestroy(graph));
  ok(cudaStreamDestroy(stream));
  return best;
}

void time_one_token(Shape shape, std::initializer_list<int> contexts) {
  shape.capacity = *std::max_element(contexts.begin(), contexts.end());
  shape.slots = 4;  // in turn, so that the second-level cache does not hold all
  for (int context : contexts) {
    std::vector<std::pair<int, int>> lengths;
    for (int row = 0; row < 4; ++row) lengths.emplace_back(row, 64);
    Layer layer(shape, lengths);
    // What lies beyond is NaN, which takes as long as any number.
    std::vector<Step> steps;
    for (int row = 0; row < 4; ++row) {
      steps.emplace_back(layer, std::vector<Lane>{{row, {context - 1}}}, 1);
    }
    const double fused = microseconds(100, [&](const Launch& on, int i) {
      launch(steps[std::size_t(i % 4)], Route::kFused, on);
    });
    const double plain = microseconds(
        100, [&](const Launch& on, int i) { attend(steps[std::size_t(i % 4)].args, nullptr, on); });
    std::printf("[ TIME     ] %s, context %5d: %.2f us fused, %.2f us after finish_heads\n",
                shape.name().c_str(), context, fused, plain);
  }
}

TEST(AttentionTiming, OneToken) {
  Shape shape;
  shape.heads = 32;
  shape.kv_heads = 8;
  time_one_token(shape, {64, 128, 192, 256, 512, 4096, 16384});
  shape.heads = 9;
  shape.kv_heads = 3;
  shape.style = RopeStyle::kInterleaved;
  time_one_token(shape, {64, 256, 4096});
  shape.heads = 16;
  shape.kv_heads = 8;
  shape.key_dim = shape.value_dim = 128;
  shape.style = RopeStyle::kHalf;
  shape.norms = true;
  time_one_token(shape, {64, 256, 4096});
}

// A token of each of `lanes` rows; the rows are others from launch to launch, so that the
// second-level cache does not hold all.
void time_lanes(Shape shape, int lanes, int context) {
  const int steps_of_rows = std::max(2, 64 / lanes);
  shape.capacity = (context + kCacheBlock - 1) / kCacheBlock * kCacheBlock;
  shape.slots = steps_of_rows * lanes;
  Layer layer(shape, {});
  std::vector<Step> steps;
  for (int i = 0; i < steps_of_rows; ++i) {
    std::vector<Lane> rows;
    for (int lane = 0; lane < lanes; ++lane) rows.push_back({i * lanes + lane, {context - 1}});
    steps.emplace_back(layer, rows, lanes);
  }
  const double fused = microseconds(64, [&](const Launch& on, int i) {
    launch(steps[std::size_t(i % steps_of_rows)], Route::kFused, on);
  });
  const double bytes = double(lanes) * context * shape.kv_heads *
                       (shape.key_dim + shape.value_dim) * double(row_bytes(shape.dtype, 1));
  std::printf("[ TIME     ] %s, %2d lanes, context %5d: %.2f us, %.0f GB/s\n", shape.name().c_str(),
              lanes, context, fused, bytes / fused / 1e3);
}

TEST(AttentionTiming, LanesOfOneToken) {
  Shape shape;
  shape.heads = 32;
  shape.kv_heads = 8;
  for (const int context : {64, 512, 4096}) {
    for (const int lanes : {2, 4, 8, 16, 32, 64}) time_lanes(shape, lanes, context);
  }
  shape.heads = 16;
  shape.key_dim = shape.value_dim = 128;
  shape.norms = true;
  for (const int lanes : {2, 8, 32}) time_lanes(shape, lanes, 512);
}

TEST(AttentionTiming, OneTokenOfWideHeads) {
  time_one_token(wide_shape(DType::kBF16, 4, 1, 0), {64, 512, 4096, 32000});
  time_one_token(wide_shape(DType::kBF16, 8, 2, 0), {64, 512, 4096, 32000});
}

TEST(AttentionTiming, Chunk) {
  for (int dim : {64, 128, 256}) {
    Shape shape;
    shape.heads = 32;
    shape.kv_heads = 8;
    shape.key_dim = shape.value_dim = dim;
    shape.capacity = 4096;
    shape.slots = 1;
    Layer layer(shape, {});
    const Step step(layer, {run_of(0, 0, 4096)}, 4096);
    const double heads =
        microseconds(4, [&](const Launch& on, int) { finish_heads(step.heads_args, on); });
    const double chunk =
        microseconds(4, [&](const Launch& on, int) { attend_chunk(step.args, on); });
    const double operations = 4.0 * dim * shape.heads * (4096.0 * 4097.0 / 2);
    std::printf(
        "[ TIME     ] 4096 tokens, heads of %3d: finish_heads %.0f us, attend_chunk %.0f us, "
        "%.0f TFLOP/s\n",
        dim, heads, chunk, operations / chunk / 1e6);
  }
}

}  // namespace
}  // namespace pianola::cuda
