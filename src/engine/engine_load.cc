// Loading: from a model and options to sealed memory and compiled Programs. Nothing here runs
// again.
#include <algorithm>

#include "base/check.h"
#include "engine/engine_impl.h"
#include "plan/plan_text.h"

namespace pianola {
namespace {

BackendOptions backend_options(const EngineOptions& options) {
  return {.threads = options.threads,
          .isa = options.isa,
          .device = options.device,
          .eager = options.eager,
          .check_each = options.check_each,
          .dependent_launch = options.dependent_launch,
          .batch_invariant = options.batch_invariant};
}

const LmHeadOp* find_head(const Plan& plan) {
  for (const Op& op : plan.ops) {
    if (const auto* head = std::get_if<LmHeadOp>(&op)) return head;
  }
  return nullptr;
}

}  // namespace

Engine::Impl::Impl(std::shared_ptr<const CausalModel> model_in, const EngineOptions& options)
    : model(std::move(model_in)),
      backend(make_backend(options.backend, backend_options(options))),
      layout(*model, options, *backend) {
  if (!layout.memory().loads()) {
    fail(ErrorCode::kOutOfMemory,
         "the model does not fit; use a shorter max_seq_len, fewer slots or a smaller model\n{}",
         layout.memory().to_string());
  }
  allocate();
  bind();
}

void Engine::Impl::allocate() {
  weight_memory = backend->allocate(layout.weight_arena().size(), MemoryUse::kDense);
  cache_memory = backend->allocate(layout.cache_arena().size(), MemoryUse::kOnDemand);
  const MemoryPlan& memory = layout.memory();
  if (layout.options().memory_limit > 0) {
    cache_memory->set_limit(layout.options().memory_limit - (memory.total - memory.cache));
  }
  state_memory = backend->allocate(layout.state().bytes(), MemoryUse::kSparse);
  shared_memory = backend->allocate(layout.state().shared_bytes(), MemoryUse::kShared);
  work_memory =
      backend->allocate(layout.workspace_bytes() + layout.scratch_bytes(), MemoryUse::kSparse);
  layout.weight_arena().seal(weight_memory->data());
  layout.cache_arena().seal(cache_memory->data());
  state = layout.state().bind(state_memory->data(), shared_memory->data());

  const auto& on_progress = layout.options().on_progress;
  layout.weights().load(
      model->checkpoint(),
      [this](const WeightDecl& decl, const WeightLayout& weight, const std::byte* source,
             std::byte* destination) { backend->repack(decl, weight, source, destination); },
      [&on_progress](std::uint64_t done, std::uint64_t total, std::string_view tensor) {
        if (on_progress) on_progress({done, total, tensor});
      });
}

void Engine::Impl::bind() {
  const EngineOptions& options = layout.options();
  for (int layer = 0; layer < static_cast<int>(layout.tables().caches.size()); ++layer) {
    caches.push_back(layout.cache().layer(layer));
  }
  for (int layer = 0; layer < static_cast<int>(layout.tables().states.size()); ++layer) {
    states.push_back(layout.cache().state(layer));
  }
  const Binding binding{.tables = {layout.tables().weights, layout.tables().cache_specs(),
                                   layout.cache().layout().shape()},
                        .weights = layout.weights().bound(),
                        .caches = caches,
                        .states = states,
                        .state = state,
                        .workspace = work_memory->data(),
                        .scratch = work_memory->data() + layout.workspace_bytes(),
                        .scratch_bytes = layout.scratch_bytes()};
  programs = std::make_unique<ProgramCache>(layout.plans(), *backend, binding);

  for (const Plan& plan : layout.plans()) {
    if (plan.shape.variant == StepVariant::kSample) {
      step_tokens = std::max(step_tokens, plan.shape.tokens);
    }
    if (plan.shape.variant == StepVariant::kLogits) {
      logits.resize(static_cast<std::size_t>(plan.shape.logit_rows) *
                    static_cast<std::size_t>(model->config().vocab_size));
    }
  }
  pages = std::make_unique<RowPages>(*cache_memory, backend->page_bytes(), caches, states,
                                     options.slots);
  tables = std::make_unique<StepTables>(layout.limits());
  rows = std::make_unique<RowTable>(state, options.slots, options.max_seq_len,
                                    static_cast<int>(model->config().vocab_size),
                                    layout.cache_layout(), states, *backend);
  lanes.reserve(static_cast<std::size_t>(layout.limits().lanes));
  needs.reserve(static_cast<std::size_t>(layout.limits().lanes));
  events.reserve(2 * static_cast<std::size_t>(state.ring_capacity));
  waiting.reserve(2 * static_cast<std::size_t>(state.ring_capacity));
  running_rows.reserve(static_cast<std::size_t>(options.slots));
  counters.plans = layout.plans().size();
}

const float* Engine::Impl::device_logits() const {
  for (const Plan& plan : layout.plans()) {
    const LmHeadOp* head = find_head(plan);
    if (!head || plan.shape.variant != StepVariant::kLogits) continue;
    const std::size_t offset =
        plan_workspace(plan).offsets[static_cast<std::size_t>(head->logits.index)];
    return reinterpret_cast<const float*>(work_memory->data() + offset);
  }
  return nullptr;
}

Engine::Engine(std::shared_ptr<const CausalModel> model, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), options)) {}
Engine::~Engine() {
  if (!impl_) return;
  try {
    impl_->settle();
  } catch (const Error&) {
    impl_->healthy = false;  // nothing is left to be told
  }
}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;

MemoryPlan Engine::plan(const CausalModel& model, const EngineOptions& options) {
  const auto backend = make_backend(options.backend, backend_options(options));
  return EngineLayout(model, options, *backend).memory();
}

std::string Engine::plan_text(const CausalModel& model, const EngineOptions& options,
                              std::string_view shape_filter) {
  const auto backend = make_backend(options.backend, backend_options(options));
  const EngineLayout layout(model, options, *backend);
  std::string text;
  for (const Plan& plan : layout.plans()) {
    if (to_string(plan.shape).find(shape_filter) == std::string::npos) continue;
    text += pianola::plan_text(plan, layout.tables().weights, layout.tables().cache_specs());
  }
  return text;
}

const MemoryPlan& Engine::memory() const { return impl_->layout.memory(); }
const CausalModel& Engine::model() const { return *impl_->model; }
int Engine::max_seq_len() const { return impl_->layout.options().max_seq_len; }
int Engine::max_input_len() const { return impl_->layout.options().max_input_len; }
int Engine::slots() const { return impl_->layout.options().slots; }
int Engine::chunk() const { return impl_->layout.options().chunk; }
int Engine::vocab_size() const { return static_cast<int>(impl_->model->config().vocab_size); }
std::string Engine::backend_description() const { return impl_->backend->description(); }
bool Engine::healthy() const { return impl_->healthy; }

EngineCounters Engine::counters() const {
  EngineCounters counters = impl_->counters;
  counters.address_hash = impl_->programs->address_certificate();
  const BackendCounters backend = impl_->backend->counters();
  counters.cache_reserved = impl_->cache_memory->size();
  counters.cache_resident = impl_->cache_memory->resident_bytes();
  counters.captures = backend.captures;
  counters.launches = backend.launches;
  counters.capture_seconds = backend.capture_seconds;
  counters.capture_bytes = backend.capture_bytes;
  return counters;
}

}  // namespace pianola
