// The short convolution of state layers. A thread block has some channels of one lane's row, all
// tokens: it reads the row's stored inputs before it stores new ones in their place, and no other
// block touches its channels.
#include <algorithm>

#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/state.h"
#include "backends/cuda/kernels/state_places.cuh"

namespace pianola::cuda {
namespace {

// kWide channels next to each other.
template <int kWide>
struct Channels {
  float x[kWide];

  __device__ __forceinline__ void load(const float* p) {
    if constexpr (kWide == 4) {
      const float4 v = load_activation4(p);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      x[0] = load_activation(p);
    }
  }
  __device__ __forceinline__ void store(float* p) const {
    if constexpr (kWide == 4) {
      *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      *p = x[0];
    }
  }
  __device__ __forceinline__ void add(const Channels& weight, const Channels& input) {
#pragma unroll
    for (int c = 0; c < kWide; ++c) x[c] = fmaf(weight.x[c], input.x[c], x[c]);
  }
};

// A token's position, -1 beyond the lane's end, and how many tokens before it an output reads, or
// would: fewer where the lane begins.
struct Place {
  int position = -1;
  int n = 0;
  bool dense = false;  // none of them is masked
};
__device__ __forceinline__ Place find_place(const StepState& s, const LaneTokens& tokens, int t,
                                            int taps) {
  if (t >= tokens.end) return {};
  const int position = __ldcg(s.position + t);
  const int n = min(taps - 1, t - tokens.begin);
  return {position, n, n == 0 || (position >= n && __ldcg(s.position + t - n) == position - n)};
}

// The input at `position`, `back` positions before that of token t: of this step, or stored. The
// n tokens before t are the positions before its own.
__device__ __forceinline__ const float* input_at(const ShortConvArgs& p, const LaneTokens& tokens,
                                                 int t, int position, int back, int n) {
  const auto width = static_cast<std::size_t>(p.view.spec.conv_width);
  if (back <= n) return p.in + static_cast<std::size_t>(t - back) * width;
  return conv_place(p.view, tokens.row, position - back);
}

// The same where masked tokens may lie between.
__device__ __forceinline__ const float* find_input(const ShortConvArgs& p, const LaneTokens& tokens,
                                                   int& source, int stored_position) {
  while (source >= tokens.begin && __ldcg(p.state.position + source) < 0) --source;
  const float* at = source >= tokens.begin
                        ? p.in + static_cast<std::size_t>(source) *
                                     static_cast<std::size_t>(p.view.spec.conv_width)
                        : conv_place(p.view, tokens.row, stored_position);
  --source;
  return at;
}

// Channels on x, lanes on y; of a thread block channels on x, tokens on y. kTaps 0: any number.
template <int kWide, int kTaps>
__global__ void short_conv_kernel(const __grid_constant__ ShortConvArgs p) {
  allow_next();
  const int width = p.view.spec.conv_width;
  const int taps = kTaps > 0 ? kTaps : p.view.spec.conv_taps;
  const int channel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kWide;
  const int step = static_cast<int>(blockDim.y);
  const bool real = channel < width;
  const LaneTokens tokens = lane_tokens(p.state, static_cast<int>(blockIdx.y));
  const int first = tokens.begin + static_cast<int>(threadIdx.y);
  const float* weight = p.weight + channel;
  // What no kernel of the step writes is on its way before the wait.
  Channels<kWide> w[kTaps > 0 ? kTaps : 1];
  Channels<kWide> bias{};
  if (real) {
    if constexpr (kTaps > 0) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) w[j].load(weight + (kTaps - 1 - j) * width);
    }
    if (p.bias) bias.load(p.bias + channel);
  }
  Place place = find_place(p.state, tokens, first, taps);
  // The position of the last token that is not masked.
  int last = tokens.end - tokens.begin == 1 ? place.position : -1;
  for (int t = tokens.end - 1; t > tokens.begin && last < 0; --t) {
    last = __ldcg(p.state.position + t);
  }
  const int first_position = place.position;
  if (real && first == tokens.begin) {
    for (int j = 1; j < taps && j <= first_position; ++j) {
      prefetch(conv_place(p.view, tokens.row, first_position - j) + channel);
    }
  }
  wait_for_previous();

  for (int t = first; real && t < tokens.end; t += step) {
    float* out = p.out + static_cast<std::size_t>(t) * width + channel;
    const auto [position, n, dense] = place;
    place = find_place(p.state, tokens, t + step, taps);
    Channels<kWide> sum{};
    if (position >= 0) {
      sum = bias;
      if constexpr (kTaps > 0) {
        Channels<kWide> x[kTaps];
        int source = t;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          x[j] = {};
          if (j > position) continue;
          x[j].load((dense ? input_at(p, tokens, t, position, j, n)
                           : find_input(p, tokens, source, position - j)) +
                    channel);
        }
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          if (j <= position) sum.add(w[j], x[j]);
        }
      } else {
        int source = t;
        for (int j = 0; j < taps && j <= position; ++j) {
          Channels<kWide> of_tap;
          Channels<kWide> x;
          of_tap.load(weight + (taps - 1 - j) * width);
          x.load((dense ? input_at(p, tokens, t, position, j, n)
                        : find_input(p, tokens, source, position - j)) +
                 channel);
          sum.add(of_tap, x);
        }
      }
      if (p.silu) {
#pragma unroll
        for (int c = 0; c < kWide; ++c) sum.x[c] = sum.x[c] / (1.0F + expf(-sum.x[c]));
      }
    }
    sum.store(out);
  }

  __syncthreads();  // the row's inputs of before have been read
  for (int t = first; real && t < tokens.end; t += step) {
    const int position = t == first ? first_position : __ldcg(p.state.position + t);
    if (position < 0 || position <= last - p.view.conv_capacity) continue;
    Channels<kWide> x;
    x.load(p.in + static_cast<std::size_t>(t) * width + channel);
    x.store(conv_place(p.view, tokens.row, position) + channel);
  }
}

using ConvKernel = void (*)(ShortConvArgs);

template <int kWide>
ConvKernel conv_kernel(int taps) {
  return taps == 4 ? short_conv_kernel<kWide, 4> : short_conv_kernel<kWide, 0>;
}

}  // namespace

void short_conv(const ShortConvArgs& args, const Launch& launch) {
  const int width = args.view.spec.conv_width;
  const bool fours = width % 4 == 0;
  const int pieces = fours ? width / 4 : width;
  // Long lanes want threads for tokens more than for channels.
  const int most = args.tokens - args.lanes + 1;  // of a lane, when all lanes have some
  const int across = most <= 64 ? 32 : 8;
  const int along = most <= 64 ? std::min(8, most) : 64;
  const ConvKernel kernel =
      fours ? conv_kernel<4>(args.view.spec.conv_taps) : conv_kernel<1>(args.view.spec.conv_taps);
  launch_kernel(launch, "short_conv", kernel,
                dim3(static_cast<unsigned>((pieces + across - 1) / across),
                     static_cast<unsigned>(args.lanes)),
                dim3(static_cast<unsigned>(across), static_cast<unsigned>(along)), 0, args);
}

}  // namespace pianola::cuda
