// The options that every subcommand shares: which model, and how its engine is made. One place, so
// that a flag has one name, one environment variable and one meaning.
//
//   ModelOptions options;
//   add_model_path(command, options);
//   add_engine_options(command, options);
//   ...                                              // after parsing
//   Loaded loaded = load(options);                   // progress on a terminal
//   loaded.engine.backend_description();
#pragma once

#include <optional>
#include <string>

#include "command_line.h"
#include "pianola/engine.h"
#include "pianola/model.h"

namespace pianola::cli {

struct ModelOptions {
  std::string path;
  EngineOptions engine;
  std::optional<int> chunk;  // the backend's default when it is not given
  std::string memory;        // as the user wrote it; "" when there is no limit
};

// Declares -m alone, and the options of the engine.
void add_model_path(Command command, ModelOptions& options);
void add_engine_options(Command command, ModelOptions& options);
void add_slots_option(Command command, ModelOptions& options);

// The options as the engine takes them. Throws InvalidArgument.
EngineOptions engine_options(const ModelOptions& options);

// "2GiB", "500M", "1073741824": bytes. Throws InvalidArgument.
std::size_t parse_bytes(const std::string& text);

struct Loaded {
  Model model;
  Engine engine;
  double seconds = 0;
};

// Opens the model and makes its engine, with a progress line unless `quiet`. Throws Error, and
// Interrupted after Ctrl-C.
Loaded load(const ModelOptions& options, bool quiet = false);
Engine make_engine(const Model& model, const ModelOptions& options, bool quiet = false);

}  // namespace pianola::cli
