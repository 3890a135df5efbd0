#include "backends/cpu/expert_groups.h"

namespace pianola::cpu {

int ExpertGroups::most_slots(int tokens, int top_k, int experts) {
  const int routes = tokens * top_k;
  return (routes + (kSlots - 1) * std::min(routes, experts) + kSlots - 1) / kSlots * kSlots;
}

std::size_t ExpertGroups::bytes(int tokens, int top_k, int experts) {
  return static_cast<std::size_t>(experts) * (sizeof(ExpertGroup) + sizeof(std::int32_t)) +
         static_cast<std::size_t>(tokens) * static_cast<std::size_t>(top_k) * sizeof(std::int32_t);
}

ExpertGroups::ExpertGroups(std::byte* memory, const float* routing, int tokens, int top_k,
                           int experts)
    : top_k_(top_k),
      groups_(reinterpret_cast<ExpertGroup*>(memory)),
      index_(reinterpret_cast<std::int32_t*>(groups_ + experts)),
      places_(index_ + experts) {
  // Routes of each expert, then where its group is.
  std::fill_n(index_, experts, 0);
  const auto expert_of = [&](int t, int rank) {
    return static_cast<int>(routing[std::int64_t{t} * 2 * top_k + rank]);
  };
  for (int t = 0; t < tokens; ++t) {
    for (int rank = 0; rank < top_k; ++rank) {
      if (const int expert = expert_of(t, rank); expert >= 0) ++index_[expert];
    }
  }
  int slots = 0;
  for (int expert = 0; expert < experts; ++expert) {
    const int count = index_[expert];
    if (count == 0) continue;
    index_[expert] = count_;
    groups_[count_++] = {expert, routes_, 0, slots};
    routes_ += count;
    slots += (count + kSlots - 1) / kSlots * kSlots;
  }
  for (int t = 0; t < tokens; ++t) {
    for (int rank = 0; rank < top_k; ++rank) {
      const int expert = expert_of(t, rank);
      std::int32_t& place = places_[t * top_k + rank];
      place = -1;
      if (expert < 0) continue;
      ExpertGroup& group = groups_[index_[expert]];
      place = group.first + group.count++;
    }
  }
}

}  // namespace pianola::cpu
