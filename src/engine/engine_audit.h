// What an engine can be asked to prove that its users do not need: `pianola check` takes it.
//
//   EngineAudit::poison(engine);      // NaN wherever no token is
//   engine.step();                    // gives the same bits as without
//
//   RoutedScores exact = EngineAudit::score(one, tokens);           // and what its routers chose
//   RoutedScores other = EngineAudit::score(two, tokens, exact.routes);
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pianola/engine.h"

namespace pianola {

// What the routers of a score() gave, one RouteOp after the other in the order they ran:
// [tokens, 2 * top_k] each, as the op writes it.
using Routes = std::vector<std::vector<float>>;

struct RoutedScores {
  std::vector<float> logprobs;
  Routes routes;
  // With routes of another: tokens of which a router chose another set of experts.
  int tokens_elsewhere = 0;
};

class EngineAudit {
 public:
  // Fills with NaN what no op may read before it has been written: every position of every slot
  // that holds no token of an open row, and the activations of the last step. A run that goes on is
  // ended first. Scratch is left alone: it is the backend's own, which may keep counters in it.
  static void poison(Engine& engine);
  // Its parts: the positions of one slot from `first` on; of inputs, those behind their ends, and
  // what the encoder's own layers have left; and the activations.
  static void poison_slot(Engine& engine, int slot, int first);
  static void poison_inputs(Engine& engine);
  static void poison_activations(Engine& engine);

  // score(), looking at the routers. A choice of experts is a jump: a difference in the last bits
  // of a score makes another function of the model, so that engines which round differently can be
  // compared only where the choices are the same. With `routes`, of an engine of the same model and
  // options but for executors, a token that would go to other experts goes to those.
  static RoutedScores score(Engine& engine, std::span<const std::int32_t> tokens,
                            const Routes& routes = {});
};

}  // namespace pianola
