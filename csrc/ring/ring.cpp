// Records through a ring: what the producer does, and what the consumer does.
#include "ring.h"

#include <algorithm>
#include <cstring>

#include "crc32c.h"

namespace staleflow {
namespace {

constexpr uint64_t kNoSequence = UINT64_MAX;  // numbers begin at 1 and never come this far; its successor would be 0

}  // namespace

// ---------------------------------------------------------------- producer

// The sequence after the last published record. A producer killed between its two publishing stores has written
// `last_start` but not `tail`: the records at `tail` are whole but do not exist, and their numbers are used again.
uint64_t Ring::recovered_sequence() const {
  const uint64_t start = header_->last_start.load(std::memory_order_acquire);
  if (staged_end_ == 0) return 1;
  if (start & (kRecordAlign - 1)) corrupt("last record at " + std::to_string(start));
  if (start < staged_end_) return copy_header(start).sequence + 1;
  const RecordHeader first = copy_header(staged_end_);
  return first.kind == kPaddingKind ? copy_header(start & ~mask_).sequence : first.sequence;
}

RecordHeader Ring::copy_header(uint64_t position) const {
  RecordHeader record;
  std::memcpy(&record, data_ + (position & mask_), sizeof record);
  if (record.crc != crc32c(&record)) corrupt("broken record header at " + std::to_string(position));
  return record;
}

void Ring::require_aligned(uint64_t tail, uint64_t head) const {
  if (((tail | head) & (kRecordAlign - 1)) || tail - head > capacity_)
    corrupt("tail " + std::to_string(tail) + ", head " + std::to_string(head));
}

void Ring::require_fits(uint64_t payload_bytes) const {
  if (payload_bytes > max_record())
    throw std::invalid_argument("record of " + std::to_string(payload_bytes) + " bytes in ring '" + segment_->name() +
                                "': the largest is capacity / 8 = " + std::to_string(max_record()));
}

uint64_t Ring::room_needed(uint64_t payload_bytes) const {
  const uint64_t need = record_bytes(payload_bytes);
  const uint64_t to_end = capacity_ - (staged_end_ & mask_);
  return need > to_end ? to_end + need : need;
}

bool Ring::room_for(uint64_t bytes) {
  if (staged_end_ + bytes - cached_head_ <= capacity_) return true;
  cached_head_ = header_->head.load(std::memory_order_seq_cst);
  if (staged_end_ - cached_head_ > capacity_)
    corrupt("tail " + std::to_string(staged_end_) + ", head " + std::to_string(cached_head_));
  return staged_end_ + bytes - cached_head_ <= capacity_;
}

bool Ring::has_room(uint64_t payload_bytes) {
  claim(Role::producer);
  require_fits(payload_bytes);
  return room_for(room_needed(payload_bytes));
}

void Ring::write_padding(uint64_t bytes) {
  RecordHeader padding{};
  padding.payload_bytes = bytes - sizeof(RecordHeader);
  padding.kind = kPaddingKind;
  padding.crc = crc32c(&padding);
  std::memcpy(data_ + (staged_end_ & mask_), &padding, sizeof padding);
}

// Where a record of this size goes: behind a padding record when it would cross the end.
std::optional<uint64_t> Ring::place(uint64_t payload_bytes) {
  const uint64_t total = room_needed(payload_bytes);
  if (!room_for(total)) return std::nullopt;
  const uint64_t padding = total - record_bytes(payload_bytes);
  if (padding) write_padding(padding);
  return staged_end_ + padding;
}

uint8_t* Ring::reserve(uint64_t payload_bytes, const RecordMeta& meta) {
  claim(Role::producer);
  require_fits(payload_bytes);
  if (meta.kind == kPaddingKind) throw std::invalid_argument("record kind 0xFFFFFFFF means padding; use another");
  if (reserved_) throw std::logic_error("reserve: the previous reservation is neither committed nor aborted");
  if (header_->consumer.closed.load(std::memory_order_relaxed)) throw RingClosed(why_closed(Role::producer).value_or("closed"));
  std::optional<uint64_t> start = place(payload_bytes);
  if (!start) return nullptr;
  reserved_ = true;
  reserved_start_ = *start;
  reserved_record_ = RecordHeader{};
  reserved_record_.payload_bytes = payload_bytes;
  reserved_record_.kind = meta.kind;
  reserved_record_.flags = meta.flags;
  reserved_record_.id0 = meta.id0;
  reserved_record_.id1 = meta.id1;
  STALEFLOW_KILL_POINT(after_reserve);
  return data_ + (reserved_start_ & mask_) + sizeof(RecordHeader);
}

void Ring::stage() {
  if (!reserved_) throw std::logic_error("commit without a reservation");
  reserved_record_.sequence = next_sequence_++;
  reserved_record_.crc = crc32c(&reserved_record_);
  std::memcpy(data_ + (reserved_start_ & mask_), &reserved_record_, sizeof reserved_record_);
  last_start_ = reserved_start_;
  staged_end_ = reserved_start_ + record_bytes(reserved_record_.payload_bytes);
  reserved_ = false;
  // What is not yet published must not reach round to the last published record: recovery reads its header.
  if (staged_end_ - published_end_ > capacity_ / 4) publish();
}

void Ring::publish() {
  STALEFLOW_KILL_POINT(before_publish);
  header_->last_start.store(last_start_, std::memory_order_release);
  STALEFLOW_KILL_POINT(between_stores);
  // Sequentially consistent, not only release: with the load in ring_bell it decides, together with the sleeper's
  // store of `waiting` and load of `tail`, that either we see the sleeper or it sees the record.
  header_->tail.store(staged_end_, std::memory_order_seq_cst);
  published_end_ = staged_end_;
  STALEFLOW_KILL_POINT(before_bell);
  ring_bell(header_->consumer_bell);
}

void Ring::commit() {
  stage();
  if (published_end_ != staged_end_) publish();
}

void Ring::abort() { reserved_ = false; }

void Ring::ring_bell(Bell& bell) {
  if (!bell.waiting.load(std::memory_order_seq_cst)) return;
  bell.waiting.store(0, std::memory_order_relaxed);
  bell.event.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(bell.event);
}

// ---------------------------------------------------------------- consumer

void Ring::rewind() {
  cursor_ = header_->head.load(std::memory_order_acquire);
  require_aligned(header_->tail.load(std::memory_order_acquire), cursor_);
  cached_tail_ = cursor_;
  expected_sequence_ = 0;
  ends_.clear();
}

bool Ring::has_data() {
  if (cursor_ != cached_tail_) return true;
  cached_tail_ = header_->tail.load(std::memory_order_seq_cst);
  if (cached_tail_ - cursor_ > capacity_ || (cached_tail_ & (kRecordAlign - 1)))
    corrupt("tail " + std::to_string(cached_tail_) + ", reading at " + std::to_string(cursor_));
  return cursor_ != cached_tail_;
}

RecordHeader Ring::read_header(uint64_t position) const {
  const RecordHeader record = copy_header(position);
  require_sound(record, position);
  return record;
}

void Ring::require_sound(const RecordHeader& record, uint64_t position) const {
  const uint64_t room = std::min(capacity_ - (position & mask_), cached_tail_ - position);
  if (record.payload_bytes > capacity_ || record_bytes(record.payload_bytes) > room)
    corrupt("record of " + std::to_string(record.payload_bytes) + " bytes at " + std::to_string(position) + " crosses the end");
}

bool Ring::next(RecordView* out) {
  claim(Role::consumer);
  while (has_data()) {
    const RecordHeader record = read_header(cursor_);
    const uint8_t* payload = data_ + (cursor_ & mask_) + sizeof(RecordHeader);
    const uint64_t end = cursor_ + record_bytes(record.payload_bytes);
    if (record.kind == kPaddingKind) {
      cursor_ = end;
      continue;
    }
    if (record.sequence == kNoSequence || (expected_sequence_ && record.sequence != expected_sequence_))
      corrupt("record " + std::to_string(record.sequence) + " where " + std::to_string(expected_sequence_) + " belongs");
    expected_sequence_ = record.sequence + 1;
    cursor_ = end;
    ends_.push_back(end);
    *out = {record.sequence, {record.kind, record.flags, record.id0, record.id1}, payload, record.payload_bytes};
    return true;
  }
  return false;
}

void Ring::release(uint64_t sequence) {
  claim(Role::consumer);
  const uint64_t oldest = expected_sequence_ - ends_.size();
  if (sequence >= expected_sequence_)
    throw std::invalid_argument("release(" + std::to_string(sequence) + "): only " + std::to_string(ends_.size()) +
                                " records are out, the next to read is " + std::to_string(expected_sequence_));
  if (sequence < oldest) return;
  const uint64_t count = sequence - oldest + 1;
  const uint64_t end = ends_[count - 1];
  ends_.erase(ends_.begin(), ends_.begin() + static_cast<int64_t>(count));
  STALEFLOW_KILL_POINT(before_release);
  header_->head.store(end, std::memory_order_seq_cst);
  ring_bell(header_->producer_bell);
}

}  // namespace staleflow
