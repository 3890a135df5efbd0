// From token ids to activations, and RMS norms that stand alone.
#include "backends/cuda/kernels/token.h"

#include <algorithm>

#include "backends/cuda/kernels/rollback.cuh"
#include "backends/cuda/kernels/unpack.cuh"

namespace pianola::cuda {
namespace {

constexpr int kEmbedThreads = 256;

// Tokens on x, pieces of kCount columns on y. Behind the tokens a column of blocks whose first one
// takes tokens back: beside the others, which read nothing of what it changes but a position's
// sign.
template <Codes kCodes, Scales kScales, int kCount>
__global__ void __launch_bounds__(kEmbedThreads)
    embed_kernel(PackedRows table, float scale, float* out, int bucket,
                 const __grid_constant__ StepState state) {
  const int t = static_cast<int>(blockIdx.x);
  if (t == bucket) {
    if (blockIdx.y == 0) {
      wait_for_previous();
      take_back<kEmbedThreads>(state);
    }
    allow_next();
    return;
  }
  allow_next();
  const int col = static_cast<int>(blockIdx.y * kEmbedThreads + threadIdx.x) * kCount;
  wait_for_previous();
  const int tokens = __ldcg(&state.counts->tokens);
  const int at = __ldcg(state.position + t);
  const TokenId id = __ldcg(state.token + t);
  if (t >= tokens || col >= table.cols) return;
  float value[kCount] = {};
  if (at >= 0) unpack_values<kCodes, kScales>(table, id, col, value);
#pragma unroll
  for (float& v : value) v = __fmul_rn(v, scale);
  float* to = out + static_cast<std::size_t>(t) * table.cols + col;
  if constexpr (kCount == 8) {
    reinterpret_cast<float4*>(to)[0] = make_float4(value[0], value[1], value[2], value[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(value[4], value[5], value[6], value[7]);
  } else {
    *to = value[0];
  }
}

constexpr int kNormThreads = 1024;
constexpr int kHeldPieces = 4;  // of a row, that a thread keeps in registers between its two passes

// Sum over the CTA, the same in every thread; the order is fixed.
__device__ __forceinline__ float block_sum(float v) {
  __shared__ float partial[kNormThreads / 32];
  v = warp_sum(v);
  const unsigned lane = threadIdx.x % 32;
  if (lane == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0F);
}

template <int kWide>
struct Piece {
  float x[kWide];
};

template <int kWide>
__device__ __forceinline__ Piece<kWide> load_piece(const float* p) {
  if constexpr (kWide == 4) {
    const float4 v = load_activation4(p);
    return {{v.x, v.y, v.z, v.w}};
  } else {
    return {{load_activation(p)}};
  }
}

template <int kWide, typename Out>
__device__ __forceinline__ void store_piece(Out* to, const Piece<kWide>& v) {
  constexpr bool kNarrow = sizeof(Out) == 2;
  if constexpr (kWide == 4 && kNarrow) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_bf16(v.x[0], v.x[1]), pack_bf16(v.x[2], v.x[3]));
  } else if constexpr (kWide == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
  } else if constexpr (kNarrow) {
    *to = __float2bfloat16_rn(v.x[0]);
  } else {
    *to = v.x[0];
  }
}

// One CTA a token; a thread has pieces tid, tid + blockDim.x, ... of kWide columns. The order of
// the sum depends on the width alone. Out is float or __nv_bfloat16.
template <int kWide, typename Out>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(NormArgs args, Out* out) {
  allow_next();
  const int t = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
  const int pieces = args.width / kWide;
  const bool norms = args.weight != nullptr;
  Piece<kWide> weight[kHeldPieces] = {};  // constant: loaded while the kernel before ends
  if (norms) {
#pragma unroll
    for (int i = 0; i < kHeldPieces; ++i) {
      const int p = tid + i * step;
      if (p < pieces) weight[i] = load_piece<kWide>(args.weight + p * kWide);
    }
  }
  wait_for_previous();
  const int count = __ldcg(args.count);
  const int source = args.gather ? __ldcg(args.gather + t) : t;
  Out* to = out + static_cast<std::size_t>(t) * args.width;
  if (t >= count) {
    if constexpr (sizeof(Out) == 2) {
      for (int p = tid; p < pieces; p += step) store_piece<kWide>(to + p * kWide, Piece<kWide>{});
    }
    return;
  }

  const float* from = args.in + static_cast<std::size_t>(source) * args.width;
  Piece<kWide> held[kHeldPieces] = {};
#pragma unroll
  for (int i = 0; i < kHeldPieces; ++i) {
    const int p = tid + i * step;
    if (p < pieces) held[i] = load_piece<kWide>(from + p * kWide);
  }
  float scale = 1;
  if (norms) {
    float sum = 0;
    const auto add = [&](const Piece<kWide>& v) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) sum = fmaf(v.x[j], v.x[j], sum);
    };
#pragma unroll
    for (int i = 0; i < kHeldPieces; ++i) add(held[i]);
    for (int p = tid + kHeldPieces * step; p < pieces; p += step) {
      add(load_piece<kWide>(from + p * kWide));
    }
    scale = 1.0F / sqrtf(block_sum(sum) / static_cast<float>(args.width) + args.eps);
  }
  const auto finish = [&](int p, Piece<kWide> v, const Piece<kWide>& w) {
    if (norms) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) v.x[j] = v.x[j] * scale * w.x[j];
    }
    if constexpr (sizeof(Out) != 2) {
      if (args.residual) {
        const Piece<kWide> r =
            load_piece<kWide>(args.residual + static_cast<std::size_t>(t) * args.width + p * kWide);
#pragma unroll
        for (int j = 0; j < kWide; ++j) v.x[j] = __fadd_rn(v.x[j], r.x[j]);
      }
    }
    store_piece<kWide>(to + p * kWide, v);
  };
#pragma unroll
  for (int i = 0; i < kHeldPieces; ++i) {
    const int p = tid + i * step;
    if (p < pieces) finish(p, held[i], weight[i]);
  }
  for (int p = tid + kHeldPieces * step; p < pieces; p += step) {
    const Piece<kWide> w = norms ? load_piece<kWide>(args.weight + p * kWide) : Piece<kWide>{};
    finish(p, load_piece<kWide>(from + p * kWide), w);
  }
}

template <typename Out>
void launch_norm(const NormArgs& args, Out* out, const char* name, const Launch& launch) {
  const bool fours = args.width % 4 == 0;
  const int pieces = fours ? args.width / 4 : args.width;
  const int threads = std::min(kNormThreads, (pieces + 31) / 32 * 32);
  launch_kernel(launch, name, fours ? norm_kernel<4, Out> : norm_kernel<1, Out>,
                dim3(static_cast<unsigned>(args.tokens)), dim3(static_cast<unsigned>(threads)), 0,
                args, out);
}

}  // namespace

void embed(const EmbedArgs& args, const Launch& launch) {
  with_form(args.table, [&](auto form) {
    using F = decltype(form);
    const int columns = kEmbedThreads * F::kCount;  // of one CTA
    const dim3 grid(static_cast<unsigned>(args.tokens + (args.rolls_back ? 1 : 0)),
                    static_cast<unsigned>((args.table.cols + columns - 1) / columns));
    launch_kernel(launch, "embed", embed_kernel<F::kCodes, F::kScales, F::kCount>, grid,
                  dim3(kEmbedThreads), 0, packed_rows(args.table), args.scale, args.out,
                  args.tokens, args.state);
  });
}

void rms_norm(const NormArgs& args, const Launch& launch) {
  launch_norm(args, args.out, "rms_norm", launch);
}

void rms_norm_bf16(const NormArgs& args, void* out, const Launch& launch) {
  launch_norm(args, static_cast<__nv_bfloat16*>(out), "rms_norm_bf16", launch);
}

}  // namespace pianola::cuda
