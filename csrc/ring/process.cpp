#include "process.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace staleflow {
namespace {

struct ProcessStat {
  char state;
  uint64_t start_ticks;
};

// Fields 3 (state) and 22 (starttime) of /proc/PID/stat, counted from behind the name, which may hold anything.
bool read_stat(uint32_t pid, ProcessStat* out) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
  std::FILE* file = std::fopen(path, "r");
  if (!file) return false;
  char text[1024];
  size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[size] = 0;
  const char* field = std::strrchr(text, ')');
  if (!field || !field[1]) return false;
  field += 2;
  out->state = *field;
  for (int index = 3; index < 22 && field; ++index) {
    field = std::strchr(field, ' ');
    if (field) ++field;
  }
  if (!field) return false;
  out->start_ticks = std::strtoull(field, nullptr, 10);
  return true;
}

uint64_t own_pid_namespace() {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

}  // namespace

ProcessId this_process() {
  ProcessStat own{};
  read_stat(static_cast<uint32_t>(getpid()), &own);
  return {static_cast<uint32_t>(getpid()), own.start_ticks, own_pid_namespace()};
}

Life life_of(const ProcessId& process) {
  if (process.pid_namespace != own_pid_namespace()) return Life::unknown;
  ProcessStat found{};
  if (!read_stat(process.pid, &found)) return Life::dead;
  if (found.state == 'Z' || found.state == 'X') return Life::dead;
  return found.start_ticks == process.start_ticks ? Life::alive : Life::dead;
}

}  // namespace staleflow
