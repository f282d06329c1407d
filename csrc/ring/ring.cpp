#include "ring.h"

#include <algorithm>
#include <cstring>

#include "crc32c.h"

namespace staleflow {
namespace {

constexpr int64_t kLivenessNs = 100000000;  // a sleeper looks this often whether the other side still lives

bool is_power_of_two(uint64_t value) { return value && (value & (value - 1)) == 0; }

void copy_text(char* to, size_t room, const std::string& text) {
  size_t size = std::min(text.size(), room - 1);
  std::memcpy(to, text.data(), size);
  std::memset(to + size, 0, room - size);
}

std::string read_text(const char* from, size_t room) { return std::string(from, strnlen(from, room)); }

// The byte whose lock a side's holder has: the first of its Side.
uint64_t lock_byte(Role role) { return offsetof(RingHeader, producer) + (role == Role::producer ? 0 : sizeof(Side)); }

const char* name_of(Role role) { return role == Role::producer ? "producer" : "consumer"; }

Role other(Role role) { return role == Role::producer ? Role::consumer : Role::producer; }

ProcessId holder_of(const Side& side) {
  return {side.pid.load(std::memory_order_acquire), side.start_ticks.load(std::memory_order_relaxed),
          side.pid_namespace.load(std::memory_order_relaxed)};
}

std::string describe(Role role, const Side& side) {
  std::string label = read_text(side.label, sizeof side.label);
  std::string pid = "pid " + std::to_string(side.pid.load(std::memory_order_relaxed));
  return std::string(name_of(role)) + " (" + (label.empty() ? pid : label + ", " + pid) + ")";
}

void initialize(uint8_t* memory, uint64_t capacity, const RingOptions& options) {
  std::memset(memory, 0, kHeaderBytes);
  auto* header = new (memory) RingHeader{};
  header->abi = kAbi;
  header->header_bytes = kHeaderBytes;
  header->capacity = capacity;
  header->run_id = options.run_id;
  header->schema_hash = options.schema_hash;
  header->magic = kRingMagic;
}

void require_identity(const Segment& segment, const RingOptions& options) {
  const std::string ring = "ring '" + segment.name() + "'";
  if (segment.bytes() < kHeaderBytes + kMinCapacity) throw RingCorrupt(ring + ": too small to be a ring");
  const auto* header = reinterpret_cast<const RingHeader*>(segment.data());
  if (header->magic != kRingMagic) throw RingCorrupt(ring + ": not a ring (wrong magic)");
  if (header->abi != kAbi || header->header_bytes != kHeaderBytes)
    throw RingError(ring + ": made with ABI " + std::to_string(header->abi) + ", this build speaks " + std::to_string(kAbi));
  const uint64_t capacity = header->capacity;
  if (!is_power_of_two(capacity) || capacity < kMinCapacity || capacity > kMaxCapacity ||
      segment.bytes() < kHeaderBytes + capacity)
    throw RingCorrupt(ring + ": capacity " + std::to_string(capacity) + " in " + std::to_string(segment.bytes()) + " bytes");
  if (header->run_id != options.run_id)
    throw RingError(ring + ": belongs to run " + std::to_string(header->run_id) + ", not " + std::to_string(options.run_id));
  if (header->schema_hash != options.schema_hash)
    throw RingError(ring + ": schema hash " + std::to_string(header->schema_hash) + ", expected " +
                    std::to_string(options.schema_hash) + ": the two sides run different code");
}

}  // namespace

// ---------------------------------------------------------------- life

std::shared_ptr<Ring> Ring::create(const std::string& name, uint64_t capacity, const RingOptions& options) {
  if (!is_power_of_two(capacity) || capacity < kMinCapacity || capacity > kMaxCapacity)
    throw std::invalid_argument("ring capacity " + std::to_string(capacity) + ": a power of two from 4096 to 2^40 bytes");
  auto segment = Segment::create(name, kHeaderBytes + capacity, options.segment,
                                 [&](uint8_t* memory) { initialize(memory, capacity, options); });
  return adopt(std::move(segment), options);
}

std::shared_ptr<Ring> Ring::attach(const std::string& name, const RingOptions& options) {
  return adopt(Segment::open_name(name, options.segment), options);
}

std::shared_ptr<Ring> Ring::attach(int descriptor, const RingOptions& options) {
  return adopt(Segment::open_descriptor(descriptor), options);
}

std::shared_ptr<Ring> Ring::adopt(std::shared_ptr<Segment> segment, const RingOptions& options) {
  require_identity(*segment, options);
  return std::shared_ptr<Ring>(new Ring(std::move(segment), options));
}

Ring::Ring(std::shared_ptr<Segment> segment, const RingOptions& options)
    : segment_(std::move(segment)),
      header_(reinterpret_cast<RingHeader*>(segment_->data())),
      data_(segment_->data() + kHeaderBytes),
      capacity_(header_->capacity),
      mask_(capacity_ - 1),
      label_(options.label) {}

void Ring::claim(Role role) {
  if (closed_here_) throw RingClosed("ring '" + segment_->name() + "' was closed here");
  if (half(role).claimed) return;
  std::lock_guard<std::mutex> guard(claim_mutex_);
  take_side(role);
  if (role == Role::producer) {
    published_end_ = staged_end_ = header_->tail.load(std::memory_order_acquire);
    cached_head_ = header_->head.load(std::memory_order_acquire);
    require_aligned(staged_end_, cached_head_);
    next_sequence_ = recovered_sequence();
  } else {
    rewind();
  }
  half(role).claimed = true;
}

void Ring::take_side(Role role) {
  Side& mine = side(role);
  if (!segment_->try_lock_byte(lock_byte(role)) && holder_lives(role))
    throw RingError("ring '" + segment_->name() + "' already has a " + describe(role, mine));
  ProcessId self = this_process();
  copy_text(mine.label, sizeof mine.label, label_);
  mine.start_ticks.store(self.start_ticks, std::memory_order_relaxed);
  mine.pid_namespace.store(self.pid_namespace, std::memory_order_relaxed);
  mine.closed.store(0, std::memory_order_relaxed);
  mine.pid.store(self.pid, std::memory_order_release);
}

// A child forked from a dead holder may still hold its lock; the pid then tells the truth.
bool Ring::holder_lives(Role role) const {
  ProcessId holder = holder_of(side(role));
  return holder.pid == 0 || life_of(holder) != Life::dead;
}

void Ring::close(const std::string& reason) {
  if (closed_here_.exchange(true)) return;
  for (Role role : {Role::producer, Role::consumer}) {
    if (!half(role).claimed) continue;
    copy_text(side(role).reason, sizeof side(role).reason, reason);
    side(role).closed.store(1, std::memory_order_seq_cst);
    segment_->unlock_byte(lock_byte(role));
  }
  ring_bell(header_->consumer_bell);
  ring_bell(header_->producer_bell);
}

std::optional<std::string> Ring::why_closed(Role own) {
  if (closed_here_) return "ring '" + segment_->name() + "' was closed here";
  const Side& peer = side(other(own));
  const Half& mine = half(own);
  std::string what;
  if (peer.closed.load(std::memory_order_seq_cst)) {
    what = " closed: " + read_text(peer.reason, sizeof peer.reason);
  } else if (mine.peer_dead && holder_of(peer).pid == mine.dead_peer.pid &&
             holder_of(peer).start_ticks == mine.dead_peer.start_ticks) {
    what = " died";
  } else {
    return std::nullopt;
  }
  if (own == Role::consumer && has_data()) return std::nullopt;
  return "ring '" + segment_->name() + "': its " + describe(other(own), peer) + what;
}

std::optional<std::string> Ring::why_closed() {
  for (Role role : {Role::consumer, Role::producer}) {
    if (!closed_here_ && !half(role).claimed) continue;
    if (auto reason = why_closed(role)) return reason;
  }
  return std::nullopt;
}

void Ring::look_at_peer(Role own) {
  const Role peer = other(own);
  ProcessId holder = holder_of(side(peer));
  if (holder.pid == 0) return;
  Life life = life_of(holder);
  if (life == Life::unknown) life = segment_->byte_is_locked_elsewhere(lock_byte(peer)) ? Life::alive : Life::dead;
  half(own).peer_dead = life == Life::dead;
  half(own).dead_peer = holder;
}

void Ring::require_open(Role own) {
  claim(own);
  look_at_peer(own);
  if (auto reason = why_closed(own)) throw RingClosed(*reason);
}

void Ring::set_stop(uint32_t code) {
  header_->stop_code.store(code, std::memory_order_seq_cst);
  ring_bell(header_->consumer_bell);
  ring_bell(header_->producer_bell);
}

uint32_t Ring::stop_code() {
  const uint32_t code = header_->stop_code.load(std::memory_order_seq_cst);
  seen_stop_ = code;
  return code;
}

bool Ring::stop_unseen() const { return header_->stop_code.load(std::memory_order_seq_cst) != seen_stop_; }

uint64_t Ring::used() const {
  uint64_t head = header_->head.load(std::memory_order_seq_cst);
  uint64_t tail = header_->tail.load(std::memory_order_seq_cst);
  // head is read first: it can only be older than tail, so this cannot go below zero in a sound ring.
  if (tail - head > capacity_ && header_->head.load(std::memory_order_seq_cst) == head)
    corrupt("tail " + std::to_string(tail) + ", head " + std::to_string(head));
  return std::min(tail - head, capacity_);
}

void Ring::corrupt(const std::string& what) const {
  throw RingCorrupt("ring '" + segment_->name() + "' is corrupt: " + what + " (capacity " + std::to_string(capacity_) + ")");
}

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
    if (expected_sequence_ && record.sequence != expected_sequence_)
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

// ---------------------------------------------------------------- waiting

bool Ring::needs_attention(Role own) { return stop_unseen() || why_closed(own).has_value(); }

namespace {

// Marks its owner as about to sleep, for as long as it lives: a flag left behind costs the other side a system call.
class Asleep {
 public:
  explicit Asleep(Bell& bell) : bell_(bell), event(bell.event.load(std::memory_order_seq_cst)) {
    bell.waiting.store(1, std::memory_order_seq_cst);
  }
  ~Asleep() { bell_.waiting.store(0, std::memory_order_relaxed); }
  Asleep(const Asleep&) = delete;

 private:
  Bell& bell_;

 public:
  const uint32_t event;  // as it was before the flag was set
};

}  // namespace

// True when `ready`; false at the timeout or when a stop came; RingClosed when nothing can come any more.
template <class Ready>
bool Ring::wait_until(Bell& bell, Role own, int64_t timeout_ns, Ready ready) {
  claim(own);
  if (ready()) return true;
  const int64_t start = monotonic_ns();
  const int64_t until = start + timeout_ns;
  const int64_t spin_until = start + std::min<int64_t>(static_cast<int64_t>(spin_ns), timeout_ns);
  while (monotonic_ns() < spin_until) {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      cpu_relax();
    }
  }
  for (;;) {
    if (stop_unseen()) return false;
    if (auto reason = why_closed(own)) throw RingClosed(*reason);
    const int64_t left = until - monotonic_ns();
    if (left <= 0) return false;
    {
      Asleep asleep(bell);
      if (ready()) return true;
      if (!needs_attention(own)) futex_wait(bell.event, asleep.event, std::min(left, kLivenessNs));
    }
    if (ready()) return true;
    look_at_peer(own);
  }
}

bool Ring::wait(int64_t timeout_ns) {
  return wait_until(header_->consumer_bell, Role::consumer, timeout_ns, [this] { return has_data(); });
}

bool Ring::wait_writable(uint64_t payload_bytes, int64_t timeout_ns) {
  require_fits(payload_bytes);
  return wait_until(header_->producer_bell, Role::producer, timeout_ns, [&] { return has_room(payload_bytes); });
}

std::vector<bool> Ring::wait_any(const std::vector<Ring*>& rings, int64_t timeout_ns) {
  for (Ring* ring : rings) ring->claim(Role::consumer);
  std::vector<bool> found(rings.size());
  auto look = [&] {
    bool any = false;
    for (size_t i = 0; i < rings.size(); ++i) {
      found[i] = rings[i]->has_data() || rings[i]->needs_attention(Role::consumer);
      any = any || found[i];
    }
    return any;
  };
  const int64_t until = monotonic_ns() + timeout_ns;
  while (!look()) {
    const int64_t left = until - monotonic_ns();
    if (left <= 0) break;
    {
      std::deque<Asleep> asleep;
      std::vector<WaitWord> words;
      for (Ring* ring : rings) {
        Bell& bell = ring->header_->consumer_bell;
        asleep.emplace_back(bell);
        words.push_back({asleep.back().event, reinterpret_cast<uint64_t>(&bell.event), FUTEX_32, 0});
      }
      if (!look()) futex_wait_any(words, std::min(left, kLivenessNs));
    }
    if (look()) break;
    for (Ring* ring : rings) ring->look_at_peer(Role::consumer);
  }
  return found;
}

}  // namespace staleflow
