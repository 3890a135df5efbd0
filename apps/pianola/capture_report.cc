#include "capture_report.h"

#include <chrono>

#include "json_text.h"
#include "terminal.h"

namespace pianola::cli {

boost::json::object counters_json(const EngineCounters& counters) {
  return {{"plans", counters.plans},
          {"captures", counters.captures},
          {"capture_seconds", counters.capture_seconds},
          {"capture_bytes", counters.capture_bytes},
          {"cache_reserved", counters.cache_reserved},
          {"cache_resident", counters.cache_resident},
          {"launches", counters.launches},
          {"rounds", counters.steps},
          {"tokens", counters.tokens},
          {"address_hash", fmt::format("{:016x}", counters.address_hash)}};
}

LoadReport measure_load(const Model& model, const ModelOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const Engine engine = make_engine(model, options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return {engine.backend_description(), seconds.count(), engine.counters()};
}

std::string load_report_text(const LoadReport& report) {
  const EngineCounters& c = report.counters;
  std::string text =
      fmt::format("loaded in {} ({})\n", human_seconds(report.load_seconds), report.backend);
  text += fmt::format("  {:<12} {:>12}  recorded and compiled\n", "plans", c.plans);
  text +=
      fmt::format("  {:<12} {:>12}  of addresses, {} of memory behind them before a first token\n",
                  "cache", human_bytes(static_cast<double>(c.cache_reserved)),
                  human_bytes(static_cast<double>(c.cache_resident)));
  if (c.captures == 0) {
    return text + fmt::format("  {:<12} {:>12}  nothing is captured here\n", "graphs", 0);
  }
  text += fmt::format("  {:<12} {:>12}  captured in {}\n", "graphs", c.captures,
                      human_seconds(c.capture_seconds));
  return text + fmt::format("  {:<12} {:>12}  of device memory, measured; not in the total\n",
                            "graph bytes", human_bytes(static_cast<double>(c.capture_bytes)));
}

boost::json::object load_report_json(const LoadReport& report) {
  boost::json::object object = counters_json(report.counters);
  object["backend"] = json_string(report.backend);
  object["load_seconds"] = report.load_seconds;
  return object;
}

}  // namespace pianola::cli
