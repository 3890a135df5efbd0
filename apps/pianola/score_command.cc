// pianola score: how likely a text is.
#include <cmath>
#include <cstdio>
#include <memory>
#include <system_error>

#include "base/check.h"
#include "command.h"
#include "json_text.h"
#include "model_options.h"
#include "prompt_source.h"
#include "signals.h"
#include "terminal.h"

namespace pianola::cli {
namespace {

struct ScoreOptions {
  ModelOptions model;
  PromptSource text;
  bool ids = false;
  bool special = false;
  bool no_special = false;
  bool json = false;
  bool quiet = false;
  int window = 0;
  int stride = 0;
  std::string dump_logits;
};

constexpr const char* kFooter = R"(
Examples:
  pianola score -m model.gguf "The capital of France is Paris."
  pianola score -m model.gguf -f book.txt --quiet -c 4096
  pianola score -m model.gguf --json --ids "1 450 7483"
  pianola score -m model.gguf -f text.txt --dump-logits logits.f32

Windows: a text longer than one window is read in several, each STRIDE tokens after the one before.
Every token but the first of the text is scored exactly once: in the first window that holds it, so
after the first window each token has at least WINDOW - STRIDE tokens before it.)";

struct Score {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;  // of tokens[1..]
  int windows = 0;

  double mean() const {
    double sum = 0;
    for (const float logprob : logprobs) sum += logprob;
    return sum / static_cast<double>(logprobs.size());
  }
  double perplexity() const { return std::exp(-mean()); }
};

struct Windows {
  std::size_t size = 0;
  std::size_t stride = 0;
};

Windows choose_windows(const ScoreOptions& options, int max_seq_len) {
  const auto check = [](bool ok, const char* flag, int found, int most) {
    if (!ok) {
      fail(ErrorCode::kInvalidArgument, "{}: {}, expected 1 to {}", flag, found, most);
    }
  };
  if (options.window != 0) {
    check(options.window >= 2 && options.window <= max_seq_len, "--window", options.window,
          max_seq_len);
  }
  const int window = options.window ? options.window : max_seq_len;
  if (options.stride != 0) {
    check(options.stride >= 1 && options.stride < window, "--stride", options.stride, window - 1);
  }
  const int stride = options.stride ? options.stride : std::max(window / 2, 1);
  return {static_cast<std::size_t>(window), static_cast<std::size_t>(stride)};
}

void score_windows(Engine& engine, const Windows& windows, Progress& progress, Score& score) {
  const std::span<const TokenId> tokens(score.tokens);
  for (std::size_t begin = 0;; begin += windows.stride) {
    const std::size_t end = std::min(begin + windows.size, tokens.size());
    const auto part = engine.score(tokens.subspan(begin, end - begin), [&](std::size_t done) {
      throw_if_interrupted();
      progress.update(begin + done, tokens.size());
    });
    // part[i] belongs to tokens[begin + i + 1]; those up to here have been scored.
    const std::size_t known = score.logprobs.size() - begin;
    score.logprobs.insert(score.logprobs.end(), part.begin() + static_cast<std::ptrdiff_t>(known),
                          part.end());
    ++score.windows;
    if (end == tokens.size()) return;
  }
}

float log_probability(std::span<const float> logits, TokenId target) {
  float largest = logits[0];
  for (const float logit : logits) largest = std::max(largest, logit);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  return static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(target)]) -
                            largest - std::log(sum));
}

// Writes the logits of all positions, and takes the scores from the same numbers.
void score_and_dump(Engine& engine, const std::string& path, Progress& progress, Score& score) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "wb"),
                                                             std::fclose);
  const auto check = [&](bool ok) {
    if (!ok) throw std::system_error(errno, std::generic_category(), path);
  };
  check(file != nullptr);
  const int row = engine.open_row({});
  const auto vocab = static_cast<std::size_t>(engine.vocab_size());
  const auto chunk = static_cast<std::size_t>(engine.logits_chunk());
  const std::span<const TokenId> tokens(score.tokens);
  for (std::size_t begin = 0; begin < tokens.size(); begin += chunk) {
    throw_if_interrupted();
    const std::size_t count = std::min(chunk, tokens.size() - begin);
    const std::span<const float> logits = engine.logits(row, tokens.subspan(begin, count));
    check(std::fwrite(logits.data(), sizeof(float), logits.size(), file.get()) == logits.size());
    for (std::size_t i = 0; i < count && begin + i + 1 < tokens.size(); ++i) {
      score.logprobs.push_back(
          log_probability(logits.subspan(i * vocab, vocab), tokens[begin + i + 1]));
    }
    progress.update(begin + count, tokens.size());
  }
  engine.close_row(row);
  score.windows = 1;
  check(std::fflush(file.get()) == 0);
}

void print_table(const Model& model, const Score& score) {
  std::string out;
  for (std::size_t i = 0; i < score.tokens.size(); ++i) {
    const TokenId id = score.tokens[i];
    const std::string text =
        model.has_tokenizer()
            ? boost::json::serialize(json_string(model.tokenizer().token_bytes(id)))
            : std::string();
    out += i == 0 ? fmt::format("{:>8}  {:>9}  {}\n", id, "-", text)
                  : fmt::format("{:>8}  {:>9.4f}  {}\n", id, score.logprobs[i - 1], text);
  }
  put(out);
}

boost::json::object to_json(const Loaded& loaded, const Score& score, const Windows& windows) {
  boost::json::object object;
  object["tokens"] = boost::json::value_from(score.tokens);
  object["logprobs"] = boost::json::value_from(score.logprobs);
  object["mean_logprob"] = score.mean();
  object["perplexity"] = score.perplexity();
  object["windows"] = {
      {"count", score.windows}, {"window", windows.size}, {"stride", windows.stride}};
  object["model"] = {{"name", json_string(loaded.model.info().name)},
                     {"weights", loaded.model.info().weight_types},
                     {"backend", loaded.engine.backend_description()}};
  return object;
}

int run(ScoreOptions options) {
  const std::string text = read_prompt(options.text);
  const bool dump = !options.dump_logits.empty();
  options.model.engine.score = !dump;
  options.model.engine.logits = dump;
  Loaded loaded = load(options.model);
  Score score;
  score.tokens = options.ids
                     ? parse_ids(text)
                     : loaded.model.tokenizer().encode(text, {.add_special = !options.no_special,
                                                              .parse_special = options.special});
  if (score.tokens.size() < 2) {
    fail(ErrorCode::kInvalidArgument,
         "the text has {} tokens; at least 2 are needed, since the first has nothing before it",
         score.tokens.size());
  }
  for (const TokenId id : score.tokens) {
    if (id >= loaded.engine.vocab_size()) {
      fail(ErrorCode::kInvalidArgument, "token {} is outside the vocabulary of {}", id,
           loaded.engine.vocab_size());
    }
  }
  const Windows windows = choose_windows(options, loaded.engine.max_seq_len());
  {
    Progress progress("scoring", ProgressUnit::kTokens);
    if (dump) {
      if (score.tokens.size() > windows.size) {
        fail(ErrorCode::kContextOverflow,
             "--dump-logits: the text has {} tokens and takes one window, which holds {}; use -c",
             score.tokens.size(), windows.size);
      }
      score_and_dump(loaded.engine, options.dump_logits, progress, score);
    } else {
      score_windows(loaded.engine, windows, progress, score);
    }
  }
  if (options.json) {
    put(to_json_text(to_json(loaded, score, windows)));
  } else {
    if (!options.quiet) print_table(loaded.model, score);
    put(fmt::format("tokens: {}; windows: {}; mean log-probability: {:.4f}; perplexity: {:.4f}\n",
                    score.tokens.size(), score.windows, score.mean(), score.perplexity()));
  }
  if (!std::isfinite(score.mean())) {
    note("pianola: error: score: the model gave NaN or infinite values");
    return kGenerationFailedExitCode;
  }
  return 0;
}

}  // namespace

void add_score(Command app, Action& action) {
  auto options = std::make_shared<ScoreOptions>();
  const Command command =
      app.subcommand("score", "Log-probability of each token of a text", kFooter);
  add_model_path(command, options->model);
  add_prompt_source(command, options->text, "TEXT");
  command.flag("--ids", options->ids, "The text is token ids: 1 2 3");
  command.flag("--special", options->special,
               "Names of control tokens in the text mean those tokens");
  command.flag("--no-add-special", options->no_special,
               "Without the tokens that the vocabulary puts around a text");
  command.option("--window", options->window, "Tokens of a window. Default: the context").type("N");
  command.option("--stride", options->stride, "From window to window. Default: half of one")
      .type("N");
  command
      .option("--dump-logits", options->dump_logits,
              "Writes float32 logits [tokens, vocabulary]; the text must fit one window")
      .type("FILE");
  command.flag("--json", options->json, "One JSON object: tokens, logprobs, perplexity");
  command.flag("-q,--quiet", options->quiet, "Only the line with the sums")
      .environment("PIANOLA_QUIET");
  add_engine_options(command, options->model);
  command.callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace pianola::cli
