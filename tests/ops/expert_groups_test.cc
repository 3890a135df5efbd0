// Routes by expert: each has one place, and the work on them is shared out whole.
#include "backends/cpu/expert_groups.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "linear_fixture.h"

namespace pianola::cpu {
namespace {

TEST(ExpertGroups, HoldEveryRouteOnceAndAreSharedOutWhole) {
  std::mt19937 random(3);
  for (const auto& [tokens, top_k, experts] : {std::tuple(1, 1, 1), std::tuple(1, 8, 128),
                                               std::tuple(37, 4, 6), std::tuple(200, 2, 300)}) {
    std::vector<float> routing;
    int routes = 0;
    for (int t = 0; t < tokens; ++t) {
      const bool masked = t % 5 == 4;
      std::set<int> chosen;
      while (static_cast<int>(chosen.size()) < top_k) {
        chosen.insert(static_cast<int>(random() % static_cast<unsigned>(experts)));
      }
      for (const int e : chosen) routing.push_back(masked ? -1.0F : static_cast<float>(e));
      routing.insert(routing.end(), static_cast<std::size_t>(top_k), 0.5F);
      routes += masked ? 0 : top_k;
    }
    AlignedBytes memory(ExpertGroups::bytes(tokens, top_k, experts));
    const ExpertGroups groups(reinterpret_cast<std::byte*>(memory.data()), routing.data(), tokens,
                              top_k, experts);
    EXPECT_TRUE(memory.intact());
    EXPECT_EQ(groups.routes(), routes);
    std::set<int> places;
    int last = -1;
    for (int t = 0; t < tokens; ++t) {
      for (int rank = 0; rank < top_k; ++rank) {
        const int place = groups.place(t, rank);
        const int expert = static_cast<int>(routing.data()[t * 2 * top_k + rank]);
        EXPECT_EQ(place < 0, expert < 0);
        if (place < 0) continue;
        const ExpertGroup& group = groups.group_of(expert);
        EXPECT_EQ(group.expert, expert);
        EXPECT_TRUE(place >= group.first && place < group.first + group.count);
        places.insert(place);
      }
    }
    EXPECT_EQ(static_cast<int>(places.size()), routes);
    int slots = 0;
    for (const ExpertGroup& group : groups.all()) {
      EXPECT_GT(group.expert, last);
      last = group.expert;
      EXPECT_EQ(group.first_slot, slots);
      slots += (group.count + 15) / 16 * 16;
    }
    EXPECT_LE(slots, ExpertGroups::most_slots(tokens, top_k, experts));
    for (const int workers : {1, 2, 7, 64}) {
      for (const int panels : {1, 3, 48}) {
        std::vector<int> done(static_cast<std::size_t>(experts) * static_cast<std::size_t>(panels));
        for (int w = 0; w < workers; ++w) {
          groups.for_share(panels, w, workers, [&](const ExpertGroup& g, int begin, int end) {
            for (int p = begin; p < end; ++p) ++done.data()[g.expert * panels + p];
          });
        }
        for (int e = 0; e < experts; ++e) {
          const bool any = std::any_of(groups.all().begin(), groups.all().end(),
                                       [e](const auto& g) { return g.expert == e; });
          for (int p = 0; p < panels; ++p) {
            ASSERT_EQ(done.data()[e * panels + p], any ? 1 : 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace pianola::cpu
