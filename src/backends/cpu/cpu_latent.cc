// Multi-head latent attention on the CPU: queries go into the space of the latent, a matrix a head,
// and what attention makes of latents comes out of it the same way.
#include <algorithm>

#include "backends/cpu/cpu_program.h"

namespace pianola::cpu {

void CpuProgram::execute(const LatentQkvOp& op, Worker w) {
  const StepState& s = bound_.state();
  const LayerCacheView& view = bound_.cache(op.cache);
  const WeightDecl& absorb = *bound_.weight(op.absorb).decl;
  const int plain = static_cast<int>(absorb.cols);
  const int turned = view.key_dim - view.value_dim;
  const HeadRows q{bound_.buffer(op.q), bound_.width(op.q), plain + turned};
  const HeadRows out{bound_.buffer(op.q_out), bound_.width(op.q_out), view.key_dim};
  multiply_heads(w, op.absorb, q, out);

  const Range range = share(tokens(), w);
  if (range.begin < range.end) {
    const int half = turned / 2;
    const auto rotate = op.rope.style == RopeStyle::kHalf ? f_.rope_halves : f_.rope_pairs;
    float* keys = scratch<float>(layout_.keys);
    for (int t = range.begin; t < range.end; ++t) {
      const float* cosines = rope_rows(op.rope) + std::int64_t{t} * 2 * half;
      const float* kv = bound_.buffer(op.kv) + std::int64_t{t} * view.key_dim;
      float* key = keys + std::int64_t{t} * view.key_dim;
      f_.rms_norm(kv, bound_.vector(op.kv_norm.weight), op.kv_norm.eps, view.value_dim, key);
      std::copy_n(kv + view.value_dim, turned, key + view.value_dim);
      rotate(cosines, cosines + half, half, 1, turned, key + view.value_dim);
      for (std::int64_t h = 0; h < absorb.experts; ++h) {
        const float* from = q.data + t * q.token_stride + h * q.head_stride + plain;
        float* to = out.data + t * out.token_stride + h * out.head_stride + view.value_dim;
        std::copy_n(from, turned, to);
        rotate(cosines, cosines + half, half, 1, turned, to);
      }
    }
    append({.isa = isa_,
            .cache = kv_cache(op.cache),
            .tokens = range.end - range.begin,
            .positions = s.position + range.begin,
            .slots = scratch<std::int32_t>(layout_.slots) + range.begin,
            .keys = keys + std::int64_t{range.begin} * view.key_dim,
            .stride = view.key_dim},
           0, 1);
  }
  pool_.barrier();
}

void CpuProgram::execute(const HeadLinearOp& op, Worker w) {
  const WeightDecl& decl = *bound_.weight(op.weight).decl;
  multiply_heads(w, op.weight, {bound_.buffer(op.in), bound_.width(op.in), decl.cols},
                 {bound_.buffer(op.out), bound_.width(op.out), decl.rows});
  pool_.barrier();
}

void CpuProgram::multiply_heads(Worker w, WeightId stack, const HeadRows& in, const HeadRows& out) {
  if (tokens() == 0) return;
  const WeightDecl& decl = *bound_.weight(stack).decl;
  const int rows = static_cast<int>(decl.rows);
  const int cols = static_cast<int>(decl.cols);
  const int panels = (rows + kPanelRows - 1) / kPanelRows;
  const ActivationKind kind = activation_kind(bound_.weight(stack).layout.dtype, isa_);
  const auto worker = static_cast<std::size_t>(w.index);
  auto* activations =
      scratch<std::byte>(layout_.head_activations + worker * layout_.head_activation_bytes);
  auto* work = scratch<std::byte>(layout_.linear + worker * layout_.linear_bytes);
  // The rows of all heads, one after the other, are shared out as those of one matrix.
  const Range own = share(static_cast<int>(decl.experts) * panels, w);
  for (int h = own.begin / panels; h * panels < own.end; ++h) {
    const int begin = std::max(own.begin - h * panels, 0) * kPanelRows;
    const int end = std::min(std::min(own.end - h * panels, panels) * kPanelRows, rows);
    prepare_activations(kind, isa_, in.data + h * in.head_stride, in.token_stride, tokens(), cols,
                        activations, 0, tokens());
    linear(packed(stack, h), activations, tokens(), begin, end, out.data + h * out.head_stride,
           out.token_stride, work, isa_);
  }
}

}  // namespace pianola::cpu
