// pianola plan: what a model takes and whether it fits, before anything is loaded.
#include <memory>
#include <optional>

#include "base/check.h"
#include "capture_report.h"
#include "command.h"
#include "json_text.h"
#include "model_options.h"
#include "signals.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

struct PlanOptions {
  ModelOptions model;
  bool measure = false;
  bool json = false;
};

constexpr const char* kFooter = R"(
Examples:
  pianola plan -m model.gguf -c 8192 --slots 4
  pianola plan -m model.gguf -c 32768 --cache-type f32 --memory 4GiB
  pianola plan -m model.gguf --json | jq .total
  pianola plan -m model.gguf --device cuda --measure

Reads headers only, and allocates nothing; with --measure it loads the model as well, when it fits,
and shows what its graphs took. On a GPU, caches take memory as rows grow: what fits only as long as
they stay short is loaded, and said. Exit status 6 when it is not.)";

MemoryPlan plan_for(const Model& model, EngineOptions options, int max_seq_len) {
  throw_if_interrupted();
  options.max_seq_len = max_seq_len;
  return Engine::plan(*model.causal(), options);
}

// The longest context that fits, up to the model's own: whole blocks of 64 tokens. 0: none.
int longest_that_fits(const Model& model, const EngineOptions& options) {
  constexpr int kBlock = 64;
  const auto limit = static_cast<int>(std::min<std::int64_t>(model.info().context, 1 << 24));
  if (plan_for(model, options, limit).fits()) return limit;
  int low = 0;
  int high = (limit + kBlock - 1) / kBlock;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (plan_for(model, options, middle * kBlock).fits() ? low : high) = middle;
  }
  return low * kBlock;
}

boost::json::object to_json(const Model& model, const MemoryPlan& plan, int longest,
                            const std::optional<LoadReport>& measured) {
  boost::json::object object;
  object["model"] = {{"name", json_string(model.info().name)},
                     {"weights", model.info().weight_types},
                     {"file_bytes", model.info().file_bytes}};
  object["backend"] = plan.backend;
  object["max_seq_len"] = plan.max_seq_len;
  object["slots"] = plan.slots;
  object["weights"] = plan.weights;
  object["mapped"] = plan.mapped;
  object["cache_per_slot"] = plan.cache_per_slot;
  if (plan.max_input_len > 0) {
    object["max_input_len"] = plan.max_input_len;
    object["cache_per_input"] = plan.cache_per_input;
  }
  object["cache"] = plan.cache;
  object["state"] = plan.state;
  object["workspace"] = plan.workspace;
  object["total"] = plan.total;
  object["available"] = plan.available;
  object["fits"] = plan.fits();
  object["page_bytes"] = plan.page_bytes;
  object["cache_at_first"] = plan.cache_at_first;
  object["loads"] = plan.loads();
  object["longest_context"] = longest;
  if (measured) object["measured"] = load_report_json(*measured);
  return object;
}

int run(const PlanOptions& options) {
  if (options.model.path.empty()) {
    fail(ErrorCode::kInvalidArgument, "no model: name one with -m, or in PIANOLA_MODEL");
  }
  const Model model = Model::open(options.model.path);
  const EngineOptions engine = engine_options(options.model);
  const MemoryPlan plan = plan_for(model, engine, engine.max_seq_len);
  const int longest = longest_that_fits(model, engine);
  std::optional<LoadReport> measured;
  if (options.measure && plan.loads()) measured = measure_load(model, options.model);
  if (options.json) {
    put(to_json_text(to_json(model, plan, longest, measured)));
  } else {
    put(fmt::format("{}: {}, {}, {} parameters in {}\n{}", model.info().name, model.info().family,
                    model.info().weight_types, model.info().parameters,
                    human_bytes(static_cast<double>(model.info().file_bytes)), plan.to_string()));
    put(longest > 0
            ? fmt::format("  longest context that fits with {} slot{}: {} (the model's own: {})\n",
                          plan.slots, plan.slots == 1 ? "" : "s", longest, model.info().context)
            : "  no context fits\n");
    if (measured) put(load_report_text(*measured));
  }
  if (plan.loads()) return 0;
  fail(ErrorCode::kOutOfMemory, "plan: {} are needed and {} available; {}",
       human_bytes(static_cast<double>(plan.total)),
       human_bytes(static_cast<double>(plan.available)),
       longest > 0 ? fmt::format("-c {} would fit", longest)
                   : "use fewer slots or a smaller cache type");
}

}  // namespace

void add_plan(Command app, Action& action) {
  auto options = std::make_shared<PlanOptions>();
  const Command command =
      app.subcommand("plan", "Whether a model fits, before it is loaded", kFooter);
  add_model_path(command, options->model);
  command.flag("--measure", options->measure,
               "Loads the model and shows captures, their seconds and their bytes");
  command.flag("--json", options->json, "One JSON object; sizes in bytes");
  add_slots_option(command, options->model);
  add_engine_options(command, options->model);
  command.callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace pianola::cli
