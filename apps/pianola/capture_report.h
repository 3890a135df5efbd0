// What an engine has captured, as `plan`, `inspect` and `check` show it. Measured, not planned: a
// driver does not say beforehand what a graph takes.
#pragma once

#include <boost/json.hpp>

#include <string>

#include "model_options.h"

namespace pianola::cli {

boost::json::object counters_json(const EngineCounters& counters);

// Loads the model as the options say and tells what its graphs took: one line for each figure.
struct LoadReport {
  std::string backend;
  double load_seconds = 0;
  EngineCounters counters;
};
LoadReport measure_load(const Model& model, const ModelOptions& options);

std::string load_report_text(const LoadReport& report);
boost::json::object load_report_json(const LoadReport& report);

}  // namespace pianola::cli
