// pianola bench: how fast a model runs here, and how near that is to what memory allows.
#include <sys/resource.h>

#include <memory>

#include "bandwidth.h"
#include "base/check.h"
#include "base/thread_pool.h"
#include "bench_run.h"
#include "build_info.h"
#include "command.h"
#include "json_text.h"
#include "model_options.h"
#include "models/model.h"
#include "signals.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

struct BenchOptions {
  ModelOptions model;
  std::vector<int> prompts = {512};
  std::vector<int> generations = {64};
  std::vector<int> depths = {0};
  int repetitions = 5;
  int rows = 1;
  std::uint64_t seed = 1;
  std::string format = "md";
  bool json = false;
  bool no_bandwidth = false;
};

constexpr const char* kFooter = R"(
Examples:
  pianola bench -m model.gguf
  pianola bench -m model.gguf -p 512 -n 64 -d 0,4096 -r 5 -t 2 -o md
  pianola bench -m model.gguf -p 0 -n 128 --json | jq '.results[].tok_s.median'

Tests are named as llama-bench names them: pp512 computes a prompt of 512 tokens, tg64 generates 64
one by one, pp512+tg64 does both; "@ d4096" does it with 4096 tokens in the cache already. Each test
runs once before it counts. Tokens are random by seed; choosing the next token (greedy) is included,
text is not involved. MEM is bytes read for each generated token (weights, and the cache at the
middle of the test) times tok/s, as a share of the read bandwidth measured just before and after the
test with a buffer larger than the processor's cache; a model that fits that cache can pass 100 %.)";

struct Report {
  const Model& model;
  const Engine& engine;
  double load_seconds = 0;
  std::size_t peak_bytes = 0;
  double best_bandwidth = 0;     // zero when it was not measured
  std::size_t buffer_bytes = 0;  // that it was measured with
  std::size_t weight_bytes = 0;
  std::size_t cache_bytes_per_token = 0;
  std::vector<BenchResult> results;

  // Bytes that one generated token reads; 0 where prompts are in the test.
  double bytes_per_token(const BenchTest& test) const {
    if (test.prompt > 0) return 0;
    // A step reads the weights once, whatever its rows.
    return static_cast<double>(weight_bytes) / test.rows +
           static_cast<double>(cache_bytes_per_token) * (test.depth + test.generate / 2.0);
  }
  double share(const BenchResult& result) const {
    if (result.bandwidth <= 0) return 0;
    return bytes_per_token(result.test) * result.median() / result.bandwidth;
  }
};

std::size_t peak_resident_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::size_t>(usage.ru_maxrss) * 1024;
}

// Everything but the embedding is read for every token; of that only one row, and of experts those
// that a token chooses.
std::size_t weight_bytes_per_token(const CausalModel& model, int max_seq_len) {
  const ModelTables tables = model.tables(max_seq_len);
  // What an encoder reads, and the keys and values of its output, are read once an input.
  std::vector<bool> skipped(tables.weights.size());
  for (const LayerWeights& w : tables.layers) {
    for (const WeightId id : {w.cross_k, w.cross_v}) {
      if (id.valid()) skipped[static_cast<std::size_t>(id.index)] = true;
    }
  }
  const std::size_t count = tables.encoder.first_weight.valid()
                                ? static_cast<std::size_t>(tables.encoder.first_weight.index)
                                : tables.weights.size();
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const WeightDecl& weight = tables.weights[i];
    if (weight.role == WeightRole::kEmbedding || skipped[i]) continue;
    const std::size_t chosen =
        weight.experts == 1
            ? weight.source_bytes()
            : weight.source_bytes() / static_cast<std::size_t>(weight.experts) *
                  static_cast<std::size_t>(model.config().experts.num_experts_per_tok);
    bytes += chosen;
  }
  return bytes;
}

void check_lengths(const BenchOptions& options) {
  const auto check = [](const std::vector<int>& values, const char* flag) {
    for (const int value : values) {
      if (value < 0 || value > (1 << 24)) {
        fail(ErrorCode::kInvalidArgument, "{}: {}, expected 0 to {}", flag, value, 1 << 24);
      }
    }
  };
  check(options.prompts, "-p");
  check(options.generations, "-n");
  check(options.depths, "-d");
  if (options.rows < 1 || options.rows > 1024) {
    fail(ErrorCode::kInvalidArgument, "--rows: {}, expected 1 to 1024", options.rows);
  }
  if (options.repetitions < 1 || options.repetitions > 10000) {
    fail(ErrorCode::kInvalidArgument, "-r: {}, expected 1 to 10000", options.repetitions);
  }
}

std::string markdown(const Report& report) {
  const ModelInfo& info = report.model.info();
  const auto parameters = static_cast<double>(info.parameters);
  std::string out = "| model | size | params | backend | test | tok/s | min to max | MEM |\n";
  out += "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |\n";
  for (const BenchResult& r : report.results) {
    const double share = report.share(r);
    out += fmt::format(
        "| {} {} | {} | {:.2f} M | {} | {} | {:.2f} ± {:.2f} | {:.2f} to {:.2f} | {} |\n",
        info.family, info.weight_types, human_bytes(static_cast<double>(info.file_bytes)),
        parameters / 1e6, report.engine.backend_description(), r.test.name(), r.median(),
        r.deviation(), r.min(), r.max(), share > 0 ? fmt::format("{:.0f} %", share * 100) : "-");
  }
  out += fmt::format(
      "\npianola {}; tok/s: median of {} runs ± standard deviation, greedy sampling included, no "
      "tokenising\n",
      version(), report.results.empty() ? 0 : report.results.front().tok_s.size());
  out += fmt::format("load {}; peak memory {}; weights read per token {}; cache per token {}\n",
                     human_seconds(report.load_seconds),
                     human_bytes(static_cast<double>(report.peak_bytes)),
                     human_bytes(static_cast<double>(report.weight_bytes)),
                     human_bytes(static_cast<double>(report.cache_bytes_per_token)));
  if (report.best_bandwidth > 0) {
    out += fmt::format("read bandwidth {:.2f} GB/s (a buffer of {}, all threads)\n",
                       report.best_bandwidth / 1e9,
                       human_bytes(static_cast<double>(report.buffer_bytes)));
  }
  return out;
}

std::string csv(const Report& report) {
  std::string out =
      "model,weights,file_bytes,parameters,backend,test,prompt,generate,depth,repetitions,"
      "tok_s_median,tok_s_min,tok_s_max,tok_s_mean,tok_s_stddev,bytes_per_token,bandwidth_share\n";
  for (const BenchResult& r : report.results) {
    const ModelInfo& info = report.model.info();
    out += fmt::format(
        "\"{}\",\"{}\",{},{},\"{}\",\"{}\",{},{},{},{},{:.4f},{:.4f},{:.4f},{:.4f},"
        "{:.4f},{:.0f},{:.4f}\n",
        info.family, info.weight_types, info.file_bytes, info.parameters,
        report.engine.backend_description(), r.test.name(), r.test.prompt, r.test.generate,
        r.test.depth, r.tok_s.size(), r.median(), r.min(), r.max(), r.mean(), r.deviation(),
        report.bytes_per_token(r.test), report.share(r));
  }
  return out;
}

boost::json::object result_json(const Report& report, const BenchResult& r) {
  boost::json::object object;
  object["test"] = r.test.name();
  object["prompt"] = r.test.prompt;
  object["generate"] = r.test.generate;
  object["depth"] = r.test.depth;
  object["rows"] = r.test.rows;
  object["tok_s"] = {{"median", r.median()},
                     {"min", r.min()},
                     {"max", r.max()},
                     {"mean", r.mean()},
                     {"stddev", r.deviation()}};
  object["runs"] = boost::json::value_from(r.tok_s);
  const double bytes = report.bytes_per_token(r.test);
  object["bytes_per_token"] = bytes > 0 ? boost::json::value(bytes) : nullptr;
  object["gb_s"] = bytes > 0 ? boost::json::value(bytes * r.median() / 1e9) : nullptr;
  const double share = report.share(r);
  object["bandwidth_share"] = share > 0 ? boost::json::value(share) : nullptr;
  return object;
}

boost::json::object to_json(const Report& report, const BenchOptions& options) {
  const ModelInfo& info = report.model.info();
  boost::json::object object;
  object["version"] = version();
  object["build"] = build_description();
  object["model"] = {{"name", json_string(info.name)}, {"path", json_string(info.path)},
                     {"family", info.family},          {"weights", info.weight_types},
                     {"file_bytes", info.file_bytes},  {"parameters", info.parameters},
                     {"layers", info.layers}};
  object["backend"] = report.engine.backend_description();
  object["max_seq_len"] = report.engine.max_seq_len();
  object["cache_type"] = options.model.engine.cache_type;
  object["chunk"] = report.engine.chunk();
  object["repetitions"] = options.repetitions;
  object["seed"] = options.seed;
  object["includes"] = "greedy sampling; not tokenising";
  object["load_seconds"] = report.load_seconds;
  object["peak_memory_bytes"] = report.peak_bytes;
  object["weight_bytes_per_token"] = report.weight_bytes;
  object["cache_bytes_per_token"] = report.cache_bytes_per_token;
  object["read_bandwidth_gb_s"] =
      report.best_bandwidth > 0 ? boost::json::value(report.best_bandwidth / 1e9) : nullptr;
  boost::json::array results;
  for (const BenchResult& r : report.results) results.emplace_back(result_json(report, r));
  object["results"] = std::move(results);
  return object;
}

void measure(const BenchOptions& options, const std::vector<BenchTest>& tests, Report& report,
             Engine& engine) {
  const bool show = is_terminal(STDERR_FILENO);
  const std::size_t peak_of_load = peak_resident_bytes();
  std::unique_ptr<BandwidthMeter> meter;
  if (!options.no_bandwidth) {
    const int threads = options.model.engine.threads;
    meter = std::make_unique<BandwidthMeter>(threads > 0 ? threads : usable_cpus());
    report.buffer_bytes = meter->buffer_bytes();
  }
  // A machine's speed changes while others use it: each test is held against what memory gave just
  // before and after it.
  double before = meter ? meter->measure() : 0;
  for (const BenchTest& test : tests) {
    if (show) put_error(fmt::format("\r\x1b[K{} ...", test.name()));
    BenchResult result = run_test(engine, test, options.repetitions, options.seed);
    const double after = meter ? meter->measure() : 0;
    result.bandwidth = std::max(before, after);
    report.best_bandwidth = std::max(report.best_bandwidth, result.bandwidth);
    report.results.push_back(std::move(result));
    before = after;
  }
  if (show) put_error("\r\x1b[K");
  // The buffer was resident all the time, and is not the model's.
  const std::size_t peak = peak_resident_bytes();
  report.peak_bytes =
      std::max(peak_of_load, peak > report.buffer_bytes ? peak - report.buffer_bytes : 0);
}

int run(BenchOptions options) {
  check_lengths(options);
  const auto tests =
      bench_tests(options.prompts, options.generations, options.depths, options.rows);
  if (tests.empty())
    fail(ErrorCode::kInvalidArgument, "there is nothing to measure: -p and -n are 0");
  int longest = 0;
  // One more than its tokens: that which follows the last.
  for (const BenchTest& t : tests) longest = std::max(longest, t.depth + t.tokens() + 2);
  if (options.model.engine.max_seq_len == 0) options.model.engine.max_seq_len = longest;
  if (options.model.engine.max_seq_len < longest) {
    fail(ErrorCode::kContextOverflow, "the longest test needs -c {} or more, found {}", longest,
         options.model.engine.max_seq_len);
  }
  options.model.engine.slots = std::max(options.model.engine.slots, options.rows);
  Loaded loaded = load(options.model);
  Engine& engine = loaded.engine;
  Report report{loaded.model, loaded.engine};
  report.load_seconds = loaded.seconds;
  report.weight_bytes = weight_bytes_per_token(*loaded.model.causal(), engine.max_seq_len());
  report.cache_bytes_per_token =
      (engine.memory().cache_per_slot - engine.memory().cache_per_input) /
      static_cast<std::size_t>((engine.max_seq_len() + kCacheBlock - 1) / kCacheBlock *
                               kCacheBlock);
  measure(options, tests, report, engine);
  const std::string format = options.json ? "json" : options.format;
  if (format == "json") {
    put(to_json_text(to_json(report, options)));
  } else {
    put(format == "csv" ? csv(report) : markdown(report));
  }
  return 0;
}

}  // namespace

void add_bench(Command app, Action& action) {
  auto options = std::make_shared<BenchOptions>();
  const Command command = app.subcommand("bench", "Measure speed", kFooter);
  add_model_path(command, options->model);
  const auto lengths = [&](const char* flag, std::vector<int>& values, const char* text) {
    command.option(flag, values, text).separator(',').repeatable().type("N[,N...]");
  };
  lengths("-p,--prompt", options->prompts, "Lengths of prompts; 0: none. Default: 512");
  lengths("-n,--generate", options->generations, "Tokens to generate; 0: none. Default: 64");
  lengths("-d,--depth", options->depths, "Tokens in the cache before. Default: 0");
  command.option("-r,--repetitions", options->repetitions, "Runs of each test. Default: 5")
      .type("N");
  command.option("--rows", options->rows, "Sequences that run together. Default: 1").type("N");
  command.option("-s,--seed", options->seed, "Of the random tokens. Default: 1").type("N");
  command.option("-o,--output", options->format, "md, csv or json. Default: md")
      .one_of({"md", "csv", "json"})
      .type("FORMAT");
  command.flag("--json", options->json, "The same as -o json");
  command.flag("--no-bandwidth", options->no_bandwidth, "Leave the memory bandwidth out");
  add_engine_options(command, options->model);
  command.callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace pianola::cli
