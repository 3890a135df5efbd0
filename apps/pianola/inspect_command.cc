// pianola inspect: what is in a model's files, and what would be recorded for it. Reads no weights,
// unless asked to load the model and to measure what its graphs take.
#include <map>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/utf8.h"
#include "capture_report.h"
#include "command.h"
#include "json_text.h"
#include "model_options.h"
#include "models/model.h"
#include "terminal.h"
#include "tokenizer/chat_template.h"
#include "tokenizer/gguf_vocab.h"
#include "tokenizer/tokenizer_json.h"

namespace pianola::cli {
namespace {

struct InspectOptions {
  ModelOptions model;
  bool with_plan = false;
  std::string plan_filter;
  bool measure = false;
  bool no_tensors = false;
  bool full = false;
  bool json = false;
};

constexpr const char* kFooter = R"(
Examples:
  pianola inspect -m model.gguf
  pianola inspect -m model.gguf --no-tensors
  pianola inspect -m model.gguf --plan            every step that is recorded
  pianola inspect -m model.gguf --plan "1 tokens" -c 4096
  pianola inspect -m model.gguf --no-tensors --device cuda --measure
  pianola inspect -m model.gguf --json | jq '.tensors[] | select(.type == "q8_0")'

A file that pianola cannot run is shown as far as it can be read, with the reason.)";

constexpr std::size_t kValueWidth = 100;

// What can be known about a file; what cannot has its reason instead.
struct Inspection {
  std::unique_ptr<const Checkpoint> checkpoint_owner;  // until `model` takes it over
  std::shared_ptr<const CausalModel> model;
  std::string model_error;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::string tokenizer_error;
  ChatTemplateSources templates;

  const Checkpoint& checkpoint() const { return model ? model->checkpoint() : *checkpoint_owner; }
};

std::shared_ptr<const Tokenizer> read_tokenizer(const Checkpoint& checkpoint) {
  if (checkpoint.format() == Checkpoint::Format::kHuggingFace) {
    if (!std::filesystem::exists(checkpoint.folder() / "tokenizer.json")) return nullptr;
    return tokenizer_from_folder(checkpoint.folder());
  }
  const std::string* kind = checkpoint.metadata().find_string("tokenizer.ggml.model");
  if (!kind || *kind == "no_vocab" || *kind == "none") return nullptr;
  return tokenizer_from_gguf(checkpoint.metadata());
}

Inspection inspect_files(const std::string& path) {
  Inspection result;
  result.checkpoint_owner = open_checkpoint(path);
  try {
    result.model = CausalModel::open(path);
  } catch (const Error& error) {
    result.model_error = error.what();
  }
  try {
    result.tokenizer = read_tokenizer(result.checkpoint());
    if (!result.tokenizer) result.tokenizer_error = "the model has none";
  } catch (const Error& error) {
    result.tokenizer_error = error.what();
  }
  const Checkpoint& checkpoint = result.checkpoint();
  result.templates = checkpoint.format() == Checkpoint::Format::kGguf
                         ? find_chat_templates(checkpoint.metadata())
                         : find_chat_templates(checkpoint.folder());
  return result;
}

// --- Values ------------------------------------------------------------------------------------

std::string scalar_text(bool value) { return value ? "true" : "false"; }
std::string scalar_text(std::int64_t value) { return fmt::format("{}", value); }
std::string scalar_text(double value) { return fmt::format("{}", value); }
std::string scalar_text(const std::string& value) { return "\"" + printable(value, 32) + "\""; }

template <typename T>
std::string array_text(const std::vector<T>& values) {
  constexpr std::size_t kShown = 6;
  std::string text = fmt::format("{} values: [", values.size());
  for (std::size_t i = 0; i < std::min(values.size(), kShown); ++i) {
    text += (i ? ", " : "") + scalar_text(static_cast<T>(values[i]));
  }
  return text + (values.size() > kShown ? ", ...]" : "]");
}

std::string value_text(const MetadataValue& value, std::size_t width) {
  return std::visit(
      [width](const auto& v) -> std::string {
        using V = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<V, std::string>) {
          return "\"" + printable(v, width) + "\"";
        } else if constexpr (requires { v.size(); }) {
          return array_text(v);
        } else {
          return scalar_text(v);
        }
      },
      value);
}

struct TypeTotal {
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;
};

std::map<std::string, TypeTotal> totals_by_type(const Checkpoint& checkpoint) {
  std::map<std::string, TypeTotal> totals;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    TypeTotal& total = totals[dtype_name(tensor.dtype)];
    ++total.tensors;
    total.bytes += tensor.bytes;
  }
  return totals;
}

// The hyper-parameters, as pairs of a name and a value.
boost::json::object config_json(const CausalModel& model) {
  const ModelConfig& c = model.config();
  boost::json::object o;
  o["model_type"] = c.model_type;
  o["parameters"] = model.parameter_count();
  o["weights"] = model.weight_types();
  o["vocab_size"] = c.vocab_size;
  o["hidden_size"] = c.hidden_size;
  o["intermediate_size"] = c.intermediate_size;
  if (c.experts.num_experts > 0) {
    o["num_experts"] = c.experts.num_experts;
    o["num_experts_per_tok"] = c.experts.num_experts_per_tok;
    o["moe_intermediate_size"] = c.experts.moe_intermediate_size;
  }
  if (c.latent.present()) {
    o["kv_lora_rank"] = c.latent.kv_lora_rank;
    o["qk_rope_head_dim"] = c.latent.qk_rope_head_dim;
  }
  o["num_hidden_layers"] = c.num_hidden_layers;
  if (c.encoder.num_layers > 0) {
    o["num_encoder_layers"] = c.encoder.num_layers;
    o["decoder_start_token_id"] = c.encoder.decoder_start_token_id;
  }
  if (c.num_kv_shared_layers > 0) o["num_kv_shared_layers"] = c.num_kv_shared_layers;
  o["num_attention_heads"] = c.num_attention_heads;
  o["num_key_value_heads"] = c.num_key_value_heads;
  o["head_dim"] = c.head_dim;
  o["max_position_embeddings"] = c.max_position_embeddings;
  o["rms_norm_eps"] = c.rms_norm_eps;
  o["qkv_bias"] = c.qkv_bias;
  o["qk_norm"] = c.qk_norm;
  o["tie_word_embeddings"] = c.tie_word_embeddings;
  if (c.relative_bias.num_buckets > 0) {
    o["relative_attention_num_buckets"] = c.relative_bias.num_buckets;
    o["relative_attention_max_distance"] = c.relative_bias.max_distance;
  } else {
    o["rope"] = rope_kind_name(c.rope.kind);
    o["rope_theta"] = c.rope.theta;
  }
  if (c.rope.kind != RopeKind::kDefault) o["rope_factor"] = c.rope.factor;
  if (const auto window = c.smallest_window()) o["sliding_window"] = *window;
  o["eos_token_ids"] = boost::json::value_from(c.eos_token_ids);
  return o;
}

boost::json::object tokenizer_json(const Tokenizer& tokenizer) {
  boost::json::object o;
  o["kind"] = tokenizer.kind();
  o["pre"] = json_string(tokenizer.pre());
  o["vocab_size"] = tokenizer.vocab_size();
  const auto token = [&](const char* name, std::optional<TokenId> id) {
    if (id) o[name] = {{"id", *id}, {"text", json_string(tokenizer.token_text(*id))}};
  };
  token("bos", tokenizer.bos_id());
  token("eos", tokenizer.eos_id());
  token("unk", tokenizer.unk_id());
  token("pad", tokenizer.pad_id());
  boost::json::array ends;
  for (const TokenId id : tokenizer.eog_ids()) {
    ends.emplace_back(
        boost::json::object{{"id", id}, {"text", json_string(tokenizer.token_text(id))}});
  }
  o["ends_answer"] = std::move(ends);
  o["add_bos"] = tokenizer.add_bos();
  o["add_eos"] = tokenizer.add_eos();
  return o;
}

// --- Text --------------------------------------------------------------------------------------

std::string object_text(const boost::json::object& object) {
  std::string out;
  for (const auto& [key, value] : object) {
    std::string text = value.is_string() ? std::string(value.get_string()) : to_json_text(value);
    std::string line;
    for (const char c : text) {
      if (c != '\n') line += c;
    }
    out += fmt::format("  {:<26} {}\n", std::string_view(key), printable(line, 400));
  }
  return out;
}

std::string tensors_text(const Checkpoint& checkpoint, bool list) {
  std::string out;
  if (list) {
    for (const TensorInfo& tensor : checkpoint.tensors()) {
      out += fmt::format("  {:<36} {:<6} {:<18} {:>12}\n", printable(tensor.name),
                         dtype_name(tensor.dtype), tensor.shape.to_string(), tensor.bytes);
    }
  }
  for (const auto& [type, total] : totals_by_type(checkpoint)) {
    out += fmt::format("  {} of type {}: {}\n", total.tensors, type,
                       human_bytes(static_cast<double>(total.bytes)));
  }
  return out;
}

std::string to_text(const Inspection& inspection, const InspectOptions& options,
                    const std::string& plan, const std::optional<LoadReport>& measured) {
  const Checkpoint& checkpoint = inspection.checkpoint();
  std::string out = fmt::format("{}\n", checkpoint.format_name());
  for (const auto& path : checkpoint.paths()) out += fmt::format("  {}\n", path.string());
  out += fmt::format("  {} in {} tensors\n",
                     human_bytes(static_cast<double>(checkpoint.total_bytes())),
                     checkpoint.tensors().size());
  const std::size_t width = options.full ? std::string::npos : kValueWidth;
  if (!checkpoint.metadata().entries().empty()) out += "\nmetadata\n";
  for (const auto& [key, value] : checkpoint.metadata().entries()) {
    out += fmt::format("  {:<40} {}\n", printable(key), value_text(value, width));
  }
  out += "\nmodel\n";
  out += inspection.model ? object_text(config_json(*inspection.model))
                          : fmt::format("  cannot run: {}\n", inspection.model_error);
  out += "\ntensors\n" + tensors_text(checkpoint, !options.no_tensors);
  out += "\ntokenizer\n";
  out += inspection.tokenizer ? object_text(tokenizer_json(*inspection.tokenizer))
                              : fmt::format("  none: {}\n", inspection.tokenizer_error);
  for (const auto& [name, source] : inspection.templates) {
    out += fmt::format("\nchat template \"{}\"\n{}\n", printable(name), sanitize_utf8(source));
  }
  if (inspection.templates.empty()) out += "\nchat template\n  none\n";
  if (!plan.empty()) out += "\nplans\n" + plan;
  if (measured) out += "\n" + load_report_text(*measured);
  return out;
}

boost::json::object to_json(const Inspection& inspection, const InspectOptions& options,
                            const std::string& plan, const std::optional<LoadReport>& measured) {
  const Checkpoint& checkpoint = inspection.checkpoint();
  boost::json::object o;
  o["format"] = checkpoint.format_name();
  boost::json::array paths;
  for (const auto& path : checkpoint.paths()) paths.emplace_back(json_string(path.string()));
  o["files"] = std::move(paths);
  o["file_bytes"] = checkpoint.total_bytes();
  boost::json::object metadata;
  const std::size_t width = options.full ? std::string::npos : kValueWidth;
  for (const auto& [key, value] : checkpoint.metadata().entries()) {
    metadata[json_string(key)] = value_text(value, width);
  }
  o["metadata"] = std::move(metadata);
  o["model"] = inspection.model ? boost::json::value(config_json(*inspection.model)) : nullptr;
  if (!inspection.model) o["model_error"] = json_string(inspection.model_error);
  boost::json::array tensors;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    boost::json::array shape;
    for (int i = 0; i < tensor.shape.rank(); ++i) shape.emplace_back(tensor.shape[i]);
    tensors.emplace_back(boost::json::object{{"name", json_string(tensor.name)},
                                             {"type", dtype_name(tensor.dtype)},
                                             {"shape", std::move(shape)},
                                             {"bytes", tensor.bytes}});
  }
  o["tensors"] = std::move(tensors);
  boost::json::object totals;
  for (const auto& [type, total] : totals_by_type(checkpoint)) {
    totals[type] = {{"tensors", total.tensors}, {"bytes", total.bytes}};
  }
  o["totals"] = std::move(totals);
  o["tokenizer"] =
      inspection.tokenizer ? boost::json::value(tokenizer_json(*inspection.tokenizer)) : nullptr;
  if (!inspection.tokenizer) o["tokenizer_error"] = json_string(inspection.tokenizer_error);
  boost::json::object templates;
  for (const auto& [name, source] : inspection.templates) templates[name] = json_string(source);
  o["chat_templates"] = std::move(templates);
  if (!plan.empty()) o["plan"] = json_string(plan);
  if (measured) o["measured"] = load_report_json(*measured);
  return o;
}

int run(const InspectOptions& options) {
  if (options.model.path.empty()) {
    fail(ErrorCode::kInvalidArgument, "no model: name one with -m, or in PIANOLA_MODEL");
  }
  const Inspection inspection = inspect_files(options.model.path);
  std::string plan;
  if (options.with_plan) {
    if (!inspection.model) fail(ErrorCode::kUnsupported, "--plan: {}", inspection.model_error);
    plan = Engine::plan_text(*inspection.model, engine_options(options.model), options.plan_filter);
    if (plan.empty()) {
      fail(ErrorCode::kNotFound, "--plan: no recorded step's first line contains '{}'",
           options.plan_filter);
    }
  }
  std::optional<LoadReport> measured;
  if (options.measure) {
    if (!inspection.model) fail(ErrorCode::kUnsupported, "--measure: {}", inspection.model_error);
    measured = measure_load(Model::open(options.model.path), options.model);
  }
  put(options.json ? to_json_text(to_json(inspection, options, plan, measured))
                   : to_text(inspection, options, plan, measured));
  return 0;
}

}  // namespace

void add_inspect(Command app, Action& action) {
  auto options = std::make_shared<InspectOptions>();
  const Command command = app.subcommand("inspect", "What is in a model's files", kFooter);
  add_model_path(command, options->model);
  const Option plan =
      command.option("--plan", options->plan_filter,
                     "The recorded steps as text; with SHAPE, those that contain it");
  plan.optional_value().type("SHAPE");
  command.flag("--measure", options->measure,
               "Loads the model and shows captures, their seconds and their bytes");
  command.flag("--no-tensors", options->no_tensors, "Only the totals of the tensors");
  command.flag("--full", options->full, "Long values in full");
  command.flag("--json", options->json, "One JSON object");
  add_slots_option(command, options->model);
  add_engine_options(command, options->model);
  command.callback([options, plan, &action] {
    options->with_plan = plan.given();
    action = [options] { return run(*options); };
  });
}

}  // namespace pianola::cli
