#include "model_options.h"

#include <chrono>
#include <cmath>

#include "backends/backend.h"
#include "backends/cpu/isa.h"
#include "base/check.h"
#include "cache/cache_type.h"
#include "signals.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

// The reference takes seconds for more, during which nothing could stop it.
constexpr int kReferenceChunk = 32;

std::string isa_list() {
  std::string names;
  for (const cpu::Isa isa : cpu::supported_isas()) {
    names += (names.empty() ? "" : ", ") + std::string(cpu::isa_name(isa));
  }
  return names;
}

}  // namespace

void add_model_path(Command command, ModelOptions& options) {
  command
      .option("-m,--model", options.path,
              "Model: a GGUF file, or a folder with config.json and safetensors")
      .environment("PIANOLA_MODEL");
}

void add_engine_options(Command command, ModelOptions& options) {
  EngineOptions& engine = options.engine;
  const std::string group = "Engine";
  const auto add = [&](const char* flag, auto& value, const std::string& text, const char* env,
                       const char* type) {
    command.option(flag, value, text).environment(env).group(group).type(type);
  };
  add("-c,--ctx", engine.max_seq_len,
      "Tokens that a sequence can hold. Default: the least of the model's own, 8192 and what fits",
      "PIANOLA_CTX", "TOKENS");
  add("--max-input", engine.max_input_len,
      "Tokens of an encoder's input, where the model has one. Default: the least of its own and "
      "8192",
      "PIANOLA_MAX_INPUT", "TOKENS");
  add("-t,--threads", engine.threads, "Threads. Default: one for each usable processor",
      "PIANOLA_THREADS", "N");
  add("--backend,--device", engine.backend,
      "cpu, cuda, or reference (scalar, slow, the specification). Default: cpu", "PIANOLA_BACKEND",
      "NAME");
  add("--gpu", engine.device, "Which GPU the cuda backend takes. Default: 0", "PIANOLA_GPU", "N");
  const auto flag = [&](const char* name, bool& value, const char* text, const char* env) {
    command.flag(name, value, text).environment(env).group(group);
  };
  flag("--eager", engine.eager, "cuda: op by op, not as a captured graph", "PIANOLA_EAGER");
  flag("--check-each", engine.check_each, "cuda, with --eager: name the op that fails",
       "PIANOLA_CHECK_EACH");
  flag("--dependent-launch,!--no-dependent-launch", engine.dependent_launch,
       "cuda: let a kernel start while the one before it ends. Default: on",
       "PIANOLA_DEPENDENT_LAUNCH");
  flag(
      "--batch-invariant", engine.batch_invariant,
      "cuda: prompts in the order of decoding: slower, any chunking gives the same bits, as on the "
      "other backends without it",
      "PIANOLA_BATCH_INVARIANT");
  add("--isa", engine.isa,
      "Instruction set of the cpu backend; here: " + isa_list() + ". Default: the best",
      "PIANOLA_ISA", "NAME");
  add("--cache-type", engine.cache_type,
      "Numbers in the cache: " + cache_type_names() + ". Default: " + engine.cache_type,
      "PIANOLA_CACHE_TYPE", "TYPE");
  add("--rollback-depth", engine.rollback_depth,
      fmt::format("Last tokens of a row that can be taken back at any time. Default: {}",
                  engine.rollback_depth),
      "PIANOLA_ROLLBACK_DEPTH", "TOKENS");
  flag("--exact-rollback", engine.exact_rollback,
       "State layers keep the state after each of them: more memory, nothing to compute again",
       "PIANOLA_EXACT_ROLLBACK");
  add("--checkpoints", engine.checkpoints,
      fmt::format(
          "Older states that a row with state layers keeps, to go back further. Default: {}",
          engine.checkpoints),
      "PIANOLA_CHECKPOINTS", "N");
  add("-b,--chunk", options.chunk,
      fmt::format("Prompt tokens in one step; Ctrl-C waits for it. Default: {}, reference {}",
                  engine.chunk, kReferenceChunk),
      "PIANOLA_CHUNK", "TOKENS");
  add("--memory", options.memory, "Bytes the engine may take, as in 2GiB. Default: what is free",
      "PIANOLA_MEMORY", "BYTES");
}

void add_slots_option(Command command, ModelOptions& options) {
  command.option("--slots", options.engine.slots, "Sequences at a time. Default: 1")
      .environment("PIANOLA_SLOTS")
      .group("Engine")
      .type("N");
}

std::size_t parse_bytes(const std::string& text) {
  std::size_t end = 0;
  double value = -1;
  try {
    value = std::stod(text, &end);
  } catch (const std::exception&) {
    end = 0;
  }
  std::string unit = text.substr(end);
  std::erase(unit, ' ');
  double factor = 0;
  if (unit.empty() || unit == "B") factor = 1;
  for (const auto& [letter, size] :
       {std::pair{'K', 0x1p10}, {'M', 0x1p20}, {'G', 0x1p30}, {'T', 0x1p40}}) {
    const std::string name(1, letter);
    if (unit == name || unit == name + "iB" || unit == name + "B") factor = size;
  }
  const double bytes = value * factor;
  if (end == 0 || factor == 0 || !(bytes >= 1) || bytes > 0x1p60) {
    fail(ErrorCode::kInvalidArgument,
         "--memory: '{}' is no size; expected bytes, or a number with KiB, MiB, GiB or TiB", text);
  }
  return static_cast<std::size_t>(bytes);
}

EngineOptions engine_options(const ModelOptions& options) {
  EngineOptions engine = options.engine;
  if (options.chunk) {
    engine.chunk = *options.chunk;
  } else if (engine.backend == "reference") {
    engine.chunk = kReferenceChunk;
  }
  if (!options.memory.empty()) engine.memory_limit = parse_bytes(options.memory);
  return engine;
}

Engine make_engine(const Model& model, const ModelOptions& options, bool quiet) {
  EngineOptions engine = engine_options(options);
  Progress progress("loading", ProgressUnit::kBytes, !quiet);
  engine.on_progress = [&](const LoadProgress& p) {
    throw_if_interrupted();
    progress.update(p.done_bytes, p.total_bytes);
  };
  Engine loaded(model.causal(), engine);
  const MemoryPlan& memory = loaded.memory();
  if (!quiet && !memory.fits()) {
    progress.finish();
    note(
        "the cache does not fit as a whole: {} of addresses, {} of memory now; rows can grow until "
        "memory ends",
        human_bytes(static_cast<double>(memory.cache)),
        human_bytes(static_cast<double>(loaded.counters().cache_resident)));
  }
  return loaded;
}

Loaded load(const ModelOptions& options, bool quiet) {
  if (options.path.empty()) {
    fail(ErrorCode::kInvalidArgument,
         "no model: name a GGUF file or a folder with -m, or in PIANOLA_MODEL");
  }
  const auto begin = std::chrono::steady_clock::now();
  Model model = Model::open(options.path);
  throw_if_interrupted();
  Engine engine = make_engine(model, options, quiet);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return {std::move(model), std::move(engine), seconds.count()};
}

}  // namespace pianola::cli
