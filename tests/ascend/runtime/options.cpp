// Starting, ending, and settings that change nothing of what tests can see: those are kept and
// given back.
#include <acl/acl_op_compiler.h>
#include <acl/error_codes/rt_error_codes.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>

#include "device.h"
#include "settings.h"

namespace {

std::atomic<bool> initialised{false};
std::atomic<int> saturation{ACL_RT_OVERFLOW_MODE_INFNAN};
std::mutex mutex;
std::map<aclSysParamOpt, int64_t> system_options;

}  // namespace

extern "C" {

aclError aclInit(const char *) {
    return initialised.exchange(true) ? ACL_ERROR_REPEAT_INITIALIZE : ACL_SUCCESS;
}

aclError aclFinalize() {
    return initialised.exchange(false) ? ACL_SUCCESS : ACL_ERROR_REPEAT_FINALIZE;
}

const char *aclrtGetSocName() { return standin::settings().soc.c_str(); }

aclError aclSetCompileopt(aclCompileOpt, const char *) { return ACL_SUCCESS; }

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    saturation = mode;
    return ACL_SUCCESS;
}

aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    const std::lock_guard lock(mutex);
    *value = system_options[option];
    return ACL_SUCCESS;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    const std::lock_guard lock(mutex);
    system_options[option] = value;
    return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    if (standin::current_device() == nullptr) {
        return REFUSE(ACL_ERROR_RT_CONTEXT_NULL, "the thread has set no device");
    }
    return aclrtSetSysParamOpt(option, value);
}
}
