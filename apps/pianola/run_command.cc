// pianola run: one prompt, one answer.
#include <memory>

#include "base/check.h"
#include "command.h"
#include "generation_options.h"
#include "json_text.h"
#include "model_options.h"
#include "prompt_source.h"
#include "signals.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

struct RunOptions {
  ModelOptions model;
  GenerationOptions generation;
  PromptSource prompt;
  bool raw = false;
  bool ids = false;
  bool special = false;
  bool json = false;
  bool quiet = false;
};

constexpr const char* kFooter = R"(
Examples:
  pianola run -m model.gguf "Why is the sky blue?"
  pianola run -m model.gguf -n 60 --temp 0.8 --top-p 0.95 --seed 7 "Write a haiku."
  git diff | pianola run -m model.gguf --system "Write a commit message for this diff."
  pianola run -m model.gguf --raw "Once upon a time" --stop "The end"
  pianola run -m model.gguf --json "Hello" | jq .usage

The prompt is put into the model's chat template when it has one; --raw gives it to the model as it
is. Without a temperature of the model's own or on the command line, the answer is the most likely
one (greedy) and always the same.)";

struct Answer {
  std::string text;
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
};

// One trailing line end belongs to the file or the pipe, not to the question.
std::string as_question(std::string text) {
  if (!text.empty() && text.back() == '\n') text.pop_back();
  if (!text.empty() && text.back() == '\r') text.pop_back();
  return text;
}

std::vector<TokenId> encode_prompt(const RunOptions& options, const Model& model,
                                   const std::string& text) {
  const GenerationOptions& generation = options.generation;
  if (options.ids) return parse_ids(text);
  const bool use_template =
      !options.raw && (model.has_chat_template() || !generation.chat_template.empty());
  if (!use_template) {
    if (!generation.system.empty()) {
      fail(ErrorCode::kInvalidArgument, "--system: {}",
           options.raw ? "plain text (--raw) has no system message"
                       : "this model has no chat template; name one with --chat-template chatml");
    }
    return model.tokenizer().encode(text, {.add_special = true, .parse_special = options.special});
  }
  const std::string question = as_question(text);
  if (question.empty()) fail(ErrorCode::kInvalidArgument, "the prompt is empty");
  std::vector<ChatMessage> messages;
  if (!generation.system.empty()) messages.push_back({"system", generation.system});
  messages.push_back({"user", question});
  return model.encode_chat(messages, make_template_options(generation));
}

double rate(int tokens, double seconds) { return seconds > 0 ? tokens / seconds : 0; }

std::string figures(const GenerationStats& stats, FinishReason reason) {
  const int decoded = std::max(stats.generated_tokens - 1, 0);
  return fmt::format(
      "prompt: {} tokens, {:.1f} tok/s; generated: {} tokens, {:.1f} tok/s; stopped by {}",
      stats.prompt_tokens, rate(stats.prompt_tokens - stats.reused_tokens, stats.prompt_seconds),
      stats.generated_tokens, rate(decoded, stats.generate_seconds), finish_reason_name(reason));
}

boost::json::object to_json(const Loaded& loaded, const Generator& generator, const Answer& answer,
                            bool logprobs, std::uint64_t seed) {
  const GenerationStats& stats = generator.stats();
  const ModelInfo& info = loaded.model.info();
  boost::json::object object;
  object["text"] = json_string(answer.text);
  object["tokens"] = boost::json::value_from(answer.tokens);
  if (logprobs) object["logprobs"] = boost::json::value_from(answer.logprobs);
  object["finish_reason"] = finish_reason_name(generator.finish_reason());
  object["usage"] = {{"prompt_tokens", stats.prompt_tokens},
                     {"completion_tokens", stats.generated_tokens},
                     {"total_tokens", stats.prompt_tokens + stats.generated_tokens}};
  object["timings"] = {
      {"load_seconds", loaded.seconds},
      {"prompt_seconds", stats.prompt_seconds},
      {"prompt_tok_s", rate(stats.prompt_tokens, stats.prompt_seconds)},
      {"generate_seconds", stats.generate_seconds},
      {"generate_tok_s", rate(std::max(stats.generated_tokens - 1, 0), stats.generate_seconds)}};
  object["model"] = {{"name", json_string(info.name)},
                     {"path", json_string(info.path)},
                     {"family", info.family},
                     {"weights", info.weight_types},
                     {"backend", loaded.engine.backend_description()}};
  object["seed"] = seed;
  return object;
}

// Takes the answer piece by piece and, unless it is wanted as JSON, hands it out as it comes.
Answer stream(Generator& generator, const Model& model, const RunOptions& options) {
  Answer answer;
  CancelOnInterrupt guard(generator);
  while (const auto piece = generator.next()) {
    std::string text = piece->text;
    if (piece->token >= 0) {
      if (!model.has_tokenizer()) {
        text = fmt::format("{}{}", answer.tokens.empty() ? "" : " ", piece->token);
      }
      answer.tokens.push_back(piece->token);
      if (options.generation.logprobs) answer.logprobs.push_back(piece->logprob);
    }
    if (!options.json && !text.empty()) put(text);
    answer.text += text;
  }
  return answer;
}

void print_logprobs(const Model& model, const Answer& answer) {
  for (std::size_t i = 0; i < answer.logprobs.size(); ++i) {
    const TokenId id = answer.tokens[i];
    const std::string text =
        model.has_tokenizer()
            ? boost::json::serialize(json_string(model.tokenizer().token_bytes(id)))
            : std::string();
    note("{:>8}  {:>9.4f}  {}", id, answer.logprobs[i], text);
  }
}

int run(const RunOptions& options) {
  const std::string text = read_prompt(options.prompt);
  Loaded loaded = load(options.model);
  GenerationRequest request = make_request(options.generation, loaded.model);
  request.prompt = encode_prompt(options, loaded.model, text);
  if (request.prompt.empty()) fail(ErrorCode::kInvalidArgument, "the prompt is empty");
  const std::uint64_t seed = request.sampling.seed;

  Generator generator(loaded.engine, loaded.model, std::move(request));
  const Answer answer = stream(generator, loaded.model, options);
  const FinishReason reason = generator.finish_reason();
  if (options.json) {
    put(to_json_text(to_json(loaded, generator, answer, options.generation.logprobs, seed)));
  } else {
    if (!answer.text.empty() && answer.text.back() != '\n') put("\n");
    if (options.generation.logprobs) print_logprobs(loaded.model, answer);
  }
  if (!options.quiet && !options.json) note("{}", figures(generator.stats(), reason));
  if (reason == FinishReason::kFailed) {
    note(
        "pianola: error: generation: the model gave NaN or infinite values after {} tokens; its "
        "weights may be damaged",
        answer.tokens.size());
    return kGenerationFailedExitCode;
  }
  return reason == FinishReason::kCancelled ? kInterruptedExitCode : 0;
}

}  // namespace

void add_run(Command app, Action& action) {
  auto options = std::make_shared<RunOptions>();
  const Command command = app.subcommand("run", "Answer one prompt", kFooter);
  add_model_path(command, options->model);
  add_prompt_source(command, options->prompt, "PROMPT");
  command.flag("--raw", options->raw, "Plain text: no chat template");
  command.flag("--special", options->special,
               "With --raw: names of control tokens in the text mean those tokens");
  command.flag("--ids", options->ids, "The prompt is token ids: 1 2 3");
  command.flag("--json", options->json,
               "One JSON object: text, tokens, finish_reason, usage, timings, model");
  command.flag("-q,--quiet", options->quiet, "No line of figures").environment("PIANOLA_QUIET");
  command.flag("--logprobs", options->generation.logprobs,
               "The log-probability of each token: in the JSON, else on standard error");
  add_generation_options(command, options->generation, 512);
  add_engine_options(command, options->model);
  command.callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace pianola::cli
