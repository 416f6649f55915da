// Memory and addresses apart from each other: what torch's expandable segments are made of.
#include <acl/error_codes/rt_error_codes.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "arena.h"
#include "memory.h"
#include "ticket.h"

namespace standin {
namespace {

struct Physical {
    int fd;
    std::size_t size;
    int32_t physical_device;
    bool imported;
};

struct Handles {
    std::mutex mutex;
    std::map<const void *, Physical> all;
    uintptr_t made = 0;
};

Handles &handles() {
    static Handles *const once = new Handles;
    return *once;
}

aclrtDrvMemHandle add(const Physical &physical) {
    const std::lock_guard lock(handles().mutex);
    const auto handle = reinterpret_cast<aclrtDrvMemHandle>(++handles().made);
    handles().all[handle] = physical;
    return handle;
}

std::optional<Physical> find(const char *function, aclrtDrvMemHandle handle) {
    const std::lock_guard lock(handles().mutex);
    const auto found = handles().all.find(handle);
    if (found == handles().all.end()) {
        refuse(ACL_ERROR_RT_INVALID_HANDLE, function, "%p is no physical memory", handle);
        return std::nullopt;
    }
    return found->second;
}

// CANN's shareable handle of the second kind.
struct FabricText {
    char text[sizeof(aclrtMemFabricHandle)];
};

aclError export_ticket(const char *function, aclrtDrvMemHandle handle, uint64_t flags,
                       TicketName &name) {
    const auto physical = find(function, handle);
    if (!physical) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    const auto access = (flags & ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION) != 0
                            ? Access::anybody
                            : Access::listed;
    if (!write_ticket(physical->fd, {physical->size, physical->physical_device}, access, name)) {
        return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, function, "no descriptor is left");
    }
    return ACL_SUCCESS;
}

aclError import_ticket(const char *function, const TicketName &name, aclrtDrvMemHandle *handle) {
    Shared shared{};
    std::string why;
    const int fd = use_ticket(name, shared, why);
    if (fd < 0) {
        return refuse(ACL_ERROR_RT_PARAM_INVALID, function, "handle %s cannot be used: %s",
                      name.text().c_str(), why.c_str());
    }
    *handle = add({fd, shared.size, shared.physical_device, true});
    return ACL_SUCCESS;
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

aclError aclrtReserveMemAddress(void **pointer, size_t size, size_t alignment, void *expected,
                                uint64_t) {
    if (expected != nullptr) {
        return REFUSE(ACL_ERROR_API_NOT_SUPPORT, "a wish for address %p cannot be met", expected);
    }
    const uintptr_t address = reserve_addresses(size, alignment);
    if (address == 0) {
        return REFUSE(ACL_ERROR_RT_MEMORY_ALLOCATION, "there are no %zu addresses left", size);
    }
    *pointer = reinterpret_cast<void *>(address);
    return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void *pointer) {
    if (!release_addresses(reinterpret_cast<uintptr_t>(pointer))) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%p is not reserved, or memory is mapped there",
                      pointer);
    }
    return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size,
                             const aclrtPhysicalMemProp *properties, uint64_t) {
    if (properties->location.type != ACL_MEM_LOCATION_TYPE_DEVICE) {
        return REFUSE(ACL_ERROR_API_NOT_SUPPORT, "physical memory of location type %d",
                      properties->location.type);
    }
    Device *device = device_at(properties->location.id);
    if (device == nullptr || size == 0 || size % kHugePage != 0) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes on device %u: whole pages of %zu",
                      size, properties->location.id, kHugePage);
    }
    if (!device->take(size)) {
        return REFUSE(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d has no %zu bytes left",
                      device->number, size);
    }
    const int fd = make_memory_file(size);
    if (fd < 0) {
        device->give_back(size);
        return REFUSE(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host cannot back %zu bytes", size);
    }
    *handle = add({fd, size, device->physical, false});
    return ACL_SUCCESS;
}

// What is mapped stays readable until it is unmapped.
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    const auto physical = find(__func__, handle);
    if (!physical) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    {
        const std::lock_guard lock(handles().mutex);
        handles().all.erase(handle);
    }
    withdraw_all(physical->fd);
    close(physical->fd);
    if (!physical->imported) {
        device_of_machine(physical->physical_device)->give_back(physical->size);
    }
    return ACL_SUCCESS;
}

aclError aclrtMapMem(void *pointer, size_t size, size_t offset, aclrtDrvMemHandle handle,
                     uint64_t) {
    const auto physical = find(__func__, handle);
    if (!physical) {
        return ACL_ERROR_RT_INVALID_HANDLE;
    }
    const bool fits = offset <= physical->size && size <= physical->size - offset && size != 0;
    if (!fits || !map_block({reinterpret_cast<uintptr_t>(pointer), size, physical->fd, offset,
                             physical->physical_device})) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID,
                      "%zu bytes from %zu of %zu cannot be mapped at %p", size, offset,
                      physical->size, pointer);
    }
    return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void *pointer) {
    if (!unmap_block(reinterpret_cast<uintptr_t>(pointer))) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "nothing is mapped at %p", pointer);
    }
    return ACL_SUCCESS;
}

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *, aclrtMemGranularityOptions,
                                          size_t *granularity) {
    *granularity = kHugePage;
    return ACL_SUCCESS;
}

aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType,
                                         uint64_t flags, uint64_t *shareable) {
    TicketName name{};
    const aclError result = export_ticket(__func__, handle, flags, name);
    if (result == ACL_SUCCESS) {
        *shareable = name.number();
    }
    return result;
}

aclError aclrtMemSetPidToShareableHandle(uint64_t shareable, int32_t *pids, size_t count) {
    if (!admit(TicketName::from_number(shareable), pids, count)) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%llx is no handle of this process",
                      static_cast<unsigned long long>(shareable));
    }
    return ACL_SUCCESS;
}

aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device,
                                           aclrtDrvMemHandle *handle) {
    if (device_at(device) == nullptr) {
        return REFUSE(ACL_ERROR_RT_INVALID_DEVICEID, "there is no device %d", device);
    }
    return import_ticket(__func__, TicketName::from_number(shareable), handle);
}

aclError aclrtMemExportToShareableHandleV2(aclrtDrvMemHandle handle, uint64_t flags,
                                           aclrtMemSharedHandleType type, void *shareable) {
    TicketName name{};
    const aclError result = export_ticket(__func__, handle, flags, name);
    if (result != ACL_SUCCESS) {
        return result;
    }
    if (type == ACL_MEM_SHARE_HANDLE_TYPE_FABRIC) {
        FabricText text{};
        name.text().copy(text.text, sizeof text.text - 1);
        std::memcpy(shareable, &text, sizeof text);
    } else {
        *static_cast<uint64_t *>(shareable) = name.number();
    }
    return ACL_SUCCESS;
}

aclError aclrtMemImportFromShareableHandleV2(void *shareable, aclrtMemSharedHandleType type,
                                             uint64_t, aclrtDrvMemHandle *handle) {
    if (type != ACL_MEM_SHARE_HANDLE_TYPE_FABRIC) {
        return import_ticket(__func__,
                             TicketName::from_number(*static_cast<const uint64_t *>(shareable)),
                             handle);
    }
    FabricText text{};
    std::memcpy(&text, shareable, sizeof text);
    text.text[sizeof text.text - 1] = '\0';
    TicketName name{};
    if (!TicketName::parse(text.text, name)) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "this is no shareable handle");
    }
    return import_ticket(__func__, name, handle);
}

aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = getpid();
    return ACL_SUCCESS;
}
}
