#include <array>

#include "models/family.h"

namespace pianola {

std::span<const Family* const> families() {
  static constexpr std::array<const Family*, 14> kFamilies = {
      &kBamba, &kDeepseekV2, &kDeepseekV3, &kGemma3,   &kGptOss,    &kLlama,  &kMistral,
      &kQwen2, &kQwen2Moe,   &kQwen3,      &kQwen3Moe, &kQwen3Next, &kQwen35, &kT5};
  return kFamilies;
}

const Family* find_family_by_model_type(std::string_view model_type) {
  for (const Family* family : families()) {
    if (family->model_type == model_type) return family;
  }
  return nullptr;
}

const Family* find_family_by_architecture(std::string_view architecture) {
  for (const Family* family : families()) {
    if (!architecture.empty() && family->architecture == architecture) return family;
  }
  return nullptr;
}

std::string known_families(std::string_view Family::* field) {
  std::string names;
  for (const Family* family : families()) {
    if ((family->*field).empty()) continue;
    if (!names.empty()) names += ", ";
    names += family->*field;
  }
  return names;
}

}  // namespace pianola
