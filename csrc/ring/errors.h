// What can go wrong, as types that the Python face shows under the same names.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace staleflow {

struct RingError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct RingCorrupt : RingError {
  using RingError::RingError;
};
struct RingClosed : RingError {
  using RingError::RingError;
};
struct SegmentError : RingError {
  using RingError::RingError;
};

inline std::string with_errno(const std::string& what) { return what + ": " + std::strerror(errno); }

}  // namespace staleflow
