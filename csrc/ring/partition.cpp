#include "partition.h"

#include <algorithm>
#include <numeric>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace staleflow {
namespace {

// One group of a partial solution: its sum, and its items as a linked list.
struct Group {
  int64_t sum;
  int32_t first, last;
};

bool heavier(const Group& a, const Group& b) { return a.sum > b.sum; }

class Differencing {
 public:
  Differencing(const std::vector<int64_t>& weights, int32_t k)
      : k_(static_cast<size_t>(k)), next_item_(weights.size(), -1), partials_(weights.size()) {
    std::vector<Spread> spreads(weights.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto item = static_cast<int32_t>(i);
      partials_[i].only = {weights[i], item, item};
      spreads[i] = {k == 1 ? 0 : weights[i], item};
    }
    open_ = std::priority_queue<Spread>({}, std::move(spreads));
  }

  std::vector<int32_t> solve() {
    while (open_.size() > 1) {
      int32_t a = take(), b = take();
      if (partials_[a].size() < partials_[b].size()) std::swap(a, b);
      combine(partials_[a].spelled_out(), partials_[b]);
      partials_[b] = Partial();
      open_.push({spread(partials_[a].groups), a});
    }
    return assignment(partials_[take()]);
  }

 private:
  using Spread = std::pair<int64_t, int32_t>;
  using Groups = std::vector<Group>;  // those with items, heaviest first; the rest of the k are empty

  // Most partial solutions are a single item for most of the time: no vector for those.
  struct Partial {
    Group only{};
    Groups groups;

    size_t size() const { return groups.empty() ? 1 : groups.size(); }
    const Group* begin() const { return groups.empty() ? &only : groups.data(); }
    const Group* end() const { return begin() + size(); }
    Groups& spelled_out() {
      if (groups.empty()) groups.push_back(only);
      return groups;
    }
  };

  int32_t take() {
    const int32_t top = open_.top().second;
    open_.pop();
    return top;
  }

  int64_t spread(const Groups& groups) const {
    return groups.front().sum - (groups.size() == k_ ? groups.back().sum : 0);
  }

  // The heaviest group of one joins the lightest of the other, and so on; empty groups are the lightest.
  void combine(Groups& large, const Partial& small) {
    const size_t alone = std::min(k_ - large.size(), small.size());
    changed_.assign(small.begin(), small.begin() + alone);
    for (const Group* group = small.begin() + alone; group != small.end(); ++group) {
      changed_.push_back(join(large.back(), *group));
      large.pop_back();
    }
    std::sort(changed_.begin(), changed_.end(), heavier);
    merge_changed(large);
  }

  void merge_changed(Groups& large) {
    if (changed_.size() == 1) {
      large.insert(std::upper_bound(large.begin(), large.end(), changed_[0], heavier), changed_[0]);
      return;
    }
    const auto middle = static_cast<int64_t>(large.size());
    large.insert(large.end(), changed_.begin(), changed_.end());
    std::inplace_merge(large.begin(), large.begin() + middle, large.end(), heavier);
  }

  Group join(const Group& a, const Group& b) {
    next_item_[static_cast<size_t>(a.last)] = b.first;
    return {a.sum + b.sum, a.first, b.last};
  }

  std::vector<int32_t> assignment(const Partial& solution) const {
    std::vector<int32_t> group_of(next_item_.size());
    int32_t g = 0;
    for (const Group& group : solution) {
      for (int32_t item = group.first; item >= 0; item = next_item_[static_cast<size_t>(item)])
        group_of[static_cast<size_t>(item)] = g;
      ++g;
    }
    return group_of;
  }

  size_t k_;
  std::vector<int32_t> next_item_;
  std::vector<Partial> partials_;
  Groups changed_;
  std::priority_queue<Spread> open_;
};

void require_groups(int32_t k) {
  if (k < 1) throw std::invalid_argument("partition into " + std::to_string(k) + " groups: at least one is needed");
}

}  // namespace

std::vector<int32_t> karmarkar_karp(const std::vector<int64_t>& weights, int32_t k) {
  require_groups(k);
  if (weights.empty()) return {};
  return Differencing(weights, k).solve();
}

std::vector<int32_t> longest_first(const std::vector<int64_t>& weights, int32_t k) {
  require_groups(k);
  std::vector<int32_t> order(weights.size()), group_of(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return weights[static_cast<size_t>(a)] > weights[static_cast<size_t>(b)];
  });
  using Load = std::pair<int64_t, int32_t>;
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> groups;
  for (int32_t g = 0; g < k; ++g) groups.push({0, g});
  for (int32_t item : order) {
    const auto [sum, group] = groups.top();
    groups.pop();
    group_of[static_cast<size_t>(item)] = group;
    groups.push({sum + weights[static_cast<size_t>(item)], group});
  }
  return group_of;
}

}  // namespace staleflow
