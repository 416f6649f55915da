#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <list>
#include <thread>

#include "../arena.h"
#include "adxl.h"
#include "faults.h"
#include "wire.h"

using standin::Deadline;
using standin::deadline_in;
using standin::Endpoint;
using standin::Ending;
using standin::Fault;
using standin::Outcome;
using standin::Socket;

#define ADXL_REFUSE(code, ...) \
    static_cast<Status>(::standin::refuse(static_cast<aclError>(code), __func__, __VA_ARGS__))

namespace adxl {
namespace {

// What an asynchronous transfer, which names no time-out, has; and a connection made on the way.
constexpr int64_t kAsyncTimeoutMs = 60'000;

struct Peer {
    std::mutex mutex;  // held during a transfer: one at a time over a connection
    Socket socket;
};

struct Caller {
    Socket socket;
    std::thread thread;
};

struct Pending {
    std::atomic<TransferStatus> status{TransferStatus::WAITING};
    std::thread thread;
};

}  // namespace

class AdxlEngine::Engine {
public:
    Status start(const std::string &local, bool connects_itself) {
        connects_itself_ = connects_itself;
        const Endpoint at = Endpoint::parse(local);
        if (at.port.empty()) {
            return SUCCESS;
        }
        if (const auto wrong = listener_.listen(at)) {
            return ADXL_REFUSE(FAILED, "cannot listen on %s: %s", local.c_str(), wrong->c_str());
        }
        accepting_ = std::thread([this] { accept(); });
        return SUCCESS;
    }

    ~Engine() {
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
            closed_.notify_all();
            for (const auto &[name, peer] : peers_) {
                peer->socket.shut_down();
            }
        }
        listener_.shut_down();
        if (accepting_.joinable()) {
            accepting_.join();
        }
        for (Caller &each : callers_) {
            each.socket.shut_down();
            each.thread.join();
        }
        for (const auto &[request, pending] : pending_) {
            pending->thread.join();
        }
    }

    Status connect(const std::string &remote, Deadline deadline) {
        {
            const std::lock_guard lock(mutex_);
            if (peers_.count(remote) != 0) {
                return ADXL_REFUSE(ALREADY_CONNECTED, "%s is connected", remote.c_str());
            }
        }
        const auto peer = std::make_shared<Peer>();
        const Outcome outcome = standin::faults().refuses()
                                    ? Outcome::broken
                                    : peer->socket.connect(Endpoint::parse(remote), deadline);
        if (outcome != Outcome::done) {
            return ADXL_REFUSE(outcome == Outcome::timed_out ? TIMEOUT : FAILED,
                               "no connection to %s", remote.c_str());
        }
        const std::lock_guard lock(mutex_);
        peers_.emplace(remote, peer);  // another thread's, if it was faster, is as good
        return SUCCESS;
    }

    Status disconnect(const std::string &remote) {
        const std::lock_guard lock(mutex_);
        const auto found = peers_.find(remote);
        if (found == peers_.end()) {
            return ADXL_REFUSE(NOT_CONNECTED, "%s is not connected", remote.c_str());
        }
        found->second->socket.shut_down();
        peers_.erase(found);
        return SUCCESS;
    }

    Status transfer(const std::string &remote, TransferOp operation,
                    const std::vector<TransferOpDesc> &pieces, Deadline deadline) {
        for (const TransferOpDesc &each : pieces) {
            if (!regions.hold(each.local_addr, each.len)) {
                return ADXL_REFUSE(PARAM_INVALID, "%zu bytes at %#zx here are not registered",
                                   each.len, each.local_addr);
            }
        }
        const auto peer = peer_at(remote, deadline);
        if (peer == nullptr) {
            return connects_itself_ ? FAILED
                                    : ADXL_REFUSE(NOT_CONNECTED, "%s is not connected",
                                                  remote.c_str());
        }
        const Fault fault = standin::faults().next_transfer();
        if (fault == Fault::fail) {
            return ADXL_REFUSE(FAILED, "a transfer to %s was told to fail", remote.c_str());
        }
        if (fault == Fault::stall) {
            wait_out(deadline);
            drop(remote, *peer);
            return ADXL_REFUSE(TIMEOUT, "a transfer to %s was told to stall", remote.c_str());
        }
        const std::lock_guard lock(peer->mutex);
        const Ending ending = fault == Fault::die ? Ending::dies_halfway : Ending::whole;
        const Status status = standin::ask(peer->socket, operation, pieces, ending, deadline);
        if (status == TIMEOUT || status == FAILED) {
            drop(remote, *peer);  // nobody knows where in the bytes it stopped
        }
        return status == SUCCESS ? SUCCESS
                                 : ADXL_REFUSE(status, "a transfer to %s", remote.c_str());
    }

    TransferReq begin(const std::string &remote, TransferOp operation,
                      const std::vector<TransferOpDesc> &pieces) {
        const auto pending = std::make_shared<Pending>();
        pending->thread = std::thread([this, pending, remote, operation, pieces] {
            const Status status =
                transfer(remote, operation, pieces, deadline_in(kAsyncTimeoutMs));
            pending->status = status == SUCCESS   ? TransferStatus::COMPLETED
                              : status == TIMEOUT ? TransferStatus::TIMEOUT
                                                  : TransferStatus::FAILED;
        });
        const std::lock_guard lock(mutex_);
        pending_[pending.get()] = pending;
        return pending.get();
    }

    // A request whose end was told is forgotten.
    Status status_of(TransferReq request, TransferStatus &status) {
        std::shared_ptr<Pending> ended;
        {
            const std::lock_guard lock(mutex_);
            const auto found = pending_.find(request);
            if (found == pending_.end()) {
                return ADXL_REFUSE(PARAM_INVALID, "%p is no transfer", request);
            }
            status = found->second->status;
            if (status == TransferStatus::WAITING) {
                return SUCCESS;
            }
            ended = found->second;
            pending_.erase(found);
        }
        ended->thread.join();
        return SUCCESS;
    }

    standin::Regions regions;

private:
    void accept() {
        for (Socket socket = listener_.accept(); socket.is_open(); socket = listener_.accept()) {
            Caller &caller = callers_.emplace_back();
            caller.socket = std::move(socket);
            caller.thread = std::thread([this, &caller] {
                standin::serve(caller.socket, regions);
                caller.socket.shut_down();
            });
        }
    }

    std::shared_ptr<Peer> find(const std::string &remote) {
        const std::lock_guard lock(mutex_);
        const auto found = peers_.find(remote);
        return found != peers_.end() ? found->second : nullptr;
    }

    std::shared_ptr<Peer> peer_at(const std::string &remote, Deadline deadline) {
        auto peer = find(remote);
        if (peer == nullptr && connects_itself_ && connect(remote, deadline) == SUCCESS) {
            peer = find(remote);
        }
        return peer;
    }

    // Forgets a connection, unless a new one has its name already.
    void drop(const std::string &remote, const Peer &peer) {
        peer.socket.shut_down();
        const std::lock_guard lock(mutex_);
        const auto found = peers_.find(remote);
        if (found != peers_.end() && found->second.get() == &peer) {
            peers_.erase(found);
        }
    }

    void wait_out(Deadline deadline) {
        std::unique_lock lock(mutex_);
        closed_.wait_until(lock, deadline, [this] { return closing_; });
    }

    bool connects_itself_ = false;
    Socket listener_;
    std::thread accepting_;
    std::list<Caller> callers_;  // grows in `accepting_` only
    std::mutex mutex_;
    std::condition_variable closed_;
    bool closing_ = false;
    std::map<std::string, std::shared_ptr<Peer>> peers_;
    std::map<TransferReq, std::shared_ptr<Pending>> pending_;
};

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
