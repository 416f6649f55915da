// Memory of a device: files without a name, which another process can open through /proc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "device.h"

namespace standin {

// A new memory file of that size, all zeros; -1 if the system has none.
int make_memory_file(std::size_t size);

struct Allocation {
    std::size_t size;
    int fd;
    int32_t physical_device;
};

// What aclrtMalloc gave out at exactly this address.
std::optional<Allocation> allocation_at(const void *address);

// Ends the exports of freed memory: who comes later with a key is refused.
void revoke_exports(int fd);

}  // namespace standin
