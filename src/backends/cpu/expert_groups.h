// The routes of a step by expert: a route is one token's choice of one expert. All routes of an
// expert stand together, in the order of their tokens, so that the expert's weights are read once.
//
//   ExpertGroups groups(memory, routing, tokens, top_k, experts);   // ExpertGroups::bytes() of it
//   for (const ExpertGroup& g : groups.all()) {
//     g.expert;                            // ascending
//     g.first;                             // its routes are first .. first + count - 1
//   }
//   groups.place(token, rank);             // of a route among all, or -1
//
// Every worker groups for itself: that costs less than handing the result over.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pianola::cpu {

struct ExpertGroup {
  int expert = 0;
  int first = 0;
  int count = 0;
  int first_slot = 0;  // where its activations begin, in tokens: a multiple of kSlots
};

class ExpertGroups {
 public:
  // Groups begin at whole tiles of prepared activations, whose bytes are then linear in slots.
  static constexpr int kSlots = 16;
  static int most_slots(int tokens, int top_k, int experts);
  static std::size_t bytes(int tokens, int top_k, int experts);

  // `routing` [tokens, 2 * top_k] as RouteOp writes it. Lives in `memory` and owns nothing.
  ExpertGroups(std::byte* memory, const float* routing, int tokens, int top_k, int experts);

  std::span<const ExpertGroup> all() const { return {groups_, static_cast<std::size_t>(count_)}; }
  int routes() const { return routes_; }
  int place(int token, int rank) const { return places_[token * top_k_ + rank]; }
  const ExpertGroup& group_of(int expert) const { return groups_[index_[expert]]; }

  // Calls visit(group, begin, end) for what worker `worker` of `workers` does of `panels` pieces of
  // every group: shares of about equal cost, each a run of neighbours.
  template <typename Visit>
  void for_share(int panels, int worker, int workers, Visit visit) const;

 private:
  // A piece costs its products and, as much as some of them, the reading of its weights.
  static constexpr int kReadCost = 8;
  static std::int64_t cost(const ExpertGroup& group) { return group.count + kReadCost; }

  int top_k_;
  int count_ = 0;
  int routes_ = 0;
  ExpertGroup* groups_;   // [experts]
  std::int32_t* index_;   // [experts] of an expert among the groups
  std::int32_t* places_;  // [tokens, top_k]
};

template <typename Visit>
void ExpertGroups::for_share(int panels, int worker, int workers, Visit visit) const {
  std::int64_t total = 0;
  for (const ExpertGroup& group : all()) total += panels * cost(group);
  std::int64_t before = 0;
  for (const ExpertGroup& group : all()) {
    const std::int64_t piece = cost(group);
    // The first piece that begins at or after a worker's part of the cost is its first.
    const auto first_of = [&](int w) {
      const std::int64_t from = total * w / workers - before;
      return static_cast<int>(std::clamp<std::int64_t>((from + piece - 1) / piece, 0, panels));
    };
    const int begin = first_of(worker);
    const int end = first_of(worker + 1);
    if (begin < end) visit(group, begin, end);
    before += panels * piece;
  }
}

}  // namespace pianola::cpu
