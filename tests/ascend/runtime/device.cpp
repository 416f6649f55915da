#include "device.h"

#include <acl/error_codes/rt_error_codes.h>

#include <deque>

#include "settings.h"
#include "stream.h"

namespace standin {
namespace {

thread_local Device *current = nullptr;

std::deque<Device> &devices() {
    static auto *const all = [] {
        auto *made = new std::deque<Device>;
        for (const int32_t physical : settings().visible) {
            Device &device = made->emplace_back();
            device.number = static_cast<int32_t>(made->size()) - 1;
            device.physical = physical;
        }
        return made;
    }();
    return *all;
}

bool is_device(const void *context) {
    for (const Device &each : devices()) {
        if (&each == context) {
            return true;
        }
    }
    return false;
}

}  // namespace

bool Device::take(std::size_t size) {
    std::size_t used = used_bytes.load();
    do {
        if (size > settings().memory_bytes - used) {
            return false;
        }
    } while (!used_bytes.compare_exchange_weak(used, used + size));
    return true;
}

void Device::give_back(std::size_t size) { used_bytes -= size; }

Device *device_at(int64_t number) {
    const bool is_one = number >= 0 && number < static_cast<int64_t>(devices().size());
    return is_one ? &devices()[static_cast<std::size_t>(number)] : nullptr;
}

Device *device_of_machine(int32_t physical) {
    for (Device &each : devices()) {
        if (each.physical == physical) {
            return &each;
        }
    }
    return nullptr;
}

Device *current_device() { return current; }

}  // namespace standin

using standin::current_device;
using standin::Device;
using standin::device_at;

namespace {

aclError no_such_device(const char *function, int64_t number) {
    return standin::refuse(ACL_ERROR_RT_INVALID_DEVICEID, function,
                           "there is no device %lld; the process sees %zu",
                           static_cast<long long>(number), standin::devices().size());
}

}  // namespace

extern "C" {

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = static_cast<uint32_t>(standin::devices().size());
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t number) {
    Device *device = device_at(number);
    if (device == nullptr) {
        return no_such_device(__func__, number);
    }
    device->active = true;
    standin::current = device;
    return ACL_SUCCESS;
}

// Asked before any device is set, CANN's answer is no error worth a line: callers rely on it.
aclError aclrtGetDevice(int32_t *number) {
    if (current_device() == nullptr) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    *number = current_device()->number;
    return ACL_SUCCESS;
}

// Memory stays: the process may be resetting one of several users of the device.
aclError aclrtResetDevice(int32_t number) {
    Device *device = device_at(number);
    if (device == nullptr) {
        return no_such_device(__func__, number);
    }
    const aclError result = standin::synchronize(*device, -1);
    device->active = false;
    if (current_device() == device) {
        standin::current = nullptr;
    }
    return result;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (current_device() == nullptr) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    *context = current_device();
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    if (!standin::is_device(context)) {
        return REFUSE(ACL_ERROR_RT_CONTEXT_NULL, "%p is no context", context);
    }
    standin::current = static_cast<Device *>(context);
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t number, uint32_t *flags, int32_t *active) {
    const Device *device = device_at(number);
    if (device == nullptr) {
        return no_such_device(__func__, number);
    }
    if (flags != nullptr) {
        *flags = 0;
    }
    *active = device->active ? 1 : 0;
    return ACL_SUCCESS;
}

aclError aclrtGetPhyDevIdByLogicDevId(const int32_t logical, int32_t *const physical) {
    const Device *device = device_at(logical);
    if (device == nullptr) {
        return no_such_device(__func__, logical);
    }
    *physical = device->physical;
    return ACL_SUCCESS;
}

// "User" numbers count visible devices; "logical" ones count the machine's.
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logical) {
    return aclrtGetPhyDevIdByLogicDevId(user, logical);
}

aclError aclrtDeviceCanAccessPeer(int32_t *can_access, int32_t number, int32_t peer) {
    if (device_at(number) == nullptr || device_at(peer) == nullptr) {
        return no_such_device(__func__, device_at(number) == nullptr ? number : peer);
    }
    *can_access = number != peer ? 1 : 0;
    return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    if (device_at(peer) == nullptr) {
        return no_such_device(__func__, peer);
    }
    if (flags != 0) {
        return REFUSE(ACL_ERROR_RT_PARAM_INVALID, "flags are %u: they are reserved", flags);
    }
    return ACL_SUCCESS;  // all memory is the host's: every device reaches it
}
}
