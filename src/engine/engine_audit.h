// What an engine can be asked to prove that its users do not need: `pianola check` takes it.
//
//   EngineAudit::poison(engine);      // NaN wherever no token is
//   engine.step();                    // gives the same bits as without
#pragma once

#include "pianola/engine.h"

namespace pianola {

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
};

}  // namespace pianola
