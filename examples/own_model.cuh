// A small attention model with kernels of its own: two layers over a static cache, greedy sampling
// on the device. It stands for yours; what matters is that everything that changes from round to
// round lies in device memory:
//
//   text[slot][i]   the tokens of a sequence: the prompt, then what was sampled
//   known[slot]     how many of them there are
//   limit[slot]     how many there may be
//   lengths[slot]   how many the cache holds; the next round computes text[slot][lengths[slot]]
//
// So one captured round serves the prompt and the answer, and a slot that is done does nothing.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <pianola/cache.h>
#include <pianola/graph.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace own_model {

constexpr int kVocab = 256;
constexpr int kWidth = 64;
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 16;
constexpr int kKvWidth = kKvHeads * kHeadDim;
constexpr int kLayers = 2;
constexpr int kLayerWeights = (kWidth + 2 * kKvWidth) * kWidth + kWidth * kWidth;

using Layer = pianola::KvLayer<__half>;

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

struct Sequences {
  std::int32_t* text;     // [slots, stride]
  std::int32_t* known;    // [slots]
  std::int32_t* limit;    // [slots]
  std::int32_t* lengths;  // [slots], of the cache
  int stride;
};

// The position that a round computes in this slot, or -1 when the sequence is complete: the last
// token needs no place in the cache.
__device__ inline int position_of(const Sequences& s, int slot) {
  const int position = s.lengths[slot];
  return position < s.known[slot] && position + 1 < s.limit[slot] ? position : -1;
}

__device__ inline float dot(const float* a, const float* b, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// x[slot] = table[token] and a wave that tells positions apart. A block a slot, a thread a channel.
__global__ void embed(const float* table, Sequences s, float* x) {
  const int slot = static_cast<int>(blockIdx.x);
  const int i = static_cast<int>(threadIdx.x);
  const int position = position_of(s, slot);
  if (position < 0) return;
  const int token = s.text[slot * s.stride + position];
  const float wave = sinf(static_cast<float>(position) / powf(100.0F, i / float{kWidth}));
  x[slot * kWidth + i] = table[token * kWidth + i] + 0.3F * wave;
}

// Queries, and keys and values into the cache. A thread a row of the three matrices.
__global__ void project(const float* weights, Sequences s, const float* x, float* q, Layer layer) {
  const int slot = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(threadIdx.x);
  const int position = position_of(s, slot);
  if (position < 0) return;  // what is not real is not stored
  const float y = dot(weights + row * kWidth, x + slot * kWidth, kWidth);
  if (row < kWidth) {
    q[slot * kWidth + row] = y;
  } else if (row < kWidth + kKvWidth) {
    const int i = row - kWidth;
    layer.key(slot, position, i / kHeadDim)[i % kHeadDim] = __float2half(y);
  } else {
    const int i = row - kWidth - kKvWidth;
    layer.value(slot, position, i / kHeadDim)[i % kHeadDim] = __float2half(y);
  }
}

// Attention over every position up to this one, with a running maximum: its work follows the length
// on the device. A thread a head and channel.
__global__ void attend(Sequences s, const float* q, Layer layer, float* mixed) {
  const int slot = static_cast<int>(blockIdx.x);
  const int i = static_cast<int>(threadIdx.x);
  const int kv_head = i / kHeadDim / (kHeads / kKvHeads);
  const float* query = q + slot * kWidth + i / kHeadDim * kHeadDim;
  float most = -INFINITY;
  float total = 0;
  float sum = 0;
  const int position = position_of(s, slot);
  if (position < 0) return;
  for (int t = 0; t <= position; ++t) {
    const __half* key = layer.key(slot, t, kv_head);
    float score = 0;
    for (int c = 0; c < kHeadDim; ++c) score += query[c] * __half2float(key[c]);
    const float larger = fmaxf(most, score);
    const float keep = expf(most - larger);
    const float weight = expf(score - larger);
    total = total * keep + weight;
    sum = sum * keep + weight * __half2float(layer.value(slot, t, kv_head)[i % kHeadDim]);
    most = larger;
  }
  mixed[slot * kWidth + i] = sum / total;
}

// x = tanh(x + output · mixed). A thread a channel.
__global__ void add_back(const float* weights, Sequences s, const float* mixed, float* x) {
  const int slot = static_cast<int>(blockIdx.x);
  const int i = static_cast<int>(threadIdx.x);
  if (position_of(s, slot) < 0) return;
  const float y = dot(weights + i * kWidth, mixed + slot * kWidth, kWidth);
  x[slot * kWidth + i] = tanhf(x[slot * kWidth + i] + y);
}

// The next token of each slot, and the end of its round: the cache holds one token more, and
// another round is asked for while there is something to compute. A block a slot, a thread a word.
__global__ void sample(const float* head, Sequences s, const float* x, pianola::LoopWords* loop) {
  __shared__ float logits[kVocab];
  const int slot = static_cast<int>(blockIdx.x);
  const int word = static_cast<int>(threadIdx.x);
  const int position = position_of(s, slot);
  if (position < 0) return;  // the whole block
  logits[word] = dot(head + word * kWidth, x + slot * kWidth, kWidth);
  __syncthreads();
  if (word != 0) return;
  int best = 0;
  for (int i = 1; i < kVocab; ++i) {
    if (logits[i] > logits[best]) best = i;
  }
  if (position + 1 == s.known[slot]) {  // not inside the prompt
    s.text[slot * s.stride + position + 1] = best;
    s.known[slot] = position + 2;
  }
  s.lengths[slot] = position + 1;
  if (position_of(s, slot) >= 0) loop->again = 1;
}

inline pianola::KvCacheOptions cache_options(int max_seq_len, int slots) {
  return {.layers = {kLayers, {.kv_heads = kKvHeads, .key_dim = kHeadDim, .value_dim = kHeadDim}},
          .max_seq_len = max_seq_len,
          .slots = slots,
          .type = pianola::KvType::kF16};
}

// Weights, activations and texts, all allocated before anything is captured.
class Model {
 public:
  // The cache outlives the model.
  explicit Model(pianola::StaticKvCache& cache) : cache_(cache) {
    const pianola::KvCacheOptions& options = cache.options();
    slots_ = options.slots;
    sequences_.stride = options.max_seq_len + 1;
    std::vector<float> weights(2 * kVocab * kWidth + kLayers * kLayerWeights);
    std::uint32_t random = 12345;
    for (float& w : weights) {
      random = random * 1664525U + 1013904223U;
      w = (static_cast<float>(random >> 8) / float{1 << 23} - 1.0F) * 0.3F;
    }
    weights_ = allocate<float>(weights.size());
    check(cudaMemcpy(weights_, weights.data(), weights.size() * sizeof(float),
                     cudaMemcpyHostToDevice));
    x_ = allocate<float>(slots_ * kWidth);
    q_ = allocate<float>(slots_ * kWidth);
    mixed_ = allocate<float>(slots_ * kWidth);
    sequences_.text = allocate<std::int32_t>(slots_ * sequences_.stride);
    sequences_.known = allocate<std::int32_t>(slots_);
    sequences_.limit = allocate<std::int32_t>(slots_);
    sequences_.lengths = cache.lengths();
  }
  ~Model() {
    for (void* p : allocated_) cudaFree(p);
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Empties a slot and gives it a prompt and the most tokens that its text may have.
  void start(int slot, const std::vector<std::int32_t>& prompt, int limit) {
    cache_.reset(slot);
    write(sequences_.text + slot * sequences_.stride, prompt);
    set_known(slot, static_cast<int>(prompt.size()));
    write(sequences_.limit + slot, {limit});
  }
  void set_known(int slot, int known) { write(sequences_.known + slot, {known}); }
  std::vector<std::int32_t> text(int slot) const {
    std::int32_t known = 0;
    check(cudaMemcpy(&known, sequences_.known + slot, sizeof(known), cudaMemcpyDeviceToHost));
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(known));
    check(cudaMemcpy(tokens.data(), sequences_.text + slot * sequences_.stride,
                     tokens.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost));
    return tokens;
  }

  // One round: only launches, all on this stream.
  void forward(cudaStream_t stream, pianola::LoopWords* loop) const {
    const auto slots = static_cast<unsigned>(slots_);
    const float* head = weights_ + kVocab * kWidth;
    embed<<<slots, kWidth, 0, stream>>>(weights_, sequences_, x_);
    for (int i = 0; i < kLayers; ++i) {
      const float* weights = head + kVocab * kWidth + i * kLayerWeights;
      const float* output = weights + (kWidth + 2 * kKvWidth) * kWidth;
      const Layer layer = cache_.layer<__half>(i);
      project<<<slots, kWidth + 2 * kKvWidth, 0, stream>>>(weights, sequences_, x_, q_, layer);
      attend<<<slots, kWidth, 0, stream>>>(sequences_, q_, layer, mixed_);
      add_back<<<slots, kWidth, 0, stream>>>(output, sequences_, mixed_, x_);
    }
    sample<<<slots, kVocab, 0, stream>>>(head, sequences_, x_, loop);
    check(cudaGetLastError());
  }

 private:
  template <typename T>
  T* allocate(std::size_t count) {
    void* p = nullptr;
    check(cudaMalloc(&p, count * sizeof(T)));
    allocated_.push_back(p);
    check(cudaMemset(p, 0, count * sizeof(T)));
    return static_cast<T*>(p);
  }
  static void write(std::int32_t* to, const std::vector<std::int32_t>& values) {
    check(cudaMemcpy(to, values.data(), values.size() * sizeof(std::int32_t),
                     cudaMemcpyHostToDevice));
  }

  pianola::StaticKvCache& cache_;
  int slots_ = 0;
  Sequences sequences_{};
  float* weights_ =
      nullptr;          // table and head [kVocab, kWidth], then q, k, v and output of each layer
  float* x_ = nullptr;  // [slots, kWidth]
  float* q_ = nullptr;  // [slots, kWidth]
  float* mixed_ = nullptr;  // [slots, kWidth]
  std::vector<void*> allocated_;
};

}  // namespace own_model
