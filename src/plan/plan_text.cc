#include "plan/plan_text.h"

#include <fmt/format.h>

#include <iterator>

#include "plan/workspace.h"

namespace pianola {
namespace {

// Prints each op as "name out <- inputs  weights  options".
class Printer {
 public:
  Printer(const Plan& plan, std::span<const WeightDecl> weights, const CacheSpecs& caches)
      : plan_(plan), weights_(weights), caches_(caches) {}

  std::string operator()(const RollbackOp&) const {
    return "rollback   rows, position <- rollback";
  }
  std::string operator()(const EmbedOp& o) const {
    return fmt::format("embed      {} <- token  table={}{}", b(o.out), w(o.table),
                       o.scale == 1 ? "" : fmt::format(" scale={:.6g}", o.scale));
  }
  std::string operator()(const NormOp& o) const {
    return fmt::format("norm       {} <- {}{}  {}", b(o.out), b(o.in), plus(o.residual),
                       norm("norm", o.norm));
  }
  std::string operator()(const LinearOp& o) const {
    return fmt::format("linear     {} <- {}{}  {}weight={}{}", b(o.out), b(o.in), plus(o.residual),
                       o.norm ? norm("norm", *o.norm) + " " : "", w(o.weight),
                       optional("bias", o.bias));
  }
  std::string operator()(const QkvOp& o) const {
    const bool q = o.q.valid();
    std::string text = fmt::format("qkv        {}cache.{} <- {}  {}{} k={} v={}",
                                   q ? b(o.q_out) + ", " : "", o.cache.index, b(o.in),
                                   norm("norm", o.norm), optional("q", o.q), w(o.k), w(o.v));
    text +=
        optional("q_bias", o.q_bias) + optional("k_bias", o.k_bias) + optional("v_bias", o.v_bias);
    if (o.q_norm) text += norm(" q_norm", *o.q_norm);
    if (o.k_norm) text += norm(" k_norm", *o.k_norm);
    return text + rope(o.rope);
  }
  std::string operator()(const QueryOp& o) const {
    return fmt::format("query      {} <- {}  {} q={}{}{}{} dim={}", b(o.q_out), b(o.in),
                       norm("norm", o.norm), w(o.q), optional("q_bias", o.q_bias),
                       o.q_norm ? norm(" q_norm", *o.q_norm) : "", rope(o.rope), o.head_dim);
  }
  std::string operator()(const LatentQkvOp& o) const {
    return fmt::format("latent_qkv {}, cache.{} <- {}, {}  {} absorb={} of {}{}", b(o.q_out),
                       o.cache.index, b(o.q), b(o.kv), norm("kv_norm", o.kv_norm), w(o.absorb),
                       decl(o.absorb).experts, rope(o.rope));
  }
  std::string operator()(const HeadLinearOp& o) const {
    return fmt::format("head_linear {} <- {}  weight={} of {}", b(o.out), b(o.in), w(o.weight),
                       decl(o.weight).experts);
  }
  std::string operator()(const AttentionOp& o) const {
    const AttentionSpec& kv = caches_.attention[static_cast<std::size_t>(o.cache.index)];
    std::string text = fmt::format(
        "attention  {} <- {}, cache.{}  heads={}/{} dim={}{} scale={:.6g}{}{}{}", b(o.out), b(o.q),
        o.cache.index, o.heads, kv.kv_heads, kv.key_dim,
        kv.latent ? fmt::format(" latent={}", kv.value_dim) : "", o.scale,
        kv.window > 0 ? fmt::format(" window={}", kv.window) : "",
        kv.holds == CacheHolds::kTokens ? "" : " over the input", optional("sinks", o.sinks));
    if (o.bias) {
      text +=
          fmt::format(" bias={} buckets={}{}..{}", w(o.bias->table),
                      o.bias->both_directions ? "±" : "", o.bias->buckets, o.bias->max_distance);
    }
    return text;
  }
  std::string operator()(const ShortConvOp& o) const {
    return fmt::format("short_conv {}, state.{} <- {}  weight={} taps={}{}{}", b(o.out),
                       o.state.index, b(o.in), w(o.weight), state(o.state).conv_taps,
                       optional("bias", o.bias),
                       o.activation ? fmt::format(" act={}", activation_name(*o.activation)) : "");
  }
  std::string operator()(const DeltaRuleOp& o) const {
    const StateSpec& spec = state(o.state);
    return fmt::format(
        "delta_rule {}, state.{} <- {}, {}, {}  heads={}/{} group={} dim={}x{} a_log={} dt_bias={} "
        "eps={:g}",
        b(o.out), o.state.index, b(o.qkv), b(o.decay), b(o.beta), spec.heads, o.key_heads, o.group,
        spec.key_dim, spec.value_dim, w(o.a_log), w(o.dt_bias), o.eps);
  }
  std::string operator()(const SsmOp& o) const {
    const StateSpec& spec = state(o.state);
    return fmt::format(
        "ssm        {}, state.{} <- {}, {}  heads={}/{} dim={}x{} a_log={} dt_bias={} skip={} "
        "dt={:g}..{:g}",
        b(o.out), o.state.index, b(o.xbc), b(o.dt), spec.heads, o.groups, spec.key_dim,
        spec.value_dim, w(o.a_log), w(o.dt_bias), w(o.skip), o.dt_min, o.dt_max);
  }
  std::string operator()(const GateOp& o) const {
    return fmt::format("gate       {} <- {} * sigmoid({})", b(o.out), b(o.in), b(o.gate));
  }
  std::string operator()(const GatedNormOp& o) const {
    return fmt::format("gated_norm {} <- {}, {}  {} group={}{}", b(o.out), b(o.in), b(o.gate),
                       norm("norm", o.norm), o.group, o.gate_first ? " gate first" : "");
  }
  std::string operator()(const GatedMlpOp& o) const {
    return fmt::format("gated_mlp  {} <- {}{}  {}{} up={} down={} act={}{}{}{}", b(o.out), b(o.in),
                       plus(o.residual), norm("norm", o.norm), optional("gate", o.gate), w(o.up),
                       w(o.down), activation_name(o.activation), optional("gate_bias", o.gate_bias),
                       optional("up_bias", o.up_bias), optional("down_bias", o.down_bias));
  }
  std::string operator()(const RouteOp& o) const {
    const RouteGroups& g = o.groups;
    return fmt::format(
        "route      {} <- {}  {} router={}{} top={}/{}{} score={}{}{}", b(o.out), b(o.in),
        o.norm ? norm("norm", *o.norm) : "", w(o.weight), optional("bias", o.bias), o.top_k,
        decl(o.weight).rows,
        g.count > 1 ? fmt::format(" groups={}/{} by {}", g.chosen, g.count, g.best) : "",
        route_score_name(o.score), optional("choice_bias", o.choice_bias),
        o.scale != 1 ? fmt::format(" scale={:.6g}", o.scale) : "");
  }
  std::string operator()(const ExpertsOp& o) const {
    return fmt::format("experts    {} <- {}[{}]{}  {} gate={} up={} down={} of {} act={}{}{}{}",
                       b(o.out), b(o.in), b(o.routing), plus(o.residual), norm("norm", o.norm),
                       w(o.gate), w(o.up), w(o.down), decl(o.gate).experts,
                       activation_name(o.activation), optional("gate_bias", o.gate_bias),
                       optional("up_bias", o.up_bias), optional("down_bias", o.down_bias));
  }
  std::string operator()(const LmHeadOp& o) const {
    return fmt::format("lm_head    {} <- {}[logit_token]  {} weight={}", b(o.logits), b(o.in),
                       norm("norm", o.norm), w(o.weight));
  }
  std::string operator()(const ScoreOp& o) const {
    return fmt::format("score      logprob <- {}[logit_token], target  {} weight={}", b(o.in),
                       norm("norm", o.norm), w(o.weight));
  }
  std::string operator()(const SampleOp& o) const {
    return fmt::format("sample     sampled, logprob <- {}, rows", b(o.logits));
  }
  std::string operator()(const AdvanceOp&) const { return "advance    rows, ring <- sampled"; }

 private:
  const StateSpec& state(StateId id) const {
    return caches_.states[static_cast<std::size_t>(id.index)];
  }
  std::string b(BufferId id) const { return fmt::format("%{}", plan_.buffer(id).name); }
  const WeightDecl& decl(WeightId id) const { return weights_[static_cast<std::size_t>(id.index)]; }
  std::string w(WeightId id) const { return decl(id).name; }
  std::string plus(BufferId id) const { return id.valid() ? fmt::format(" + {}", b(id)) : ""; }
  std::string optional(const char* name, WeightId id) const {
    return id.valid() ? fmt::format(" {}={}", name, w(id)) : "";
  }
  std::string rope(const Rope& r) const {
    if (!r.turns()) return {};
    return fmt::format(" rope={}({}){}", r.style == RopeStyle::kHalf ? "half" : "interleaved",
                       w(r.inverse_frequencies),
                       r.attention_factor != 1 ? fmt::format("*{:g}", r.attention_factor) : "");
  }
  std::string norm(const char* name, const RmsNorm& n) const {
    return fmt::format("{}={} eps={:g}", name, w(n.weight), n.eps);
  }

  const Plan& plan_;
  std::span<const WeightDecl> weights_;
  CacheSpecs caches_;
};

}  // namespace

std::string plan_text(const Plan& plan, std::span<const WeightDecl> weights,
                      const CacheSpecs& caches) {
  std::string text = fmt::format("plan {}\n", to_string(plan.shape));
  const WorkspacePlan workspace = plan_workspace(plan);
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    const BufferDecl& buffer = plan.buffers[i];
    fmt::format_to(std::back_inserter(text), "  %{:<10} [{}, {}] f32 at {}\n", buffer.name,
                   buffer.extent == Extent::kTokens ? "tokens" : "logit_rows", buffer.width,
                   workspace.offsets[i]);
  }
  const Printer printer(plan, weights, caches);
  for (std::size_t i = 0; i < plan.ops.size(); ++i) {
    fmt::format_to(std::back_inserter(text), "{:4} {}\n", i, std::visit(printer, plan.ops[i]));
  }
  return text;
}

}  // namespace pianola
