#include "arena.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>

#include "layout.h"

namespace staleflow {

std::shared_ptr<Arena> Arena::create(const std::string& name, uint64_t capacity, uint64_t run_id,
                                     const SegmentOptions& options) {
  if (capacity == 0 || capacity % kRecordAlign || capacity > kMaxCapacity)
    throw std::invalid_argument("arena capacity " + std::to_string(capacity) + ": a multiple of 64 up to 2^40 bytes");
  auto segment = Segment::create(name, kHeaderBytes + capacity, options, [&](uint8_t* memory) {
    const uint64_t identity[] = {kArenaMagic, kAbi | (kHeaderBytes << 32), capacity, run_id};
    std::memcpy(memory, identity, sizeof identity);
  });
  return std::shared_ptr<Arena>(new Arena(std::move(segment), capacity));
}

Arena::Arena(std::shared_ptr<Segment> segment, uint64_t capacity) : segment_(std::move(segment)), capacity_(capacity) {
  add_hole(0, capacity);
}

uint8_t* Arena::data() const { return segment_->data() + kHeaderBytes; }

double Arena::fragmentation() const {
  const uint64_t free_bytes = capacity_ - used_;
  return free_bytes ? 1.0 - static_cast<double>(largest_hole()) / static_cast<double>(free_bytes) : 0.0;
}

std::shared_ptr<Block> Arena::allocate(uint64_t bytes) {
  if (bytes > capacity_) return nullptr;
  const uint64_t room = align_record(std::max<uint64_t>(bytes, 1));
  if (room > capacity_ - used_) return nullptr;
  auto fit = by_size_.lower_bound({room, 0});
  if (fit == by_size_.end()) {
    if (!make_hole(room)) return nullptr;
    fit = by_size_.lower_bound({room, 0});
  }
  const auto [hole_bytes, offset] = *fit;
  erase_hole(holes_.find(offset));
  if (hole_bytes > room) add_hole(offset + room, hole_bytes - room);
  auto block = std::make_shared<Block>(Block{offset, bytes, room, 0, false});
  blocks_.emplace(offset, block);
  used_ += room;
  return block;
}

void Arena::require_own(const std::shared_ptr<Block>& block) const {
  auto found = blocks_.find(block->offset);
  if (block->freed || found == blocks_.end() || found->second != block)
    throw std::invalid_argument("block of " + std::to_string(block->bytes) + " bytes: freed before, or of another arena");
}

void Arena::free(const std::shared_ptr<Block>& block) {
  require_own(block);
  block->freed = true;
  if (block->pins == 0) give_back(block);
}

void Arena::pin(const std::shared_ptr<Block>& block) {
  require_own(block);
  ++block->pins;
}

void Arena::unpin(const std::shared_ptr<Block>& block) {
  if (--block->pins == 0 && block->freed) give_back(block);
}

void Arena::give_back(const std::shared_ptr<Block>& block) {
  blocks_.erase(block->offset);
  used_ -= block->room;
  add_hole(block->offset, block->room);
}

void Arena::add_hole(uint64_t offset, uint64_t bytes) {
  auto after = holes_.lower_bound(offset);
  if (after != holes_.end() && after->first == offset + bytes) {
    bytes += after->second;
    auto joined = after++;
    erase_hole(joined);
  }
  if (after != holes_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      erase_hole(before);
    }
  }
  holes_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

void Arena::erase_hole(std::map<uint64_t, uint64_t>::iterator hole) {
  by_size_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

bool Arena::make_hole(uint64_t bytes) {
  Stretch stretch;
  if (!cheapest_stretch(bytes, &stretch)) return false;
  slide(stretch);
  return true;
}

// Two ends moving over the blocks in address order: the stretch of movable neighbours with at least `bytes` of holes
// around and between them, and the fewest bytes to move.
bool Arena::cheapest_stretch(uint64_t bytes, Stretch* out) {
  uint64_t best = std::numeric_limits<uint64_t>::max();
  auto first = blocks_.begin();
  uint64_t start = 0, moved = 0;
  for (auto last = blocks_.begin(); last != blocks_.end();) {
    if (last->second->pins) {
      start = last->first + last->second->room;
      moved = 0;
      first = ++last;
      continue;
    }
    moved += last->second->room;
    ++last;
    const uint64_t end = last == blocks_.end() ? capacity_ : last->first;
    while (first != last && end - start - moved >= bytes) {
      if (moved < best) {
        best = moved;
        *out = {first, last, start, moved};
      }
      moved -= first->second->room;
      start = first->first + first->second->room;
      ++first;
    }
  }
  return best != std::numeric_limits<uint64_t>::max();
}

void Arena::slide(const Stretch& stretch) {
  const uint64_t end = stretch.last == blocks_.end() ? capacity_ : stretch.last->first;
  for (auto hole = holes_.lower_bound(stretch.start); hole != holes_.end() && hole->first < end;) {
    auto gone = hole++;
    erase_hole(gone);
  }
  uint64_t to = stretch.start;
  for (auto at = stretch.first; at != stretch.last;) {
    auto node = blocks_.extract(at++);
    Block& block = *node.mapped();
    if (to != block.offset) {
      std::memmove(data() + to, data() + block.offset, block.bytes);
      moved_bytes_ += block.bytes;
    }
    block.offset = node.key() = to;
    to += block.room;
    blocks_.insert(std::move(node));
  }
  add_hole(to, end - to);
}

}  // namespace staleflow
