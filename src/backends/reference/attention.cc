#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cache_reach.h"
#include "backends/reference/ops.h"
#include "base/check.h"
#include "plan/relative_bias.h"
#include "tensor/fp8.h"
#include "tensor/half.h"

namespace pianola::reference {
namespace {

// Rotates the first `dim` elements of a head in place. Angles are f32 products, as the models were
// trained and as transformers computes them.
void rotate(float* head, int dim, std::int32_t position, const float* inverse_frequencies,
            const Rope& rope) {
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * inverse_frequencies[i];
    const double c = std::cos(static_cast<double>(angle)) * rope.attention_factor;
    const double s = std::sin(static_cast<double>(angle)) * rope.attention_factor;
    float& a = head[rope.style == RopeStyle::kHalf ? i : 2 * i];
    float& b = head[rope.style == RopeStyle::kHalf ? i + half : 2 * i + 1];
    const double x = a;
    const double y = b;
    a = static_cast<float>(x * c - y * s);
    b = static_cast<float>(y * c + x * s);
  }
}

// Projects one token to all heads of q, k or v, then normalises and rotates each head.
void project(const BoundPlan& bound, WeightId weight_id, WeightId bias_id, const float* x,
             const std::optional<RmsNorm>& norm, const Rope* rope, int dim, std::int32_t position,
             float* out) {
  const BoundWeight& weight = bound.weight(weight_id);
  const float* bias = bound.vector(bias_id);
  const std::int64_t cols = weight.decl->cols;
  for (std::int64_t n = 0; n < weight.decl->rows; ++n) {
    out[n] = static_cast<float>(dot(weight.f32() + n * cols, x, cols) + (bias ? bias[n] : 0.0F));
  }
  for (float* head = out; head != out + weight.decl->rows; head += dim) {
    if (norm) {
      rms_norm({head, static_cast<std::size_t>(dim)}, bound.vector(norm->weight), norm->eps, head);
    }
    if (rope && rope->turns()) {
      const BoundWeight& frequencies = bound.weight(rope->inverse_frequencies);
      rotate(head, static_cast<int>(2 * frequencies.decl->cols), position, frequencies.f32(),
             *rope);
    }
  }
}

// Where one head of one position lies in a slot of keys or values.
struct StoredHead {
  std::byte* elements = nullptr;  // [dim]
  float* scale = nullptr;         // of int8
};

// `place` is where the position lies in the slot.
StoredHead stored_head(const LayerCacheView& cache, std::byte* slot, int dim, std::int32_t place,
                       int kv_head) {
  const std::size_t index = cache_index(place, kv_head, cache.kv_heads, 1);
  StoredHead head{slot + index * row_bytes(cache.dtype, static_cast<std::size_t>(dim)), nullptr};
  if (has_scales(cache.dtype)) {
    head.scale = reinterpret_cast<float*>(
                     slot + cache_element_bytes(cache.dtype, cache.capacity, cache.kv_heads, dim)) +
                 index;
  }
  return head;
}

// `heads` are those of one position, [kv_heads, dim].
void store_heads(const LayerCacheView& cache, std::byte* slot, std::int32_t place, int dim,
                 const float* heads) {
  for (int h = 0; h < cache.kv_heads; ++h) {
    const StoredHead head = stored_head(cache, slot, dim, place, h);
    store_head(cache.dtype, heads + std::ptrdiff_t{h} * dim, dim, head.elements, head.scale);
  }
}

// In place where the cache holds f32, else widened into `buffer`.
const float* widened(const LayerCacheView& cache, const StoredHead& head, int dim, float* buffer) {
  if (cache.dtype == DType::kF32) return reinterpret_cast<const float*>(head.elements);
  load_head(cache.dtype, head.elements, head.scale, dim, buffer);
  return buffer;
}

// What a position `offset` from the token adds to its score.
float bias_of(const BoundPlan& bound, const AttentionOp& op, std::int32_t offset, int head) {
  const int bucket = relative_bucket(*op.bias, offset);
  return bound.vector(op.bias->table)[bucket * op.heads + head];
}

// The largest magnitude / 127. NaN where the head is not finite: an infinity has no neighbour to be
// a multiple of. 0, and all elements with it, where the scale would have lost precision itself.
float int8_scale(const float* head, int dim) {
  float largest = 0;
  for (int i = 0; i < dim; ++i) {
    if (!std::isfinite(head[i])) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::abs(head[i]));
  }
  const float scale = largest / 127;
  return scale < std::numeric_limits<float>::min() ? 0 : scale;
}

}  // namespace

void load_head(DType dtype, const std::byte* elements, const float* scale, int dim, float* head) {
  const auto* floats = reinterpret_cast<const float*>(elements);
  const auto* halves = reinterpret_cast<const std::uint16_t*>(elements);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(elements);
  for (int i = 0; i < dim; ++i) {
    switch (dtype) {
      case DType::kF16:
        head[i] = f16_to_f32(halves[i]);
        break;
      case DType::kBF16:
        head[i] = bf16_to_f32(halves[i]);
        break;
      case DType::kI8:
        head[i] = static_cast<float>(static_cast<std::int8_t>(bytes[i])) * *scale;
        break;
      case DType::kF8E4M3:
        head[i] = e4m3_to_f32(bytes[i]);
        break;
      default:
        head[i] = floats[i];
    }
  }
}

void store_head(DType dtype, const float* head, int dim, std::byte* elements, float* scale) {
  auto* floats = reinterpret_cast<float*>(elements);
  auto* halves = reinterpret_cast<std::uint16_t*>(elements);
  auto* bytes = reinterpret_cast<std::uint8_t*>(elements);
  if (has_scales(dtype)) *scale = int8_scale(head, dim);
  for (int i = 0; i < dim; ++i) {
    switch (dtype) {
      case DType::kF16:
        halves[i] = f32_to_f16(head[i]);
        break;
      case DType::kBF16:
        halves[i] = f32_to_bf16(head[i]);
        break;
      case DType::kI8: {
        const float multiple = *scale > 0 ? std::nearbyint(head[i] / *scale) : 0;
        bytes[i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(multiple));
        break;
      }
      case DType::kF8E4M3:
        bytes[i] = f32_to_e4m3(head[i]);
        break;
      default:
        floats[i] = head[i];
    }
  }
}

void run(const QkvOp& op, const BoundPlan& bound) {
  const StepState& s = bound.state();
  const LayerCacheView& cache = bound.cache(op.cache);
  const std::int64_t in = bound.width(op.in);
  const std::int64_t q_width = op.q.valid() ? bound.width(op.q_out) : 0;
  auto* normed = reinterpret_cast<float*>(bound.scratch());
  float* k = normed + in;
  float* v = k + std::int64_t{cache.kv_heads} * cache.key_dim;
  for (std::int32_t t = 0; t < s.counts->tokens; ++t) {
    const std::int32_t position = s.position[t];
    float* q = op.q.valid() ? bound.buffer(op.q_out) + t * q_width : nullptr;
    if (position < 0) {
      std::fill_n(q, q_width, 0.0F);
      continue;
    }
    rms_norm({bound.buffer(op.in) + t * in, static_cast<std::size_t>(in)},
             bound.vector(op.norm.weight), op.norm.eps, normed);
    if (q) {
      project(bound, op.q, op.q_bias, normed, op.q_norm, &op.rope, cache.key_dim, position, q);
    }
    project(bound, op.k, op.k_bias, normed, op.k_norm, &op.rope, cache.key_dim, position, k);
    project(bound, op.v, op.v_bias, normed, std::nullopt, nullptr, cache.value_dim, position, v);
    const std::int32_t slot = slot_of(s, cache.holds, t);
    const std::int32_t place = position % cache.capacity;
    store_heads(cache, cache.key_slot(slot), place, cache.key_dim, k);
    store_heads(cache, cache.value_slot(slot), place, cache.value_dim, v);
  }
}

void run(const QueryOp& op, const BoundPlan& bound) {
  const StepState& s = bound.state();
  const std::int64_t in = bound.width(op.in);
  const std::int64_t q_width = bound.width(op.q_out);
  auto* normed = reinterpret_cast<float*>(bound.scratch());
  for (std::int32_t t = 0; t < s.counts->tokens; ++t) {
    float* q = bound.buffer(op.q_out) + t * q_width;
    if (s.position[t] < 0) {
      std::fill_n(q, q_width, 0.0F);
      continue;
    }
    rms_norm({bound.buffer(op.in) + t * in, static_cast<std::size_t>(in)},
             bound.vector(op.norm.weight), op.norm.eps, normed);
    project(bound, op.q, op.q_bias, normed, op.q_norm, &op.rope, op.head_dim, s.position[t], q);
  }
}

void run(const LatentQkvOp& op, const BoundPlan& bound) {
  const StepState& s = bound.state();
  const LayerCacheView& cache = bound.cache(op.cache);
  const BoundWeight& absorb = bound.weight(op.absorb);
  const BoundWeight& frequencies = bound.weight(op.rope.inverse_frequencies);
  const std::int64_t rank = cache.value_dim;
  const int turned = cache.key_dim - cache.value_dim;
  const std::int64_t plain = absorb.decl->cols;
  auto* key = reinterpret_cast<float*>(bound.scratch());
  for (std::int32_t t = 0; t < s.counts->tokens; ++t) {
    float* out = bound.buffer(op.q_out) + t * bound.width(op.q_out);
    const std::int32_t position = s.position[t];
    if (position < 0) {
      std::fill_n(out, bound.width(op.q_out), 0.0F);
      continue;
    }
    const float* kv = bound.buffer(op.kv) + t * bound.width(op.kv);
    rms_norm({kv, static_cast<std::size_t>(rank)}, bound.vector(op.kv_norm.weight), op.kv_norm.eps,
             key);
    std::copy_n(kv + rank, turned, key + rank);
    rotate(key + rank, turned, position, frequencies.f32(), op.rope);
    const std::int32_t row = s.row_of[s.lane_of[t]];
    store_heads(cache, cache.key_slot(row), position % cache.capacity, cache.key_dim, key);

    const float* q = bound.buffer(op.q) + t * bound.width(op.q);
    for (std::int64_t h = 0; h < absorb.decl->experts; ++h) {
      const auto* matrix = reinterpret_cast<const float*>(absorb.matrix(h));
      for (std::int64_t n = 0; n < rank; ++n) {
        out[n] = static_cast<float>(dot(matrix + n * plain, q, plain));
      }
      std::copy_n(q + plain, turned, out + rank);
      rotate(out + rank, turned, position, frequencies.f32(), op.rope);
      q += plain + turned;
      out += cache.key_dim;
    }
  }
}

void run(const AttentionOp& op, const BoundPlan& bound) {
  const StepState& s = bound.state();
  const LayerCacheView& cache = bound.cache(op.cache);
  const float* sinks = bound.vector(op.sinks);
  const int group = op.heads / cache.kv_heads;
  auto* sums = reinterpret_cast<double*>(bound.scratch());
  auto* scores = reinterpret_cast<float*>(sums + cache.value_dim);
  float* buffer = scores + cache.capacity;
  for (std::int32_t t = 0; t < s.counts->tokens; ++t) {
    float* out = bound.buffer(op.out) + t * bound.width(op.out);
    std::fill_n(out, bound.width(op.out), 0.0F);
    const std::int32_t position = s.position[t];
    const std::int32_t end = end_of(s, cache.holds, t);
    if (end <= 0) continue;
    const std::int32_t first = window_begin(position, cache.window);
    const std::int32_t slot = slot_of(s, cache.holds, t);
    for (int h = 0; h < op.heads; ++h) {
      const float* q = bound.buffer(op.q) + t * bound.width(op.q) + h * cache.key_dim;
      double max = -std::numeric_limits<double>::infinity();
      for (std::int32_t p = first; p < end; ++p) {
        const StoredHead stored =
            stored_head(cache, cache.key_slot(slot), cache.key_dim, p % cache.capacity, h / group);
        const float* key = widened(cache, stored, cache.key_dim, buffer);
        float& score = scores[p - first];
        double sum = dot(q, key, cache.key_dim) * op.scale;
        if (op.bias) sum += bias_of(bound, op, p - position, h);
        score = static_cast<float>(sum);
        max = std::max(max, static_cast<double>(score));
      }
      double total = 0;
      if (sinks) {
        max = std::max(max, static_cast<double>(sinks[h]));
        total = std::exp(sinks[h] - max);
      }
      for (std::int32_t p = first; p < end; ++p) {
        const double weight = std::exp(scores[p - first] - max);
        scores[p - first] = static_cast<float>(weight);
        total += weight;
      }
      std::fill_n(sums, cache.value_dim, 0.0);
      for (std::int32_t p = first; p < end; ++p) {
        const StoredHead stored = stored_head(cache, cache.value_slot(slot), cache.value_stride(),
                                              p % cache.capacity, h / group);
        const float* value = widened(cache, stored, cache.value_dim, buffer);
        const double weight = scores[p - first];
        for (int i = 0; i < cache.value_dim; ++i) sums[i] += weight * value[i];
      }
      float* head = out + static_cast<std::int64_t>(h) * cache.value_dim;
      for (int i = 0; i < cache.value_dim; ++i) head[i] = static_cast<float>(sums[i] / total);
    }
  }
}

}  // namespace pianola::reference
