// A piece of shared memory with an owner, a token of life, and room that is known to exist before it is touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace staleflow {

struct SegmentOptions {
  std::string directory = "/dev/shm";
  int numa_node = -1;  // -1: where the first touch falls
};

class Segment {
 public:
  // Makes the memory, lets `initialize` fill it, and only then gives it its name: nobody can find it half made, and a
  // process killed before that leaves nothing behind. SegmentError when the name is taken or the room is not there.
  static std::shared_ptr<Segment> create(const std::string& name, uint64_t bytes, const SegmentOptions& options,
                                         const std::function<void(uint8_t*)>& initialize);
  static std::shared_ptr<Segment> open_name(const std::string& name, const SegmentOptions& options);
  // The descriptor stays the caller's; the segment opens the file anew, so that its locks are its own.
  static std::shared_ptr<Segment> open_descriptor(int descriptor);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Takes the name away; the memory lives until the last mapping and descriptor are gone. Idempotent.
  void unlink();
  // Byte-range locks on this open file: what a process cannot take with it when it is killed.
  bool try_lock_byte(uint64_t offset);
  void unlock_byte(uint64_t offset);
  bool byte_is_locked_elsewhere(uint64_t offset) const;

  uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }
  const std::string& name() const { return name_; }

 private:
  Segment(std::string name, std::string path, int descriptor);
  void map(uint64_t bytes);
  void hold_life_token();
  void prefault();

  std::string name_;
  std::string path_;  // empty once unlinked, or when opened by descriptor
  int descriptor_ = -1;
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace staleflow
