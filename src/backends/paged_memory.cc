#include "backends/paged_memory.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace pianola {

PagedMemory::PagedMemory(std::size_t bytes, std::size_t page)
    : size_(bytes),
      page_(page),
      limit_(std::numeric_limits<std::size_t>::max()),
      is_resident_((bytes + page - 1) / page) {}

void PagedMemory::require(std::size_t offset, std::size_t bytes) {
  if (bytes == 0) return;
  PIANOLA_CHECK(offset < size_ && bytes <= size_ - offset, "{} bytes at {} were required of {}",
                bytes, offset, size_);
  for (std::size_t page = offset / page_; page * page_ < offset + bytes; ++page) {
    if (is_resident_[page]) continue;
    if (resident_ >= limit_) {
      fail(ErrorCode::kOutOfMemory, "memory: no more than {} bytes in pages are allowed here",
           limit_ * page_);
    }
    bring(page);
    is_resident_[page] = true;
    ++resident_;
  }
}

void PagedMemory::give_back(std::size_t offset, std::size_t bytes) {
  const std::size_t end = std::min(offset + bytes, size_);
  bool finished = false;
  for (std::size_t page = (offset + page_ - 1) / page_; page < pages(); ++page) {
    if (std::min((page + 1) * page_, size_) > end) break;
    if (!is_resident_[page]) continue;
    if (!finished) finish_work();
    finished = true;
    take(page);
    is_resident_[page] = false;
    --resident_;
  }
}

MemoryRange PagedMemory::first_resident(MemoryRange within) const {
  const std::size_t limit = std::min(within.end, size_);
  std::size_t first = within.begin / page_;
  while (first * page_ < limit && !is_resident_[first]) ++first;
  std::size_t end = first;
  while (end * page_ < limit && is_resident_[end]) ++end;
  if (first == end) return {};
  return {std::max(within.begin, first * page_), std::min(limit, end * page_)};
}

}  // namespace pianola
