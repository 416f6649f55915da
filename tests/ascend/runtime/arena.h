// Device addresses. A range of the address space stands for device memory: nothing can be read or
// written there, as on hardware. The bytes are mapped a fixed distance away, in the shadow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "report.h"

namespace standin {

constexpr std::size_t kHugePage = std::size_t{2} << 20;  // alignment of what CANN hands out

// What is mapped at a device address.
struct Block {
    uintptr_t address;
    std::size_t size;  // as asked for: bytes beyond it are out of bounds
    int fd;            // of the memory file; whoever mapped it closes it
    std::size_t offset;
    int32_t physical_device;
};

// Takes addresses, with nothing behind them yet; 0 if there are no more.
uintptr_t reserve_addresses(std::size_t size, std::size_t alignment = kHugePage);
// False if these are not the beginning of reserved addresses, or memory is still mapped there.
bool release_addresses(uintptr_t address);
// False if the addresses are not reserved or in use, or the system refuses.
bool map_block(const Block &block);
// The block that was mapped at exactly this address. Waits while a Pin is held.
std::optional<Block> unmap_block(uintptr_t address);

STANDIN_API bool is_device_address(const void *address);
// The block that holds this address.
std::optional<Block> block_at(const void *address);

// Keeps what is mapped mapped while it lives. Not to be nested: a thread that waits to unmap
// would stop the second one.
class STANDIN_API Pin {
public:
    Pin();
    ~Pin();
    Pin(const Pin &) = delete;
    Pin &operator=(const Pin &) = delete;

    // Where the host finds `size` bytes of an address: device memory in the shadow, host memory as
    // it is. nullptr if a byte of it is a device address with nothing behind.
    std::byte *reach(const void *address, std::size_t size) const;
};

}  // namespace standin
