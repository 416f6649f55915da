// Memory of aclrtMalloc in another process, by a key.
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

constexpr std::size_t kKeySize = 65;

struct Imported {
    uintptr_t address;
    int fd;
    int users;
};

struct Imports {
    std::mutex mutex;
    std::map<std::string, Imported> by_key;
};

Imports &imports() {
    static Imports *const once = new Imports;
    return *once;
}

aclError no_key(const char *function, const char *key) {
    return refuse(ACL_ERROR_RT_PARAM_INVALID, function, "'%s' is no key of this process", key);
}

void close_import(const Imported &import) {
    unmap_block(import.address);
    release_addresses(import.address);
    close(import.fd);
}

}  // namespace

void revoke_exports(int fd) { withdraw_all(fd); }

}  // namespace standin

using namespace standin;

extern "C" {

// Only whole allocations: what a real driver makes of a part is not known.
aclError aclrtIpcMemGetExportKey(void *pointer, size_t size, char *key, size_t length,
                                 uint64_t flags) {
    const auto allocation = allocation_at(pointer);
    if (!allocation || size == 0 || size > allocation->size) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes at %p are no memory of aclrtMalloc",
                      size, pointer);
    }
    if (length < kKeySize) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "a key needs %zu bytes, there are %zu", kKeySize,
                      length);
    }
    const auto access = (flags & ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION) != 0
                            ? Access::anybody
                            : Access::listed;
    TicketName name{};
    if (!write_ticket(allocation->fd, {allocation->size, allocation->physical_device}, access,
                      name)) {
        return REFUSE(ACL_ERROR_RT_MEMORY_ALLOCATION, "no descriptor is left for a key");
    }
    std::memset(key, 0, length);  // torch compares all of it
    name.text().copy(key, length - 1);
    return ACL_SUCCESS;
}

aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pids, size_t count) {
    TicketName name{};
    if (!TicketName::parse(key, name) || !admit(name, pids, count)) {
        return no_key(__func__, key);
    }
    return ACL_SUCCESS;
}

// The same key twice gives the same address, to be closed twice.
aclError aclrtIpcMemImportByKey(void **pointer, const char *key, uint64_t flags) {
    if (current_device() == nullptr) {
        return REFUSE(ACL_ERROR_RT_CONTEXT_NULL, "the thread has set no device");
    }
    const std::lock_guard lock(imports().mutex);
    const auto known = imports().by_key.find(key);
    if (known != imports().by_key.end()) {
        ++known->second.users;
        *pointer = reinterpret_cast<void *>(known->second.address);
        return ACL_SUCCESS;
    }
    TicketName name{};
    if (!TicketName::parse(key, name)) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "'%s' is no key", key);
    }
    Shared shared{};
    std::string why;
    const int fd = use_ticket(name, shared, why);
    if (fd < 0) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "key %s cannot be used: %s", key, why.c_str());
    }
    const bool is_peer = shared.physical_device != current_device()->physical;
    if (is_peer && (flags & ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS) == 0) {
        close(fd);
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID,
                      "the memory is on device %d of the machine, and the flags do not say that "
                      "a peer's is meant",
                      shared.physical_device);
    }
    const uintptr_t address = reserve_addresses(shared.size);
    if (!map_block({address, shared.size, fd, 0, shared.physical_device})) {
        release_addresses(address);
        close(fd);
        return REFUSE(ACL_ERROR_RT_MEMORY_ALLOCATION, "%zu bytes cannot be mapped", shared.size);
    }
    imports().by_key[key] = {address, fd, 1};
    *pointer = reinterpret_cast<void *>(address);
    return ACL_SUCCESS;
}

// Ends an import, or, in the process that exported, the key.
aclError aclrtIpcMemClose(const char *key) {
    const std::lock_guard lock(imports().mutex);
    const auto known = imports().by_key.find(key);
    if (known != imports().by_key.end()) {
        if (--known->second.users == 0) {
            close_import(known->second);
            imports().by_key.erase(known);
        }
        return ACL_SUCCESS;
    }
    TicketName name{};
    if (!TicketName::parse(key, name) || !withdraw(name)) {
        return no_key(__func__, key);
    }
    return ACL_SUCCESS;
}
}
