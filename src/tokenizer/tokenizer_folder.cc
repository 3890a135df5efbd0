// A Hugging Face folder: what the files beside tokenizer.json add to it.
#include <array>

#include "base/check.h"
#include "base/mapped_file.h"
#include "tokenizer/tokenizer_json.h"
#include "tokenizer/tokenizer_json_parts.h"

namespace pianola {
namespace {

constexpr std::size_t kMaxConfig = std::size_t{16} << 20;

std::optional<boost::json::value> read_json(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return std::nullopt;
  return parse_json(read_text_file(path, kMaxConfig), path.filename().string());
}

// "bos_token": "<s>", or {"content": "<s>", …}.
std::optional<TokenId> read_named_token(const JsonObject& config, const char* name,
                                        const Vocabulary& vocabulary) {
  const boost::json::value* value = config.find(name);
  if (!value) return std::nullopt;
  const std::string text = value->is_object() ? config.get_object(name).get_string("content")
                                              : *config.find_string(name);
  if (text.empty()) return std::nullopt;
  // A config may name a token that the vocabulary does not have; the reference would add it.
  return vocabulary.find(text);
}

void read_named_tokens(const JsonObject& config, TokenizerData& data) {
  const std::array<std::pair<const char*, std::optional<TokenId>*>, 4> names = {
      {{"bos_token", &data.bos},
       {"eos_token", &data.eos},
       {"unk_token", &data.unk},
       {"pad_token", &data.pad}}};
  for (const auto& [name, id] : names) {
    if (!*id) *id = read_named_token(config, name, data.vocabulary);
  }
}

// eos_token_id: one id or a list.
void read_end_ids(const JsonObject& config, TokenizerData& data) {
  const auto add = [&](std::int64_t id) {
    if (id < 0 || id >= data.vocabulary.size()) {
      fail(ErrorCode::kInvalidModel, "{}: {}, expected 0 to {}", config.field_path("eos_token_id"),
           id, data.vocabulary.size() - 1);
    }
    data.eog.push_back(static_cast<TokenId>(id));
  };
  const boost::json::value* value = config.find("eos_token_id");
  if (!value) return;
  if (!value->is_array()) return add(config.get_int("eos_token_id"));
  for (const boost::json::value& id : value->get_array()) {
    if (!id.is_int64()) {
      fail(ErrorCode::kInvalidModel, "{}: expected integers", config.field_path("eos_token_id"));
    }
    add(id.get_int64());
  }
}

// The Llama and Gemma classes of transformers build the template anew from these two flags; every
// other class leaves the one of tokenizer.json.
void apply_add_flags(const JsonObject& config, TokenizerData& data) {
  const std::string name = config.find_string("tokenizer_class").value_or("");
  const bool rebuilds = name == "LlamaTokenizer" || name == "LlamaTokenizerFast" ||
                        name == "GemmaTokenizer" || name == "GemmaTokenizerFast";
  if (!rebuilds) return;
  const auto apply = [](std::optional<bool> wanted, std::optional<TokenId> id,
                        std::vector<TokenId>& around) {
    if (!wanted || !id) return;
    around.clear();
    if (*wanted) around.push_back(*id);
  };
  apply(config.find_bool("add_bos_token"), data.bos, data.prefix);
  apply(config.find_bool("add_eos_token"), data.eos, data.suffix);
}

}  // namespace

std::shared_ptr<const Tokenizer> tokenizer_from_folder(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "tokenizer.json";
  if (!std::filesystem::exists(path)) {
    const bool has_model = std::filesystem::exists(folder / "tokenizer.model");
    fail(has_model ? ErrorCode::kUnsupported : ErrorCode::kNotFound, "{}: no tokenizer.json{}",
         folder.string(),
         has_model ? "; tokenizer.model alone is not supported, save a fast tokenizer" : "");
  }
  const MappedFile file(path);
  const auto bytes = file.bytes();
  std::unique_ptr<TokenizerData> data = read_tokenizer_json(
      {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, "tokenizer.json");
  if (const auto config = read_json(folder / "tokenizer_config.json")) {
    const JsonObject object(*config, "tokenizer_config.json");
    read_named_tokens(object, *data);
    apply_add_flags(object, *data);
  }
  if (const auto map = read_json(folder / "special_tokens_map.json")) {
    read_named_tokens(JsonObject(*map, "special_tokens_map.json"), *data);
  }
  if (data->eos) data->eog.push_back(*data->eos);
  if (const auto generation = read_json(folder / "generation_config.json")) {
    read_end_ids(JsonObject(*generation, "generation_config.json"), *data);
  } else if (const auto config = read_json(folder / "config.json")) {
    read_end_ids(JsonObject(*config, "config.json"), *data);
  }
  finish_eog(*data);
  return std::make_shared<const Tokenizer>(std::move(data));
}

}  // namespace pianola
