// The life of a ring: made, attached to, claimed by its two sides, closed; and whether the other side still lives.
#include "ring.h"

#include <algorithm>
#include <cstring>

#include "crc32c.h"

namespace staleflow {
namespace {

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

}  // namespace staleflow
