// SPDX-License-Identifier: Apache-2.0
#include "tools/fa2/machine.h"

#include <fmt/core.h>

#include <cstdlib>
#include <fstream>

namespace fa2::tool {

std::string CpuName() {
  std::ifstream stream("/proc/cpuinfo");
  std::string line;
  while (std::getline(stream, line)) {
    if (line.rfind("model name", 0) == 0) {
      const size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  }
  return "unknown";
}

int64_t CacheBytes(int level) {
  for (int index = 0; index < 8; ++index) {
    const std::string folder =
        fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/", index);
    std::ifstream of_level(folder + "level"), of_type(folder + "type"),
        of_size(folder + "size");
    int found = 0;
    std::string type, size;
    if (!(of_level >> found) || !(of_type >> type) || !(of_size >> size)) break;
    if (found != level || type == "Instruction") continue;
    int64_t bytes = std::atoll(size.c_str());
    if (size.back() == 'K') bytes <<= 10;
    if (size.back() == 'M') bytes <<= 20;
    return bytes;
  }
  return 0;
}

}  // namespace fa2::tool
