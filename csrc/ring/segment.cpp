#include "segment.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "errors.h"

namespace staleflow {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
constexpr int kBind = 2;            // MPOL_BIND

std::string mebibytes(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::string path_of(const std::string& name, const SegmentOptions& options) {
  if (name.empty() || name.size() > 200 || name.find('/') != std::string::npos)
    throw std::invalid_argument("segment name '" + name + "': 1 to 200 characters without '/'");
  return options.directory + "/" + name;
}

std::string no_room(const std::string& name, uint64_t bytes, const std::string& directory) {
  struct statvfs space {};
  statvfs(directory.c_str(), &space);
  return "segment '" + name + "' needs " + std::to_string(bytes) + " bytes (" + mebibytes(bytes) + ") in " + directory +
         ", which has " + mebibytes(uint64_t{space.f_bavail} * space.f_frsize) + " free of " +
         mebibytes(uint64_t{space.f_blocks} * space.f_frsize) +
         ": make it larger (containers: --shm-size), lower the capacity, or clean up with `staleflow doctor --reap`";
}

void require_room(const std::string& name, uint64_t bytes, const std::string& directory) {
  struct statvfs space {};
  if (statvfs(directory.c_str(), &space) != 0) throw SegmentError(with_errno("cannot read the free space of " + directory));
  if (uint64_t{space.f_bavail} * space.f_frsize < bytes) throw SegmentError(no_room(name, bytes, directory));
}

void bind_to_node(uint8_t* data, uint64_t bytes, int node) {
  if (node < 0) return;
  if (node >= 1024) throw std::invalid_argument("numa_node " + std::to_string(node) + ": 0 to 1023, or -1 for none");
  unsigned long mask[1024 / (8 * sizeof(unsigned long))] = {};
  mask[node / (8 * sizeof(unsigned long))] = 1ul << (node % (8 * sizeof(unsigned long)));
  if (syscall(SYS_mbind, data, bytes, kBind, mask, 1025ul, 0u) != 0 && errno != ENOSYS && errno != EPERM)
    throw SegmentError(with_errno("cannot bind memory to NUMA node " + std::to_string(node)));
}

}  // namespace

Segment::Segment(std::string name, std::string path, int descriptor)
    : name_(std::move(name)), path_(std::move(path)), descriptor_(descriptor) {}

std::shared_ptr<Segment> Segment::create(const std::string& name, uint64_t bytes, const SegmentOptions& options,
                                         const std::function<void(uint8_t*)>& initialize) {
  std::string path = path_of(name, options);
  require_room(name, bytes, options.directory);
  int descriptor = open(options.directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor < 0) throw SegmentError(with_errno("cannot make a file in " + options.directory));
  std::shared_ptr<Segment> segment(new Segment(name, "", descriptor));
  segment->hold_life_token();
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) throw SegmentError(with_errno("cannot size segment '" + name + "'"));
  segment->map(bytes);
  bind_to_node(segment->data_, bytes, options.numa_node);
  // Takes the pages now: another process may have used the room since the check, and touching a page that cannot be
  // had is SIGBUS.
  if (int code = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes)); code != 0) {
    errno = code;
    throw SegmentError(code == ENOSPC ? no_room(name, bytes, options.directory) : with_errno("cannot fill segment '" + name + "'"));
  }
  segment->prefault();
  initialize(segment->data_);
  std::string anonymous = "/proc/self/fd/" + std::to_string(descriptor);
  if (linkat(AT_FDCWD, anonymous.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0)
    throw SegmentError(errno == EEXIST ? "segment '" + name + "' exists: its job still runs, or was killed (`staleflow doctor --reap`)"
                                       : with_errno("cannot name segment '" + name + "'"));
  segment->path_ = path;
  return segment;
}

std::shared_ptr<Segment> Segment::open_name(const std::string& name, const SegmentOptions& options) {
  std::string path = path_of(name, options);
  int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) throw SegmentError(with_errno("cannot open segment '" + name + "' in " + options.directory));
  std::shared_ptr<Segment> segment(new Segment(name, path, descriptor));
  segment->hold_life_token();
  struct stat info {};
  if (fstat(descriptor, &info) != 0) throw SegmentError(with_errno("cannot stat segment '" + name + "'"));
  segment->map(static_cast<uint64_t>(info.st_size));
  madvise(segment->data_, segment->bytes_, kPopulateWrite);  // saves faults later; nothing depends on it
  return segment;
}

std::shared_ptr<Segment> Segment::open_descriptor(int descriptor) {
  std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) throw SegmentError(with_errno("cannot open the segment behind descriptor " + std::to_string(descriptor)));
  std::shared_ptr<Segment> segment(new Segment("descriptor " + std::to_string(descriptor), "", own));
  segment->hold_life_token();
  struct stat info {};
  if (fstat(own, &info) != 0) throw SegmentError(with_errno("cannot stat " + segment->name_));
  segment->map(static_cast<uint64_t>(info.st_size));
  madvise(segment->data_, segment->bytes_, kPopulateWrite);  // saves faults later; nothing depends on it
  return segment;
}

Segment::~Segment() {
  if (data_) munmap(data_, bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

void Segment::unlink() {
  if (path_.empty()) return;
  struct stat named {}, own {};
  bool still_ours = stat(path_.c_str(), &named) == 0 && fstat(descriptor_, &own) == 0 && named.st_ino == own.st_ino;
  if (still_ours && ::unlink(path_.c_str()) != 0 && errno != ENOENT)
    throw SegmentError(with_errno("cannot unlink " + path_));
  path_.clear();
}

void Segment::map(uint64_t bytes) {
  if (bytes == 0) throw SegmentError("segment '" + name_ + "' is empty");
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED) throw SegmentError(with_errno("cannot map segment '" + name_ + "'"));
  data_ = static_cast<uint8_t*>(data);
  bytes_ = bytes;
}

// Everyone who has the segment open holds a shared lock; whoever can lock it exclusively knows that nobody lives.
void Segment::hold_life_token() {
  if (flock(descriptor_, LOCK_SH | LOCK_NB) != 0)
    throw SegmentError(with_errno("segment '" + name_ + "' is being reaped"));
}

void Segment::prefault() {
  if (madvise(data_, bytes_, kPopulateWrite) == 0) return;
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (uint64_t at = 0; at < bytes_; at += page) *static_cast<volatile uint8_t*>(data_ + at) = 0;
}

namespace {

struct flock one_byte(uint64_t offset, short type) {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(offset);
  range.l_len = 1;
  return range;
}

}  // namespace

bool Segment::try_lock_byte(uint64_t offset) {
  struct flock range = one_byte(offset, F_WRLCK);
  return fcntl(descriptor_, F_OFD_SETLK, &range) == 0;
}

void Segment::unlock_byte(uint64_t offset) {
  struct flock range = one_byte(offset, F_UNLCK);
  if (fcntl(descriptor_, F_OFD_SETLK, &range) != 0) throw SegmentError(with_errno("cannot unlock " + name_));
}

bool Segment::byte_is_locked_elsewhere(uint64_t offset) const {
  struct flock range = one_byte(offset, F_WRLCK);
  if (fcntl(descriptor_, F_OFD_GETLK, &range) != 0) throw SegmentError(with_errno("cannot probe the lock of " + name_));
  return range.l_type != F_UNLCK;
}

}  // namespace staleflow
