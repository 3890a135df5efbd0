// Memory whose addresses are reserved and whose pages come when they are required: the bookkeeping,
// for backends that know how to bring one.
#pragma once

#include <vector>

#include "backends/backend.h"

namespace pianola {

class PagedMemory : public DeviceMemory {
 public:
  std::size_t size() const override { return size_; }
  void require(std::size_t offset, std::size_t bytes) override;
  void give_back(std::size_t offset, std::size_t bytes) override;
  MemoryRange first_resident(MemoryRange within) const override;
  std::size_t resident_bytes() const override { return resident_ * page_; }
  // Of whole pages: the last one may lie half beyond it.
  void set_limit(std::size_t bytes) override { limit_ = (bytes + page_ - 1) / page_; }

 protected:
  PagedMemory(std::size_t bytes, std::size_t page);

  std::size_t page_bytes() const { return page_; }
  std::size_t pages() const { return is_resident_.size(); }  // with and without memory behind them
  bool is_resident(std::size_t page) const { return is_resident_[page]; }

  // A zeroed page behind addresses that have none. Throws OutOfMemory; then nothing has changed.
  virtual void bring(std::size_t page) = 0;
  // Takes it away again.
  virtual void take(std::size_t page) = 0;
  // Before pages are taken: nothing that was queued needs them any more.
  virtual void finish_work() {}

 private:
  std::size_t size_;
  std::size_t page_;
  std::size_t resident_ = 0;
  std::size_t limit_;  // pages
  std::vector<bool> is_resident_;
};

}  // namespace pianola
