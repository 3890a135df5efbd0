// The options of what is generated and how: sampling, limits, stop strings, chat template. Shared
// by `run` and `chat`.
//
//   GenerationOptions options;
//   add_generation_options(command, options);
//   ...                                              // after parsing
//   GenerationRequest request = make_request(options, model);    // all but the prompt
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "command_line.h"
#include "pianola/generator.h"
#include "pianola/model.h"

namespace pianola::cli {

struct GenerationOptions {
  // What the user set; the rest comes from the model's own generation config.
  std::optional<float> temperature, top_p, min_p, repeat_penalty, presence_penalty,
      frequency_penalty;
  std::optional<int> top_k, penalty_window;
  std::optional<std::uint64_t> seed;
  std::vector<std::string> logit_bias;
  Option stop;  // verbatim
  int max_tokens = -1;
  bool ignore_eos = false;
  bool logprobs = false;

  std::string system;
  std::string chat_template;       // as the user wrote it: a name, or a file
  std::string template_variables;  // JSON object
};

void add_generation_options(Command command, GenerationOptions& options, int default_max_tokens);

// Throws InvalidArgument for a bias that names no token.
GenerationRequest make_request(const GenerationOptions& options, const Model& model);

// Reads the template file when one was named.
ChatTemplateOptions make_template_options(const GenerationOptions& options);

}  // namespace pianola::cli
