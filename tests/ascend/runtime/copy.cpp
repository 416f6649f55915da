// Copies and fills. Those of a stream look their addresses up when they are queued, so that a bad
// one fails there, and again when they run: memory freed in between fails the stream.
#include <acl/error_codes/rt_error_codes.h>

#include <cstring>

#include "arena.h"
#include "stream.h"

namespace standin {
namespace {

struct Sides {
    bool from_device;
    bool to_device;
};

const char *side(bool device) { return device ? "a device's" : "the host's"; }

// Whether the addresses are on the sides that `kind` names.
aclError check_kind(const char *function, const void *to, const void *from,
                    aclrtMemcpyKind kind) {
    Sides named{};
    switch (kind) {
        case ACL_MEMCPY_HOST_TO_HOST: named = {false, false}; break;
        case ACL_MEMCPY_HOST_TO_DEVICE:
        case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE: named = {false, true}; break;
        case ACL_MEMCPY_DEVICE_TO_HOST: named = {true, false}; break;
        case ACL_MEMCPY_DEVICE_TO_DEVICE:
        case ACL_MEMCPY_INNER_DEVICE_TO_DEVICE:
        case ACL_MEMCPY_INTER_DEVICE_TO_DEVICE: named = {true, true}; break;
        case ACL_MEMCPY_DEFAULT: return ACL_SUCCESS;
        default:
            return refuse(ACL_ERROR_RT_PARAM_INVALID, function, "kind %d is unknown", kind);
    }
    if (is_device_address(from) != named.from_device || is_device_address(to) != named.to_device) {
        return refuse(ACL_ERROR_RT_PARAM_INVALID, function,
                      "kind %d does not go with %s address %p and %s address %p", kind,
                      side(is_device_address(from)), from, side(is_device_address(to)), to);
    }
    return ACL_SUCCESS;
}

aclError check_reach(const char *function, const void *address, std::size_t size) {
    const Pin pin;
    if (pin.reach(address, size) == nullptr) {
        return refuse(ACL_ERROR_RT_PARAM_INVALID, function,
                      "%zu bytes at device address %p are not all memory", size, address);
    }
    return ACL_SUCCESS;
}

aclError check_copy(const char *function, const void *to, std::size_t room, const void *from,
                    std::size_t size, aclrtMemcpyKind kind) {
    if (to == nullptr || from == nullptr || size > room) {
        return refuse(ACL_ERROR_RT_PARAM_INVALID, function, "%zu bytes from %p to %p, room for %zu",
                      size, from, to, room);
    }
    aclError result = check_kind(function, to, from, kind);
    if (result == ACL_SUCCESS) {
        result = check_reach(function, from, size);
    }
    return result == ACL_SUCCESS ? check_reach(function, to, size) : result;
}

aclError copy_now(const char *function, void *to, const void *from, std::size_t size) {
    const Pin pin;
    std::byte *const target = pin.reach(to, size);
    const std::byte *const source = pin.reach(from, size);
    if (target == nullptr || source == nullptr) {
        return refuse(ACL_ERROR_RT_PARAM_INVALID, function,
                      "device memory was freed before its copy ran: %zu bytes from %p to %p", size,
                      from, to);
    }
    std::memmove(target, source, size);
    return ACL_SUCCESS;
}

aclError fill_now(const char *function, void *at, int32_t value, std::size_t size) {
    const Pin pin;
    std::byte *const target = pin.reach(at, size);
    if (target == nullptr) {
        return refuse(ACL_ERROR_RT_PARAM_INVALID, function,
                      "%zu bytes at device address %p are not all memory", size, at);
    }
    std::memset(target, value, size);
    return ACL_SUCCESS;
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

// At once, whatever streams still have to do: a caller who needs their result synchronises first.
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
    const aclError result = check_copy(__func__, to, room, from, size, kind);
    return result == ACL_SUCCESS ? copy_now(__func__, to, from, size) : result;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size,
                          aclrtMemcpyKind kind, aclrtStream stream) {
    const aclError result = check_copy(__func__, to, room, from, size, kind);
    if (result != ACL_SUCCESS) {
        return result;
    }
    return submit(__func__, stream,
                  [=] { return copy_now("aclrtMemcpyAsync", to, from, size); });
}

aclError aclrtMemcpyBatch(void **to, size_t *rooms, void **from, size_t *sizes, size_t count,
                          aclrtMemcpyBatchAttr *, size_t *, size_t, size_t *failed) {
    for (size_t each = 0; each < count; ++each) {
        const aclError result = aclrtMemcpy(to[each], rooms[each], from[each], sizes[each],
                                            ACL_MEMCPY_DEFAULT);
        if (result != ACL_SUCCESS) {
            *failed = each;
            return result;
        }
    }
    return ACL_SUCCESS;
}

aclError aclrtMemset(void *at, size_t room, int32_t value, size_t size) {
    if (size > room) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes, room for %zu", size, room);
    }
    return fill_now(__func__, at, value, size);
}

aclError aclrtMemsetAsync(void *at, size_t room, int32_t value, size_t size, aclrtStream stream) {
    if (size > room) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes, room for %zu", size, room);
    }
    const aclError result = check_reach(__func__, at, size);
    if (result != ACL_SUCCESS) {
        return result;
    }
    return submit(__func__, stream,
                  [=] { return fill_now("aclrtMemsetAsync", at, value, size); });
}
}
