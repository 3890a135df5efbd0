// pianola check: whether a model gives the same on every executor of its backend, how near it is to
// another backend, and what works with it.
#include <algorithm>
#include <map>
#include <memory>

#include "base/check.h"
#include "capture_report.h"
#include "command.h"
#include "engine/support_matrix.h"
#include "json_text.h"
#include "model_checks.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

struct CheckOptions {
  ModelOptions model;
  std::string path;  // MODEL, which wins over -m and its variable
  CheckSettings settings;
  bool json = false;
  bool no_support = false;
};

constexpr const char* kFooter = R"(
Examples:
  pianola check -m model.gguf
  pianola check -m model.gguf --device cuda -n 256
  pianola check -m model.gguf --device cuda --against cpu --json | jq '.checks[]'

The prompt is always the same: a text, or tokens by seed where the model has no tokenizer. A check
that says = compares bits; one that allows a difference of log-probabilities prints the largest, the
bar, and how many times it is below the bar. The model is loaded once for each executor, one after
the other. Exit status 0 only when no check has failed.)";

const char* result_name(ModelCheck::Result result) {
  switch (result) {
    case ModelCheck::Result::kPassed:
      return "passed";
    case ModelCheck::Result::kFailed:
      return "FAILED";
    case ModelCheck::Result::kSkipped:
      return "skipped";
  }
  return "";
}

std::string margin_text(const ModelCheck& check) {
  if (!check.difference) return check.detail;
  std::string times;
  if (*check.difference > 0 && *check.difference <= *check.bar) {
    times = fmt::format(", {:.3g} times below", *check.bar / *check.difference);
  }
  return fmt::format("largest difference {:.3g}, bar {:.3g}{}; {}", *check.difference, *check.bar,
                     times, check.detail);
}

std::string checks_text(const CheckReport& report) {
  std::size_t width = 0;
  for (const ModelCheck& check : report.checks) width = std::max(width, check.name.size());
  std::string out = fmt::format("{:<{}}  result   margin\n", "check", width);
  for (const ModelCheck& check : report.checks) {
    out += fmt::format("{:<{}}  {:<7}  {}\n", check.name, width, result_name(check.result),
                       margin_text(check));
  }
  return out;
}

// --- The support matrix: a table for each kind of layer, or one for each type of cache where they
// differ; reasons below, each once.

class Reasons {
 public:
  // "works", or the number of the reason.
  std::string cell(const std::string& refused) {
    if (refused.empty()) return "works";
    auto at = std::find(reasons_.begin(), reasons_.end(), refused);
    if (at == reasons_.end()) at = reasons_.insert(reasons_.end(), refused);
    return fmt::format("[{}]", at - reasons_.begin() + 1);
  }
  std::string text() const {
    std::string out;
    for (std::size_t i = 0; i < reasons_.size(); ++i) {
      out += fmt::format("  [{}] refused: {}\n", i + 1, reasons_[i]);
    }
    return out;
  }

 private:
  std::vector<std::string> reasons_;
};

std::string column_name(const SupportEntry& entry) {
  if (entry.backend != "cuda") return entry.backend;
  return entry.captured ? "cuda, captured" : "cuda, op by op";
}

// Rows are verbs, columns backends; nothing is captured on a CPU, whose one column says so little.
std::string table_text(const std::vector<SupportEntry>& entries, Reasons& reasons) {
  std::vector<std::string> verbs;
  std::vector<std::string> columns;
  std::map<std::pair<std::string, std::string>, std::string> cells;
  const auto add = [](std::vector<std::string>& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const SupportEntry& entry : entries) {
    if (entry.captured && entry.backend != "cuda") continue;
    add(verbs, entry.verb);
    add(columns, column_name(entry));
    cells[{entry.verb, column_name(entry)}] = reasons.cell(entry.refused);
  }
  std::string out = fmt::format("    {:<30}", "");
  for (const std::string& column : columns) out += fmt::format("{:<16}", column);
  for (const std::string& verb : verbs) {
    out += fmt::format("\n    {:<30}", verb);
    for (const std::string& column : columns) out += fmt::format("{:<16}", cells[{verb, column}]);
  }
  return out + "\n";
}

std::string support_text(const std::vector<SupportEntry>& matrix,
                         const std::vector<WeightSupport>& weights) {
  Reasons reasons;
  std::string out = "what works with this model\n";
  // Entries of one layer kind and cache type; equal tables are printed once.
  std::vector<std::pair<std::string, std::string>> tables;  // title, table
  for (std::size_t begin = 0; begin < matrix.size();) {
    std::size_t end = begin;
    while (end < matrix.size() && matrix[end].layer == matrix[begin].layer &&
           matrix[end].cache_type == matrix[begin].cache_type) {
      ++end;
    }
    const std::vector<SupportEntry> part(matrix.begin() + static_cast<std::ptrdiff_t>(begin),
                                         matrix.begin() + static_cast<std::ptrdiff_t>(end));
    const std::string table = table_text(part, reasons);
    const std::string& cache = matrix[begin].cache_type;
    if (begin > 0 && matrix[begin - 1].layer == matrix[begin].layer &&
        tables.back().second == table) {
      tables.back().first += ", " + cache;
    } else {
      tables.emplace_back(fmt::format("{}, cache {}", matrix[begin].layer, cache), table);
    }
    begin = end;
  }
  for (const auto& [title, table] : tables) out += fmt::format("  {}\n{}", title, table);

  std::map<std::string, std::string> by_backend;
  for (const WeightSupport& weight : weights) {
    const std::string cell = reasons.cell(weight.refused);
    by_backend[weight.backend] +=
        fmt::format(" {}{}", dtype_name(weight.dtype), weight.refused.empty() ? "" : " " + cell);
  }
  for (const auto& [backend, types] : by_backend) {
    out += fmt::format("  weights, {:<10}{}\n", backend, types);
  }
  return out + reasons.text();
}

// --- JSON ---------------------------------------------------------------------------------------

boost::json::array checks_json(const CheckReport& report) {
  boost::json::array all;
  for (const ModelCheck& check : report.checks) {
    boost::json::object o;
    o["check"] = json_string(check.name);
    o["result"] = check.failed() ? "failed" : result_name(check.result);
    o["detail"] = json_string(check.detail);
    if (check.difference) o["difference"] = *check.difference;
    if (check.bar) o["bar"] = *check.bar;
    all.emplace_back(std::move(o));
  }
  return all;
}

boost::json::array support_json(const std::vector<SupportEntry>& matrix) {
  boost::json::array all;
  for (const SupportEntry& entry : matrix) {
    boost::json::object o{{"layer", entry.layer},
                          {"cache_type", entry.cache_type},
                          {"verb", entry.verb},
                          {"backend", entry.backend},
                          {"captured", entry.captured}};
    o["result"] = json_string(entry.refused.empty() ? "works" : "refused: " + entry.refused);
    if (entry.refused.empty()) o["how"] = entry.how;
    all.emplace_back(std::move(o));
  }
  return all;
}

boost::json::array weights_json(const std::vector<WeightSupport>& weights) {
  boost::json::array all;
  for (const WeightSupport& weight : weights) {
    all.emplace_back(boost::json::object{
        {"type", dtype_name(weight.dtype)},
        {"backend", weight.backend},
        {"result", json_string(weight.refused.empty() ? "works" : "refused: " + weight.refused)}});
  }
  return all;
}

boost::json::object to_json(const Model& model, const CheckReport& report) {
  boost::json::object o;
  o["model"] = {{"name", json_string(model.info().name)},
                {"family", model.info().family},
                {"weights", model.info().weight_types},
                {"parameters", model.info().parameters}};
  o["backend"] = json_string(report.backend);
  o["prompt"] = json_string(report.prompt);
  o["prompt_tokens"] = report.prompt_tokens;
  o["tokens"] = boost::json::value_from(report.tokens);
  o["checks"] = checks_json(report);
  o["counters"] = counters_json(report.counters);
  o["passed"] = report.passed();
  return o;
}

int run(const CheckOptions& options) {
  if (options.model.path.empty()) {
    fail(ErrorCode::kInvalidArgument, "no model: name one with -m, or in PIANOLA_MODEL");
  }
  const Model model = Model::open(options.model.path);
  const CheckReport report = check_model(model, options.model, options.settings);
  std::vector<SupportEntry> matrix;
  std::vector<WeightSupport> weights;
  if (!options.no_support) {
    matrix = support_matrix(*model.causal(), options.model.engine);
    weights = weight_support(options.model.engine);
  }
  if (options.json) {
    boost::json::object object = to_json(model, report);
    if (!options.no_support) {
      object["support"] = support_json(matrix);
      object["weight_support"] = weights_json(weights);
    }
    put(to_json_text(object));
  } else {
    put(fmt::format("{}: {}, {}; {}; prompt: {}, {} tokens\n", model.info().name,
                    model.info().family, model.info().weight_types, report.backend, report.prompt,
                    report.prompt_tokens));
    put(checks_text(report));
    if (!options.no_support) put("\n" + support_text(matrix, weights));
    put(report.passed() ? "every check passed\n" : "something is wrong\n");
  }
  return report.passed() ? 0 : 1;
}

}  // namespace

void add_check(Command app, Action& action) {
  auto options = std::make_shared<CheckOptions>();
  const Command command =
      app.subcommand("check", "Whether a model gives the same everywhere", kFooter);
  add_model_path(command, options->model);
  command.option("MODEL", options->path, "The same as -m");
  command
      .option("-n,--tokens", options->settings.tokens, "Tokens of the longest answer. Default: 96")
      .type("N");
  command.option("--seed", options->settings.seed, "Of draws and of a prompt without text")
      .type("N");
  command
      .option("--against", options->settings.against,
              "Whose log-probabilities to compare with: reference, cpu, none, or auto: the "
              "reference for as many tokens as take some seconds, else cpu")
      .one_of({"auto", "reference", "cpu", "none"})
      .type("NAME");
  command.flag("--no-support", options->no_support, "Without the table of what works");
  command.flag("--json", options->json, "One JSON object");
  add_engine_options(command, options->model);
  command.callback([options, &action] {
    if (!options->path.empty()) options->model.path = options->path;
    action = [options] { return run(*options); };
  });
}

}  // namespace pianola::cli
