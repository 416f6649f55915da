// The part of CANN's transfer engine that Mooncake imports, as far as its binary interface shows
// it: no wheel ships this header.
#pragma once

#include <acl/acl.h>
#include <graph/ascend_string.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "../report.h"

namespace adxl {

using Status = uint32_t;
constexpr Status SUCCESS = 0;
constexpr Status PARAM_INVALID = 103900;
constexpr Status TIMEOUT = 103901;
constexpr Status NOT_CONNECTED = 103902;
constexpr Status ALREADY_CONNECTED = 103903;
constexpr Status UNSUPPORTED = 103905;
constexpr Status FAILED = 503900;

enum class MemType : int32_t { DEVICE, HOST };
enum class TransferOp : int32_t { READ, WRITE };
enum class TransferStatus : int32_t { WAITING, COMPLETED, TIMEOUT, FAILED };
enum class FeatureType : int32_t { AUTO_CONNECT };

using MemHandle = void *;
using TransferReq = void *;

struct MemDesc {
    uintptr_t addr;
    std::size_t len;
    uint8_t reserved[128];
};

struct TransferOpDesc {
    uintptr_t local_addr;
    uintptr_t remote_addr;
    std::size_t len;
};

struct TransferArgs {
    uint8_t reserved[128];
};

class STANDIN_API AdxlEngine {
public:
    AdxlEngine();
    ~AdxlEngine();

    // Listens on `local`, a host:port; with a host alone it only connects.
    Status Initialize(const ge::AscendString &local,
                      const std::map<ge::AscendString, ge::AscendString> &options);
    void Finalize();

    Status RegisterMem(const MemDesc &memory, MemType type, MemHandle &handle);
    Status DeregisterMem(MemHandle handle);

    Status Connect(const ge::AscendString &remote, int32_t timeout_ms);
    Status Disconnect(const ge::AscendString &remote, int32_t timeout_ms);

    Status TransferSync(const ge::AscendString &remote, TransferOp operation,
                        const std::vector<TransferOpDesc> &pieces, int32_t timeout_ms);
    Status TransferAsync(const ge::AscendString &remote, TransferOp operation,
                         const std::vector<TransferOpDesc> &pieces, const TransferArgs &arguments,
                         TransferReq &request);
    Status GetTransferStatus(const TransferReq &request, TransferStatus &status);

    static Status GetCapability(FeatureType feature, int32_t &value);
    static Status MallocMem(MemType type, std::size_t size, void **pointer);
    static Status FreeMem(void *pointer);
    static Status ExportToShareableHandle(void *pointer, aclrtMemFabricHandle &handle);

private:
    class Engine;
    std::unique_ptr<Engine> engine_;  // Mooncake reserves room for one pointer
};

}  // namespace adxl
