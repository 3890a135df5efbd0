// Caches on the host that behave as on a GPU: what no page was required for cannot be touched.
//
//   const HostPages pages(4096);
//   Engine engine(model, {.max_seq_len = 1 << 16});  // a kernel that reads too far ends the test
#pragma once

#include "backends/host_memory.h"

namespace pianola {

class HostPages {
 public:
  explicit HostPages(std::size_t bytes) { set_host_page_bytes(bytes); }  // 0: as they are otherwise
  ~HostPages() { set_host_page_bytes(0); }
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;
};

}  // namespace pianola
