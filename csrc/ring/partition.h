// Number partitioning: k groups of nearly equal sum.
#pragma once

#include <cstdint>
#include <vector>

namespace staleflow {

// The group (0 to k-1) of each weight, by the largest differencing method of Karmarkar and Karp: groups come in
// descending order of their sums.
std::vector<int32_t> karmarkar_karp(const std::vector<int64_t>& weights, int32_t k);

// The same by giving each weight, heaviest first, to the lightest group: coarser, but its cost does not grow with k.
std::vector<int32_t> longest_first(const std::vector<int64_t>& weights, int32_t k);

}  // namespace staleflow
