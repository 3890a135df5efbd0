#include "tensor/weight_layout.h"

namespace pianola {

const char* weight_role_name(WeightRole role) {
  switch (role) {
    case WeightRole::kLinear:
      return "linear";
    case WeightRole::kEmbedding:
      return "embedding";
    case WeightRole::kVector:
      return "vector";
  }
  return "?";
}

}  // namespace pianola
