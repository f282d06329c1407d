// Who is on the other side, and is it still alive?
#pragma once

#include <cstdint>
#include <string>

namespace staleflow {

struct ProcessId {
  uint32_t pid;
  uint64_t start_ticks;
  uint64_t pid_namespace;
};

ProcessId this_process();

enum class Life { alive, dead, unknown };

// Dead: no such pid, a zombie, or the pid now belongs to a process that started at another time.
// Unknown: the id comes from another pid namespace, where our /proc says nothing about it.
Life life_of(const ProcessId& process);

}  // namespace staleflow
