#include "backends/cuda/kernels/linear.h"

#include <algorithm>

#include "backends/cuda/kernels/linear_forms.h"

namespace pianola::cuda {

std::size_t linear_scratch_bytes(int tokens, int widest) {
  const auto groups = static_cast<std::size_t>((std::min(tokens, kDecodeTokens) + 7) / 8);
  const std::size_t padded = (static_cast<std::size_t>(widest) + 127) / 128 * 128;
  return kDecodeTokens * sizeof(float) + groups * 8 * padded * sizeof(float);
}

void linear(const LinearArgs& args, const Launch& launch) {
  require(args.tokens <= kDecodeTokens, "linear: more tokens than a decode-class step has");
  for (int i = 0; i < args.parts; ++i) {
    const PackedWeight& w = args.part[i].weight;
    const PackedWeight& first = args.part[0].weight;
    require(w.codes == first.codes && w.scales == first.scales && w.cols == first.cols &&
                w.cols % 8 == 0,
            "linear: parts of different forms");
  }
  switch (args.part[0].weight.codes) {
    case Codes::kF32:
    case Codes::kF16:
      return products::linear_float(args, launch);
    case Codes::kBF16:
      return products::linear_bf16(args, launch);
    case Codes::kInt4:
      return products::linear_int4(args, launch);
    case Codes::kInt8:
      return products::linear_int8(args, launch);
  }
}

}  // namespace pianola::cuda
