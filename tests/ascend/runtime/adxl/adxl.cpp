// What Mooncake calls: arguments are checked here, the rest is the engine's.
#include "adxl.h"

#include "../arena.h"
#include "engine.h"

using standin::deadline_in;

namespace adxl {

AdxlEngine::AdxlEngine() = default;
AdxlEngine::~AdxlEngine() = default;

Status AdxlEngine::Initialize(const ge::AscendString &local,
                              const std::map<ge::AscendString, ge::AscendString> &options) {
    if (engine_ != nullptr) {
        return ADXL_REFUSE(FAILED, "the engine is initialised already");
    }
    int32_t device = 0;
    if (aclrtGetDevice(&device) != ACL_SUCCESS) {
        return ADXL_REFUSE(FAILED, "the thread has set no device");
    }
    bool connects_itself = false;
    for (const auto &[name, value] : options) {
        if (name.GetString() == std::string("AutoConnect")) {
            connects_itself = value.GetString() == std::string("1");
        }
    }
    auto engine = std::make_unique<Engine>();
    const Status status = engine->start(local.GetString(), connects_itself);
    if (status == SUCCESS) {
        engine_ = std::move(engine);
    }
    return status;
}

void AdxlEngine::Finalize() { engine_.reset(); }

#define NEEDS_ENGINE()                                                 \
    if (engine_ == nullptr) {                                          \
        return ADXL_REFUSE(FAILED, "the engine is not initialised"); \
    }

Status AdxlEngine::RegisterMem(const MemDesc &memory, MemType type, MemHandle &handle) {
    NEEDS_ENGINE()
    const auto *const address = reinterpret_cast<const void *>(memory.addr);
    const bool on_device = standin::is_device_address(address);
    const standin::Pin pin;
    if (memory.len == 0 || on_device != (type == MemType::DEVICE) ||
        pin.reach(address, memory.len) == nullptr) {
        return ADXL_REFUSE(PARAM_INVALID, "%zu bytes at %p are no memory of type %d", memory.len,
                           address, static_cast<int>(type));
    }
    const uintptr_t added = engine_->regions.add(memory.addr, memory.len);
    if (added == 0) {
        return ADXL_REFUSE(PARAM_INVALID, "too many regions are registered");
    }
    handle = reinterpret_cast<MemHandle>(added);
    return SUCCESS;
}

Status AdxlEngine::DeregisterMem(MemHandle handle) {
    NEEDS_ENGINE()
    if (!engine_->regions.remove(reinterpret_cast<uintptr_t>(handle))) {
        return ADXL_REFUSE(PARAM_INVALID, "%p is no registered region", handle);
    }
    return SUCCESS;
}

Status AdxlEngine::Connect(const ge::AscendString &remote, int32_t timeout_ms) {
    NEEDS_ENGINE()
    return engine_->connect(remote.GetString(), deadline_in(timeout_ms));
}

Status AdxlEngine::Disconnect(const ge::AscendString &remote, int32_t) {
    NEEDS_ENGINE()
    return engine_->disconnect(remote.GetString());
}

Status AdxlEngine::TransferSync(const ge::AscendString &remote, TransferOp operation,
                                const std::vector<TransferOpDesc> &pieces, int32_t timeout_ms) {
    NEEDS_ENGINE()
    return engine_->transfer(remote.GetString(), operation, pieces, deadline_in(timeout_ms));
}

Status AdxlEngine::TransferAsync(const ge::AscendString &remote, TransferOp operation,
                                 const std::vector<TransferOpDesc> &pieces, const TransferArgs &,
                                 TransferReq &request) {
    NEEDS_ENGINE()
    request = engine_->begin(remote.GetString(), operation, pieces);
    return SUCCESS;
}

Status AdxlEngine::GetTransferStatus(const TransferReq &request, TransferStatus &status) {
    NEEDS_ENGINE()
    return engine_->status_of(request, status);
}

Status AdxlEngine::GetCapability(FeatureType feature, int32_t &value) {
    value = feature == FeatureType::AUTO_CONNECT ? 1 : 0;
    return SUCCESS;
}

Status AdxlEngine::MallocMem(MemType, std::size_t, void **) {
    standin::unimplemented("AdxlEngine::MallocMem");
    return UNSUPPORTED;
}

Status AdxlEngine::FreeMem(void *) {
    standin::unimplemented("AdxlEngine::FreeMem");
    return UNSUPPORTED;
}

Status AdxlEngine::ExportToShareableHandle(void *, aclrtMemFabricHandle &) {
    standin::unimplemented("AdxlEngine::ExportToShareableHandle");
    return UNSUPPORTED;
}

}  // namespace adxl
