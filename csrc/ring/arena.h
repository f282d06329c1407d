// Shared memory in which a host keeps variable-size blocks, freed in any order.
//
// Best fit over holes that are joined as soon as they touch. When no hole is large enough but the free bytes would do,
// the cheapest stretch of blocks is slid together, so that `allocate` fails only for want of room (or because blocks in
// use by a view, which never move, stand in the way). Blocks are therefore handles: an offset holds while pinned.
//
// One process allocates; its threads take turns (the Python face holds the GIL).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "segment.h"

namespace staleflow {

constexpr uint64_t kArenaMagic = 0x31414E4552414653;  // "SFARENA1"

struct Block {
  uint64_t offset;
  uint64_t bytes;  // asked for
  uint64_t room;   // taken: a multiple of 64
  uint32_t pins;   // views alive; a pinned block neither moves nor gives its room back
  bool freed;
};

class Arena {
 public:
  static std::shared_ptr<Arena> create(const std::string& name, uint64_t capacity, uint64_t run_id,
                                       const SegmentOptions& options);

  std::shared_ptr<Block> allocate(uint64_t bytes);  // nullptr: full
  void free(const std::shared_ptr<Block>& block);   // with views alive: when the last of them is gone
  void pin(const std::shared_ptr<Block>& block);
  void unpin(const std::shared_ptr<Block>& block);

  uint8_t* data() const;
  uint64_t capacity() const { return capacity_; }
  uint64_t used() const { return used_; }
  uint64_t blocks() const { return blocks_.size(); }
  uint64_t largest_hole() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  uint64_t moved_bytes() const { return moved_bytes_; }
  double fragmentation() const;  // share of the free bytes outside the largest hole
  const std::shared_ptr<Segment>& segment() const { return segment_; }

 private:
  using BlockMap = std::map<uint64_t, std::shared_ptr<Block>>;
  struct Stretch {
    BlockMap::iterator first, last;  // [first, last)
    uint64_t start;                  // where the first may slide to
    uint64_t moved_bytes;
  };

  Arena(std::shared_ptr<Segment> segment, uint64_t capacity);
  void add_hole(uint64_t offset, uint64_t bytes);
  void erase_hole(std::map<uint64_t, uint64_t>::iterator hole);
  bool make_hole(uint64_t bytes);
  bool cheapest_stretch(uint64_t bytes, Stretch* out);
  void slide(const Stretch& stretch);
  void give_back(const std::shared_ptr<Block>& block);
  void require_own(const std::shared_ptr<Block>& block) const;

  std::shared_ptr<Segment> segment_;
  uint64_t capacity_;
  uint64_t used_ = 0;
  uint64_t moved_bytes_ = 0;
  BlockMap blocks_;                                  // by offset
  std::map<uint64_t, uint64_t> holes_;               // offset -> bytes
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (bytes, offset) of the same holes
};

}  // namespace staleflow
