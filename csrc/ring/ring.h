// A single-producer, single-consumer byte ring in shared memory that survives the death of either side.
//
// The producer writes records behind `tail` and publishes them with one store of `tail`: killed anywhere, it leaves
// nothing half visible. The consumer reads up to `tail` and gives room back with one store of `head`: killed anywhere,
// its successor starts at the last released record. Everything else a side knows lives in its own process.
//
// One thread at a time may use the producer half, and one the consumer half, of a Ring object.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "futex.h"
#include "layout.h"
#include "process.h"
#include "segment.h"

// Tests that kill a process between two instructions give this a body; elsewhere it is nothing.
#ifndef STALEFLOW_KILL_POINT
#define STALEFLOW_KILL_POINT(name)
#endif

namespace staleflow {

struct RingOptions {
  uint64_t run_id = 0;
  uint64_t schema_hash = 0;
  std::string label;  // names this process in the other side's errors
  SegmentOptions segment;
};

struct RecordMeta {
  uint32_t kind = 0;
  uint32_t flags = 0;
  uint64_t id0 = 0;
  uint64_t id1 = 0;
};

struct RecordView {
  uint64_t sequence;
  RecordMeta meta;
  const uint8_t* payload;
  uint64_t payload_bytes;
};

enum class Role { producer, consumer };

class Ring {
 public:
  static std::shared_ptr<Ring> create(const std::string& name, uint64_t capacity, const RingOptions& options);
  static std::shared_ptr<Ring> attach(const std::string& name, const RingOptions& options);
  static std::shared_ptr<Ring> attach(int descriptor, const RingOptions& options);

  // Producer. `reserve` gives room for a payload, or nullptr when the ring is full; invalid_argument when it can never
  // fit; RingClosed when the consumer has closed. What is reserved becomes visible with `commit`, or never.
  uint8_t* reserve(uint64_t payload_bytes, const RecordMeta& meta);
  void commit();
  void abort();
  // Several records under one publishing store: reserve, stage, reserve, stage, ..., publish.
  void stage();
  void publish();
  bool has_room(uint64_t payload_bytes);
  bool wait_writable(uint64_t payload_bytes, int64_t timeout_ns);

  // Consumer. `next` steps to the next record not yet seen; its bytes stay valid until it is released.
  bool next(RecordView* out);
  void release(uint64_t sequence);
  void release_all() { release(expected_sequence_ - 1); }
  void rewind();
  bool has_data();
  bool wait(int64_t timeout_ns);

  // Takes one half of the ring for this process; the first use of either half does so by itself. RingError when a
  // living process has it.
  void claim(Role role);
  // Throws RingClosed when the other side of `own` has closed or died (for a consumer: and all is read).
  void require_open(Role own);
  std::optional<std::string> why_closed(Role own);
  std::optional<std::string> why_closed();
  bool claimed(Role role) const { return half(role).claimed; }

  void set_stop(uint32_t code);
  uint32_t stop_code();
  bool stop_unseen() const;
  void close(const std::string& reason);
  bool closed_here() const { return closed_here_; }
  void unlink() { segment_->unlink(); }

  uint64_t used() const;
  uint64_t capacity() const { return capacity_; }
  uint64_t max_record() const { return capacity_ / 8; }
  uint64_t unreleased() const { return ends_.size(); }
  uint64_t next_sequence() const { return next_sequence_; }  // of the next record staged; known once claimed
  uint64_t run_id() const { return header_->run_id; }
  uint8_t* data() const { return data_; }
  uint64_t spin_ns = 10000;  // how long a wait looks before it sleeps
  const std::shared_ptr<Segment>& segment() const { return segment_; }

  // Sleeps until one of the rings has data, a stop, or a closed or dead producer; true for each that has.
  static std::vector<bool> wait_any(const std::vector<Ring*>& rings, int64_t timeout_ns);

 private:
  struct Half {
    bool claimed = false;
    bool peer_dead = false;  // as of the last look at /proc
    ProcessId dead_peer{};
  };

  Ring(std::shared_ptr<Segment> segment, const RingOptions& options);
  static std::shared_ptr<Ring> adopt(std::shared_ptr<Segment> segment, const RingOptions& options);

  Half& half(Role role) { return role == Role::producer ? producer_ : consumer_; }
  const Half& half(Role role) const { return role == Role::producer ? producer_ : consumer_; }
  Side& side(Role role) const { return role == Role::producer ? header_->producer : header_->consumer; }
  void take_side(Role role);
  bool holder_lives(Role role) const;
  void look_at_peer(Role own);

  uint64_t recovered_sequence() const;
  RecordHeader copy_header(uint64_t position) const;
  void require_aligned(uint64_t tail, uint64_t head) const;
  std::optional<uint64_t> place(uint64_t payload_bytes);
  bool room_for(uint64_t bytes);
  uint64_t room_needed(uint64_t payload_bytes) const;
  void write_padding(uint64_t bytes);
  void require_fits(uint64_t payload_bytes) const;

  RecordHeader read_header(uint64_t position) const;
  void require_sound(const RecordHeader& record, uint64_t position) const;
  bool needs_attention(Role own);
  template <class Ready>
  bool wait_until(Bell& bell, Role own, int64_t timeout_ns, Ready ready);
  void ring_bell(Bell& bell);
  [[noreturn]] void corrupt(const std::string& what) const;

  std::shared_ptr<Segment> segment_;
  RingHeader* header_;
  uint8_t* data_;
  uint64_t capacity_;
  uint64_t mask_;
  std::string label_;
  std::atomic<bool> closed_here_{false};    // these two are shared by a thread on each half
  std::atomic<uint32_t> seen_stop_{0};
  std::mutex claim_mutex_;

  // Producer half.
  alignas(128) Half producer_;
  uint64_t staged_end_ = 0;     // tail as it will be after publish
  uint64_t published_end_ = 0;  // tail as it is
  uint64_t cached_head_ = 0;
  uint64_t next_sequence_ = 1;
  uint64_t last_start_ = 0;
  bool reserved_ = false;
  uint64_t reserved_start_ = 0;
  RecordHeader reserved_record_{};

  // Consumer half.
  alignas(128) Half consumer_;
  uint64_t cursor_ = 0;  // where the next unread record begins
  uint64_t cached_tail_ = 0;
  uint64_t expected_sequence_ = 0;  // 0: not known yet
  std::deque<uint64_t> ends_;       // ends of the records read and not yet released
};

}  // namespace staleflow
