#include "engine/engine_layout.h"

#include <algorithm>

#include "base/check.h"
#include "cache/cache_type.h"

namespace pianola {
namespace {

constexpr int kDefaultMaxSeqLen = 8192;
constexpr int kLeastMaxSeqLen = 64;
constexpr int kMaxSlots = 1024;
constexpr int kMaxChunk = 8192;
constexpr int kMaxRollback = 1024;
constexpr int kMaxCheckpoints = 64;
constexpr int kLogitsChunk = 64;
constexpr int kSmallChunk = 64;

void validate(const EngineOptions& o) {
  const auto check = [](bool ok, const char* field, auto found, const char* range) {
    if (!ok) {
      fail(ErrorCode::kInvalidArgument, "engine options: {} is {}, expected {}", field, found,
           range);
    }
  };
  check(o.max_seq_len >= 0 && o.max_seq_len <= (1 << 24), "max_seq_len", o.max_seq_len,
        "1 to 16777216, or 0 for the default");
  check(o.slots >= 1 && o.slots <= kMaxSlots, "slots", o.slots, "1 to 1024");
  check(o.max_input_len >= 0 && o.max_input_len <= (1 << 24), "max_input_len", o.max_input_len,
        "1 to 16777216, or 0 for the default");
  check(o.chunk >= 1 && o.chunk <= kMaxChunk, "chunk", o.chunk, "1 to 8192");
  check(o.rollback_depth >= 1 && o.rollback_depth <= kMaxRollback, "rollback_depth",
        o.rollback_depth, "1 to 1024");
  check(o.checkpoints >= 0 && o.checkpoints <= kMaxCheckpoints, "checkpoints", o.checkpoints,
        "0 to 64");
  check(o.threads >= 0 && o.threads <= 1024, "threads", o.threads,
        "1 to 1024, or 0 for the default");
}

DType cache_dtype(const std::string& name) {
  const auto dtype = parse_cache_type(name);
  if (!dtype) {
    fail(ErrorCode::kInvalidArgument, "engine options: cache_type is '{}', expected {}", name,
         cache_type_names());
  }
  return *dtype;
}

StepLimits step_limits(const EngineOptions& options, const std::vector<StepShape>& shapes) {
  StepLimits limits{.rows = options.slots, .max_seq_len = options.max_seq_len};
  for (const StepShape& shape : shapes) {
    limits.tokens = std::max(limits.tokens, shape.tokens);
    limits.lanes = std::max(limits.lanes, shape.lanes);
    limits.logit_rows = std::max(limits.logit_rows, shape.logit_rows);
  }
  return limits;
}

CacheOptions cache_options(const EngineOptions& options) {
  return {
      .max_seq_len = options.max_seq_len,
      .slots = options.slots,
      .rollback_depth = options.rollback_depth,
      .chunk = step_limits(options, step_shapes(options)).tokens,
      .dtype = cache_dtype(options.cache_type),
      .state_rollback = options.exact_rollback ? StateRollback::kExact : StateRollback::kCompact,
      .checkpoints = options.checkpoints,
      .max_input_len = options.max_input_len};
}

// Bytes with the binary unit a person would choose.
std::string human_bytes(std::size_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (value < 1024.0 * 1024.0) return fmt::format("{:.1f} KiB", value / 1024.0);
  if (value < 1024.0 * 1024.0 * 1024.0) return fmt::format("{:.1f} MiB", value / (1024.0 * 1024.0));
  return fmt::format("{:.2f} GiB", value / (1024.0 * 1024.0 * 1024.0));
}

}  // namespace

std::string MemoryPlan::to_string() const {
  std::string text;
  const auto line = [&text](const char* what, std::size_t bytes, const std::string& note) {
    text += fmt::format("  {:<12} {:>12}  {}\n", what, human_bytes(bytes), note);
  };
  text += fmt::format("memory plan ({} backend)\n", backend);
  line("weights", weights, "repacked copies");
  line("mapped", mapped, "used in place in the model file; not counted in the total");
  line("cache", cache,
       fmt::format("{} slot{} of {} tokens{}, {} each", slots, slots == 1 ? "" : "s", max_seq_len,
                   max_input_len > 0 ? fmt::format(" and an input of {}", max_input_len) : "",
                   human_bytes(cache_per_slot)));
  line("state", state, "tokens, lengths, sampling parameters");
  line("workspace", workspace, "activations and scratch");
  line("total", total, "");
  if (page_bytes > 0) {
    line("at first", total - cache + cache_at_first,
         fmt::format("caches take pages of {} as rows grow", human_bytes(page_bytes)));
  }
  line("available", available,
       fits()    ? "it fits"
       : loads() ? "it does not fit as a whole: rows can grow until it is used"
                 : "it does not fit");
  return text;
}

std::vector<StepShape> step_shapes(const EngineOptions& options) {
  std::vector<StepShape> shapes;
  const auto add = [&shapes](int tokens, int lanes, int logit_rows, StepVariant variant) {
    const StepShape shape{tokens, lanes, logit_rows, variant};
    if (std::find(shapes.begin(), shapes.end(), shape) == shapes.end()) shapes.push_back(shape);
  };
  int lanes = 1;
  for (; lanes < options.slots; lanes *= 2) add(lanes, lanes, lanes, StepVariant::kSample);
  add(lanes, lanes, lanes, StepVariant::kSample);
  const int largest = std::max(options.chunk, lanes);
  for (const int tokens : {std::min(std::max(kSmallChunk, lanes), largest), largest}) {
    add(tokens, std::min(lanes, tokens), std::min(lanes, tokens), StepVariant::kSample);
  }
  if (options.score) add(options.chunk, 1, options.chunk, StepVariant::kScore);
  if (options.logits) {
    const int tokens = logits_chunk_of(options);
    add(tokens, 1, tokens, StepVariant::kLogits);
  }
  return shapes;
}

std::vector<StepShape> encode_shapes(const EngineOptions& options) {
  std::vector<StepShape> shapes;
  for (const int tokens : {std::min(kSmallChunk, options.max_input_len), options.max_input_len}) {
    const StepShape shape{.tokens = tokens, .variant = StepVariant::kEncode};
    if (shapes.empty() || shapes.back() != shape) shapes.push_back(shape);
  }
  return shapes;
}

int logits_chunk_of(const EngineOptions& options) { return std::min(options.chunk, kLogitsChunk); }

namespace {

// The longest that a model can use: its own limit and the default.
int longest_default(const ModelConfig& config) {
  const auto length = std::min<std::int64_t>(config.max_position_embeddings, kDefaultMaxSeqLen);
  return static_cast<int>(std::max<std::int64_t>(length, 1));
}

int choose_max_input_len(const ModelConfig& config, int asked) {
  if (config.encoder.num_layers == 0) {
    if (asked == 0) return 0;
    fail(ErrorCode::kInvalidArgument,
         "engine options: max_input_len is {}, but the model has no encoder", asked);
  }
  return asked > 0 ? asked : longest_default(config);
}

// The largest default length that fits, by whole blocks. Apart from the caches all memory is
// counted as `longest` needs it, which is a little more than a shorter length does.
int choose_max_seq_len(const CausalModel& model, EngineOptions options, const Backend& backend,
                       std::size_t available) {
  int length = longest_default(model.config());
  options.max_seq_len = length;
  options.memory_limit = available;
  const EngineLayout longest(model, options, backend);
  const MemoryPlan& memory = longest.memory();
  const std::size_t other_bytes = memory.total - memory.cache;
  const auto cache_bytes = [&](int n) {
    options.max_seq_len = n;
    return CacheLayout(longest.tables().cache_specs(), cache_options(options)).total_bytes();
  };
  while (length > kLeastMaxSeqLen && cache_bytes(length) + other_bytes > available) {
    length = std::max(kLeastMaxSeqLen, (length - 1) / kCacheBlock * kCacheBlock);
  }
  return length;
}

}  // namespace

EngineLayout::EngineLayout(const CausalModel& model, const EngineOptions& options,
                           const Backend& backend)
    : options_(options), state_(limits_) {
  validate(options_);
  cache_dtype(options_.cache_type);
  const auto layout = [&backend](const WeightDecl& decl) { return backend.weight_layout(decl); };
  options_.max_input_len = choose_max_input_len(model.config(), options_.max_input_len);
  const std::size_t available =
      options_.memory_limit ? options_.memory_limit : backend.available_memory();
  if (options_.max_seq_len == 0) {
    options_.max_seq_len = choose_max_seq_len(model, options_, backend, available);
  }
  options_.chunk = std::min(options_.chunk, options_.max_seq_len);

  tables_ = model.tables(options_.max_seq_len);
  cache_layout_ = CacheLayout(tables_.cache_specs(), cache_options(options_));
  std::vector<StepShape> shapes = step_shapes(options_);
  if (options_.max_input_len > 0) {
    for (const StepShape& shape : encode_shapes(options_)) shapes.push_back(shape);
  }
  limits_ = step_limits(options_, shapes);
  limits_.rollback_depth = options_.rollback_depth;
  limits_.most_ahead = cache_layout_.most_ahead();
  state_ = StepStateLayout(limits_);
  const PlanTables plan_tables{tables_.weights, tables_.cache_specs(), cache_layout_.shape()};
  for (const StepShape& shape : shapes) {
    plans_.push_back(model.record(tables_, shape));
    backend.check(plans_.back(), plan_tables);
    workspace_bytes_ = std::max(workspace_bytes_, plan_workspace(plans_.back()).bytes);
    scratch_bytes_ = std::max(scratch_bytes_, backend.scratch_bytes(plans_.back(), plan_tables));
  }
  weights_ = std::make_unique<WeightStore>(tables_.weights, layout, weight_arena_);
  cache_ = std::make_unique<StaticCache>(cache_layout_, cache_arena_);

  memory_.backend = backend.name();
  memory_.max_seq_len = options_.max_seq_len;
  memory_.max_input_len = options_.max_input_len;
  memory_.slots = options_.slots;
  memory_.weights = weight_arena_.size();
  memory_.mapped = weights_->mapped_bytes();
  memory_.cache_per_slot = cache_layout_.bytes_per_slot();
  memory_.cache_per_input = cache_layout_.bytes_per_input();
  memory_.cache = cache_arena_.size();
  memory_.state = state_.bytes() + state_.shared_bytes();
  memory_.workspace = workspace_bytes_ + scratch_bytes_;
  memory_.total = memory_.weights + memory_.cache + memory_.state + memory_.workspace;
  memory_.available = available;
  memory_.page_bytes = backend.page_bytes();
  if (memory_.page_bytes > 0) {
    memory_.cache_at_first = cache_->first_token_bytes(memory_.page_bytes);
  }
}

}  // namespace pianola
