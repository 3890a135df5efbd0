// The steps of a tokenizer.json around its model: normaliser, pre-tokenizer, decoder.
#include <functional>

#include "base/check.h"
#include "base/utf8.h"
#include "tokenizer/tokenizer_json_parts.h"

namespace pianola {
namespace {

[[noreturn]] void refuse(const JsonObject& at, const char* what, std::string_view name) {
  fail(ErrorCode::kUnsupported, "{}: {} '{}' is not supported", at.path(), what,
       name.substr(0, 200));
}

// Calls `read` for a step, or for every step of a Sequence of them (sequences may nest).
void for_each_step(const JsonObject& step, const char* list,
                   const std::function<void(const JsonObject&)>& read) {
  if (step.get_string("type") != "Sequence") return read(step);
  const boost::json::array* steps = step.find_array(list);
  if (!steps) fail(ErrorCode::kInvalidModel, "{} is missing", step.field_path(list));
  for (std::size_t i = 0; i < steps->size(); ++i) {
    for_each_step(JsonObject((*steps)[i], fmt::format("{}[{}]", step.field_path(list), i)), list,
                  read);
  }
}

// {"String": "…"} of Replace and Split.
std::string literal_pattern(const JsonObject& step) {
  const JsonObject pattern = step.get_object("pattern");
  if (const auto regex = pattern.find_string("Regex")) refuse(step, "regular expression", *regex);
  return pattern.get_string("String");
}

// Replace takes a string, and of regular expressions that which joins spaces.
Normalizer::Step read_replace(const JsonObject& step) {
  using Kind = Normalizer::Step::Kind;
  std::string content = step.get_string("content");
  if (step.get_object("pattern").find_string("Regex") == " {2,}") {
    return {.kind = Kind::kReplaceSpaces, .content = std::move(content)};
  }
  return {.kind = Kind::kReplace, .from = literal_pattern(step), .content = std::move(content)};
}

std::shared_ptr<const Charsmap> read_charsmap(const JsonObject& step) {
  const std::string where = step.field_path("precompiled_charsmap");
  return std::make_shared<const Charsmap>(
      decode_base64(step.get_string("precompiled_charsmap"), where), Charsmap::Matching::kGrapheme,
      where);
}

struct MetaspaceSettings {
  std::string replacement;
  PreStep::Prepend prepend = PreStep::Prepend::kAlways;
};

MetaspaceSettings read_metaspace(const JsonObject& step) {
  MetaspaceSettings settings{step.find_string("replacement").value_or("▁")};
  if (settings.replacement.empty() || settings.replacement.size() > 4 ||
      static_cast<std::size_t>(decode_utf8(settings.replacement).length) !=
          settings.replacement.size()) {
    fail(ErrorCode::kInvalidModel, "{}: expected one character", step.field_path("replacement"));
  }
  const auto scheme = step.find_string("prepend_scheme");
  if (scheme == "first") {
    settings.prepend = PreStep::Prepend::kFirst;
  } else if (scheme == "never" || (!scheme && step.find_bool("add_prefix_space") == false)) {
    settings.prepend = PreStep::Prepend::kNever;
  } else if (scheme && scheme != "always") {
    refuse(step, "prepend_scheme", *scheme);
  }
  return settings;
}

PreStep::Behaviour read_behaviour(const JsonObject& step) {
  using Behaviour = PreStep::Behaviour;
  const std::string name = step.get_string("behavior");
  if (name == "Isolated") return Behaviour::kIsolated;
  if (name == "Removed") return Behaviour::kRemoved;
  if (name == "MergedWithPrevious") return Behaviour::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behaviour::kMergedWithNext;
  refuse(step, "Split behavior", name);
}

PreStep read_split(const JsonObject& step) {
  const bool invert = step.find_bool("invert").value_or(false);
  const JsonObject pattern = step.get_object("pattern");
  if (const auto regex = pattern.find_string("Regex")) {
    const auto known = known_pattern(*regex);
    if (!known) refuse(step, "regular expression", *regex);
    // The known expressions match every character, so keeping the matches is isolating them.
    const PreStep::Behaviour behaviour = read_behaviour(step);
    const bool isolates = !invert && behaviour == PreStep::Behaviour::kIsolated;
    const bool keeps = invert && behaviour == PreStep::Behaviour::kRemoved;
    if (!isolates && !keeps) refuse(step, "Split behavior", step.get_string("behavior"));
    return {.kind = PreStep::Kind::kPattern, .pattern = *known};
  }
  if (invert) refuse(step, "Split of a string with", "invert");
  PreStep split{.kind = PreStep::Kind::kLiteral,
                .literal = literal_pattern(step),
                .behaviour = read_behaviour(step)};
  if (split.literal.empty()) {
    fail(ErrorCode::kInvalidModel, "{}: empty", step.field_path("pattern"));
  }
  return split;
}

// The name that a GGUF file has for the same pre-tokenizer, where it has one.
std::string name_of_steps(const std::vector<std::string>& names) {
  std::string joined;
  for (const std::string& name : names) {
    if (!joined.empty()) joined += " + ";
    joined += name;
  }
  if (joined == "digits + gpt-2") return "smollm";
  return joined.empty() ? "none" : joined;
}

const char* pattern_name(WordPattern pattern) {
  switch (pattern) {
    case WordPattern::kGpt2:
      return "gpt-2";
    case WordPattern::kLlama3:
      return "llama-bpe";
    case WordPattern::kQwen2:
      return "qwen2";
    case WordPattern::kQwen35:
      return "qwen35";
    case WordPattern::kO200k:
      return "gpt-4o";
  }
  return "";
}

struct DecoderSettings {
  bool byte_level = false;
  bool byte_fallback = false;
  bool fused = false;
  std::vector<std::pair<std::string, std::string>> replacements;
};

void read_decoder_step(const JsonObject& step, DecoderSettings& settings, TokenizerData& data) {
  const std::string type = step.get_string("type");
  const auto in_order = [&](bool good) {
    if (!good) refuse(step, "this order of decoders, at", type);
  };
  if (type == "ByteLevel") {
    settings.byte_level = true;
  } else if (type == "Replace") {
    in_order(!settings.byte_fallback && !settings.fused);
    settings.replacements.emplace_back(literal_pattern(step), step.get_string("content"));
    const auto& [from, to] = settings.replacements.back();
    if (from.empty() || to.size() > 64 || settings.replacements.size() > 16) {
      fail(ErrorCode::kInvalidModel, "{}: an empty pattern, or one that multiplies the text",
           step.path());
    }
  } else if (type == "ByteFallback") {
    in_order(!settings.fused);
    settings.byte_fallback = true;
  } else if (type == "Fuse") {
    settings.fused = true;
  } else if (type == "Strip") {
    in_order(settings.fused);
    if (step.get_string("content") != " " || step.get_int("stop", 0, 1 << 20) != 0) {
      refuse(step, "decoder", "Strip of anything but leading spaces");
    }
    data.strip_spaces += static_cast<int>(step.get_int("start", 0, 1 << 20));
  } else if (type == "Metaspace") {
    in_order(settings.replacements.empty() && !settings.fused);
    const MetaspaceSettings metaspace = read_metaspace(step);
    if (metaspace.replacement != "▁") refuse(step, "replacement", metaspace.replacement);
    settings.replacements.emplace_back("▁", " ");
    data.strip_first_token = metaspace.prepend != PreStep::Prepend::kNever;
  } else {
    refuse(step, "decoder", type);
  }
}

}  // namespace

void read_normalizer(const JsonObject& root, TokenizerData& data) {
  const auto normalizer = root.find_object("normalizer");
  if (!normalizer) return;
  using Kind = Normalizer::Step::Kind;
  for_each_step(*normalizer, "normalizers", [&](const JsonObject& step) {
    const std::string type = step.get_string("type");
    if (type == "NFC") {
      data.normalizer.add({Kind::kNfc}, step.path());
    } else if (type == "Prepend") {
      data.normalizer.add({.kind = Kind::kPrepend, .content = step.get_string("prepend")},
                          step.path());
    } else if (type == "Replace") {
      data.normalizer.add(read_replace(step), step.path());
    } else if (type == "Precompiled") {
      data.normalizer.add({.kind = Kind::kCharsmap, .charsmap = read_charsmap(step)}, step.path());
    } else if (type == "Strip") {
      if (step.find_bool("strip_left").value_or(true)) {
        data.normalizer.add({Kind::kStripLeft}, step.path());
      }
      if (step.find_bool("strip_right").value_or(true)) {
        data.normalizer.add({Kind::kStripRight}, step.path());
      }
    } else {
      refuse(step, "normalizer", type);
    }
  });
}

bool read_pre_tokenizer(const JsonObject& root, TokenizerData& data) {
  bool byte_level = false;
  std::vector<std::string> names;
  const auto pre_tokenizer = root.find_object("pre_tokenizer");
  const auto add = [&](PreStep step, std::string name) {
    data.pre_tokenizer.add(std::move(step));
    names.push_back(std::move(name));
  };
  const auto read = [&](const JsonObject& step) {
    const std::string type = step.get_string("type");
    if (byte_level) refuse(step, "behind ByteLevel the pre-tokenizer", type);
    if (type == "ByteLevel") {
      byte_level = true;
      if (step.find_bool("add_prefix_space").value_or(true)) {
        add({.kind = PreStep::Kind::kSpacePrefix}, "space");
      }
      if (step.find_bool("use_regex").value_or(true)) {
        add({PreStep::Kind::kPattern, WordPattern::kGpt2}, "gpt-2");
      }
    } else if (type == "Digits") {
      const bool each = step.find_bool("individual_digits").value_or(false);
      add({.kind = each ? PreStep::Kind::kDigits : PreStep::Kind::kDigitRuns},
          each ? "digits" : "digit runs");
    } else if (type == "Split") {
      const PreStep split = read_split(step);
      add(split, split.kind == PreStep::Kind::kPattern ? pattern_name(split.pattern) : "split");
    } else if (type == "WhitespaceSplit") {
      add({.kind = PreStep::Kind::kWhitespace}, "whitespace");
    } else if (type == "Metaspace") {
      const MetaspaceSettings settings = read_metaspace(step);
      const bool split = step.find_bool("split").value_or(true);
      add({.kind = PreStep::Kind::kMetaspace,
           .literal = settings.replacement,
           .behaviour = split ? PreStep::Behaviour::kMergedWithNext : PreStep::Behaviour::kNone,
           .prepend = settings.prepend},
          "metaspace");
    } else {
      refuse(step, "pre-tokenizer", type);
    }
    if (names.size() > 16) {
      fail(ErrorCode::kInvalidModel, "{}: more than 16 pre-tokenizers", step.path());
    }
  };
  if (pre_tokenizer) for_each_step(*pre_tokenizer, "pretokenizers", read);
  data.pre = name_of_steps(names);
  return byte_level;
}

void read_decoder(const JsonObject& root, bool byte_level, TokenizerData& data) {
  DecoderSettings settings;
  const auto decoder = root.find_object("decoder");
  if (!decoder) fail(ErrorCode::kUnsupported, "{}: no decoder", root.path());
  for_each_step(*decoder, "decoders",
                [&](const JsonObject& step) { read_decoder_step(step, settings, data); });
  if (settings.byte_level != byte_level ||
      (byte_level && (!settings.replacements.empty() || settings.byte_fallback))) {
    fail(ErrorCode::kUnsupported, "{}: this decoder does not undo the pre-tokenizer",
         decoder->path());
  }
  Vocabulary& vocabulary = data.vocabulary;
  for (TokenId id = 0; id < vocabulary.size(); ++id) {
    std::string text(vocabulary.text(id));
    std::string bytes;
    if (byte_level) {
      // Added tokens are text as it stands, in no alphabet.
      if (vocabulary.kind(id) != TokenKind::kNormal || !append_alphabet_bytes(text, bytes)) {
        bytes = std::move(text);
      }
    } else {
      for (const auto& [from, to] : settings.replacements) text = replace_all(text, from, to);
      const auto byte = settings.byte_fallback ? parse_byte_token(text) : std::nullopt;
      bytes = byte ? std::string(1, static_cast<char>(*byte)) : std::move(text);
    }
    vocabulary.set_bytes(id, std::move(bytes));
  }
}

}  // namespace pianola
