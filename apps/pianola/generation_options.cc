#include "generation_options.h"

#include <charconv>
#include <filesystem>
#include <limits>
#include <random>

#include "base/check.h"
#include "base/mapped_file.h"
#include "model_options.h"

namespace pianola::cli {
namespace {

constexpr std::size_t kMaxTemplateBytes = std::size_t{1} << 20;

void add_sampling_options(Command command, GenerationOptions& options) {
  const auto add = [&](const char* flag, auto& value, const char* text, const char* env,
                       const char* type) {
    command.option(flag, value, text).environment(env).group("Sampling").type(type);
  };
  add("-s,--seed", options.seed, "Seed of the draws. Default: a new one each time", "PIANOLA_SEED",
      "N");
  add("--temp", options.temperature,
      "Temperature; 0 takes the most likely token. Default: the model's own, else 0",
      "PIANOLA_TEMP", "T");
  add("--top-k", options.top_k, "Only the K most likely tokens; 0 is off", "PIANOLA_TOP_K", "K");
  add("--top-p", options.top_p, "Only the most likely tokens that sum to P; 1 is off",
      "PIANOLA_TOP_P", "P");
  add("--min-p", options.min_p, "Only tokens at least P times as likely as the best; 0 is off",
      "PIANOLA_MIN_P", "P");
  add("--repeat-penalty", options.repeat_penalty,
      "Makes tokens that occurred less likely; 1 is off", "PIANOLA_REPEAT_PENALTY", "X");
  add("--repeat-last-n", options.penalty_window,
      "Tokens that the penalties look back on; -1 is all. Default: 64", "PIANOLA_REPEAT_LAST_N",
      "N");
  add("--presence-penalty", options.presence_penalty,
      "Subtracted once from tokens that occurred, -2 to 2", "PIANOLA_PRESENCE_PENALTY", "X");
  add("--frequency-penalty", options.frequency_penalty, "Subtracted for each occurrence, -2 to 2",
      "PIANOLA_FREQUENCY_PENALTY", "X");
  command
      .option("-l,--logit-bias", options.logit_bias,
              "Added to a token's logit: ID+V, ID-V or TOKEN=V, as in 15043+1 or "
              "' the=-inf'. Repeatable; in the environment, one a line")
      .environment("PIANOLA_LOGIT_BIAS")
      .group("Sampling")
      .type("BIAS")
      .repeatable();
}

float parse_bias_value(std::string_view text, const std::string& whole) {
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  float value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) {
    if (value == value && value != std::numeric_limits<float>::infinity()) return value;
  }
  fail(ErrorCode::kInvalidArgument,
       "--logit-bias: '{}': expected ID+V, ID-V or TOKEN=V, with V a number or -inf", whole);
}

TokenId find_biased_token(const std::string& text, const std::string& whole, const Model& model) {
  const Tokenizer& tokenizer = model.tokenizer();
  // As the vocabulary writes it first: "<|im_end|>", "Ġthe"; then as text.
  if (const auto id = tokenizer.find_token(text)) return *id;
  const auto ids = tokenizer.encode(text, {.add_special = false});
  if (ids.size() == 1) return ids.front();
  fail(ErrorCode::kInvalidArgument,
       "--logit-bias: '{}': '{}' is {} tokens of this vocabulary, expected one; name it by its id",
       whole, text, ids.size());
}

TokenBias parse_bias(const std::string& text, const Model& model) {
  std::size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  if (digits > 0 && digits < text.size() && (text[digits] == '+' || text[digits] == '-')) {
    TokenId id = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + digits, id);
    if (error == std::errc()) {
      return {id, parse_bias_value(std::string_view(text).substr(digits), text)};
    }
  }
  const std::size_t equals = text.rfind('=');
  if (equals == std::string::npos || equals == 0) parse_bias_value("", text);
  const float value = parse_bias_value(std::string_view(text).substr(equals + 1), text);
  return {find_biased_token(text.substr(0, equals), text, model), value};
}

template <typename T>
void replace(T& value, const std::optional<T>& chosen) {
  if (chosen) value = *chosen;
}

}  // namespace

void add_generation_options(Command command, GenerationOptions& options, int default_max_tokens) {
  options.max_tokens = default_max_tokens;
  const std::string default_text =
      default_max_tokens < 0 ? "none" : std::to_string(default_max_tokens);
  command
      .option("-n,--max-tokens", options.max_tokens,
              "Tokens of an answer; -1 is no limit, 0 only computes the prompt. Default: " +
                  default_text)
      .environment("PIANOLA_MAX_TOKENS")
      .type("N");
  options.stop =
      command.option("--stop", "Ends the answer before this text; repeatable, at most 16")
          .environment("PIANOLA_STOP")
          .type("TEXT")
          .verbatim()
          .repeatable();
  command.flag("--ignore-eos", options.ignore_eos, "Go on where the model wants to end its answer")
      .environment("PIANOLA_IGNORE_EOS");
  command.option("--system", options.system, "The system message")
      .environment("PIANOLA_SYSTEM")
      .type("TEXT");
  command
      .option("--chat-template", options.chat_template,
              "chatml, or a file with a Jinja template. Default: the model's own")
      .environment("PIANOLA_CHAT_TEMPLATE")
      .type("NAME|FILE");
  command
      .option("--template-vars", options.template_variables,
              "Variables of the template, as in '{\"enable_thinking\": false}'")
      .environment("PIANOLA_TEMPLATE_VARS")
      .type("JSON");
  add_sampling_options(command, options);
}

GenerationRequest make_request(const GenerationOptions& options, const Model& model) {
  GenerationRequest request;
  request.sampling = model.default_sampling();
  SamplingParams& sampling = request.sampling;
  replace(sampling.temperature, options.temperature);
  replace(sampling.top_k, options.top_k);
  replace(sampling.top_p, options.top_p);
  replace(sampling.min_p, options.min_p);
  replace(sampling.repeat_penalty, options.repeat_penalty);
  replace(sampling.presence_penalty, options.presence_penalty);
  replace(sampling.frequency_penalty, options.frequency_penalty);
  replace(sampling.penalty_window, options.penalty_window);
  sampling.seed = options.seed ? *options.seed : std::random_device{}();
  sampling.logprobs = options.logprobs;
  for (const std::string& entry : options.logit_bias) {
    for (std::size_t begin = 0; begin <= entry.size();) {
      const std::size_t end = std::min(entry.find('\n', begin), entry.size());
      if (end > begin) {
        sampling.logit_bias.push_back(parse_bias(entry.substr(begin, end - begin), model));
      }
      begin = end + 1;
    }
  }
  request.max_tokens = options.max_tokens;
  if (options.stop.given()) request.stop = options.stop.values();
  request.ignore_eos = options.ignore_eos;
  return request;
}

ChatTemplateOptions make_template_options(const GenerationOptions& options) {
  ChatTemplateOptions result;
  result.variables_json = options.template_variables;
  const std::string& name = options.chat_template;
  if (name.empty() || name == "chatml") {
    result.template_source = name;
  } else if (std::filesystem::exists(name)) {
    result.template_source = read_text_file(name, kMaxTemplateBytes);
    if (result.template_source.empty()) {
      fail(ErrorCode::kInvalidArgument, "--chat-template: {} is empty", name);
    }
  } else {
    fail(ErrorCode::kNotFound,
         "--chat-template: '{}' is neither a file nor a built-in template (chatml)", name);
  }
  return result;
}

}  // namespace pianola::cli
