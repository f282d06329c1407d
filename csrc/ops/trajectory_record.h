// The trajectory record as pack reads it; staleflow/trajectories/schema.py writes the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "checksum.h"

namespace staleflow {

constexpr uint32_t kTrajectoryMagic = 0x31544653;  // "SFT1"
constexpr int64_t kRecordAlignment = 8;

struct TrajectoryHeader {
  uint32_t magic;
  uint32_t prompt_tokens;
  uint32_t response_tokens;
  uint32_t n_segments;
  int64_t group_id;
  uint32_t member;
  uint32_t v_traj;
  uint32_t finish;
  float reward;
  float advantage;
  uint32_t reserved0;
  int64_t seed;
  uint64_t reserved1;
};
static_assert(sizeof(TrajectoryHeader) == 64);
static_assert(offsetof(TrajectoryHeader, group_id) == 16 && offsetof(TrajectoryHeader, seed) == 48);

struct VersionSegment {
  uint32_t version;
  uint32_t n_tokens;
};

// Pointers into one record of the buffer.
struct TrajectoryView {
  int64_t prompt_tokens;
  int64_t response_tokens;
  int64_t n_segments;
  const int32_t* tokens;
  const float* logprobs;
  const VersionSegment* segments;

  STALEFLOW_BOTH int64_t total_tokens() const { return prompt_tokens + response_tokens; }
};

enum class RecordFault : int32_t { none = 0, misaligned, outside, not_a_record, longer_than_buffer, segments_do_not_add_up };

// Checks everything that reading the record relies on, so that a broken one is an error and never a wild read.
STALEFLOW_BOTH inline RecordFault view_record(const uint8_t* bytes, int64_t size, int64_t offset, TrajectoryView* out) {
  if (offset % kRecordAlignment) return RecordFault::misaligned;
  if (offset < 0 || offset > size - static_cast<int64_t>(sizeof(TrajectoryHeader))) return RecordFault::outside;
  const auto* header = reinterpret_cast<const TrajectoryHeader*>(bytes + offset);
  if (header->magic != kTrajectoryMagic) return RecordFault::not_a_record;
  out->prompt_tokens = header->prompt_tokens;
  out->response_tokens = header->response_tokens;
  out->n_segments = header->n_segments;
  const int64_t body = 4 * (out->prompt_tokens + 2 * out->response_tokens) + 8 * out->n_segments;
  if (body > size - offset - static_cast<int64_t>(sizeof(TrajectoryHeader))) return RecordFault::longer_than_buffer;
  const uint8_t* at = bytes + offset + sizeof(TrajectoryHeader);
  out->tokens = reinterpret_cast<const int32_t*>(at);
  out->logprobs = reinterpret_cast<const float*>(at + 4 * out->total_tokens());
  out->segments = reinterpret_cast<const VersionSegment*>(out->logprobs + out->response_tokens);
  int64_t covered = 0;
  for (int64_t i = 0; i < out->n_segments; ++i) covered += out->segments[i].n_tokens;
  return covered == out->response_tokens ? RecordFault::none : RecordFault::segments_do_not_add_up;
}

inline const char* describe(RecordFault fault) {
  switch (fault) {
    case RecordFault::none: return "sound";
    case RecordFault::misaligned: return "does not begin at a multiple of 8 bytes";
    case RecordFault::outside: return "begins outside the buffer";
    case RecordFault::not_a_record: return "does not begin with the magic SFT1";
    case RecordFault::longer_than_buffer: return "is longer than the buffer";
    case RecordFault::segments_do_not_add_up: return "has version segments that do not add up to its response";
  }
  return "is broken";
}

}  // namespace staleflow
