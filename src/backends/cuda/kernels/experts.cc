#include "backends/cuda/kernels/experts.h"

#include <algorithm>

#include "backends/cuda/kernels/experts_forms.h"

namespace pianola::cuda {
namespace {

using products::ExpertLaunch;
using products::ExpertParams;
using products::ExpertProduct;
using products::Segment;

// Larger steps are computed in tiles, so that scratch stays small.
constexpr int kMostTokens = 512;
constexpr int kMostRoutes = 16384;
// Up to so many tokens a segment is one operand of a tensor-core product.
constexpr int kFewTokens = 8;

int most_tokens(int top_k) { return std::clamp(kMostRoutes / top_k, 1, kMostTokens); }

int segment_routes(int tokens) { return tokens <= kFewTokens ? 8 : 32; }

struct Scratch {
  std::size_t words = 0, inverse_rms = 0, segment_count = 0, segments = 0, routes = 0;
  std::size_t hidden = 0, parts = 0, ups = 0;
  std::size_t bytes = 0;
};

Scratch plan(const ExpertsShape& s) {
  const auto size = [](int n) { return static_cast<std::size_t>(n); };
  Scratch c;
  const auto take = [&c](std::size_t bytes) {
    const std::size_t at = c.bytes;
    c.bytes += (bytes + 255) / 256 * 256;
    return at;
  };
  const int tile = std::min(s.tokens, most_tokens(s.top_k));
  const std::size_t routes = size(tile) * size(s.top_k);
  c.words = take(size(tile) * size(s.width) * sizeof(float));
  c.inverse_rms = take(size(tile) * sizeof(float));
  c.segment_count = take(sizeof(std::int32_t));
  const std::size_t segments = routes / size(segment_routes(tile)) + size(s.experts);
  c.segments = take(std::min(routes, segments) * sizeof(Segment));
  c.routes = take(routes * sizeof(std::int32_t));
  c.hidden = take(routes * size(s.ff) * sizeof(float));
  c.parts =
      take(routes * size(s.mixed ? std::max(s.out_width, s.ff) : s.out_width) * sizeof(float));
  if (s.mixed) c.ups = take(routes * size(s.ff) * sizeof(float));
  return c;
}

void multiply(const PackedWeight& form, const ExpertParams& p, const ExpertLaunch& kind,
              const Launch& launch) {
  switch (form.codes) {
    case Codes::kF32:
    case Codes::kF16:
      return products::experts_float(form, p, kind, launch);
    case Codes::kBF16:
      return products::experts_bf16(form, p, kind, launch);
    case Codes::kInt4:
      return products::experts_int4(form, p, kind, launch);
    case Codes::kInt8:
      return products::experts_int8(form, p, kind, launch);
  }
}

// One tile of tokens, from `first` on.
class Tile {
 public:
  Tile(const ExpertsArgs& args, int first, const Launch& launch)
      : args_(args),
        launch_(launch),
        tokens_(std::min(args.tokens - first, most_tokens(args.top_k))) {
    at_ = plan({.tokens = args.tokens,
                .experts = args.experts,
                .top_k = args.top_k,
                .width = args.gate.weight.cols,
                .ff = args.gate.weight.rows,
                .out_width = args.down.weight.rows,
                .mixed = !same_form(args.gate.weight, args.up.weight)});
    const auto skip = static_cast<std::int64_t>(first);
    first_ = first;
    args_.in += skip * args.gate.weight.cols;
    args_.routing += skip * 2 * args.top_k;
    args_.out += skip * args.down.weight.rows;
    if (args_.residual) args_.residual += skip * args.down.weight.rows;
  }

  int run() {
    if (is_direct()) {
      run_direct();
    } else {
      run_sorted();
    }
    return tokens_;
  }

 private:
  template <typename T>
  T* scratch(std::size_t offset) const {
    return reinterpret_cast<T*>(args_.scratch + offset);
  }

  // A single token needs no sorting, and its blocks hold what they multiply with.
  bool is_direct() const {
    const auto bytes = [](std::int64_t floats) {
      return static_cast<std::size_t>(floats) * sizeof(float);
    };
    return args_.tokens == 1 && same_form(args_.gate.weight, args_.up.weight) &&
           args_.top_k <= products::kMostDirectRoutes &&
           bytes(args_.gate.weight.cols) <= products::kMostDirectBytes &&
           bytes(std::int64_t{args_.top_k} * args_.down.weight.cols) <= products::kMostDirectBytes;
  }

  ExpertParams params(const ExpertStack& stack) const {
    const PackedWeight& w = stack.weight;
    ExpertParams p;
    p.matrix[0] = {w.data, w.scale_data, stack.bias, stack.stride};
    p.rows = w.rows;
    p.cols = w.cols;
    p.code_row = static_cast<int>(code_row_bytes(w.codes, w.cols));
    p.scale_row = static_cast<int>(scale_row_bytes(w.scales, w.codes, w.cols));
    p.top_k = args_.top_k;
    p.count = args_.count;
    p.first = first_;
    p.routing = args_.routing;
    return p;
  }
  ExpertParams gated_params() const {
    ExpertParams p = params(args_.gate);
    const ExpertStack& up = args_.up;
    p.matrix[1] = {up.weight.data, up.weight.scale_data, up.bias, up.stride};
    p.activation = args_.activation;
    p.hidden = scratch<std::uint16_t>(at_.hidden);
    return p;
  }
  ExpertParams down_params() const {
    ExpertParams p = params(args_.down);
    p.words = scratch<uint4>(at_.hidden);
    p.words_by_route = true;
    return p;
  }
  void then(const PackedWeight& form, const ExpertParams& p, const ExpertLaunch& kind) {
    multiply(form, p, kind, launch_);
    launch_.dependent = launch_.dependent_inside;
  }

  void run_direct() {
    ExpertParams gated = gated_params();
    gated.in = args_.in;
    gated.norm = args_.norm;
    gated.eps = args_.eps;
    then(args_.gate.weight, gated, {.product = ExpertProduct::kGated, .direct = true});
    ExpertParams down = down_params();
    down.residual = args_.residual;
    down.out = args_.out;
    then(args_.down.weight, down, {.product = ExpertProduct::kSum, .direct = true});
  }

  void run_sorted() {
    const int most = segment_routes(std::min(args_.tokens, most_tokens(args_.top_k)));
    const int groups = most / 8;
    products::order_experts({.routing = args_.routing,
                             .count = args_.count,
                             .first = first_,
                             .tokens = tokens_,
                             .top_k = args_.top_k,
                             .experts = args_.experts,
                             .segment_routes = most,
                             .segment_count = scratch<std::int32_t>(at_.segment_count),
                             .segments = scratch<Segment>(at_.segments),
                             .routes = scratch<std::int32_t>(at_.routes),
                             .in = args_.in,
                             .norm = args_.norm,
                             .eps = args_.eps,
                             .cols = args_.gate.weight.cols,
                             .words = scratch<uint4>(at_.words),
                             .inverse_rms = scratch<float>(at_.inverse_rms)},
                            args_.gate.weight.codes, launch_);
    launch_.dependent = launch_.dependent_inside;
    const auto sorted = [this](ExpertParams p) {
      p.segment_count = scratch<std::int32_t>(at_.segment_count);
      p.segments = scratch<Segment>(at_.segments);
      p.routes = scratch<std::int32_t>(at_.routes);
      return p;
    };
    const auto on_tokens = [&](ExpertParams p) {
      p.words = scratch<uint4>(at_.words);
      p.inverse_rms = scratch<float>(at_.inverse_rms);
      return sorted(p);
    };
    if (same_form(args_.gate.weight, args_.up.weight)) {
      then(args_.gate.weight, on_tokens(gated_params()),
           {.product = ExpertProduct::kGated, .groups = groups});
    } else {
      ExpertParams gate = on_tokens(params(args_.gate));
      gate.parts = scratch<float>(at_.parts);
      then(args_.gate.weight, gate, {.groups = groups});
      ExpertParams up = on_tokens(params(args_.up));
      up.parts = scratch<float>(at_.ups);
      then(args_.up.weight, up, {.groups = groups});
      products::activate_experts({.gate = gate.parts,
                                  .up = up.parts,
                                  .routing = args_.routing,
                                  .count = args_.count,
                                  .first = first_,
                                  .activation = args_.activation,
                                  .hidden = scratch<std::uint16_t>(at_.hidden),
                                  .width = args_.gate.weight.rows,
                                  .top_k = args_.top_k,
                                  .tokens = tokens_},
                                 launch_);
    }
    ExpertParams down = sorted(down_params());
    down.parts = scratch<float>(at_.parts);
    then(args_.down.weight, down, {.groups = groups});
    sum_experts({.parts = down.parts,
                 .routing = args_.routing,
                 .residual = args_.residual,
                 .out = args_.out,
                 .count = args_.count,
                 .first = first_,
                 .width = args_.down.weight.rows,
                 .top_k = args_.top_k,
                 .tokens = tokens_},
                launch_);
  }

  ExpertsArgs args_;
  Launch launch_;
  int tokens_;
  int first_ = 0;
  Scratch at_;
};

}  // namespace

std::size_t experts_scratch_bytes(const ExpertsShape& shape) { return plan(shape).bytes; }

void run_experts(const ExpertsArgs& args, const Launch& launch) {
  require(args.gate.weight.cols == args.up.weight.cols && args.down.weight.rows % 4 == 0 &&
              args.top_k <= kMostRoutes,
          "experts: matrices that do not go together");
  Launch next = launch;
  for (int first = 0; first < args.tokens;) {
    first += Tile(args, first, next).run();
    next.dependent = launch.dependent_inside;
  }
}

}  // namespace pianola::cuda
