// Activations in the layout of packed_layout.h, in plain C++.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "backends/cpu/kernels/packed_layout.h"
#include "tensor/half.h"

namespace pianola::cpu {
namespace {

using Byte = std::uint8_t;

// The tile of a token, its place there and the tile's width.
struct Place {
  int tile;
  int at;
  int width;
};

Place place_of(int token, int tokens) {
  if (tokens < kTileTokens) return {0, token, tokens};
  return {token / kTileTokens, token % kTileTokens, kTileTokens};
}

// Tokens to write: the range, and the padding of the last tile after the last token.
int padded_end(const PrepareCall& call) {
  if (call.tokens < kTileTokens || call.token_end != call.tokens) return call.token_end;
  return (call.tokens + kTileTokens - 1) / kTileTokens * kTileTokens;
}

struct BlockScale {
  float d;
  float inverse;
};

// The same rule in every ISA's version. A block that holds a NaN or an infinity gets the scale NaN
// and zeros. Values below 1e-30 count as zero: their inverse would overflow.
BlockScale block_scale(const float* x) {
  std::uint32_t most = 0;
  for (int i = 0; i < kBlock; ++i) {
    most = std::max(most, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffU);
  }
  if (most >= 0x7f800000U) return {std::numeric_limits<float>::quiet_NaN(), 0.0F};
  const float largest = std::bit_cast<float>(most);
  if (largest < 1e-30F) return {0.0F, 0.0F};
  return {largest / 127.0F, 127.0F / largest};
}

}  // namespace

void prepare_int8_portable(const PrepareCall& call) {
  const int blocks = call.cols / kBlock;
  for (int token = call.token_begin; token < padded_end(call); ++token) {
    const Place place = place_of(token, call.tokens);
    const std::ptrdiff_t record = static_cast<std::ptrdiff_t>(place.width) * kActRecord;
    Byte* out = call.out + place.tile * blocks * record;
    for (int b = 0; b < blocks; ++b, out += record) {
      std::int8_t q[kBlock] = {};
      float scales[2] = {};
      std::int32_t sums[2] = {};
      if (token < call.tokens) {
        const float* x = call.x + token * call.ldx + b * kBlock;
        const BlockScale scale = block_scale(x);
        for (int i = 0; i < kBlock && scale.inverse != 0.0F; ++i) {
          // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
          const float rounded = x[i] * scale.inverse + 12582912.0F;
          q[i] = static_cast<std::int8_t>(std::bit_cast<std::int32_t>(rounded) - 0x4b400000);
        }
        for (int i = 0; i < kBlock; ++i) sums[i / 16] -= q[i];
        scales[0] = scale.d;
        scales[1] = scale.d * static_cast<float>(-(sums[0] + sums[1]));
      }
      const std::int32_t all = sums[0] + sums[1];
      Byte* meta = out + place.width * kBlock + place.at * 4;
      std::memcpy(out + place.at * kBlock, q, kBlock);
      std::memcpy(meta, &scales[0], 4);
      std::memcpy(meta + place.width * 4, &scales[1], 4);
      std::memcpy(meta + place.width * 8, &all, 4);
      std::memcpy(meta + place.width * 12, &sums[0], 4);
    }
  }
}

void prepare_f32(const PrepareCall& call) {
  const int cols = padded_cols(call.cols);
  for (int token = call.token_begin; token < padded_end(call); ++token) {
    const Place place = place_of(token, call.tokens);
    float* out = reinterpret_cast<float*>(call.out) +
                 static_cast<std::ptrdiff_t>(place.tile) * place.width * cols + place.at;
    const float* x = call.x + token * call.ldx;
    const int real = token < call.tokens ? call.cols : 0;
    for (int k = 0; k < real; ++k) out[static_cast<std::ptrdiff_t>(k) * place.width] = x[k];
    for (int k = real; k < cols; ++k) out[static_cast<std::ptrdiff_t>(k) * place.width] = 0.0F;
  }
}

void prepare_bf16(const PrepareCall& call) {
  const int cols = padded_cols(call.cols);
  for (int token = call.token_begin; token < padded_end(call); ++token) {
    const Place place = place_of(token, call.tokens);
    std::uint16_t* out = reinterpret_cast<std::uint16_t*>(call.out) +
                         static_cast<std::ptrdiff_t>(place.tile) * place.width * cols +
                         2 * place.at;
    const float* x = call.x + token * call.ldx;
    const int real = token < call.tokens ? call.cols : 0;
    for (int k = 0; k < cols; ++k) {
      out[static_cast<std::ptrdiff_t>(k / 2) * place.width * 2 + k % 2] =
          k < real ? f32_to_bf16(x[k]) : std::uint16_t{0};
    }
  }
}

}  // namespace pianola::cpu
