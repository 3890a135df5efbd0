// A Plan: the recorded step, as plain data. The same for every backend; printable (plan_text),
// diffable (tests/plan/golden) and plannable (workspace).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/op.h"
#include "tensor/weight_layout.h"

namespace pianola {

// What a step ends with. A load-time choice that changes kernels; all else is device data.
enum class StepVariant : std::uint8_t {
  kSample,  // LmHead, Sample, Advance
  kScore,   // Score, Advance
  kLogits,  // LmHead, Advance: the host reads the logits
  kEncode,  // an encoder over an input: it ends with what it stores, and no row grows
};

const char* step_variant_name(StepVariant variant);

// The largest step that a Program takes; the tables mask the rest.
struct StepShape {
  std::int32_t tokens = 1;
  std::int32_t lanes = 1;
  std::int32_t logit_rows = 1;
  StepVariant variant = StepVariant::kSample;
  bool operator==(const StepShape&) const = default;
  // A token a lane, sampled from each: AdvanceOp can write the next round's tables, so only such a
  // step can be the body of a loop on a device.
  bool feeds_itself() const {
    return variant == StepVariant::kSample && tokens == lanes && lanes == logit_rows;
  }
};

// "tokens=512 lanes=4 logit_rows=4 sample"
std::string to_string(const StepShape& shape);

enum class Extent : std::uint8_t { kTokens, kLogitRows };

// A workspace buffer of f32: [tokens or logit_rows, width].
struct BufferDecl {
  std::string name;
  Extent extent = Extent::kTokens;
  std::int64_t width = 0;
};

struct Plan {
  StepShape shape;
  std::vector<BufferDecl> buffers;
  std::vector<Op> ops;

  std::int64_t rows(BufferId id) const;
  std::size_t bytes(BufferId id) const;
  const BufferDecl& buffer(BufferId id) const {
    return buffers[static_cast<std::size_t>(id.index)];
  }
};

}  // namespace pianola
