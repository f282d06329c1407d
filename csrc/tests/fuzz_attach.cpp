// Corrupted segments: whatever the bytes, attaching, reading and writing end in a RingError or in plain records; never
// in a crash, a wild read or an endless loop. The input is a list of patches over the image of a sound ring.
//
// With clang: a libFuzzer target. Elsewhere (STALEFLOW_FUZZ_ROUNDS) a driver with its own random patches.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "ring.h"

using namespace staleflow;

namespace {

constexpr uint64_t kCapacity = kMinCapacity;
constexpr uint64_t kImageBytes = kHeaderBytes + kCapacity;

std::vector<uint8_t> sound_image() {
  auto ring = Ring::create("staleflow-fuzz-" + std::to_string(getpid()), kCapacity, {});
  ring->unlink();
  for (uint64_t lap = 0; lap < 3; ++lap) {
    for (uint64_t bytes : {0, 1, 64, 200, 500, 512}) {
      uint8_t* to = ring->reserve(bytes, {1, 2, 3, 4});
      if (!to) break;
      std::memset(to, 0x11, bytes);
      ring->commit();
    }
    RecordView record;
    for (int i = 0; i < 4 && ring->next(&record); ++i) ring->release(record.sequence);
  }
  return {ring->segment()->data(), ring->segment()->data() + kImageBytes};
}

// A patch is 12 bytes: place (2), how (1), length (1), value (8). Half of them hit the words that steer everything; a
// patched record header can get a valid CRC, to reach behind that check.
void apply_patch(std::vector<uint8_t>& image, const uint8_t* patch) {
  static constexpr uint16_t kSteering[] = {0, 8, 12, 16, 24, 32, 128, 136, 256, 384, 388, 512, 640, 768, 772, 776, 784};
  uint16_t place;
  std::memcpy(&place, patch, 2);
  const uint8_t how = patch[2];
  size_t at = how & 1 ? kSteering[place % (sizeof kSteering / 2)] : place % (kImageBytes - 8);
  if (how & 2) at = kHeaderBytes + (place % (kCapacity / 64)) * 64 + (patch[3] & 0x30) / 2;
  std::memcpy(image.data() + at, patch + 4, 1 + (patch[3] & 7));
  if (how & 4 && at >= kHeaderBytes) {
    uint8_t* record = image.data() + (at & ~size_t{63});
    const uint32_t crc = crc32c(record);
    std::memcpy(record + offsetof(RecordHeader, crc), &crc, sizeof crc);
  }
}

void read_all(Ring& ring) {
  RecordView record;
  uint64_t sum = 0;
  for (uint64_t count = 0; ring.next(&record); ++count) {
    CHECK(count <= kCapacity / 64);
    for (uint64_t i = 0; i < record.payload_bytes; ++i) sum += record.payload[i];
    ring.release(record.sequence);
  }
  if (sum == 1) std::puts("");  // the bytes must really be read
}

void write_some(Ring& ring) {
  for (int i = 0; i < 20; ++i) {
    uint8_t* to = ring.reserve(300, {9, 0, 0, 0});
    if (!to) return;
    std::memset(to, 0x22, 300);
    ring.commit();
  }
}

template <class Use>
void try_with(int descriptor, Use use) {
  try {
    use(*Ring::attach(descriptor, RingOptions{}));
  } catch (const RingError&) {
  }
}

void run(const uint8_t* data, size_t size) {
  static const std::vector<uint8_t> sound = sound_image();
  static const int descriptor = memfd_create("staleflow-fuzz", MFD_CLOEXEC);
  std::vector<uint8_t> image = sound;
  for (; size >= 12; data += 12, size -= 12) apply_patch(image, data);
  CHECK(ftruncate(descriptor, static_cast<off_t>(kImageBytes - (size ? data[0] % 3 * 4095 : 0))) == 0);
  const auto write_image = [&] { CHECK(pwrite(descriptor, image.data(), kImageBytes, 0) == ssize_t{kImageBytes}); };
  if (size) {
    try_with(descriptor, read_all);  // a file cut short, before its rest is restored
  }
  for (int order = 0; order < 2; ++order) {
    write_image();
    try_with(descriptor, [&](Ring& ring) { order ? read_all(ring) : write_some(ring); });
    try_with(descriptor, [&](Ring& ring) { order ? write_some(ring) : read_all(ring); });
    try_with(descriptor, [](Ring& ring) { ring.wait(0); });
    try_with(descriptor, [](Ring& ring) { ring.used(); });
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run(data, size);
  return 0;
}

#ifdef STALEFLOW_FUZZ_ROUNDS
int main() {
  std::mt19937_64 random(20260112);
  std::vector<uint8_t> input;
  for (int round = 0; round < STALEFLOW_FUZZ_ROUNDS; ++round) {
    input.resize(random() % 64);
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random() >> (random() % 57));
    run(input.data(), input.size());
  }
  std::printf("fuzz_attach: %d corrupted rings, no crash\n", STALEFLOW_FUZZ_ROUNDS);
}
#endif
