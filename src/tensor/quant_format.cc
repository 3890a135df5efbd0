#include "tensor/quant_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "tensor/half.h"

namespace pianola {
namespace {

using Byte = unsigned char;

// This file is compiled without contraction of a * b + c to one rounding: the oracle rounds twice.

std::uint16_t load_u16(const Byte* p) {
  return static_cast<std::uint16_t>(p[0] | static_cast<unsigned>(p[1]) << 8);
}

float load_f16(const Byte* p) { return f16_to_f32(load_u16(p)); }

void store_u16(Byte* p, std::uint16_t v) {
  p[0] = static_cast<Byte>(v & 0xFF);
  p[1] = static_cast<Byte>(v >> 8);
}

void store_f16(Byte* p, float v) { store_u16(p, f32_to_f16(v)); }

float signed_byte(Byte b) { return static_cast<float>(static_cast<signed char>(b)); }

void dequantize_q4_0(const Byte* p, float* y) {
  const float d = load_f16(p);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>((p[2 + i] & 0xF) - 8);
    y[i + 16] = d * static_cast<float>((p[2 + i] >> 4) - 8);
  }
}

void dequantize_q4_1(const Byte* p, float* y) {
  const float d = load_f16(p);
  const float m = load_f16(p + 2);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>(p[4 + i] & 0xF) + m;
    y[i + 16] = d * static_cast<float>(p[4 + i] >> 4) + m;
  }
}

// The five-bit codes of q5_0 and q5_1: `high` is 4 bytes of fifth bits, `low` 16 bytes of nibbles.
void unpack_q5(const Byte* high, const Byte* low, int* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = (low[i] & 0xF) | ((high[i / 8] >> (i % 8) & 1) << 4);
    q[i + 16] = (low[i] >> 4) | ((high[2 + i / 8] >> (i % 8) & 1) << 4);
  }
}

void dequantize_q5_0(const Byte* p, float* y) {
  const float d = load_f16(p);
  std::array<int, 32> q;
  unpack_q5(p + 2, p + 6, q.data());
  for (std::size_t i = 0; i < 32; ++i) y[i] = d * static_cast<float>(q[i] - 16);
}

void dequantize_q5_1(const Byte* p, float* y) {
  const float d = load_f16(p);
  const float m = load_f16(p + 2);
  std::array<int, 32> q;
  unpack_q5(p + 4, p + 8, q.data());
  for (std::size_t i = 0; i < 32; ++i) y[i] = d * static_cast<float>(q[i]) + m;
}

void dequantize_q8_0(const Byte* p, float* y) {
  const float d = load_f16(p);
  for (int i = 0; i < 32; ++i) y[i] = signed_byte(p[2 + i]) * d;
}

void dequantize_q4_k(const Byte* p, float* y) {
  const float d = load_f16(p);
  const float m = load_f16(p + 2);
  for (int j = 0; j < 8; ++j) {
    const KScale s = unpack_k_scale(p + 4, j);
    const float scale = d * static_cast<float>(s.scale);
    const float min = m * static_cast<float>(s.min);
    const Byte* q = p + 16 + 32 * (j / 2);
    for (int i = 0; i < 32; ++i) {
      y[32 * j + i] = scale * static_cast<float>(q[i] >> (4 * (j % 2)) & 0xF) - min;
    }
  }
}

void dequantize_q5_k(const Byte* p, float* y) {
  const float d = load_f16(p);
  const float m = load_f16(p + 2);
  const Byte* high = p + 16;
  for (int j = 0; j < 8; ++j) {
    const KScale s = unpack_k_scale(p + 4, j);
    const float scale = d * static_cast<float>(s.scale);
    const float min = m * static_cast<float>(s.min);
    const Byte* q = p + 48 + 32 * (j / 2);
    for (int i = 0; i < 32; ++i) {
      const int code = (q[i] >> (4 * (j % 2)) & 0xF) | ((high[i] >> j & 1) << 4);
      y[32 * j + i] = scale * static_cast<float>(code) - min;
    }
  }
}

// Where value i of a q6_k block lies: two runs of 128 values; in each, 32 bytes of low nibbles
// serve values 0-31 and 64-95, the next 32 bytes values 32-63 and 96-127, and byte l of the 32 high
// bytes holds the top bits of values l, l + 32, l + 64 and l + 96.
struct Q6Place {
  int low;
  int low_shift;
  int high;
  int high_shift;
};

constexpr Q6Place q6_place(int i) {
  const int run = i / 128;
  const int quarter = i % 128 / 32;
  const int l = i % 32;
  return {64 * run + 32 * (quarter % 2) + l, 4 * (quarter / 2), 128 + 32 * run + l, 2 * quarter};
}

void dequantize_q6_k(const Byte* p, float* y) {
  const float d = load_f16(p + 208);
  for (int j = 0; j < 16; ++j) {
    const float scale = d * signed_byte(p[192 + j]);
    for (int i = 16 * j; i < 16 * j + 16; ++i) {
      const Q6Place at = q6_place(i);
      const int q = (p[at.low] >> at.low_shift & 0xF) | ((p[at.high] >> at.high_shift & 3) << 4);
      y[i] = scale * static_cast<float>(q - 32);
    }
  }
}

// Truncates to a code in [low, high]. Not a number (which finite input of extreme range can give)
// becomes `low`, where a plain conversion would be undefined.
int to_code(float v, int low, int high) {
  if (!(v > static_cast<float>(low))) return low;
  return v < static_cast<float>(high) ? static_cast<int>(v) : high;
}

float inverse(float d) { return d == 0.0F ? 0.0F : 1.0F / d; }

// The value of largest magnitude with its sign; the first one on a tie.
float extreme(const float* x, int n) {
  float best = x[0];
  for (int i = 1; i < n; ++i) {
    if (std::fabs(x[i]) > std::fabs(best)) best = x[i];
  }
  return best;
}

void store_nibbles(const int* q, Byte* out) {
  for (int i = 0; i < 16; ++i) out[i] = static_cast<Byte>((q[i] & 0xF) | ((q[i + 16] & 0xF) << 4));
}

void store_fifth_bits(const int* q, Byte* out) {
  std::fill_n(out, 4, Byte{0});
  for (int i = 0; i < 32; ++i) out[i / 8] |= static_cast<Byte>((q[i] >> 4 & 1) << (i % 8));
}

// Codes with a symmetric scale: the value of largest magnitude gets code 0 of `levels`.
float fit_symmetric(const float* x, int levels, int* q) {
  const auto half = static_cast<float>(levels / 2);
  const float d = extreme(x, 32) / -half;
  const float id = inverse(d);
  for (int i = 0; i < 32; ++i) {
    q[i] = to_code(x[i] * id + (half + 0.5F), 0, levels - 1);
  }
  return d;
}

struct Affine {
  float d;
  float m;
};

// Codes from the minimum up, in equal steps.
Affine fit_affine(const float* x, int levels, int* q) {
  const auto [low, high] = std::minmax_element(x, x + 32);
  const float m = *low;
  const float d = (*high - m) / static_cast<float>(levels - 1);
  const float id = inverse(d);
  for (int i = 0; i < 32; ++i) {
    q[i] = to_code((x[i] - m) * id + 0.5F, 0, levels - 1);
  }
  return {d, m};
}

void quantize_q4_0(const float* x, Byte* p) {
  std::array<int, 32> q;
  store_f16(p, fit_symmetric(x, 16, q.data()));
  store_nibbles(q.data(), p + 2);
}

void quantize_q4_1(const float* x, Byte* p) {
  std::array<int, 32> q;
  const Affine a = fit_affine(x, 16, q.data());
  store_f16(p, a.d);
  store_f16(p + 2, a.m);
  store_nibbles(q.data(), p + 4);
}

void quantize_q5_0(const float* x, Byte* p) {
  std::array<int, 32> q;
  store_f16(p, fit_symmetric(x, 32, q.data()));
  store_fifth_bits(q.data(), p + 2);
  store_nibbles(q.data(), p + 6);
}

void quantize_q5_1(const float* x, Byte* p) {
  std::array<int, 32> q;
  const Affine a = fit_affine(x, 32, q.data());
  store_f16(p, a.d);
  store_f16(p + 2, a.m);
  store_fifth_bits(q.data(), p + 4);
  store_nibbles(q.data(), p + 8);
}

void quantize_q8_0(const float* x, Byte* p) {
  const float d = std::fabs(extreme(x, 32)) / 127.0F;
  const float id = inverse(d);
  store_f16(p, d);
  for (int i = 0; i < 32; ++i) {
    p[2 + i] = static_cast<Byte>(to_code(std::round(x[i] * id), -127, 127));
  }
}

// q4_k and q5_k: an affine fit of each sub-block, its scale and minimum rounded to 6 bits of the
// block's. Minima are stored negated and unsigned, so a sub-block of positive values starts at 0.
void quantize_affine_k(const float* x, int levels, Byte* p, Byte* high, Byte* low) {
  std::array<float, 8> scale;
  std::array<float, 8> min;
  for (std::size_t j = 0; j < 8; ++j) {
    const auto [lo, hi] = std::minmax_element(x + 32 * j, x + 32 * j + 32);
    min[j] = std::max(0.0F, -*lo);
    scale[j] = (std::max(*hi, 0.0F) + min[j]) / static_cast<float>(levels - 1);
  }
  const float d = f16_to_f32(f32_to_f16(*std::max_element(scale.begin(), scale.end()) / 63.0F));
  const float m = f16_to_f32(f32_to_f16(*std::max_element(min.begin(), min.end()) / 63.0F));
  store_f16(p, d);
  store_f16(p + 2, m);
  Byte* packed = p + 4;
  std::fill_n(packed, 12, Byte{0});
  std::fill_n(low, 128, Byte{0});
  for (int j = 0; j < 8; ++j) {
    const auto at = static_cast<std::size_t>(j);
    const int s = to_code(std::round(scale[at] * inverse(d)), 0, 63);
    const int n = to_code(std::round(min[at] * inverse(m)), 0, 63);
    if (j < 4) {
      packed[j] |= static_cast<Byte>(s);
      packed[j + 4] |= static_cast<Byte>(n);
    } else {
      packed[j + 4] = static_cast<Byte>((s & 0xF) | ((n & 0xF) << 4));
      packed[j - 4] |= static_cast<Byte>((s >> 4) << 6);
      packed[j] |= static_cast<Byte>((n >> 4) << 6);
    }
    const float step = inverse(d * static_cast<float>(s));
    const float offset = m * static_cast<float>(n);
    for (int i = 0; i < 32; ++i) {
      const auto q = to_code(std::round((x[32 * j + i] + offset) * step), 0, levels - 1);
      low[32 * (j / 2) + i] |= static_cast<Byte>((q & 0xF) << (4 * (j % 2)));
      if (high) high[i] |= static_cast<Byte>((q >> 4) << j);
    }
  }
}

void quantize_q4_k(const float* x, Byte* p) { quantize_affine_k(x, 16, p, nullptr, p + 16); }

void quantize_q5_k(const float* x, Byte* p) {
  std::fill_n(p + 16, 32, Byte{0});
  quantize_affine_k(x, 32, p, p + 16, p + 48);
}

void quantize_q6_k(const float* x, Byte* p) {
  std::array<float, 16> scale;
  for (std::size_t j = 0; j < 16; ++j) scale[j] = extreme(x + 16 * j, 16) / -32.0F;
  const float d = f16_to_f32(f32_to_f16(std::fabs(extreme(scale.data(), 16)) / 127.0F));
  std::fill_n(p, 210, Byte{0});
  store_f16(p + 208, d);
  for (int j = 0; j < 16; ++j) {
    const float wanted = scale[static_cast<std::size_t>(j)] * inverse(d);
    const int s = to_code(std::round(wanted), -127, 127);
    p[192 + j] = static_cast<Byte>(s);
    const float step = inverse(d * static_cast<float>(s));
    for (int i = 16 * j; i < 16 * j + 16; ++i) {
      const int q = to_code(std::round(x[i] * step), -32, 31) + 32;
      const Q6Place at = q6_place(i);
      p[at.low] |= static_cast<Byte>((q & 0xF) << at.low_shift);
      p[at.high] |= static_cast<Byte>((q >> 4) << at.high_shift);
    }
  }
}

using Dequantize = void (*)(const Byte*, float*);
using Quantize = void (*)(const float*, Byte*);

// The functions that code one block; null for types that are not block types.
struct BlockCodec {
  Dequantize dequantize = nullptr;
  Quantize quantize = nullptr;
};

BlockCodec block_codec(DType dtype) {
  switch (dtype) {
    case DType::kQ4_0:
      return {dequantize_q4_0, quantize_q4_0};
    case DType::kQ4_1:
      return {dequantize_q4_1, quantize_q4_1};
    case DType::kQ5_0:
      return {dequantize_q5_0, quantize_q5_0};
    case DType::kQ5_1:
      return {dequantize_q5_1, quantize_q5_1};
    case DType::kQ8_0:
      return {dequantize_q8_0, quantize_q8_0};
    case DType::kQ4_K:
      return {dequantize_q4_k, quantize_q4_k};
    case DType::kQ5_K:
      return {dequantize_q5_k, quantize_q5_k};
    case DType::kQ6_K:
      return {dequantize_q6_k, quantize_q6_k};
    default:
      return {};
  }
}

}  // namespace

void dequantize_row(DType dtype, const void* src, float* dst, std::size_t n) {
  const auto* p = static_cast<const Byte*>(src);
  const DTypeInfo& info = dtype_info(dtype);
  if (n == 0) return;
  if (dtype == DType::kF32) {
    std::memcpy(dst, src, n * sizeof(float));
  } else if (dtype == DType::kF16) {
    for (std::size_t i = 0; i < n; ++i) dst[i] = load_f16(p + 2 * i);
  } else if (dtype == DType::kBF16) {
    for (std::size_t i = 0; i < n; ++i) dst[i] = bf16_to_f32(load_u16(p + 2 * i));
  } else if (const BlockCodec codec = block_codec(dtype); codec.dequantize) {
    const std::size_t bytes = row_bytes(dtype, n);  // checks that the row holds whole blocks
    for (std::size_t at = 0; at < bytes; at += info.bytes, dst += info.elements) {
      codec.dequantize(p + at, dst);
    }
  } else {
    fail(ErrorCode::kUnsupported, "dequantize: {} does not hold real numbers", info.name);
  }
}

void quantize_row(DType dtype, const float* src, void* dst, std::size_t n) {
  auto* p = static_cast<Byte*>(dst);
  const DTypeInfo& info = dtype_info(dtype);
  if (n == 0) return;
  if (dtype == DType::kF32) {
    std::memcpy(dst, src, n * sizeof(float));
  } else if (dtype == DType::kF16) {
    for (std::size_t i = 0; i < n; ++i) store_f16(p + 2 * i, src[i]);
  } else if (dtype == DType::kBF16) {
    for (std::size_t i = 0; i < n; ++i) store_u16(p + 2 * i, f32_to_bf16(src[i]));
  } else if (const BlockCodec codec = block_codec(dtype); codec.quantize) {
    const std::size_t bytes = row_bytes(dtype, n);
    for (std::size_t at = 0; at < bytes; at += info.bytes, src += info.elements) {
      codec.quantize(src, p + at);
    }
  } else {
    fail(ErrorCode::kUnsupported, "quantize: {} does not hold real numbers", info.name);
  }
}

KScale unpack_k_scale(const unsigned char* packed, int j) {
  if (j < 4) {
    return {static_cast<Byte>(packed[j] & 0x3F), static_cast<Byte>(packed[j + 4] & 0x3F)};
  }
  const Byte low = packed[j + 4];
  return {static_cast<Byte>((low & 0xF) | ((packed[j - 4] >> 6) << 4)),
          static_cast<Byte>((low >> 4) | ((packed[j] >> 6) << 4))};
}

}  // namespace pianola
