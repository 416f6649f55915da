#include "memory.h"

#include <acl/error_codes/rt_error_codes.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "arena.h"
#include "settings.h"
#include "stream.h"

namespace standin {
namespace {

struct Table {
    std::mutex mutex;
    std::map<uintptr_t, Allocation> device;
    std::map<uintptr_t, std::size_t> host;
};

Table &table() {
    static Table *const once = new Table;
    return *once;
}

constexpr std::size_t kHostPage = 4096;

}  // namespace

int make_memory_file(std::size_t size) {
    const int fd = memfd_create("ascend-standin", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

std::optional<Allocation> allocation_at(const void *address) {
    const std::lock_guard lock(table().mutex);
    const auto found = table().device.find(reinterpret_cast<uintptr_t>(address));
    if (found == table().device.end()) {
        return std::nullopt;
    }
    return found->second;
}

}  // namespace standin

using namespace standin;

extern "C" {

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy) {
    Device *device = current_device();
    if (device == nullptr) {
        return REFUSE(ACL_ERROR_RT_CONTEXT_NULL, "the thread has set no device");
    }
    if (pointer == nullptr || size == 0) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes asked for", size);
    }
    if (!device->take(size)) {
        return REFUSE(ACL_ERROR_RT_MEMORY_ALLOCATION,
                      "device %d is out of memory: %zu bytes asked for, %zu of %zu in use",
                      device->number, size, device->used_bytes.load(), settings().memory_bytes);
    }
    const uintptr_t address = reserve_addresses(size);
    const int fd = make_memory_file(size);
    if (address == 0 || fd < 0 || !map_block({address, size, fd, 0, device->physical})) {
        if (fd >= 0) {
            close(fd);
        }
        release_addresses(address);
        device->give_back(size);
        return REFUSE(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host cannot back %zu bytes", size);
    }
    const std::lock_guard lock(table().mutex);
    table().device[address] = {size, fd, device->physical};
    *pointer = reinterpret_cast<void *>(address);
    return ACL_SUCCESS;
}

// Without the padding that aclrtMalloc adds on hardware: here neither has any.
aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(pointer, size, policy);
}

aclError aclrtFree(void *pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    Allocation freed{};
    {
        const std::lock_guard lock(table().mutex);
        const auto found = table().device.find(address);
        if (found == table().device.end()) {
            return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%p was not given out by aclrtMalloc",
                          pointer);
        }
        freed = found->second;
        table().device.erase(found);
    }
    revoke_exports(freed.fd);
    unmap_block(address);
    release_addresses(address);
    close(freed.fd);
    device_of_machine(freed.physical_device)->give_back(freed.size);
    return ACL_SUCCESS;
}

aclError aclrtMallocHost(void **pointer, size_t size) {
    if (pointer == nullptr || size == 0) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes asked for", size);
    }
    if (posix_memalign(pointer, kHostPage, size) != 0) {
        return REFUSE(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no %zu bytes", size);
    }
    const std::lock_guard lock(table().mutex);
    table().host[reinterpret_cast<uintptr_t>(*pointer)] = size;
    return ACL_SUCCESS;
}

aclError aclrtFreeHost(void *pointer) {
    const std::lock_guard lock(table().mutex);
    if (table().host.erase(reinterpret_cast<uintptr_t>(pointer)) == 0) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%p was not given out by aclrtMallocHost",
                      pointer);
    }
    std::free(pointer);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total_bytes) {
    const Device *device = current_device();
    if (device == nullptr) {
        return REFUSE(ACL_ERROR_RT_CONTEXT_NULL, "the thread has set no device");
    }
    *total_bytes = settings().memory_bytes;
    *free_bytes = settings().memory_bytes - device->used_bytes.load();
    return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    *attributes = {};
    if (is_device_address(pointer)) {
        const auto block = block_at(pointer);
        if (!block) {
            return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "no memory is at device address %p",
                          pointer);
        }
        const Device *device = device_of_machine(block->physical_device);
        attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
        // Memory of a device that this process does not see has no number here.
        attributes->location.id = device != nullptr ? static_cast<uint32_t>(device->number)
                                                    : UINT32_MAX;
        attributes->pageSize = static_cast<uint32_t>(kHugePage);
        return ACL_SUCCESS;
    }
    const std::lock_guard lock(table().mutex);
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto after = table().host.upper_bound(address);
    const bool pinned = after != table().host.begin() &&
                        address - std::prev(after)->first < std::prev(after)->second;
    attributes->location.type =
        pinned ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    attributes->pageSize = kHostPage;
    return ACL_SUCCESS;
}
}
